"""Calls and transfers over worse and worse links: they work, and the deadlines suit. (F9)

A rung is a link made by the proxy between us and a peer: a far one, a narrow one, a narrow one
behind a deep buffer (a home router: bytes that wait in it delay all others), a satellite.

Easy to get wrong: a saturated narrow link answers late, and late looks like dead. Neither the
keep-alive nor any stall limit may end what still moves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest
import trio

from lab.bench.link_proxy import LinkConditions, open_link_proxy
from protocols.errors import DeadlineExceeded
from protocols.network import LinkFacts
from protocols.rpc import Empty
from tests.processes.children import PeerProcess, running_peer
from tests.processes.methods import CHUNK_BYTES, ECHO, LINGER, SINK, Content, Duration
from tests.processes.peer import TestPeer, open_test_peer

MEGABIT: Final = 125_000  # bytes per second
CALL_SECONDS: Final = 30.0
# A call's time beyond the round trip, for two processes and a proxy on a busy machine
GRACE_SECONDS: Final = 0.5
CONNECT_ROUND_TRIPS: Final = 6  # to a link and a stream, with the call's own
SMALL_BYTES: Final = 50_000
SHORT_SECONDS: Final = 6.0
LONG_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Rung:
    """A link, as seen from us: up is from us to the other side."""

    name: str
    round_trip_seconds: float
    up: LinkConditions
    down: LinkConditions

    @property
    def buffer_seconds(self) -> float:
        """How long what enters the full buffer on the way up waits in it."""
        if self.up.bytes_per_second is None:
            return 0.0
        return self.up.queue_bytes / self.up.bytes_per_second

    def __str__(self) -> str:
        return self.name


def rung(
    name: str,
    round_trip_seconds: float,
    up_rate: float | None = None,
    down_rate: float | None = None,
    buffer_seconds: float = 0.2,
) -> Rung:
    def conditions(rate: float | None) -> LinkConditions:
        if rate is None:
            return LinkConditions(delay_seconds=round_trip_seconds / 2)
        return LinkConditions(
            delay_seconds=round_trip_seconds / 2,
            bytes_per_second=rate,
            queue_bytes=int(rate * buffer_seconds),
        )

    return Rung(name, round_trip_seconds, conditions(up_rate), conditions(down_rate))


RUNGS: Final = [
    rung("200 ms", 0.2),
    rung("1 Mb/s up", 0.03, MEGABIT, 16 * MEGABIT),
    rung("1 Mb/s up behind 2 s of buffer", 0.03, MEGABIT, 16 * MEGABIT, buffer_seconds=2.0),
    rung("600 ms", 0.6),
    rung("600 ms, 1 Mb/s up, 2 s of buffer", 0.6, MEGABIT, 8 * MEGABIT, buffer_seconds=2.0),
]
ENDS: Final = (RUNGS[0], RUNGS[-1])

# The ends of the ladder for everybody, and the rungs between with scripts/test --soak
SOME_RUNGS: Final = [
    pytest.param(one, id=str(one), marks=pytest.mark.slow if one in ENDS else pytest.mark.soak)
    for one in RUNGS
]


@asynccontextmanager
async def across(link: Rung) -> AsyncIterator[tuple[TestPeer, PeerProcess]]:
    """We, and a peer at the other end of the link."""
    async with (
        running_peer() as other,
        open_link_proxy(("127.0.0.1", other.port), link.up, link.down) as proxy,
        open_test_peer() as us,
    ):
        address = f"/ip4/{proxy.host}/tcp/{proxy.port}/p2p/{other.peer}"
        us.network.learn_addresses(other.peer, [address])
        yield us, other


async def timed_call(us: TestPeer, other: PeerProcess) -> float:
    asked_at = trio.current_time()
    sent = Content(b"how far?")
    assert await us.rpc.call(other.peer, ECHO, sent, timeout=CALL_SECONDS) == sent
    return trio.current_time() - asked_at


@pytest.mark.parametrize("link", SOME_RUNGS)
async def test_calls_take_little_more_than_the_round_trip(link: Rung) -> None:
    """F9"""
    async with across(link) as (us, other):
        first = await timed_call(us, other)
        later = [await timed_call(us, other) for _ in range(3)]

        assert first < CONNECT_ROUND_TRIPS * link.round_trip_seconds + 2 * GRACE_SECONDS
        assert link.round_trip_seconds <= min(later) < link.round_trip_seconds + GRACE_SECONDS
        measured = facts_of(us, other).round_trip_seconds
        assert measured is not None
        assert measured < link.round_trip_seconds + GRACE_SECONDS


@pytest.mark.parametrize("link", SOME_RUNGS)
async def test_a_call_without_an_answer_ends_at_its_deadline_on_any_link(link: Rung) -> None:
    """F9: a deadline is the caller's, not the link's."""
    timeout = link.round_trip_seconds + 1.0
    async with across(link) as (us, other):
        await timed_call(us, other)
        asked_at = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=timeout)
        assert timeout <= trio.current_time() - asked_at < timeout + GRACE_SECONDS


@pytest.mark.parametrize("link", SOME_RUNGS)
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SHORT_SECONDS, id="short"),
        pytest.param(LONG_SECONDS, id="long", marks=pytest.mark.soak),
    ],
)
async def test_a_saturated_link_stays_up_and_still_answers_calls(
    link: Rung, seconds: float
) -> None:
    """F9: an upload keeps the link full; the keep-alive and calls wait their turn behind it."""
    async with across(link) as (us, other):
        await timed_call(us, other)
        connected_at = facts_of(us, other).connected_at
        async with us.rpc.open_bulk(other.peer, SINK, Empty(), timeout=CALL_SECONDS) as upload:
            opened_at = trio.current_time()
            took = 0.0

            async def keep_it_full() -> None:
                nonlocal took
                while trio.current_time() < opened_at + seconds:
                    await upload.send_chunk(bytes(SMALL_BYTES))
                seen = await upload.finish(Empty())
                took = trio.current_time() - opened_at
                assert seen.total_bytes == upload.bytes_sent

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_it_full)
                while trio.current_time() < opened_at + seconds:
                    await timed_call(us, other)
                    await trio.sleep(0.2)

        assert facts_of(us, other).connected_at == connected_at
        if link.up.bytes_per_second is not None:
            # the last round trip carries the word that all has arrived
            carried = upload.bytes_sent / (took - link.round_trip_seconds)
            assert carried > 0.9 * link.up.bytes_per_second


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", [RUNGS[0], pytest.param(RUNGS[3], marks=pytest.mark.soak)], ids=str
)
async def test_one_stream_fills_a_far_link(link: Rung) -> None:
    """F9: the window grows with the bandwidth and the delay."""
    async with across(link) as (us, other):
        await timed_call(us, other)
        began_at = trio.current_time()
        await us.upload(other.peer, 24)
        took = trio.current_time() - began_at

        # a window that stayed at the 256 KiB it begins with would take a round trip for each
        windows = 24 * CHUNK_BYTES / (256 * 1024)
        assert took < 0.5 * windows * link.round_trip_seconds


def facts_of(us: TestPeer, other: PeerProcess) -> LinkFacts:
    facts = us.network.link(other.peer)
    assert facts is not None, "the link is down"
    return facts
