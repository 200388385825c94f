"""Members that die, stop, are slow or never come: which are named, how soon, and what is left."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
import trio

from protocols.errors import Busy
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.attempt import OPEN_SECONDS
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.bandwidth import SMALLEST_BYTES
from protocols.moshpit.butterfly import Butterfly, ReducerTransfer
from protocols.moshpit.layout import Layout, Segment
from protocols.moshpit.part_messages import STALL_SECONDS, PartOpening
from protocols.network import Network, Stream
from protocols.rpc import Rpc
from protocols.testing.world import LinkSettings
from tests.moshpit.exchanges import Exchanging, among, bits, layout_of, values_of

WEAK = ("cut", "gave_up")  # says that a transfer has ended, and nothing against its other end
SLOW_BYTES_PER_SECOND = 20_000.0


def check_over(group: Exchanging, dead: int, within_seconds: float) -> None:
    """All others have given up before that, and one that names another has only lost its link."""
    for peer in group.peers:
        if peer.index == dead:
            continue
        assert peer.suspicion is not None, f"member {peer.index} holds a result"
        assert peer.ended <= within_seconds
        assert peer.suspicion.member == dead or peer.suspicion.code in WEAK
    suspected = {one.suspicion.member for one in group.peers if one.suspicion is not None}
    assert dead in suspected


@pytest.mark.parametrize("moment", [0.05, 0.15, 0.25, 0.4])
def test_a_member_that_is_killed_ends_the_exchange_at_once(moment: float) -> None:
    async def scenario(group: Exchanging) -> None:
        async def kill() -> None:
            await trio.sleep(moment)
            group.world.crash(group[1].network)

        for peer in group.peers:
            group.world.throttle(peer.network, upload_bytes_per_second=100_000)
        before = [bits(peer.source) for peer in group.peers]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            nursery.start_soon(group.exchange)
        check_over(group, dead=1, within_seconds=began + moment + 1.0)
        assert [bits(peer.source) for peer in group.peers] == before

    among(scenario, [1.0] * 4)


@pytest.mark.parametrize("moment", [0.05, 0.3, 1.0])
def test_a_member_that_is_stopped_is_given_up_after_the_stall(moment: float) -> None:
    async def scenario(group: Exchanging) -> None:
        for peer in group.peers:
            group.world.throttle(peer.network, upload_bytes_per_second=20_000)
        began = trio.current_time()

        async def stop() -> None:
            await trio.sleep(moment)
            group.world.stop(group[2].network)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            nursery.start_soon(group.exchange)
        longest = max(STALL_SECONDS, OPEN_SECONDS) + 1.5
        check_over(group, dead=2, within_seconds=began + moment + longest)
        codes = {one.code for one in group.peers if one.index != 2}
        assert codes & {"stalled 2", "unreachable 2"}

    among(scenario, [1.0] * 4)


@pytest.mark.slow
def test_a_slow_member_is_waited_for_and_nobody_takes_anybody_for_stalled() -> None:
    """Its part takes four times as long as the wait for a stopped member."""

    async def scenario(group: Exchanging) -> float:
        group.world.throttle(group[2].network, upload_bytes_per_second=SLOW_BYTES_PER_SECOND)
        began = trio.current_time()
        await group.exchange()
        group.check_all_hold_the_same()
        return trio.current_time() - began

    layout = layout_of("none", values=60_000)
    seconds = among(scenario, [1.0] * 3, layout=layout, chunk_bytes=65_536)
    assert seconds > 3 * STALL_SECONDS


@pytest.mark.slow
def test_a_chunk_may_take_longer_to_send_than_the_stall() -> None:
    async def scenario(group: Exchanging) -> float:
        group.world.throttle(group[1].network, upload_bytes_per_second=SLOW_BYTES_PER_SECOND)
        began = trio.current_time()
        await group.exchange()
        group.check_all_hold_the_same()
        return trio.current_time() - began

    layout = Layout((Segment("t", 100_000),))
    assert among(scenario, [1.0] * 3, layout=layout, chunk_bytes=1 << 20) > 3 * STALL_SECONDS


@pytest.mark.slow
def test_a_chunk_may_take_longer_to_receive_than_the_stall() -> None:
    async def scenario(group: Exchanging) -> float:
        group.world.throttle(group[1].network, download_bytes_per_second=100_000)
        began = trio.current_time()
        await group.exchange()
        group.check_all_hold_the_same()
        return trio.current_time() - began

    layout = Layout((Segment("t", 400_000),))
    seconds = among(scenario, [1.0] * 3, layout=layout, chunk_bytes=1 << 20, window_bytes=64 << 10)
    assert seconds > 3 * STALL_SECONDS


def test_a_member_that_never_begins_is_named_by_all() -> None:
    async def scenario(group: Exchanging) -> None:
        began = trio.current_time()
        await group.exchange(3)
        check_over(group, dead=3, within_seconds=began + OPEN_SECONDS + 1.0)

    among(scenario, [1.0] * 4)


def test_a_member_that_brings_no_data_is_waited_for_too() -> None:
    async def scenario(group: Exchanging) -> None:
        await group.exchange(2)
        assert {group[0].code, group[1].code} <= {"absent 2", "gave_up 0", "gave_up 1"}

    among(scenario, [1.0, 1.0, 0.0], fractions=[1.0, 1.0, 0.0])


def test_two_that_cannot_reach_each_other_name_each_other() -> None:
    async def scenario(group: Exchanging) -> None:
        group.world.partition([group[0].network], [group[1].network])
        await group.exchange()
        assert "unreachable 1" in group[0].code or "unreachable 0" in group[1].code

    among(scenario, [1.0] * 3)


def test_a_waiting_member_is_told_for_whom_it_waits() -> None:
    async def scenario(group: Exchanging) -> None:
        # member 2 reduces nothing, so only the reducer meets its silence
        group.world.throttle(group[2].network, upload_bytes_per_second=30_000)

        async def stop() -> None:
            await trio.sleep(1.0)
            group.world.stop(group[2].network)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            nursery.start_soon(group.exchange)
        assert group[0].code == "stalled 2"
        assert group[1].suspicion is not None
        assert group[1].code == "gave_up 0"
        assert "member 2" in group[1].suspicion.text

    among(scenario, [1.0] * 3, fractions=[1.0, 0.0, 0.0], layout=layout_of("none", values=40_000))


@pytest.mark.parametrize(("bytes_per_second", "code"), [(8_000, "no_values 1"), (12_000, "slow 1")])
def test_a_member_that_is_far_behind_is_named(bytes_per_second: int, code: str) -> None:
    """The slower one is late by the others' median already, the other when the time is over."""

    async def scenario(group: Exchanging) -> None:
        group.world.throttle(group[1].network, upload_bytes_per_second=bytes_per_second)
        began = trio.current_time()
        await group.exchange()
        check_over(group, dead=1, within_seconds=began + 11.0)
        assert code in {group[0].code, group[2].code}

    among(scenario, [1.0] * 3, seconds=10.0, layout=layout_of("none", values=40_000))


def test_a_member_that_only_receives_averages_is_named_when_the_time_is_over() -> None:
    async def scenario(group: Exchanging) -> None:
        await group.exchange(1)  # which brings no data, and does not begin
        assert group[0].code == "slow 1"

    among(scenario, [1.0, 0.0], seconds=2.0)  # less than it takes to be absent


def test_an_attempt_of_one_that_takes_no_time_names_nobody_else() -> None:
    async def scenario(group: Exchanging) -> None:
        await group.exchange()
        assert group[0].code == "slow 0"

    among(scenario, [1.0], seconds=0.0)


@pytest.mark.slow
def test_a_cancelled_exchange_leaves_nothing_behind_and_the_next_attempt_is_whole() -> None:
    async def scenario(group: Exchanging) -> None:
        for peer in group.peers:
            group.world.throttle(peer.network, upload_bytes_per_second=50_000)
        with trio.move_on_after(0.7):
            await group.exchange()
        for peer in group.peers:
            assert (peer.report, peer.suspicion) == (None, None)
            assert peer.rpc.statistics().transfers_open == 0
        frozen = [bits(peer.result) for peer in group.peers]
        await trio.sleep(2.0)
        assert [bits(peer.result) for peer in group.peers] == frozen

        again = Ballot(1, 2)
        async with trio.open_nursery() as nursery:
            for peer in group.peers:
                plan = dataclasses.replace(peer.plan, ballot=again)
                nursery.start_soon(peer.exchange, plan)
        group.check_all_hold_the_same()
        expected = group.average()
        torch.testing.assert_close(group[0].result.double(), expected, rtol=1e-5, atol=1e-5)
        await trio.sleep(1.0)
        assert all(not peer.rpc.statistics().transfers_open for peer in group.peers)

    among(scenario, [1.0] * 3, layout=layout_of("none", values=40_000))


class OnceBusy(Butterfly):
    """Has no room for the first transfer of each sender."""

    def __init__(self, rpc: Rpc, network: Network) -> None:
        super().__init__(rpc, network)
        self.refused: set[PeerId] = set()

    async def _serve(self, caller: Caller, transfer: ReducerTransfer, opening: PartOpening) -> None:
        if caller.peer not in self.refused:
            self.refused.add(caller.peer)
            raise Busy("There is no room here just now.")
        await super()._serve(caller, transfer, opening)


def test_a_reducer_that_is_busy_for_a_moment_is_asked_again() -> None:
    async def scenario(group: Exchanging) -> None:
        peer = group[1]
        peer.butterfly = busy = OnceBusy(peer.rpc, peer.network)
        await group.exchange()
        group.check_all_hold_the_same()
        assert busy.refused == {group[0].network.peer_id, group[2].network.peer_id}

    among(scenario, [1.0] * 3, hostile=[1])


def test_a_member_that_begins_late_finds_the_others_waiting() -> None:
    async def scenario(group: Exchanging) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group[0].exchange)
            nursery.start_soon(group[1].exchange)
            await trio.sleep(OPEN_SECONDS / 2)
            late = group[2].butterfly
            assert late is not None
            assert late.waiting == 2
            nursery.start_soon(group[2].exchange)
        group.check_all_hold_the_same()
        assert late.waiting == 0

    among(scenario, [1.0] * 3)


def test_values_that_became_infinite_after_the_check_are_named_as_our_own() -> None:
    layout = layout_of("float16")
    sources = [values_of(layout, seed) for seed in range(2)]
    sources[0][17] = float("inf")
    sources[0][4_000] = float("nan")

    async def scenario(group: Exchanging) -> None:
        await group.exchange()
        assert group[0].code == "not_finite 0"
        assert group[1].code in {"cut 0", "gave_up 0"}

    among(scenario, [1.0] * 2, layout=layout, sources=sources)


def test_a_flaky_link_ends_the_exchange_and_costs_nobody_its_name() -> None:
    async def scenario(group: Exchanging) -> None:
        for peer in group.peers:
            group.world.throttle(peer.network, upload_bytes_per_second=50_000)

        async def lose() -> None:
            await trio.sleep(0.5)
            group.world.break_link(group[0].network, group[1].network)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            nursery.start_soon(group.exchange)
        assert all(one.suspicion and one.suspicion.code in WEAK for one in group.peers)

    among(scenario, [1.0] * 3, layout=layout_of("none", values=20_000))


@pytest.mark.slow
def test_memory_beside_source_and_result_is_a_chunk_for_each_stream() -> None:
    """Four members with a slow reader among them, whose averages wait for it. 4 × 400 kB."""
    chunk_bytes, members = 4_096, 4
    layout = layout_of("float16", values=100_000)

    async def scenario(group: Exchanging) -> int:
        group.world.throttle(group[3].network, download_bytes_per_second=100_000)
        largest = 0

        async def watch() -> None:
            nonlocal largest
            own = tracemalloc.Filter(True, "*/protocols/moshpit/*")
            while True:
                await trio.sleep(0.5)
                snapshot = tracemalloc.take_snapshot().filter_traces([own])
                chunks = [
                    one.size for one in snapshot.statistics("lineno") if one.size > chunk_bytes
                ]
                largest = max(largest, sum(chunks))

        tracemalloc.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await group.exchange()
            nursery.cancel_scope.cancel()
        tracemalloc.stop()
        group.check_all_hold_the_same()
        return largest

    largest = among(
        scenario, [1.0] * members, layout=layout, chunk_bytes=chunk_bytes, window_bytes=16 << 10
    )
    streams = members * (members - 1) * 2
    lists_of_chunks = 2 * members * 100 * 500  # what there is to know of each chunk, not its bytes
    assert largest <= streams * chunk_bytes * 2 + lists_of_chunks


def test_links_measure_what_they_carry() -> None:
    rate = 40_000.0

    async def scenario(group: Exchanging) -> None:
        group.world.set_path(
            group[0].network, group[1].network, LinkSettings(0.02, bytes_per_second=rate)
        )
        await group.exchange()
        for peer in group.peers:
            assert peer.report is not None
            sent, received = peer.report.sending_bytes, peer.report.bytes_received
            assert sent / peer.report.sending_seconds == pytest.approx(rate, rel=0.3)
            assert received / peer.report.receiving_seconds == pytest.approx(rate, rel=0.3)

    among(scenario, [1.0] * 2, layout=Layout((Segment("t", 200_000),)), chunk_bytes=65_536)


UPLINKS = [62_500.0, 125_000.0, 250_000.0]


def check_uplinks(group: Exchanging, uplinks: Sequence[float], *, least: float) -> None:
    """Each is measured as it is, or down to this part of it. But it does not seem faster: the
    fastest become heads, and get the largest parts."""
    measured = {}
    for peer, uplink in zip(group.peers, uplinks, strict=True):
        assert peer.report is not None
        if peer.report.sending_bytes >= SMALLEST_BYTES:
            rate = peer.report.sending_bytes / peer.report.sending_seconds
            measured[peer.index] = rate / uplink
    assert measured
    assert all(least < one < 1.1 for one in measured.values()), measured


@pytest.mark.parametrize(
    "fractions",
    [
        pytest.param([1, 1, 1], id="equal parts"),
        pytest.param([1, 50, 1], id="links with few bytes"),
        pytest.param([1, 0, 1], id="a member that reduces nothing"),
        pytest.param([0, 1, 0], id="a sender that is held for a slower one"),
        pytest.param([0, 0, 1], id="one that only sends averages"),
    ],
)
@pytest.mark.parametrize(
    "window_bytes", [pytest.param(1 << 20, id="buffers"), pytest.param(65_536, id="no buffers")]
)
def test_an_uplink_is_measured_whatever_the_parts_are(
    fractions: list[float], window_bytes: int
) -> None:
    async def scenario(group: Exchanging) -> None:
        await group.exchange()
        check_uplinks(group, UPLINKS, least=0.8)

    among(
        scenario,
        layout=Layout((Segment("t", 150_000),)),
        fractions=fractions,
        chunk_bytes=16_384,
        window_bytes=window_bytes,
        rates=UPLINKS,
        uplinks=UPLINKS,
    )


@pytest.mark.slow
def test_equal_uplinks_are_measured_equal_if_chunks_arrive_in_whole_packets() -> None:
    """A reader then sees all of a chunk at once, and its sender has put it into a buffer."""
    uplinks = [62_500.0] * 8

    async def scenario(group: Exchanging) -> None:
        await group.exchange()
        check_uplinks(group, uplinks, least=0.9)

    among(
        scenario,
        [1.0] * 8,
        layout=Layout((Segment("t", 8_000_000, "sparse-sign"),)),
        chunk_bytes=32_768,
        packet_bytes=65_536,
        uplinks=uplinks,
    )


def test_an_uplink_is_measured_while_it_carries_other_bytes_too() -> None:
    """A peer that serves a state beside rounds does not seem slow by that."""
    uplinks = [125_000.0, 250_000.0, 250_000.0]

    async def scenario(group: Exchanging) -> None:
        async def sink(stream: Stream) -> None:
            async for _ in stream:
                pass

        group[1].network.serve("/sink", sink)
        stream = await group[0].network.open(group[1].network.peer_id, "/sink")
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(2_000_000))
            await group.exchange()
            nursery.cancel_scope.cancel()
        check_uplinks(group, uplinks, least=0.8)

    vector = Layout((Segment("t", 150_000),))
    among(scenario, layout=vector, chunk_bytes=65_536, uplinks=uplinks)
