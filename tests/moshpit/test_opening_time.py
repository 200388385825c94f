"""A member that opens late is waited for while bytes come from it, but not for ever."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from protocols.errors import PotluckError
from protocols.moshpit.attempt import LONGEST_OPENING_SECONDS, OPEN_SECONDS, STEP_SECONDS
from protocols.moshpit.butterfly import BEAT_SECONDS
from protocols.moshpit.part_messages import STALL_SECONDS
from protocols.rpc import Empty, Method
from tests.moshpit.exchanges import LONGEST_SECONDS, Exchanging, Peer, among

OTHER = Method("/potluck/test/1.0.0", "other", Empty, Empty)
LATE = 2


async def talk(group: Exchanging, late: Peer, seconds: float = LONGEST_SECONDS) -> None:
    """Other bytes come from this member, to all others, for this long."""
    others = [peer for peer in group.peers if peer is not late]
    until = trio.current_time() + seconds
    while trio.current_time() < until:
        for peer in others:
            with suppress(PotluckError):
                await late.rpc.call(peer.network.peer_id, OTHER, Empty(), timeout=STALL_SECONDS)
        await trio.sleep(1.0)


def serve_others(group: Exchanging) -> None:
    for peer in group.peers:
        peer.rpc.serve(OTHER, lambda _caller, request: request)


@pytest.mark.parametrize("fractions", [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
def test_a_member_that_begins_late_and_is_heard_meanwhile_takes_part(
    fractions: list[float],
) -> None:
    """The same if it only sends, or only reduces."""

    async def scenario(group: Exchanging) -> None:
        late = group[LATE]
        serve_others(group)
        async with trio.open_nursery() as talking:
            talking.start_soon(talk, group, late)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group.exchange, late.index)
                await trio.sleep(OPEN_SECONDS + STEP_SECONDS / 2)
                nursery.start_soon(late.exchange)
            talking.cancel_scope.cancel()
        group.check_all_hold_the_same()

    among(scenario, [1.0] * 3, fractions=fractions)


@pytest.mark.parametrize(
    ("talks_for", "given_up_after"),
    [
        (0.0, OPEN_SECONDS),
        (2 * LONGEST_OPENING_SECONDS, OPEN_SECONDS + STEP_SECONDS),
    ],
)
def test_a_member_that_never_begins_is_given_up_when_it_is_silent_or_too_late(
    talks_for: float, given_up_after: float
) -> None:
    async def scenario(group: Exchanging) -> None:
        late, began = group[LATE], trio.current_time()
        serve_others(group)
        async with trio.open_nursery() as talking:
            talking.start_soon(talk, group, late, talks_for)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group.exchange, late.index)
            talking.cancel_scope.cancel()
        for peer in group.peers[:LATE]:
            assert peer.suspicion is not None
            assert peer.code in {"absent 2", "unreachable 2", "gave_up 0", "gave_up 1"}
            assert abs(peer.ended - began - given_up_after) < 3 * BEAT_SECONDS
        assert LATE in {peer.suspicion.member for peer in group.peers[:LATE] if peer.suspicion}

    among(scenario, [1.0] * 3)
