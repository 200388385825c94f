"""Members that are in the list and agree as they should, but exchange as no member should.

A rogue is a `Butterfly` of another kind. Everything else of its node is ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from contextlib import suppress
from typing import Any

import msgspec
import torch
import trio
from torch import Tensor

from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.agreement_messages import (
    Accept,
    AgreementMessage,
    Decided,
    Held,
    Holding,
    Promise,
)
from protocols.moshpit.attempt import ExchangeAttempt
from protocols.moshpit.ballots import DIGEST_BYTES, digest_of_parts, digest_of_result
from protocols.moshpit.butterfly import (
    Butterfly,
    PartExchange,
    PartService,
    ReducerTransfer,
    _report,
    serve_part,
    until_whole,
)
from protocols.moshpit.exchange import ExchangePlan, ExchangeReport, Participant
from protocols.moshpit.layout import Chunk, chunks_of
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    PART,
    PartClosed,
    PartOpening,
    PartTaken,
    make_statement,
    opening_for,
)
from protocols.moshpit.round import Buffers, Finished, Round, Shell, Task
from protocols.moshpit.verdicts import Effect, Send
from protocols.network import Network
from protocols.rpc import ChunkCount, Empty, Transfer, chunk_header

SenderTransfer = Transfer[Empty, PartTaken, PartClosed]


class Silent(Butterfly):
    """Never begins."""

    async def exchange(
        self, _plan: ExchangePlan, _source: Tensor, _result: Tensor
    ) -> ExchangeReport:
        await trio.sleep_forever()
        raise AssertionError


class RogueSender(Butterfly):
    """Opens its transfers as it should, and then does something else."""

    async def exchange(
        self, plan: ExchangePlan, _source: Tensor, _result: Tensor
    ) -> ExchangeReport:
        async with trio.open_nursery() as nursery:
            for place, member in enumerate(plan.members):
                if member.index != plan.me and plan.cuts[place] < plan.cuts[place + 1]:
                    nursery.start_soon(self._to, plan, place, member)
        await trio.sleep_forever()
        raise AssertionError

    async def _to(self, plan: ExchangePlan, place: int, member: Participant) -> None:
        chunks = chunks_of(plan.layout, plan.cuts[place], plan.cuts[place + 1], plan.chunk_bytes)
        opening = opening_for(plan, place)
        async with self._rpc.open_bulk(member.peer, PART, opening, timeout=5.0) as transfer:
            await self.misbehave(transfer, chunks)
            await trio.sleep_forever()

    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        raise NotImplementedError


class SendsNaN(RogueSender):
    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        values = torch.full((chunks[0].encoded_bytes // 4,), float("nan"))
        await transfer.send_chunk(values.numpy().tobytes())


class SendsTooMuch(RogueSender):
    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        await transfer.send_chunk(bytes(chunks[0].encoded_bytes + 4))


class SendsTooLittle(RogueSender):
    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        for chunk in chunks[:-1]:
            await transfer.send_chunk(bytes(chunk.encoded_bytes))
        await transfer.send_closing(PartTaken(bytes(DIGEST_BYTES)))


class SendsTwice(RogueSender):
    """Sends its part a second time after its part."""

    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        for chunk in [*chunks, *chunks]:
            await transfer.send_chunk(bytes(chunk.encoded_bytes))


class Trickles(RogueSender):
    """A slow loris: alive, and never finished."""

    async def misbehave(self, transfer: SenderTransfer, _chunks: list[Chunk]) -> None:
        while True:
            await transfer.say_alive()
            await trio.sleep(1.0)


class StopsReading(RogueSender):
    """Sends what it should, but receives nothing."""

    async def misbehave(self, transfer: SenderTransfer, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            await transfer.send_chunk(bytes(chunk.encoded_bytes))


class Strange(Butterfly):
    """Exchanges in its own way, receives everything and is always alive. It accuses no member."""

    sends: type[PartExchange] = PartExchange
    serves: type[PartService] = PartService

    async def _run(self, attempt: ExchangeAttempt) -> None:
        async with trio.open_nursery() as nursery:
            for reducer in attempt.reducers:
                nursery.start_soon(self.sends(attempt, reducer).run, self._rpc)
            if attempt.senders:
                await attempt.all_served.wait()
            else:
                await trio.sleep_forever()

    async def _serve(self, caller: Caller, transfer: ReducerTransfer, opening: PartOpening) -> None:
        attempt = await self._attempt_for(caller.peer, opening)
        sender = next(one for one in attempt.plan.members if one.peer == caller.peer)
        attempt.arrived(sender.index, transfer)
        with attempt.serving(), attempt.blaming(sender.index):
            await transfer.accept(Empty())
            await self.serves(attempt, sender, transfer).run()
            attempt.served()


async def stays_alive(transfer: Transfer[Any, Any, Any], seconds: float = math.inf) -> None:
    """Says ALIVE for this long, and nothing else."""
    with trio.move_on_after(seconds):
        while True:
            await transfer.say_alive()
            await trio.sleep(ALIVE_SECONDS)


class NoValues(PartExchange):
    async def _send_values(self, transfer: SenderTransfer) -> None:
        await stays_alive(transfer)


class NoValuesToSome(PartExchange):
    """Sends nothing to every second reducer."""

    async def _send_values(self, transfer: SenderTransfer) -> None:
        if self._reducer.index % 2:
            await stays_alive(transfer)
        await super()._send_values(transfer)


class HalfOfTheValues(PartExchange):
    async def _send_values(self, transfer: SenderTransfer) -> None:
        self._chunks = self._chunks[: len(self._chunks) // 2]
        await super()._send_values(transfer)
        await stays_alive(transfer)


WAITED_SECONDS = 3.5  # shorter than any link is taken for stalled


class LateValues(PartExchange):
    """Waits before each chunk."""

    async def _send_values(self, transfer: SenderTransfer) -> None:
        send_chunk = transfer.send_chunk

        async def send_later(chunk: bytes | bytearray | memoryview) -> None:
            await stays_alive(transfer, WAITED_SECONDS)
            await send_chunk(chunk)

        transfer.send_chunk = send_later  # type: ignore[method-assign]
        await super()._send_values(transfer)


class ReadsNoAverages(PartExchange):
    async def _receive_averages(self, transfer: SenderTransfer) -> None:
        await stays_alive(transfer)


class NoAverages(PartService):
    async def _send_averages(self) -> None:
        await stays_alive(self._transfer)


class ReadsNoValues(PartService):
    async def _receive_values(self) -> None:
        await stays_alive(self._transfer)


class KeepsItsValues(Strange):
    sends = NoValues


class SendsToSome(Strange):
    sends = NoValuesToSome


class StopsHalfway(Strange):
    sends = HalfOfTheValues


class WaitsBeforeEachChunk(Strange):
    sends = LateValues


class ReturnsNothing(Strange):
    serves = NoAverages


class ReadsNothing(Strange):
    sends = ReadsNoAverages
    serves = ReadsNoValues


class Liar(Butterfly):
    """As a reducer, it sends one member another result than the others, and signs both."""

    cheated: PeerId | None = None  # set before the exchange; else it is honest

    async def exchange(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> ExchangeReport:
        report = await super().exchange(plan, source, result)
        return dataclasses.replace(report, contradicted_by=())  # which it does not mind

    async def _serve(self, caller: Caller, transfer: ReducerTransfer, opening: PartOpening) -> None:
        attempt = await self._attempt_for(caller.peer, opening)
        if caller.peer != self.cheated:
            await serve_part(attempt, caller.peer, transfer, opening)
            return
        sender = next(one for one in attempt.plan.members if one.peer == caller.peer)
        attempt.arrived(sender.index, transfer)
        with attempt.serving(), attempt.blaming(sender.index):
            await transfer.accept(Empty())
            await LyingService(attempt, sender, transfer, self._network).run()
            attempt.served()


class LyingService(PartService):
    def __init__(
        self,
        attempt: ExchangeAttempt,
        sender: Participant,
        transfer: ReducerTransfer,
        network: Network,
    ) -> None:
        super().__init__(attempt, sender, transfer)
        self._network = network

    async def _send_averages(self) -> None:
        attempt, plan = self._attempt, self._attempt.plan
        count = ChunkCount(hashed=True)
        for number, chunk in enumerate(attempt.reduction.chunks):
            await self._averaged(number)
            lie = bytes(chunk.encoded_bytes)
            count.add(chunk_header(len(lie)), memoryview(lie))
            await self._transfer.send_chunk(lie)
            attempt.reduction.taken(number)
        attempt.own_statement()
        statement = make_statement(
            self._network.identity, plan.round_id, plan.ballot, plan.me, count.digest
        )
        await until_whole(attempt, self._transfer)
        told = {each.part: each.digest for each in attempt.statements.values()}
        result = digest_of_parts({**told, plan.me: count.digest})  # as if it held what it told
        await self._transfer.send_closing(PartClosed(statement.signature, result))


class TwoFacedRound(Round):
    """The leader of a round that is a `Liar` as a reducer. Then it proposes to each member the
    result which that member holds, and claims that it is decided."""

    def __init__(self, shell: Shell, task: Task) -> None:
        super().__init__(shell, task)
        self._held_by: dict[int, Holding] = {}

    def receive(self, peer: PeerId, message: AgreementMessage) -> None:
        """Makes our own side believe that all members hold our result."""
        if not isinstance(message, Holding) or message.ballot.number > 0:
            super().receive(peer, message)
            return
        members = self._task.group.members
        self._held_by[members.index(peer)] = message
        if len(self._held_by) == len(members) - 1:
            (true,) = {
                msgspec.structs.replace(each, contradicted=())
                for place, each in self._held_by.items()
                if members[place] != self.cheated
            }
            for place in self._held_by:
                super().receive(members[place], true)

    @property
    def cheated(self) -> PeerId | None:
        butterfly = self._shell.butterfly
        assert isinstance(butterfly, Liar)
        return butterfly.cheated

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(to, Accept() | Decided() as said) if said.result and to in self._held_by:
                own = msgspec.structs.replace(said.result, digest=self._held_by[to].digest)
                effect = Send(to, msgspec.structs.replace(said, result=own))
                super()._do(effect)
                super()._do(Send(to, Decided(own)))
            case _:
                super()._do(effect)


async def _run(this: Round, buffers: Buffers) -> Finished:
    with this._shell.switchboard.running(this._task.group.round_id, this.receive):
        return await this.run(buffers)


async def run_two_faced(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """As `run_round`; the member behind us in the list is cheated."""
    butterfly = shell.butterfly
    assert isinstance(butterfly, Liar)
    butterfly.cheated = task.group.members[task.group.me + 1]
    return await _run(TwoFacedRound(shell, task), buffers)


class TightLippedRound(Round):
    """Exchanges and is alive, and does not say what it holds."""

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(_, Holding()):
                return
            case Send(to, Promise(held=Held()) as promise):
                effect = Send(to, msgspec.structs.replace(promise, held=self._told(promise)))
        super()._do(effect)

    def _told(self, _promise: Promise) -> Held | None:
        return None


class MuteRound(TightLippedRound):
    """Does not promise anything either."""

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(_, Promise()):
                return
        super()._do(effect)


class ForgingRound(TightLippedRound):
    """Says that it holds something else, when it is asked for a promise."""

    def _told(self, promise: Promise) -> Held | None:
        assert promise.held is not None
        forged = tuple(
            msgspec.structs.replace(each, digest=bytes(DIGEST_BYTES))
            for each in promise.held.statements
        )
        return msgspec.structs.replace(
            promise.held, statements=forged, digest=digest_of_result(forged)
        )


async def run_tight_lipped(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """As `run_round`."""
    return await _run(TightLippedRound(shell, task), buffers)


async def run_mute(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """As `run_round`."""
    return await _run(MuteRound(shell, task), buffers)


async def run_forging(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """As `run_round`."""
    return await _run(ForgingRound(shell, task), buffers)


class TakesWithoutAWord(PartExchange):
    """Takes all averages, and does not confirm to some reducers that it has them."""

    seconds = math.inf

    async def _send(self, transfer: SenderTransfer) -> None:
        if self._reducer.index not in self._attempt.framed:  # type: ignore[attr-defined]
            await super()._send(transfer)
            return
        with suppress(PotluckError):
            await self._send_values(transfer)
            await stays_alive(transfer, self.seconds)
            await transfer.send_closing(PartTaken(self._attempt.result_digest))


class TakesAndIsLate(TakesWithoutAWord):
    """Confirms it just before it would be complained of."""

    seconds = 6.0


class GivesWithoutAWord(PartService):
    """Sends its averages, and does not sign to some senders that they are its own."""

    async def _send_averages(self) -> None:
        if self._sender.index in self._attempt.framed:  # type: ignore[attr-defined]
            transfer = self._transfer

            async def never(_closing: PartClosed) -> None:
                with suppress(PotluckError):
                    await stays_alive(transfer)

            transfer.send_closing = never  # type: ignore[method-assign]
        await super()._send_averages()


class GivesNothing(NoAverages):
    """Sends no averages to some senders."""

    async def _send_averages(self) -> None:
        if self._sender.index not in self._attempt.framed:  # type: ignore[attr-defined]
            await PartService._send_averages(self)
            return
        with suppress(PotluckError):
            await super()._send_averages()


class Frames(Strange):
    """Keeps other members from ending their exchange, and never says how its own went."""

    framed: Set[int] = frozenset()

    async def _run(self, attempt: ExchangeAttempt) -> None:
        attempt.framed = self.framed  # type: ignore[attr-defined]
        await super()._run(attempt)


class FramesAsSender(Frames):
    sends = TakesWithoutAWord


class FramesForAWhile(Frames):
    sends = TakesAndIsLate


class FramesAsReducer(Frames):
    serves = GivesWithoutAWord


class StarvesSome(Frames):
    serves = GivesNothing


class FramesAndReports(FramesAsReducer):
    """Says at once that it holds the result, and keeps its transfers open."""

    nursery: trio.Nursery

    async def exchange(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> ExchangeReport:
        attempt = self._begin(plan, source, result)
        self.nursery.start_soon(self._run, attempt)
        while len(attempt.statements) < len(plan.members):  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.01)
        return _report(attempt)


async def run_and_keep_open(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """As `run_round`; its butterfly goes on after its exchange."""
    butterfly = shell.butterfly
    assert isinstance(butterfly, FramesAndReports)
    butterfly.nursery = shell.nursery
    return await _run(Round(shell, task), buffers)
