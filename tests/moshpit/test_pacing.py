"""Streams over one uplink or one downlink end together, and a slow peer does not count as
stalled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio

from protocols.errors import PotluckError
from protocols.moshpit.layout import CHUNKS_OF_SMALL_PART, Layout, Segment
from protocols.moshpit.part_messages import PART, STALL_SECONDS, opening_for
from protocols.moshpit.plan import Members, best_shares, predicted_seconds
from protocols.rpc import Empty, Method
from tests.moshpit.exchanges import CHUNK_BYTES, Exchanging, Peer, among

OTHER = Method("/potluck/test/1.0.0", "other", Empty, Empty)

SLOW = 30_000.0  # bytes per second
SENDERS = 6
FAST = 0.8 * SENDERS * SLOW  # about as in setup D: both ends of its links are busy all the time
RATES = [SLOW] * SENDERS + [FAST]
CONTRIBUTES = [True] * SENDERS + [False]
FRACTIONS = best_shares(Members(RATES, RATES, CONTRIBUTES, [True] * len(RATES)))
WINDOW_BYTES = 16_384  # half a second of a slow link
LAYOUT = Layout((Segment("values", 200_000),))


@pytest.mark.slow
def test_small_parts_do_not_starve_the_large_one() -> None:
    """Peers on slow links, and a fast one that brings no data and reduces most of the vector."""

    async def scenario(group: Exchanging) -> None:
        for peer, rate in zip(group.peers, RATES, strict=True):
            group.world.throttle(
                peer.network, upload_bytes_per_second=rate, download_bytes_per_second=rate
            )
        predicted = predicted_seconds(FRACTIONS, RATES, RATES, CONTRIBUTES, 4 * LAYOUT.values)
        await group.exchange()
        group.check_all_hold_the_same()
        assert max(peer.ended for peer in group.peers) < 1.15 * predicted

    weights = [1.0] * SENDERS + [0.0]
    among(
        scenario,
        weights,
        layout=LAYOUT,
        fractions=FRACTIONS,
        window_bytes=WINDOW_BYTES,
        rates=RATES,
    )


def test_a_small_part_beside_a_large_one_has_several_chunks() -> None:
    async def scenario(group: Exchanging) -> None:
        plan = group[0].plan
        assert len(plan.chunks_at(0)) >= 2
        large = plan.chunks_at(SENDERS)
        assert len(large) > CHUNKS_OF_SMALL_PART
        assert large[0].encoded_bytes == plan.chunk_bytes

    among(scenario, [1.0] * SENDERS + [0.0], layout=LAYOUT, fractions=FRACTIONS)


ONE_REDUCER = [1.0, 0.0, 0.0, 0.0]
AHEAD_BYTES = 8 * CHUNK_BYTES + WINDOW_BYTES  # a 32nd of the part, two chunks more, and the rest


@pytest.mark.slow
def test_no_sender_gets_far_ahead_of_the_slowest() -> None:
    """A reducer can send no averages before the slowest sender's values are here, so the others
    leave it the downlink."""

    async def scenario(group: Exchanging) -> None:
        reducer, *senders = group.peers
        world, slow = group.world, senders[-1]
        world.throttle(slow.network, upload_bytes_per_second=SLOW)
        world.throttle(reducer.network, download_bytes_per_second=5 * SLOW)
        most_apart = 0

        async def watch() -> None:
            nonlocal most_apart
            while True:
                arrived = arrived_from(reducer, senders)
                most_apart = max(most_apart, max(arrived) - min(arrived))
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await group.exchange()
            nursery.cancel_scope.cancel()
        group.check_all_hold_the_same()
        assert CHUNK_BYTES < most_apart <= AHEAD_BYTES
        assert slow.ended < 1.15 * 4 * LAYOUT.values / SLOW

    among(scenario, [1.0] * 4, layout=LAYOUT, fractions=ONE_REDUCER, window_bytes=WINDOW_BYTES)


def test_no_sender_waits_for_one_from_which_nothing_arrives() -> None:
    async def scenario(group: Exchanging) -> None:
        reducer, *senders = group.peers
        connected = [peer.network for peer in group.peers[:-1]]
        group.world.partition(connected, [senders[-1].network])
        async with trio.open_nursery() as nursery:
            for peer in group.peers:
                nursery.start_soon(peer.exchange)
            await trio.sleep(STALL_SECONDS - 0.5)
            arrived = arrived_from(reducer, senders[:-1])
            nursery.cancel_scope.cancel()
        assert min(arrived) > 4 * LAYOUT.values

    among(scenario, [1.0] * 4, layout=LAYOUT, fractions=ONE_REDUCER, window_bytes=4 * WINDOW_BYTES)


def arrived_from(reducer: Peer, senders: Sequence[Peer]) -> list[int]:
    links = [reducer.network.link(one.network.peer_id) for one in senders]
    return [0 if link is None else link.bytes_received for link in links]


@pytest.mark.parametrize("says_something", [True, False])
def test_a_member_that_sends_other_bytes_has_not_stalled(says_something: bool) -> None:
    """Member 2 opens its transfers but sends no values; other bytes come from it, or none."""

    async def scenario(group: Exchanging) -> None:
        late, others = group[2], (group[0], group[1])

        async def open_to(reducer: int) -> None:
            opening = opening_for(late.plan, reducer)
            with suppress(PotluckError):
                peer = group[reducer].network.peer_id
                async with late.rpc.open_bulk(peer, PART, opening, timeout=STALL_SECONDS):
                    await trio.sleep_forever()

        async def say_something(reducer: int) -> None:
            while True:
                await trio.sleep(1.0)
                with suppress(PotluckError):
                    await late.rpc.call(
                        group[reducer].network.peer_id, OTHER, Empty(), timeout=STALL_SECONDS
                    )

        for peer in others:
            peer.rpc.serve(OTHER, lambda _caller, request: request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.exchange, late.index)
            for reducer in (0, 1):
                nursery.start_soon(open_to, reducer)
                if says_something:
                    nursery.start_soon(say_something, reducer)
            await trio.sleep(3 * STALL_SECONDS)
            nursery.cancel_scope.cancel()
        assert ("stalled 2" in [peer.code for peer in others]) is not says_something

    among(scenario, [1.0] * 3, fractions=[1.0, 1.0, 0.0], hostile=[2])
