"""Members that each break the protocol in one way, and the names of these faults.

Member 1 is hostile and speaks through its rpc; the others are as they should be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
import trio
from torch import Tensor

from protocols.errors import Busy, PotluckError
from protocols.guard import Caller
from protocols.moshpit.attempt import LONGEST_OPENING_SECONDS
from protocols.moshpit.ballots import DIGEST_BYTES, Ballot, digest_of_result
from protocols.moshpit.butterfly import MOST_WAITING_OF_PEER
from protocols.moshpit.exchange import ExchangeReport
from protocols.moshpit.layout import Chunk, Layout, Segment, chunks_of
from protocols.moshpit.part_messages import (
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
    make_statement,
    opening_for,
)
from protocols.rpc import ChunkCount, Empty, Transfer, chunk_header, open_rpc
from protocols.tensors import CodecName, raw_bytes
from tests.chunks import next_chunk
from tests.moshpit.exchanges import BALLOT, ROUND_ID, Exchanging, Peer, among, layout_of

HOSTILE = 1
REDUCES_NOTHING = [1.0, 0.0, 1.0]
SECONDS = LONGEST_OPENING_SECONDS + 2.0

OpenTransfer = Transfer[Empty, PartTaken, PartClosed]
ServedTransfer = Transfer[Empty, PartClosed, PartTaken]


def opening_to(group: Exchanging, reducer: int, **changes: Any) -> PartOpening:
    opening = opening_for(group[HOSTILE].plan, reducer)
    return msgspec.structs.replace(opening, **changes)


def chunks_for(peer: Peer, part: int) -> list[Chunk]:
    plan = peer.plan
    return chunks_of(plan.layout, plan.cuts[part], plan.cuts[part + 1], plan.chunk_bytes)


def values_in(peer: Peer, chunk: Chunk) -> memoryview:
    return raw_bytes(peer.source[chunk.start : chunk.stop])


async def send_as_hostile(
    group: Exchanging,
    reducer: int,
    opening: PartOpening,
    chunks: Sequence[bytes | memoryview] = (),
    *,
    then_listen: bool = True,
) -> PotluckError | None:
    """Open a transfer, send these, and wait for the reducer's answer."""
    rpc, peer = group[HOSTILE].rpc, group[reducer].network.peer_id
    try:
        async with rpc.open_bulk(peer, PART, opening, timeout=SECONDS) as transfer:
            for chunk in chunks:
                await transfer.send_chunk(chunk)
            await transfer.send_closing(PartTaken(bytes(DIGEST_BYTES)))
            while then_listen and await next_chunk(transfer) is not None:
                pass
    except PotluckError as error:
        return error
    return None


async def with_the_others(
    group: Exchanging, hostile: Callable[[], Awaitable[PotluckError | None]]
) -> PotluckError | None:
    """The honest members exchange while the hostile one does this. Returns what it was told."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(group.exchange, HOSTILE)
        await trio.sleep(0.5)
        return await hostile()


# Openings


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sender": 2}, NotInAttempt, "as member 2"),
        ({"part": 2}, WrongPart, "part 2"),
        ({"layout": bytes(32)}, PlanDiffers, "different tensors"),
        ({"weight": 9.0}, PlanDiffers, "weight 9"),
        ({"stop": 1}, PlanDiffers, "cuts part 0"),
        ({"start": 1}, PlanDiffers, "cuts part 0"),
        ({"chunk_bytes": 4_096}, PlanDiffers, "chunks of 4,096"),
        ({"plan": bytes(32)}, PlanDiffers, "other members, weights or cuts"),
    ],
)
def test_a_member_that_means_something_else_is_refused_by_name(
    changes: dict[str, Any], error: type[PotluckError], words: str
) -> None:
    async def scenario(group: Exchanging) -> None:
        opening = opening_to(group, 0, **changes)
        told = await with_the_others(group, lambda: send_as_hostile(group, 0, opening))
        assert type(told) is error
        assert words in told.what
        assert group[0].code == "refused 1"

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE])


def test_a_peer_that_is_not_a_member_is_refused_and_disturbs_nobody() -> None:
    async def scenario(group: Exchanging) -> None:
        stranger = group.world.add_node("stranger")
        group.world.introduce(stranger, *(peer.network for peer in group.peers))

        async def intrude() -> None:
            opening = opening_for(group[1].plan, 0)
            async with open_rpc(stranger) as rpc:
                with pytest.raises(NotInAttempt):
                    async with rpc.open_bulk(group[0].network.peer_id, PART, opening, timeout=9):
                        pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(intrude)
            nursery.start_soon(group.exchange)
        group.check_all_hold_the_same()

    among(scenario, [1.0] * 3)


def test_a_part_that_is_opened_twice_counts_once() -> None:
    layout = layout_of("none", values=8_000)

    async def scenario(group: Exchanging) -> None:
        for peer in group.peers:
            group.world.throttle(peer.network, upload_bytes_per_second=30_000)
        told: list[PotluckError | None] = []

        async def again() -> None:
            await trio.sleep(0.5)
            told.append(await send_as_hostile(group, 0, opening_to(group, 0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            nursery.start_soon(group.exchange)
        assert [type(one) for one in told] == [PartTwice]
        group.check_all_hold_the_same()
        expected = group.average()
        torch.testing.assert_close(group[0].result.double(), expected, rtol=1e-5, atol=1e-5)

    among(scenario, [1.0] * 3, layout=layout)


def test_an_attempt_that_is_over_is_refused_at_once_and_an_unknown_one_after_a_while() -> None:
    async def scenario(group: Exchanging) -> None:
        await group.exchange()
        began = trio.current_time()
        told = await send_as_hostile(group, 0, opening_to(group, 0))
        assert type(told) is StaleAttempt
        assert trio.current_time() - began < 1.0
        opening = opening_to(group, 0, round_id=bytes(32))
        told = await send_as_hostile(group, 0, opening)
        assert type(told) is StaleAttempt
        waited = trio.current_time() - began
        assert LONGEST_OPENING_SECONDS <= waited < LONGEST_OPENING_SECONDS + 1.0

    among(scenario, [1.0] * 2)


def test_an_old_ballot_is_refused_while_a_newer_one_runs() -> None:
    async def scenario(group: Exchanging) -> None:
        newer = msgspec.structs.replace
        plan = group[0].plan
        began = Ballot(3, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                group[0].exchange,
                type(plan)(**{**vars(plan), "ballot": began}),
            )
            await trio.sleep(0.1)
            for ballot in (Ballot(2, 2), Ballot(0, 0)):
                opening = newer(opening_to(group, 0), ballot=ballot)
                assert type(await send_as_hostile(group, 0, opening)) is StaleAttempt

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE])


def test_few_transfers_of_one_peer_wait_for_attempts_to_come() -> None:
    async def scenario(group: Exchanging) -> None:
        told: list[PotluckError | None] = []

        async def knock(number: int) -> None:
            opening = opening_to(group, 0, round_id=number.to_bytes(32, "big"))
            told.append(await send_as_hostile(group, 0, opening))

        async with trio.open_nursery() as nursery:
            for number in range(MOST_WAITING_OF_PEER + 3):
                nursery.start_soon(knock, number)
        kinds = [type(one) for one in told]
        assert kinds.count(Busy) == 3
        assert kinds.count(StaleAttempt) == MOST_WAITING_OF_PEER
        butterfly = group[0].butterfly
        assert butterfly is not None
        assert butterfly.waiting == 0

    among(scenario, [1.0] * 2)


# Chunks of a sender


def check_called(group: Exchanging, code: str, told: PotluckError | None) -> None:
    assert group[0].code == f"{code} {HOSTILE}"
    assert told is not None
    assert group[2].suspicion is not None
    assert group[2].report is None


BAD_VALUES = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("number", [0, 1])
def test_values_that_are_not_finite_are_named_and_go_into_no_average(
    bad: float, number: int
) -> None:
    async def scenario(group: Exchanging) -> None:
        mine = chunks_for(group[HOSTILE], 0)
        chunks: list[bytes | memoryview] = [values_in(group[HOSTILE], one) for one in mine]
        spoilt = group[HOSTILE].source[mine[number].start : mine[number].stop].clone()
        spoilt[-1] = bad
        chunks[number] = raw_bytes(spoilt)
        told = await with_the_others(
            group, lambda: send_as_hostile(group, 0, opening_to(group, 0), chunks)
        )
        check_called(group, "not_finite", told)

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE])


def spoilt_scale(encoded: bytearray) -> None:
    encoded[:] = b"\xff" * len(encoded)


def spoilt_place(encoded: bytearray) -> None:
    encoded[4] = 4  # behind the scale of the only block


def spoilt_end(encoded: bytearray) -> None:
    encoded[-1] = 0xFF  # 1,000 values have 250 signs, and six bits are left


@pytest.mark.parametrize(
    ("codec", "spoil"),
    [
        ("blockwise-int8", spoilt_scale),
        ("sparse-sign", spoilt_scale),
        ("sparse-sign", spoilt_place),
        ("sparse-sign", spoilt_end),
    ],
)
def test_bytes_that_no_honest_member_sends_are_no_finite_values_either(
    codec: CodecName, spoil: Callable[[bytearray], None]
) -> None:
    layout = Layout((Segment("t", 1_000, codec), Segment("u", 8_000, codec)))

    async def scenario(group: Exchanging) -> None:
        encoded = bytearray(chunks_for(group[HOSTILE], 0)[0].encoded_bytes)
        spoil(encoded)
        told = await with_the_others(
            group, lambda: send_as_hostile(group, 0, opening_to(group, 0), [encoded])
        )
        check_called(group, "not_finite", told)

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE], layout=layout)


@pytest.mark.parametrize("size", [4, 8_188, 8_196])
def test_a_chunk_of_another_size_is_called_malformed(size: int) -> None:
    async def scenario(group: Exchanging) -> None:
        told = await with_the_others(
            group, lambda: send_as_hostile(group, 0, opening_to(group, 0), [bytes(size)])
        )
        check_called(group, "malformed", told)

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE])


@pytest.mark.parametrize("more", [1, -1])
def test_more_or_fewer_chunks_than_the_part_has_are_called_malformed(more: int) -> None:
    async def scenario(group: Exchanging) -> None:
        mine = chunks_for(group[HOSTILE], 0)
        chunks = [values_in(group[HOSTILE], one) for one in mine]
        chunks = [*chunks, chunks[0]] if more > 0 else chunks[:more]
        told = await with_the_others(
            group, lambda: send_as_hostile(group, 0, opening_to(group, 0), chunks)
        )
        check_called(group, "malformed", told)

    among(scenario, [1.0] * 3, fractions=REDUCES_NOTHING, hostile=[HOSTILE])


def test_a_member_without_data_may_send_none() -> None:
    async def scenario(group: Exchanging) -> None:
        (chunk, *_) = chunks_for(group[HOSTILE], 0)
        chunks = [values_in(group[HOSTILE], chunk)]
        await with_the_others(
            group, lambda: send_as_hostile(group, 0, opening_to(group, 0), chunks)
        )
        assert group[0].code == f"malformed {HOSTILE}"

    among(scenario, [1.0, 0.0, 1.0], fractions=REDUCES_NOTHING, hostile=[HOSTILE])


# A reducer


class Liar:
    """A reducer that sends what `answer` makes of its true average, for each of its senders."""

    def __init__(
        self,
        group: Exchanging,
        answer: Callable[[int, list[bytes]], list[bytes]],
        *,
        signs: bool = True,
    ) -> None:
        self._group, self._answer, self._signs = group, answer, signs
        self.me = group[HOSTILE]
        group[HOSTILE].rpc.serve_bulk(PART, self._serve)

    async def take_part(self) -> None:
        """Send true values to the reducers, and serve the own part meanwhile."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._group.exchange, HOSTILE)
            for reducer in (0, 2):
                nursery.start_soon(self._send, reducer)

    async def _send(self, reducer: int) -> None:
        chunks = [values_in(self.me, chunk) for chunk in chunks_for(self.me, reducer)]
        opening = opening_to(self._group, reducer)
        await send_as_hostile(self._group, reducer, opening, chunks)

    async def _serve(self, _: Caller, transfer: ServedTransfer, opening: PartOpening) -> None:
        await transfer.accept(Empty())
        chunks = chunks_for(self.me, HOSTILE)
        for _chunk in chunks:
            await next_chunk(transfer)
        true = self._group.average().float()
        averages = [bytes(raw_bytes(true[one.start : one.stop].clone())) for one in chunks]
        count = ChunkCount(hashed=True)
        for average in self._answer(opening.sender, averages):
            await transfer.send_chunk(average)
            count.add(chunk_header(len(average)), memoryview(average))
        identity = self.me.network.identity
        statement = make_statement(identity, ROUND_ID, BALLOT, HOSTILE, count.digest)
        signature = statement.signature if self._signs else bytes(64)
        await transfer.finish(PartClosed(signature, bytes(DIGEST_BYTES)))


def not_finite(averages: list[bytes]) -> list[bytes]:
    spoilt: Tensor = torch.frombuffer(bytearray(averages[-1]), dtype=torch.float32)
    spoilt[3] = float("nan")
    return [*averages[:-1], bytes(raw_bytes(spoilt))]


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("not_finite", not_finite),
        ("malformed", lambda averages: averages[:-1]),
        ("malformed", lambda averages: [*averages, averages[0]]),
        ("malformed", lambda averages: [averages[0][:-4], *averages[1:]]),
        ("malformed", lambda averages: [averages[0] + bytes(4), *averages[1:]]),
    ],
)
def test_a_reducer_that_answers_with_anything_but_its_chunks_is_named(
    code: str, answer: Callable[[list[bytes]], list[bytes]]
) -> None:
    async def scenario(group: Exchanging) -> None:
        await Liar(group, lambda _sender, averages: answer(averages)).take_part()
        assert f"{code} {HOSTILE}" in {group[0].code, group[2].code}

    among(scenario, [1.0] * 3, hostile=[HOSTILE])


def test_a_reducer_that_does_not_sign_is_named() -> None:
    async def scenario(group: Exchanging) -> None:
        await Liar(group, lambda _sender, averages: averages, signs=False).take_part()
        assert f"bad_statement {HOSTILE}" in {group[0].code, group[2].code}

    among(scenario, [1.0] * 3, hostile=[HOSTILE])


def test_a_reducer_that_tells_one_member_something_else_proves_it_with_its_own_hand() -> None:
    async def scenario(group: Exchanging) -> tuple[ExchangeReport, ExchangeReport]:
        def answer(sender: int, averages: list[bytes]) -> list[bytes]:
            return averages if sender == 0 else [bytes(len(one)) for one in averages]

        await Liar(group, answer).take_part()
        first, second = group[0].report, group[2].report
        assert first is not None, group[0].suspicion
        assert second is not None, group[2].suspicion
        assert first.result_digest != second.result_digest
        told_first, told_second = first.statements[HOSTILE], second.statements[HOSTILE]
        reducer = group[HOSTILE].network.peer_id
        assert told_first.part == told_second.part == HOSTILE
        assert told_first.digest != told_second.digest
        assert counts(reducer, ROUND_ID, BALLOT, told_first)
        assert counts(reducer, ROUND_ID, BALLOT, told_second)
        honest = [0, 2]
        assert all(first.statements[part] == second.statements[part] for part in honest)
        assert 2 in first.contradicted_by
        assert 0 in second.contradicted_by
        return first, second

    first, second = among(scenario, [1.0] * 3, hostile=[HOSTILE])
    for report in (first, second):
        assert report.result_digest == digest_of_result(report.statements)


def test_a_statement_counts_for_one_reducer_round_ballot_and_part_only() -> None:
    async def scenario(group: Exchanging) -> None:
        identity, me = group[0].network.identity, group[0].network.peer_id
        statement = make_statement(identity, ROUND_ID, BALLOT, 0, bytes(32))
        assert counts(me, ROUND_ID, BALLOT, statement)
        assert not counts(group[1].network.peer_id, ROUND_ID, BALLOT, statement)
        assert not counts(me, bytes(32), BALLOT, statement)
        assert not counts(me, ROUND_ID, Ballot(1, 0), statement)
        for changes in ({"part": 1}, {"digest": bytes(31) + b"\1"}, {"signature": bytes(64)}):
            changed = msgspec.structs.replace(statement, **changes)
            assert not counts(me, ROUND_ID, BALLOT, changed)
        await trio.lowlevel.checkpoint()

    among(scenario, [1.0] * 2)


def test_the_error_of_a_reducer_that_gives_up_accuses_nobody() -> None:
    """An error that a peer sends is only a claim: it is reported as such, whatever its code."""

    async def scenario(group: Exchanging) -> None:
        async def give_up(_: Caller, transfer: ServedTransfer, _opening: PartOpening) -> None:
            await transfer.accept(Empty())
            raise GaveUp("member 2 is to blame")

        group[HOSTILE].rpc.serve_bulk(PART, give_up)
        await group.exchange(HOSTILE)
        assert group[0].code in {"gave_up 1", "gave_up 2", "cut 2"}
        assert group[2].code in {"gave_up 1", "gave_up 0", "cut 0"}

    among(scenario, [1.0] * 3, hostile=[HOSTILE])
