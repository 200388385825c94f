"""Towards one sender: judge its opening, take its values, give it the averages.

Easy to get wrong: a reducer that waits for a slow sender has nothing to send to the others, and
they would take it for stalled. So whoever waits for an average here says ALIVE meanwhile.
"""

from __future__ import annotations

import trio

from protocols.bulk import LAST_WORD_SECONDS, Transfer
from protocols.errors import PotluckError, Unreachable
from protocols.identity import PeerId
from protocols.messages import Empty
from protocols.moshpit.attempt import Attempt
from protocols.moshpit.exchange import ExchangePlan, Participant
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    LONGEST_BUSY_MS,
    GaveUp,
    NotAMember,
    PartClosed,
    PartOpening,
    PartTaken,
    PartTwice,
    PlanDiffers,
    WrongPart,
    plan_digest,
)
from protocols.moshpit.sending import check_no_more, check_size, until_whole

ReducerTransfer = Transfer[Empty, PartClosed, PartTaken]


async def serve_part(
    attempt: Attempt, peer: PeerId, transfer: ReducerTransfer, opening: PartOpening
) -> None:
    """The handler of one sender's transfer. Raises what the sender is to be told."""
    sender = _admit(attempt, peer, opening)
    attempt.arrived(sender.index, transfer)
    with attempt.serving(), attempt.blaming(sender.index):
        await transfer.accept(Empty())
        with attempt.transferring(sender.index, transfer):
            await PartService(attempt, sender, transfer).run()
        attempt.served()
    if not transfer.finished:
        raise GaveUp(attempt.over or "The exchange ended.")


def _admit(attempt: Attempt, peer: PeerId, opening: PartOpening) -> Participant:
    """The participant that opens this transfer. Refusals say what is wrong, by name.

    A participant with another plan in mind ends the attempt: it will not come back with ours.
    """
    plan = attempt.plan
    sender = next((member for member in plan.members if member.peer == peer), None)
    if sender is None or sender.index == plan.me:
        raise NotAMember(f"{peer} does not take part in this attempt.")
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
        return NotAMember(f"Member {sender.index} opened a transfer as member {opening.sender}.")
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
        return PlanDiffers(f"Member {sender.index} has other members, weights or cuts in mind.")
    return None


class PartService:
    """What we do for one sender whose transfer was accepted."""

    def __init__(self, attempt: Attempt, sender: Participant, transfer: ReducerTransfer) -> None:
        self._attempt, self._sender, self._transfer = attempt, sender, transfer
        self._received = trio.Event()

    async def run(self) -> None:
        """Both directions, to their closing messages."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            with self._attempt.blaming(self._sender.index):
                await self._receive_values()
            self._received.set()

    async def _receive_values(self) -> None:
        attempt, sender, transfer = self._attempt, self._sender, self._transfer
        reduction = attempt.reduction
        receiving = attempt.meter.receiving_from(sender.peer)
        chunks = reduction.chunks if sender.weight > 0.0 else []
        buffer = memoryview(bytearray(max((one.encoded_bytes for one in chunks), default=0)))
        for number, chunk in enumerate(chunks):
            check_size(await transfer.next_chunk_bytes(), chunk, number)
            encoded = buffer[: chunk.encoded_bytes]
            with receiving:
                await transfer.receive_chunk_into(encoded)
            receiving.bytes += chunk.encoded_bytes
            reduction.add(sender.index, number, encoded)
            attempt.values_of[sender.index].advanced()
        check_no_more(await transfer.next_chunk_bytes(), len(chunks))
        taken = await transfer.receive_closing()
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
        sending = attempt.meter.sending_to(sender.peer)
        transfer.send_alike(reduction.count)
        chunks = len(reduction.chunks)
        with attempt.pace.averages(attempt.steps_to(sender.index), chunks) as stream:
            for number in range(chunks):
                await self._averaged(number)
                await stream.turn(number, transfer)
                encoded = reduction.encoded(number)
                with sending:
                    await transfer.send_chunk(encoded)
                sending.bytes += len(encoded)
                reduction.taken(number)
        signature = attempt.own_statement().signature
        await until_whole(attempt, transfer)
        busy_ms = round(1000 * attempt.meter.receiving_from(sender.peer).seconds)
        closed = PartClosed(signature, attempt.result_digest, min(busy_ms, LONGEST_BUSY_MS))
        await transfer.send_closing(closed)

    async def _averaged(self, number: int) -> None:
        """Wait for an averaged chunk, and let the sender know meanwhile that we are there."""
        reduction = self._attempt.reduction
        while reduction.finished <= number:
            if reduction.waits_for_nobody:
                reduction.finish_due(most=1)
                continue
            with trio.move_on_after(ALIVE_SECONDS):
                await reduction.averaged(number)
            if reduction.finished <= number:
                await self._transfer.say_alive()
