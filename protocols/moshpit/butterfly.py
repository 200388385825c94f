"""The butterfly: each member reduces one part for all (DeDLOC, 2.2). One attempt's data.

    butterfly = Butterfly(rpc, network)                    # one per node
    report = await butterfly.exchange(plan, source, result)

Each member sends each reducer its values of that reducer's part, and gets the average back on the
same stream. So a peer that can only dial out takes part like any other. attempt.py has the shared
state of one attempt, reducing.py the sums. The two directions are below.

Promise: `exchange` returns when all averages are here *and* ours were sent to all members, or it
raises. In both cases no task of it goes on, and `source` is unchanged.

Easy to get wrong: members learn at different moments that an attempt has begun, so transfers for it
may come early. A few of them wait here, for a short time, until it begins or is known to be over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import trio
from torch import Tensor

from auth.bounded_map import BoundedMap
from protocols.errors import Busy, MalformedMessage, PotluckError, ProtocolMisuse, Unreachable
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.attempt import (
    LONGEST_OPENING_SECONDS,
    OPEN_SECONDS,
    ExchangeAttempt,
    watch_openings,
)
from protocols.moshpit.ballots import LARGEST_GROUP, Ballot, Statement, Suspicion
from protocols.moshpit.exchange import ExchangeFailed, ExchangePlan, ExchangeReport, Participant
from protocols.moshpit.layout import Chunk, check_values
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    PART,
    GaveUp,
    NotInAttempt,
    PartClosed,
    PartOpening,
    PartTaken,
    PartTwice,
    PlanDiffers,
    StaleAttempt,
    WrongPart,
    counts,
    opening_for,
    plan_digest,
)
from protocols.moshpit.reducing import NotFiniteReceived
from protocols.network import Network
from protocols.rpc import LAST_WORD_SECONDS, Empty, Rpc, Transfer
from protocols.tensors import WIDE, all_finite, decode_into, encode_into, raw_bytes

MOST_WAITING = 2 * LARGEST_GROUP  # early transfers: of two attempts
MOST_WAITING_OF_PEER = 2  # one of this attempt, and one of the next
ROUNDS_REMEMBERED = 64  # with their last ballots, so that late transfers are refused at once


class Butterfly:
    """The exchanges of one node."""

    def __init__(self, rpc: Rpc, network: Network) -> None:
        """Serves the bulk method `part` of `/potluck/allreduce/1.0.0` from now on."""
        self._rpc, self._network = rpc, network
        self._running: dict[tuple[bytes, Ballot], ExchangeAttempt] = {}
        self._last_ballots = BoundedMap[bytes, Ballot](ROUNDS_REMEMBERED)
        self._waiting: Counter[PeerId] = Counter()
        self._begun = trio.Event()
        self._tell: Callable[[ExchangeReport], None] = lambda _report: None
        self._tell_begun: Callable[[], None] = lambda: None
        rpc.serve_bulk(PART, self._serve)

    @property
    def waiting(self) -> int:
        """How many transfers wait for attempts that have not begun here."""
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

    def when_ended(self, tell: Callable[[ExchangeReport], None]) -> None:
        """From now on, report each exchange's measurements, even if it fails or is stopped."""
        self._tell = tell

    def when_begun(self, tell: Callable[[], None]) -> None:
        """From now on, report when an exchange begins."""
        self._tell_begun = tell

    def awaited(self, round_id: bytes, ballot: Ballot) -> tuple[Suspicion, ...]:
        """The members for which a running exchange of this ballot waits; none if none runs."""
        attempt = self._running.get((round_id, ballot))
        return () if attempt is None else attempt.lateness.awaited()

    def _begin(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> ExchangeAttempt:
        name = (plan.round_id, plan.ballot)
        last = self._last_ballots.get(plan.round_id)
        if last is not None and plan.ballot <= last:
            raise ProtocolMisuse(f"The exchange of ballot {plan.ballot} was begun here before.")
        attempt = ExchangeAttempt(self._network, plan, source, result)
        self._last_ballots[plan.round_id] = plan.ballot
        self._running[name] = attempt
        self._tell_begun()
        self._begun.set()
        self._begun = trio.Event()
        return attempt

    async def _run(self, attempt: ExchangeAttempt) -> None:
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

    async def _end(self, attempt: ExchangeAttempt) -> None:
        plan = attempt.plan
        del self._running[plan.round_id, plan.ballot]
        attempt.stop("This attempt is over here.")
        report = _report(attempt)
        self._tell(report if attempt.received_seconds else _of_what_arrived(attempt, report))
        with trio.CancelScope(shield=True):  # they were cancelled above, and end at their next step
            await attempt.handlers_gone()

    async def _serve(self, caller: Caller, transfer: ReducerTransfer, opening: PartOpening) -> None:
        attempt = await self._attempt_for(caller.peer, opening)
        await serve_part(attempt, caller.peer, transfer, opening)

    async def _attempt_for(self, peer: PeerId, opening: PartOpening) -> ExchangeAttempt:
        """The attempt of this opening, as soon as it begins here."""
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


async def _finish_alone(attempt: ExchangeAttempt) -> None:
    """No other member sends us values: our part, if there is one, is our own values."""
    reduction = attempt.reduction
    while not reduction.is_finished:
        reduction.finish_due(most=1)
        await trio.lowlevel.checkpoint()
    if reduction.chunks:
        attempt.own_statement()


def _report(attempt: ExchangeAttempt) -> ExchangeReport:
    meter = attempt.meter
    statements = tuple(attempt.statements[index] for index in sorted(attempt.statements))
    sending_bytes, sending_seconds = meter.uplink()
    return ExchangeReport(
        statements=statements,
        result_digest=attempt.result_digest,
        bytes_sent=meter.bytes_sent,
        bytes_received=meter.bytes_received,
        opened_seconds=attempt.opened_seconds,
        reduced_seconds=attempt.reduced_seconds,
        received_seconds=attempt.received_seconds,
        seconds=trio.current_time() - attempt.began,
        sending_bytes=sending_bytes,
        sending_seconds=sending_seconds,
        receiving_seconds=meter.receiving.seconds,
        contradicted_by=attempt.contradicted_by(),
    )


def _of_what_arrived(attempt: ExchangeAttempt, report: ExchangeReport) -> ExchangeReport:
    """The report of an exchange that has not ended. Sent bytes may still be in buffers. But if a
    chunk's average is here, our values of it have arrived."""
    plan = attempt.plan
    sent = 0
    for member in attempt.averages_of.keys() & attempt.values_to.keys():
        chunks = plan.chunks_at(plan.place_of(member))[: attempt.averages_of[member].done]
        sent += sum(chunk.encoded_bytes for chunk in chunks)
    return replace(report, bytes_sent=sent, sending_bytes=sent, sending_seconds=report.seconds)


# Towards one reducer: sends our values of its part, and receives its averages on the same stream.
#
# If nothing is encoded (codecs none and float64), both directions copy memory: chunks are sent
# directly from `source`, and averages are received directly into `result`.
#
# Easy to get wrong: both directions must go on at the same time, or each side could wait for the
# other to read. After a closing message we cannot say ALIVE, so we send ours only when our whole
# result is here, from the other reducers, too. If a transfer breaks, the explanation is received,
# not sent, so the sending task leaves the judgement to the receiving one for a moment.


BUSY_SECONDS = 0.5  # until a reducer that had no room is asked again

SenderTransfer = Transfer[Empty, PartTaken, PartClosed]


class PartExchange:
    """Our exchange with one reducer."""

    def __init__(self, attempt: ExchangeAttempt, reducer: Participant) -> None:
        plan = attempt.plan
        place = plan.place_of(reducer.index)
        self._attempt, self._reducer = attempt, reducer
        self._steps = attempt.steps_to(reducer.index)
        self._opening = opening_for(plan, place)
        self._chunks = plan.chunks_at(place)
        self._brings_data = plan.member_of(plan.me).weight > 0.0
        self._received = trio.Event()  # everything up to the closing message, or the reason why not

    async def run(self, rpc: Rpc) -> None:
        """Run the whole exchange. An error ends the attempt; nothing is raised."""
        attempt, reducer = self._attempt, self._reducer
        with attempt.blaming(reducer.index, opening=True):
            async with AsyncExitStack() as opened:
                transfer = await self._open(rpc, opened)
                attempt.opened(reducer.index)
                with attempt.transferring(reducer.index, transfer):
                    await self._exchange(transfer)

    async def _exchange(self, transfer: SenderTransfer) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, transfer)
            with self._attempt.blaming(self._reducer.index):
                await self._receive_averages(transfer)
            self._received.set()

    async def _open(self, rpc: Rpc, opened: AsyncExitStack) -> SenderTransfer:
        """An accepted transfer. A reducer that is busy is asked again for a while."""
        began = self._attempt.began
        while True:
            left = began + LONGEST_OPENING_SECONDS - trio.current_time()
            opening = rpc.open_bulk(self._reducer.peer, PART, self._opening, timeout=left)
            try:
                return await opened.enter_async_context(opening)
            except Busy:
                if began + OPEN_SECONDS - trio.current_time() <= BUSY_SECONDS:
                    raise
            await trio.sleep(BUSY_SECONDS)

    async def _send(self, transfer: SenderTransfer) -> None:
        with self._attempt.blaming(self._reducer.index):
            try:
                if self._brings_data:
                    await self._send_values(transfer)
                await until_whole(self._attempt, transfer)
                await transfer.send_closing(PartTaken(self._attempt.result_digest))
            except Unreachable:
                with trio.move_on_after(LAST_WORD_SECONDS):
                    await self._received.wait()
                raise

    async def _send_values(self, transfer: SenderTransfer) -> None:
        source = self._attempt.source
        memory = raw_bytes(source)
        buffer = bytearray(_largest_encoded(self._chunks))
        with self._attempt.pace.values(self._steps, len(self._chunks)) as stream:
            for number, chunk in enumerate(self._chunks):
                await stream.turn(number, transfer)
                if chunk.as_it_lies:
                    encoded = self._place(memory, chunk)
                else:
                    values = source[chunk.start : chunk.stop]
                    encode_into(values, chunk.codec, buffer, name="a tensor of this peer")
                    encoded = memoryview(buffer)[: chunk.encoded_bytes]
                await transfer.send_chunk(encoded)
                self._attempt.meter.bytes_sent += chunk.encoded_bytes
                self._attempt.values_to[self._reducer.index].advanced()

    async def _receive_averages(self, transfer: SenderTransfer) -> None:
        attempt, reducer = self._attempt, self._reducer
        memory = raw_bytes(attempt.result)
        buffer = bytearray(_largest_encoded(self._chunks))
        for number, chunk in enumerate(self._chunks):
            check_size(await transfer.next_chunk_bytes(), chunk, number)
            place = self._place(memory, chunk) if chunk.as_it_lies else memoryview(buffer)
            encoded = place[: chunk.encoded_bytes]
            with attempt.meter.receiving:
                await transfer.receive_chunk_into(encoded)
            attempt.meter.bytes_received += chunk.encoded_bytes
            _take(attempt.result, chunk, encoded)
            attempt.averages_of[reducer.index].advanced()
        attempt.has_part(reducer.index, transfer.received_digest)
        check_no_more(await transfer.next_chunk_bytes(), len(self._chunks))
        closed = await transfer.receive_closing()
        self._take_statement(transfer.received_digest, closed)

    def _place(self, memory: memoryview, chunk: Chunk) -> memoryview:
        size = self._attempt.plan.layout.value_bytes
        return memory[size * chunk.start : size * chunk.stop]

    def _take_statement(self, digest: bytes, closed: PartClosed) -> None:
        attempt, plan, reducer = self._attempt, self._attempt.plan, self._reducer
        statement = Statement(reducer.index, digest, closed.signature)
        if not counts(reducer.peer, plan.round_id, plan.ballot, statement):
            attempt.suspect(
                reducer.index, "bad_statement", "It did not sign the averages that it sent."
            )
            return
        attempt.statements[reducer.index] = statement
        attempt.told(reducer.index, closed.result)


async def until_whole(attempt: ExchangeAttempt, transfer: Transfer[Any, Any, Any]) -> None:
    """Keep our direction open until our whole result is here, so that we can send ALIVE."""
    while not attempt.whole.is_set():
        await transfer.say_alive()
        with trio.move_on_after(ALIVE_SECONDS):
            await attempt.whole.wait()


def check_size(size: int | None, chunk: Chunk, number: int) -> None:
    """MalformedMessage unless the next chunk has the only size that it may have."""
    if size is None:
        raise MalformedMessage(f"The chunks end after {number:,}, before the part does.")
    if size != chunk.encoded_bytes:
        raise MalformedMessage(
            f"Chunk {number:,} came with {size:,} bytes; {chunk.values:,} values in {chunk.codec} "
            f"have {chunk.encoded_bytes:,}."
        )


def check_no_more(size: int | None, chunks: int) -> None:
    if size is not None:
        raise MalformedMessage(f"More chunks came than the {chunks:,} that the part has.")


def _take(result: Tensor, chunk: Chunk, encoded: memoryview) -> None:
    """Put averages into our result. If nothing is encoded, they are there already."""
    if chunk.as_it_lies:
        if not all_finite(np.frombuffer(encoded, WIDE[result.dtype])):
            raise NotFiniteReceived("An average came with values that are not finite.")
        return
    try:
        decode_into(result[chunk.start : chunk.stop], chunk.codec, encoded, "float32")
    except MalformedMessage as error:
        raise NotFiniteReceived(error.what) from None


def _largest_encoded(chunks: list[Chunk]) -> int:
    """Room for any chunk that is encoded."""
    return max((one.encoded_bytes for one in chunks if not one.as_it_lies), default=0)


# Towards one sender: checks its opening, receives its values, and sends it the averages.
#
# Easy to get wrong: a reducer that waits for a slow sender has nothing to send to the others, and
# would look stalled to them. So a task that waits for an average here says ALIVE meanwhile.


ReducerTransfer = Transfer[Empty, PartClosed, PartTaken]


async def serve_part(
    attempt: ExchangeAttempt, peer: PeerId, transfer: ReducerTransfer, opening: PartOpening
) -> None:
    """The handler of one sender's transfer. Raises the error to send to the sender."""
    sender = _admit(attempt, peer, opening)
    attempt.arrived(sender.index, transfer)
    with attempt.serving(), attempt.blaming(sender.index):
        await transfer.accept(Empty())
        with attempt.transferring(sender.index, transfer):
            await PartService(attempt, sender, transfer).run()
        attempt.served()
    if not transfer.finished:
        raise GaveUp(attempt.over or "The exchange ended.")


def _admit(attempt: ExchangeAttempt, peer: PeerId, opening: PartOpening) -> Participant:
    """The participant that opens this transfer. Refusals name the problem.

    A participant with another plan ends the attempt: it will not come back with ours.
    """
    plan = attempt.plan
    sender = next((member for member in plan.members if member.peer == peer), None)
    if sender is None or sender.index == plan.me:
        raise NotInAttempt(f"{peer} does not take part in this attempt.")
    refusal = _disagreement(plan, sender, opening)
    if refusal is not None:
        attempt.suspect(sender.index, "refused", refusal.what)
        raise refusal
    if sender.index in attempt.values_of:
        raise PartTwice(f"Member {sender.index} has opened its transfer for this attempt already.")
    return sender


def _disagreement(
    plan: ExchangePlan, sender: Participant, opening: PartOpening
) -> PotluckError | None:
    place = plan.my_place
    mine = (plan.cuts[place], plan.cuts[place + 1])
    if opening.sender != sender.index:
        return NotInAttempt(f"Member {sender.index} opened a transfer as member {opening.sender}.")
    if opening.part != plan.me or mine[0] == mine[1]:
        return WrongPart(
            f"Member {plan.me} was sent part {opening.part}, which it does not reduce."
        )
    if opening.layout != plan.layout.digest:
        return PlanDiffers("The two sides average different tensors, or with different codecs.")
    if opening.weight != sender.weight:
        return PlanDiffers(
            f"Member {sender.index} claims the weight {opening.weight:g}; "
            f"the roster gives it {sender.weight:g}."
        )
    if (opening.start, opening.stop) != mine:
        return PlanDiffers(
            f"Member {sender.index} cuts part {plan.me} from {opening.start:,} to "
            f"{opening.stop:,}; it goes from {mine[0]:,} to {mine[1]:,}."
        )
    if opening.chunk_bytes != plan.chunk_bytes:
        return PlanDiffers(
            f"Member {sender.index} makes chunks of {opening.chunk_bytes:,} bytes; "
            f"they have {plan.chunk_bytes:,}."
        )
    if opening.plan != plan_digest(plan):
        return PlanDiffers(f"Member {sender.index} has other members, weights or cuts in its plan.")
    return None


class PartService:
    """Our service for one sender whose transfer was accepted."""

    def __init__(
        self, attempt: ExchangeAttempt, sender: Participant, transfer: ReducerTransfer
    ) -> None:
        self._attempt, self._sender, self._transfer = attempt, sender, transfer
        self._received = trio.Event()

    async def run(self) -> None:
        """Run both directions, up to their closing messages."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            with self._attempt.blaming(self._sender.index):
                await self._receive_values()
            self._received.set()

    async def _receive_values(self) -> None:
        attempt, sender, transfer = self._attempt, self._sender, self._transfer
        reduction = attempt.reduction
        chunks = reduction.chunks if sender.weight > 0.0 else []
        buffer = memoryview(bytearray(max((one.encoded_bytes for one in chunks), default=0)))
        for number, chunk in enumerate(chunks):
            await attempt.arrivals.turn(sender.index, number)
            check_size(await transfer.next_chunk_bytes(), chunk, number)
            encoded = buffer[: chunk.encoded_bytes]
            with attempt.meter.receiving:
                await transfer.receive_chunk_into(encoded)
            attempt.meter.bytes_received += chunk.encoded_bytes
            reduction.add(sender.index, number, encoded)
            attempt.values_of[sender.index].advanced()
        check_no_more(await transfer.next_chunk_bytes(), len(chunks))
        taken = await transfer.receive_closing()
        attempt.taken_by.add(sender.index)
        attempt.told(sender.index, taken.result)

    async def _send(self) -> None:
        with self._attempt.blaming(self._sender.index):
            try:
                await self._send_averages()
            except Unreachable:
                with trio.move_on_after(LAST_WORD_SECONDS):
                    await self._received.wait()
                raise

    async def _send_averages(self) -> None:
        attempt, sender, transfer = self._attempt, self._sender, self._transfer
        reduction = attempt.reduction
        transfer.share_count(reduction.count)
        chunks = len(reduction.chunks)
        stream = attempt.pace.averages(attempt.steps_to(sender.index), chunks)
        for number in range(chunks):
            await self._averaged(number)
            await stream.turn(number, transfer)
            encoded = reduction.encoded(number)
            await transfer.send_chunk(encoded)
            attempt.meter.bytes_sent += len(encoded)
            reduction.taken(number)
        signature = attempt.own_statement().signature
        await until_whole(attempt, transfer)
        await transfer.send_closing(PartClosed(signature, attempt.result_digest))

    async def _averaged(self, number: int) -> None:
        """Wait for an averaged chunk, and say ALIVE to the sender meanwhile."""
        reduction = self._attempt.reduction
        while reduction.finished <= number:
            if reduction.waits_for_nobody:
                reduction.finish_due(most=1)
                continue
            with trio.move_on_after(ALIVE_SECONDS):
                await reduction.averaged(number)
            if reduction.finished <= number:
                await self._transfer.say_alive()


# Finds out which members of a round are alive, by the bytes that arrive over their links.
#
# A message on a slow link waits behind the chunks that were queued before it, for many seconds if
# a home connection's buffers are full. So a missing answer means little while bytes arrive from a
# member, and much if none do: a process that is stopped or cut off sends nothing.
#
# Easy to get wrong: bytes that arrive show that a member is alive, not that it got our message.


BEAT_SECONDS = 0.5  # between two looks at the links
FRESH_SECONDS = 3.5  # the time of several chunks on a slow link, each for another member


class Pulse:
    """When bytes last arrived from each member, by its place in the list."""

    def __init__(
        self, network: Network, peers: Sequence[PeerId], heard: Callable[[int], None]
    ) -> None:
        self._network = network
        self._peers = tuple(peers)
        self._heard = heard
        self._received = [0] * len(self._peers)
        self._last: list[float | None] = [None] * len(self._peers)

    def is_fresh(self, place: int) -> bool:
        """Whether bytes have come from this member a moment ago."""
        last = self._last[place]
        return last is not None and trio.current_time() - last <= FRESH_SECONDS

    async def follow(self) -> None:
        """Look at the links for ever, and report every member from which bytes have come."""
        self._look(tell=False)
        while True:
            await trio.sleep(BEAT_SECONDS)
            self._look(tell=True)

    def _look(self, *, tell: bool) -> None:
        for place, peer in enumerate(self._peers):
            link = self._network.link(peer)
            received = 0 if link is None else link.bytes_received
            if received > self._received[place] and tell:
                self._last[place] = trio.current_time()
                self._heard(place)
            self._received[place] = received
