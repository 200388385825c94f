"""Crashes, stops, cuts and limits, as streams and links see them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from protocols.errors import Unreachable
from protocols.network import Reach, Stream
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    run_simulation,
)
from tests.simulated.worlds import (
    LATENCY_SECONDS,
    PROTOCOL,
    SETTINGS,
    echo,
    joined,
    pair,
    read_exactly,
    simulated,
    time_of,
    time_until_broken,
)

SILENCE_SECONDS = 15.0
DIAL_TIMEOUT_SECONDS = 5.0
MEBIBYTE = 1_048_576


# Killed


@simulated
async def test_a_killed_peer_breaks_streams_one_latency_later(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.crash(second)
    assert await time_until_broken(near) == pytest.approx(LATENCY_SECONDS)
    with pytest.raises(trio.BrokenResourceError):
        await near.send_all(b"x")
    assert first.link(second.peer_id) is None


@simulated
async def test_a_killed_peer_mid_transfer_wakes_its_sender(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await near.send_all(bytes(100 * MEBIBYTE))

        nursery.start_soon(send)
        await read_exactly(far, 3 * MEBIBYTE)
        world.crash(second)


@simulated
async def test_bytes_sent_before_a_kill_still_arrive_if_the_stream_had_ended(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    await far.send_all(b"my last will")
    await far.send_eof()
    world.crash(second)
    assert await read_exactly(near, 100) == b"my last will"


@simulated
async def test_a_power_cut_is_noticed_by_the_keep_alive_only(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.crash(second, silently=True)
    await trio.sleep(SILENCE_SECONDS - 1)
    assert first.link(second.peer_id) is not None
    assert await time_until_broken(near) == pytest.approx(1.0)
    assert first.link(second.peer_id) is None


@simulated
async def test_a_crash_ends_the_node_s_programs_and_lets_them_say_nothing(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    heard = []

    async def listen(stream: object) -> None:
        heard.append(stream)

    first.serve("/potluck/farewell/1.0.0", listen)
    ended = trio.Event()

    async def program(network: SimulatedNetwork) -> None:
        await network.connect(first.peer_id)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), pytest.raises(trio.ClosedResourceError):
                await network.open(first.peer_id, "/potluck/farewell/1.0.0")
            ended.set()

    world.start(second, program)
    await trio.sleep(10)
    world.crash(second)
    await ended.wait()
    await trio.sleep(10)
    assert heard == []


@simulated
async def test_a_restarted_node_is_met_under_the_same_identity(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.crash(second)
    await time_until_broken(near)
    with pytest.raises(Unreachable):
        await first.connect(second.peer_id)
    again = world.restart(second)
    assert again.peer_id == second.peer_id
    again.serve(PROTOCOL, echo)
    stream = await first.open(again.peer_id, PROTOCOL)
    await stream.send_all(b"you again")
    assert await read_exactly(stream, 9) == b"you again"


@simulated
async def test_a_node_that_came_back_first_replaces_its_stale_link(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.crash(second, silently=True)
    again = world.restart(second)
    world.introduce(first, again)
    with first.link_events() as events:
        await again.connect(first.peer_id)
        assert (await events.receive()).reach is Reach.NONE
        assert (await events.receive()).reach is Reach.DIRECT
    assert await time_until_broken(near) == 0
    facts = first.link(again.peer_id)
    assert facts is not None
    assert facts.inbound
    await trio.sleep(10 * SILENCE_SECONDS)
    assert first.link(again.peer_id) == facts


@simulated
async def test_using_a_stale_link_to_a_restarted_node_breaks_it_soon(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.crash(second, silently=True)
    world.restart(second)
    await near.send_all(b"are you still you?")
    assert await time_until_broken(near) == pytest.approx(2 * LATENCY_SECONDS)


@pytest.mark.slow
@simulated
async def test_a_node_may_flap_every_two_seconds(world: SimulatedWorld) -> None:
    first, second = pair(world)
    for _ in range(300):
        second.serve(PROTOCOL, echo)
        stream = await first.open(second.peer_id, PROTOCOL)
        await stream.send_all(b"x")
        assert await read_exactly(stream, 1) == b"x"
        world.crash(second)
        await trio.sleep(1)
        second = world.restart(second)
        await trio.sleep(1)
    assert first.links() == ()


# Stopped


@simulated
async def test_a_stopped_peer_answers_nothing_and_loses_nothing(world: SimulatedWorld) -> None:
    first, second = pair(world)
    second.serve(PROTOCOL, echo)
    stream = await first.open(second.peer_id, PROTOCOL)
    world.stop(second)
    await stream.send_all(b"hello?")
    with trio.move_on_after(SILENCE_SECONDS - 1) as scope:
        await stream.receive_some()
    assert scope.cancelled_caught
    world.resume(second)
    assert await time_of(read_exactly(stream, 6)) == pytest.approx(LATENCY_SECONDS)


@simulated
async def test_a_stopped_peer_takes_one_window_and_no_more(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.stop(second)
    accepted = 0
    with trio.move_on_after(SILENCE_SECONDS - 1):
        while True:
            await near.send_all(bytes(1000))
            accepted += 1000
    assert accepted <= world.settings.window_bytes


@simulated
async def test_a_peer_stopped_for_long_is_given_up_and_finds_out_when_it_goes_on(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    world.stop(second)
    assert await time_until_broken(near) == pytest.approx(SILENCE_SECONDS)
    assert second.link(first.peer_id) is not None
    await trio.sleep(60 - SILENCE_SECONDS)
    world.resume(second)
    assert await time_until_broken(far) == pytest.approx(0)
    again, _ = await joined(first, second)
    await again.send_all(b"x")


@simulated
async def test_a_stopped_peer_that_is_killed_breaks_streams_at_once(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, _ = await joined(first, second)
    world.stop(second)
    world.crash(second)
    assert await time_until_broken(near) == pytest.approx(LATENCY_SECONDS)


# Cut off


@simulated
async def test_a_short_partition_delays_and_loses_nothing(world: SimulatedWorld) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    world.partition([first], [second])
    await near.send_all(b"held")
    await far.send_all(b"back")
    await trio.sleep(SILENCE_SECONDS - 1)
    world.heal()
    assert await time_of(read_exactly(far, 4)) == pytest.approx(LATENCY_SECONDS)
    assert await read_exactly(near, 4) == b"back"


@pytest.mark.parametrize("towards_second", [True, False])
def test_a_long_cut_one_way_breaks_the_link_at_both_ends(towards_second: bool) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        first, second = pair(world)
        near, far = await joined(first, second)
        if towards_second:
            world.cut([first], [second])
        else:
            world.cut([second], [first])
        async with trio.open_nursery() as nursery:
            for end in (near, far):

                async def check(end: object = end) -> None:
                    seconds = await time_until_broken(end)  # type: ignore[arg-type]
                    assert SILENCE_SECONDS <= seconds <= SILENCE_SECONDS + LATENCY_SECONDS

                nursery.start_soon(check)
        assert first.links() == second.links() == ()
        with pytest.raises(Unreachable):
            await first.connect(second.peer_id)
        with pytest.raises(Unreachable):
            await second.connect(first.peer_id)

    scenario()


@simulated
async def test_a_partition_leaves_links_within_each_side_alone(world: SimulatedWorld) -> None:
    nodes = [world.add_node() for _ in range(6)]
    world.introduce(*nodes)
    for node in nodes:
        node.serve(PROTOCOL, echo)
        for other in nodes:
            if other is not node:
                await node.connect(other.peer_id)
    left, right = nodes[:3], nodes[3:]
    cuts = world.partition(left, right)
    await trio.sleep(2 * SILENCE_SECONDS)
    for side in (left, right):
        for node in side:
            assert {link.peer for link in node.links()} == {
                other.peer_id for other in side if other is not node
            }
    world.heal(cuts)
    stream = await left[0].open(right[0].peer_id, PROTOCOL)
    await stream.send_all(b"together again")
    assert await read_exactly(stream, 14) == b"together again"


@simulated
async def test_overlapping_cuts_heal_one_by_one(world: SimulatedWorld) -> None:
    first, second = pair(world)
    one = world.partition([first], [second])
    other = world.cut([first], [second])
    world.heal(one)
    with pytest.raises(Unreachable):
        await first.connect(second.peer_id)
    world.heal(other)
    await first.connect(second.peer_id)


@simulated
async def test_a_dial_across_a_cut_takes_the_timeout_and_no_longer(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.partition([first], [second])
    with pytest.raises(Unreachable, match="no answer"):
        await first.connect(second.peer_id)
    assert world.now() == pytest.approx(DIAL_TIMEOUT_SECONDS)


@simulated
async def test_connections_are_lost_for_no_reason_at_the_rate_that_was_set(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    world.set_path(first, second, LinkSettings(LATENCY_SECONDS, breaks_per_hour=60.0))
    breaks = 0
    with trio.move_on_after(10 * 3600), first.link_events() as events:
        await first.connect(second.peer_id)
        async for event in events:
            if event.reach is Reach.NONE:
                breaks += 1
                await first.connect(second.peer_id)
    assert 500 < breaks < 700  # 600 expected, give or take four deviations


# Something at a node's k-th message


@pytest.mark.parametrize("heard_out", [False, True])
def test_a_node_dies_instead_of_sending_its_third_message(heard_out: bool) -> None:
    heard = run_simulation(last_words, heard_out, settings=SETTINGS)
    assert heard == (b"one two " if heard_out else b"")


async def last_words(world: SimulatedWorld, heard_out: bool) -> bytes:
    """The bytes read from a node that dies instead of sending its third word."""
    dying, other = world.add_node("dying"), world.add_node("other")
    world.introduce(dying, other)
    heard = bytearray()

    async def hear(stream: Stream) -> None:
        with suppress(trio.BrokenResourceError):
            async for piece in stream:
                heard.extend(piece)

    other.serve(PROTOCOL, hear)

    async def speak(node: SimulatedNetwork) -> None:
        stream = await node.open(other.peer_id, PROTOCOL)
        world.at_message(node, 3, lambda: world.crash(node, heard_out=heard_out))
        for piece in (b"one ", b"two ", b"three "):
            await stream.send_all(piece)

    world.start(dying, speak)
    await trio.sleep(1)
    assert dying.closed
    assert other.links() == ()
    return bytes(heard)


@simulated
async def test_a_node_stops_instead_of_sending_a_message_and_sends_it_when_it_goes_on(
    world: SimulatedWorld,
) -> None:
    stopping, other = world.add_node("stopping"), world.add_node("other")
    world.introduce(stopping, other)
    other.serve(PROTOCOL, echo)
    stream = await stopping.open(other.peer_id, PROTOCOL)
    world.at_message(stopping, 1, lambda: world.stop(stopping))
    await stream.send_all(b"late")
    await trio.sleep(1)
    world.resume(stopping)
    assert await time_of(read_exactly(stream, 4)) < 10 * LATENCY_SECONDS


# Not let in


@simulated
async def test_a_node_behind_a_nat_dials_out_and_is_not_dialled(world: SimulatedWorld) -> None:
    public = world.add_node("public")
    private = world.add_node("private", NodeSettings(dialable=False))
    world.introduce(public, private)
    with pytest.raises(Unreachable):
        await public.connect(private.peer_id)
    private.serve(PROTOCOL, echo)
    await private.connect(public.peer_id)
    stream = await public.open(private.peer_id, PROTOCOL)
    await stream.send_all(b"through the link you made")
    assert await read_exactly(stream, 25) == b"through the link you made"


@simulated
async def test_five_times_as_many_connections_over_time_as_the_limit(
    world: SimulatedWorld,
) -> None:
    limit = 8
    server = world.add_node("server", NodeSettings(inbound_links=limit))
    for _ in range(5 * limit):
        guest = world.add_node()
        guest.learn_addresses(server.peer_id, server.addresses())
        await guest.connect(server.peer_id)
        await guest.disconnect(server.peer_id)
        await trio.sleep(LATENCY_SECONDS)
    guests = [world.add_node() for _ in range(limit + 1)]
    for guest in guests:
        guest.learn_addresses(server.peer_id, server.addresses())
    for guest in guests[:limit]:
        await guest.connect(server.peer_id)
    with pytest.raises(Unreachable, match="too many connections"):
        await guests[limit].connect(server.peer_id)


@simulated
async def test_more_streams_than_the_limit_are_refused_and_no_more_once_some_end(
    world: SimulatedWorld,
) -> None:
    opener = world.add_node()
    acceptor = world.add_node("acceptor", NodeSettings(inbound_streams_per_link=3))
    world.introduce(opener, acceptor)
    acceptor.serve(PROTOCOL, echo)
    streams = [await opener.open(acceptor.peer_id, PROTOCOL) for _ in range(3)]
    with pytest.raises(Unreachable):
        await opener.open(acceptor.peer_id, PROTOCOL)
    streams[0].reset()
    await opener.open(acceptor.peer_id, PROTOCOL)


@simulated
async def test_a_dead_address_costs_a_head_start_and_no_more(world: SimulatedWorld) -> None:
    first, second = world.add_node(), world.add_node()
    first.learn_addresses(second.peer_id, second.addresses())
    first.learn_addresses(second.peer_id, [world.place_of(999)])  # the newest is tried first
    seconds = await time_of(first.connect(second.peer_id))
    assert seconds == pytest.approx(0.25 + 10 * LATENCY_SECONDS)
