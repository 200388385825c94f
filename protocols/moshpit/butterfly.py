"""The butterfly: each member reduces one part for all (002 §3.1; DeDLOC §2.2). One attempt's data.

    butterfly = Butterfly(rpc, network)                    # one per node
    report = await butterfly.exchange(plan, source, result)

Each member sends to each reducer its share of that reducer's part, and gets the average back on
the same stream; so a peer that can only dial out takes part like any other. What one attempt
shares is in attempt.py, its two directions are sending.py and serving.py, the sums reducing.py.

Promise: `exchange` returns when all averages are here *and* everybody has been sent ours, or it
raises; either way nothing of it goes on, and `source` is as it was.

Easy to get wrong: members learn at different moments that an attempt has begun, so transfers for
it come early. They wait here, few of them and not for long, until it begins or is known to be over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import trio
from torch import Tensor

from protocols.errors import Busy, ProtocolMisuse
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.attempt import Attempt
from protocols.moshpit.ballots import LARGEST_GROUP, Ballot, Suspicion
from protocols.moshpit.exchange import ExchangeFailed, ExchangePlan, ExchangeReport
from protocols.moshpit.opening_time import LONGEST_OPENING_SECONDS, watch_openings
from protocols.moshpit.part_messages import PART, PartOpening, StaleAttempt
from protocols.moshpit.pulse import Pulse
from protocols.moshpit.sending import PartExchange
from protocols.moshpit.serving import ReducerTransfer, serve_part
from protocols.moshpit.vector import check_values
from protocols.network import Network
from protocols.rpc import Rpc

MOST_WAITING = 2 * LARGEST_GROUP  # early transfers: of two attempts
MOST_WAITING_OF_PEER = 2  # the one of this attempt, and one of the next
ROUNDS_REMEMBERED = 64  # of which the last ballot is known, so that late transfers are told at once


class Butterfly:
    """The exchanges of one node."""

    def __init__(self, rpc: Rpc, network: Network) -> None:
        """Serves the bulk method `part` of `/potluck/allreduce/1.0.0` from now on."""
        self._rpc, self._network = rpc, network
        self._running: dict[tuple[bytes, Ballot], Attempt] = {}
        self._last_ballots: OrderedDict[bytes, Ballot] = OrderedDict()
        self._waiting: Counter[PeerId] = Counter()
        self._begun = trio.Event()
        rpc.serve_bulk(PART, self._serve)

    @property
    def waiting(self) -> int:
        """How many transfers have come for attempts that have not begun here."""
        return self._waiting.total()

    async def exchange(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> ExchangeReport:
        """Average `source` with the other participants' into `result`.

        ExchangeFailed names who was to blame. `source` is only read, `result` only written (what
        is in it after a failure means nothing). Cancelling leaves nothing behind.
        """
        plan.check()
        check_values(plan.layout, source, "The source of an exchange")
        check_values(plan.layout, result, "The result of an exchange")
        if source.data_ptr() == result.data_ptr():
            raise ProtocolMisuse("An exchange needs its source unchanged: give it another result.")
        attempt = self._begin(plan, source, result)
        try:
            with trio.move_on_after(plan.seconds) as patience, attempt.within():
                await self._run(attempt)
            if patience.cancelled_caught:
                slow = attempt.furthest_behind()
                attempt.suspect(slow, "slow", f"Not finished after {plan.seconds:g} seconds.")
        finally:
            await self._end(attempt)
        if attempt.suspicion is not None:
            raise ExchangeFailed((attempt.suspicion,), attempt.awaited)
        return _report(attempt)

    def awaited(self, round_id: bytes, ballot: Ballot) -> tuple[Suspicion, ...]:
        """For whom this member waits in an exchange that runs; nobody, if it does not."""
        attempt = self._running.get((round_id, ballot))
        return () if attempt is None else attempt.lateness.awaited()

    def _begin(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> Attempt:
        name = (plan.round_id, plan.ballot)
        last = self._last_ballots.get(plan.round_id)
        if last is not None and plan.ballot <= last:
            raise ProtocolMisuse(f"The exchange of ballot {plan.ballot} was begun here before.")
        attempt = Attempt(self._network, plan, source, result)
        self._last_ballots[plan.round_id] = plan.ballot
        self._last_ballots.move_to_end(plan.round_id)
        if len(self._last_ballots) > ROUNDS_REMEMBERED:
            self._last_ballots.popitem(last=False)
        self._running[name] = attempt
        self._begun.set()
        self._begun = trio.Event()
        return attempt

    async def _run(self, attempt: Attempt) -> None:
        peers = [member.peer for member in attempt.others]
        pulse = Pulse(self._network, peers, attempt.heard)
        async with trio.open_nursery() as watching:
            watching.start_soon(pulse.follow)
            watching.start_soon(watch_openings, attempt)
            watching.start_soon(attempt.lateness.watch)
            async with trio.open_nursery() as nursery:
                for reducer in attempt.reducers:
                    nursery.start_soon(PartExchange(attempt, reducer).run, self._rpc)
                if attempt.senders:
                    await attempt.all_served.wait()
                else:
                    await _finish_alone(attempt)
            watching.cancel_scope.cancel()
        attempt.received_seconds = trio.current_time() - attempt.began

    async def _end(self, attempt: Attempt) -> None:
        plan = attempt.plan
        del self._running[plan.round_id, plan.ballot]
        attempt.stop("This attempt is over here.")
        with trio.CancelScope(shield=True):  # cancelled above, they end at their next step
            await attempt.handlers_gone()

    async def _serve(self, caller: Caller, transfer: ReducerTransfer, opening: PartOpening) -> None:
        attempt = await self._attempt_for(caller.peer, opening)
        await serve_part(attempt, caller.peer, transfer, opening)

    async def _attempt_for(self, peer: PeerId, opening: PartOpening) -> Attempt:
        """The attempt that is meant, as soon as it begins here."""
        name = (opening.round_id, opening.ballot)
        with trio.move_on_after(LONGEST_OPENING_SECONDS):
            while name not in self._running:
                self._check_may_wait(peer, opening)
                self._waiting[peer] += 1
                try:
                    await self._begun.wait()
                finally:
                    self._waiting[peer] -= 1
                    if not self._waiting[peer]:
                        del self._waiting[peer]
            return self._running[name]
        raise StaleAttempt(
            f"Ballot {opening.ballot} of this round has not begun here.",
            why="The round is unknown to this peer, or it was slow to begin.",
        )

    def _check_may_wait(self, peer: PeerId, opening: PartOpening) -> None:
        last = self._last_ballots.get(opening.round_id)
        if last is not None and opening.ballot <= last:
            raise StaleAttempt(f"Ballot {opening.ballot} of this round is over; {last} was begun.")
        if self._waiting[peer] >= MOST_WAITING_OF_PEER or self.waiting >= MOST_WAITING:
            raise Busy("Too many transfers wait here for an exchange to begin.")


async def _finish_alone(attempt: Attempt) -> None:
    """Nobody sends us anything: our part, if there is one, is our own values."""
    reduction = attempt.reduction
    while not reduction.is_finished:
        reduction.finish_due(most=1)
        await trio.lowlevel.checkpoint()
    if reduction.chunks:
        attempt.own_statement()


def _report(attempt: Attempt) -> ExchangeReport:
    meter = attempt.meter
    statements = tuple(attempt.statements[index] for index in sorted(attempt.statements))
    return ExchangeReport(
        statements=statements,
        result_digest=attempt.result_digest,
        bytes_sent=meter.bytes_sent,
        bytes_received=meter.bytes_received,
        opened_seconds=attempt.opened_seconds,
        reduced_seconds=attempt.reduced_seconds,
        received_seconds=attempt.received_seconds,
        seconds=trio.current_time() - attempt.began,
        sending_seconds=meter.sending_seconds,
        receiving_seconds=meter.receiving_seconds,
        links=meter.uses(),
        contradicted_by=attempt.contradicted_by(),
    )
