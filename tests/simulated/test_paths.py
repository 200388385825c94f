"""The time of paths between nodes, to the millisecond: latency, rates, and shared links."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from protocols.network import Stream
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedWorld,
    run_simulation,
)
from tests.simulated.worlds import (
    LATENCY_SECONDS,
    ROUND_TRIP_SECONDS,
    SETTINGS,
    joined,
    pair,
    read_exactly,
    simulated,
    time_of,
)

MEGABYTE = 1_000_000


async def _pour(stream: Stream, size: int) -> None:
    await stream.send_all(bytes(size))


async def _transfer_seconds(*streams: tuple[Stream, Stream], size: int) -> list[float]:
    """How long it takes to send `size` bytes over each of these streams at once."""
    started = trio.current_time()
    seconds = [0.0] * len(streams)

    async def take(number: int, far: Stream) -> None:
        assert len(await read_exactly(far, size)) == size
        seconds[number] = trio.current_time() - started

    async with trio.open_nursery() as nursery:
        for number, (near, far) in enumerate(streams):
            nursery.start_soon(_pour, near, size)
            nursery.start_soon(take, number, far)
    return seconds


@simulated
async def test_a_byte_takes_the_latency(world: SimulatedWorld) -> None:
    near, far = await joined(*pair(world))
    sent_at = trio.current_time()
    await near.send_all(b"x")
    assert trio.current_time() == sent_at
    await far.receive_some()
    assert trio.current_time() - sent_at == pytest.approx(LATENCY_SECONDS)


@simulated
async def test_connecting_and_opening_take_their_round_trips(world: SimulatedWorld) -> None:
    first, second = pair(world)
    assert await time_of(first.connect(second.peer_id)) == pytest.approx(5 * ROUND_TRIP_SECONDS)
    assert await time_of(joined(first, second)) == pytest.approx(2 * ROUND_TRIP_SECONDS)
    assert await first.ping(second.peer_id) == pytest.approx(ROUND_TRIP_SECONDS)


@simulated
async def test_a_path_may_be_longer_one_way(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.set_path_one_way(first, second, LinkSettings(latency_seconds=0.3))
    world.set_path_one_way(second, first, LinkSettings(latency_seconds=0.1))
    near, far = await joined(first, second)
    await near.send_all(b"x")
    assert await time_of(far.receive_some()) == pytest.approx(0.3)
    await far.send_all(b"x")
    assert await time_of(near.receive_some()) == pytest.approx(0.1)


@simulated
async def test_jitter_never_reorders(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.set_path(first, second, LinkSettings(latency_seconds=0.01, jitter_seconds=0.5))
    near, far = await joined(first, second)
    for number in range(100):
        await near.send_all(bytes([number]))
        await trio.sleep(0.001)
    assert await read_exactly(far, 100) == bytes(range(100))


@simulated
async def test_a_narrow_path_takes_size_over_rate(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.set_path(first, second, LinkSettings(LATENCY_SECONDS, bytes_per_second=MEGABYTE))
    streams = await joined(first, second)
    (seconds,) = await _transfer_seconds(streams, size=10 * MEGABYTE)
    assert seconds == pytest.approx(10 + LATENCY_SECONDS, rel=0.01)
    facts = first.link(second.peer_id)
    assert facts is not None
    assert facts.send_bytes_per_second == pytest.approx(MEGABYTE, rel=0.05)


@simulated
async def test_streams_share_a_narrow_path_fairly(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.set_path(first, second, LinkSettings(LATENCY_SECONDS, bytes_per_second=MEGABYTE))
    streams = [await joined(first, second, f"/potluck/{n}/1.0.0") for n in range(4)]
    seconds = await _transfer_seconds(*streams, size=2 * MEGABYTE)
    assert seconds == [pytest.approx(8.0, rel=0.05)] * 4


@simulated
async def test_a_small_message_waits_little_beside_a_bulk_transfer(world: SimulatedWorld) -> None:
    first, second = pair(world)
    world.set_path(first, second, LinkSettings(LATENCY_SECONDS, bytes_per_second=MEGABYTE))
    bulk, _ = await joined(first, second, "/potluck/bulk/1.0.0")
    near, far = await joined(first, second)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_pour, bulk, 100 * MEGABYTE)
        await trio.sleep(0.5)
        await near.send_all(b"urgent")
        assert await time_of(read_exactly(far, 6)) < LATENCY_SECONDS + 0.03
        nursery.cancel_scope.cancel()


@simulated
async def test_all_links_of_a_node_share_its_upload(world: SimulatedWorld) -> None:
    source = world.add_node("source", NodeSettings(upload_bytes_per_second=MEGABYTE))
    targets = [world.add_node() for _ in range(4)]
    world.introduce(source, *targets)
    streams = [await joined(source, target) for target in targets]
    seconds = await _transfer_seconds(*streams, size=2 * MEGABYTE)
    assert seconds == [pytest.approx(8.0, rel=0.05)] * 4


@simulated
async def test_all_links_of_a_node_share_its_download(world: SimulatedWorld) -> None:
    target = world.add_node("target", NodeSettings(download_bytes_per_second=MEGABYTE))
    sources = [world.add_node() for _ in range(4)]
    world.introduce(target, *sources)
    streams = [await joined(source, target) for source in sources]
    seconds = await _transfer_seconds(*streams, size=5 * MEGABYTE)
    assert max(seconds) == pytest.approx(20.0, rel=0.05)
    assert min(seconds) > 17.0  # fair within a window of each


@simulated
async def test_one_stream_carries_at_most_a_window_per_round_trip(world: SimulatedWorld) -> None:
    streams = await joined(*pair(world))
    size = 50 * world.settings.window_bytes
    (seconds,) = await _transfer_seconds(streams, size=size)
    assert 50 * ROUND_TRIP_SECONDS * 0.9 < seconds < 50 * ROUND_TRIP_SECONDS * 1.1


@simulated
async def test_a_download_of_one_byte_a_second_gives_a_byte_each_second(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    world.throttle(second, download_bytes_per_second=1.0)
    await near.send_all(bytes(100))
    for _ in range(5):
        assert await time_of(far.receive_some()) == pytest.approx(1.0, abs=LATENCY_SECONDS + 0.01)
    world.throttle(second)
    assert await time_of(read_exactly(far, 95)) <= 1.0


@simulated
async def test_an_upload_of_one_byte_a_second_gives_a_byte_each_second(
    world: SimulatedWorld,
) -> None:
    first, second = pair(world)
    near, far = await joined(first, second)
    world.throttle(first, upload_bytes_per_second=1.0)
    await near.send_all(bytes(100))
    assert await time_of(read_exactly(far, 10)) == pytest.approx(10.0, abs=LATENCY_SECONDS + 0.01)


@simulated
async def test_clocks_are_as_wrong_as_they_are_told_to_be(world: SimulatedWorld) -> None:
    honest = world.add_node()
    fast = world.add_node("fast", NodeSettings(clock_skew_seconds=600.0))
    assert fast.wall_time() - honest.wall_time() == 600.0
    before = honest.wall_time()
    await trio.sleep(60)
    assert honest.wall_time() - before == 60.0
    world.set_clock_skew(fast, -600.0)
    assert fast.wall_time() - honest.wall_time() == -600.0


@simulated
async def test_an_uplink_is_busy_while_bytes_are_on_their_way(world: SimulatedWorld) -> None:
    """Over whatever links; not while they wait for their reader."""
    first, second, third = (world.add_node(name) for name in ("first", "second", "third"))
    world.introduce(first, second, third)
    world.throttle(first, upload_bytes_per_second=100_000)
    one, other = await joined(first, second), await joined(first, third)
    before = first.traffic()
    await one[0].send_all(bytes(100_000))
    await other[0].send_all(bytes(100_000))
    await trio.sleep(10.0)
    now = first.traffic()
    assert now.sent_bytes - before.sent_bytes == 200_000
    assert now.sending_bytes - before.sending_bytes == pytest.approx(200_000, rel=0.05)
    assert now.sending_seconds - before.sending_seconds == pytest.approx(2.0, abs=0.1)
    for _ in range(100):
        await one[0].send_all(bytes(1_000))
        await trio.sleep(0.1)
    assert first.traffic().sending_bytes == now.sending_bytes, "signs of life"
    await one[0].send_all(bytes(200_000))
    await trio.sleep(1.0)
    world.crash(second)
    await trio.sleep(30.0)
    seconds = first.traffic().sending_seconds
    await trio.sleep(1.0)
    assert first.traffic().sending_seconds == seconds, "what was on its way is lost"


@pytest.mark.parametrize("download", [None, 4_000.0])
def test_a_packet_is_read_when_all_of_it_has_arrived(download: float | None) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        first, second = pair(world)
        world.throttle(first, upload_bytes_per_second=1_000)
        if download is not None:
            world.throttle(second, download_bytes_per_second=download)
        near, far = await joined(first, second)
        await near.send_all(bytes(2_500))
        for size, seconds in ((1_000, 1.0), (1_000, 1.0), (500, 0.5)):
            assert await time_of(read_exactly(far, 1)) == pytest.approx(seconds, abs=0.1)
            assert len(await far.receive_some()) == size - 1

    run_simulation(scenario, settings=replace(SETTINGS, packet_bytes=1_000))
