"""What a server of experts refuses, by name; and peers that break off, or ask too much."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    MalformedMessage,
    PotluckError,
    Unreachable,
)
from protocols.experts import (
    EXPERTS_PROTOCOL,
    ExpertBackend,
    Rows,
    UnknownExpert,
    WrongTensor,
    WrongUid,
)
from protocols.experts.messages import (
    BACKWARD,
    FORWARD,
    LARGEST_TENSOR_BYTES,
    TRANSFER,
    BackwardRequest,
    EncodedTensor,
    ForwardRequest,
    TransferOpening,
)
from protocols.experts.runtime import MOST_BYTES
from protocols.rpc import LARGEST_UNARY_BYTES, Empty
from protocols.tensors import CodecName, DtypeName, TensorHeader
from tests.chunks import next_chunk
from tests.contract.neighbourhood import Neighbourhood, on_both
from tests.experts.serving import (
    GRID,
    LARGE,
    ROWS,
    UID,
    WIDTH,
    Halving,
    Served,
    halving,
    loopback,
    served,
)
from tests.waiting import PATIENCE_SECONDS, until

SECONDS = 60.0


def header(*shape: int, dtype: DtypeName = "float32", codec: CodecName = "none") -> TensorHeader:
    return TensorHeader(shape, dtype, codec)


def zeros(of: TensorHeader, size: int | None = None) -> EncodedTensor:
    """Bytes that need not fit the header."""
    return EncodedTensor(of, memoryview(bytes(4 * of.values if size is None else size)))


GOOD = header(2, WIDTH)


async def ask(s: Served, inputs: EncodedTensor, uid: str = str(UID)) -> None:
    await s.asking.call(s.peer, FORWARD, ForwardRequest(uid, inputs), timeout=SECONDS)


async def open_only(
    s: Served, inputs: TensorHeader, gradients: TensorHeader | None = None, uid: str = str(UID)
) -> None:
    opening = TransferOpening(uid, 60_000, inputs, gradients)
    async with s.asking.open_bulk(s.peer, TRANSFER, opening, timeout=SECONDS):
        pytest.fail("it was accepted")


async def still_serves(s: Served) -> None:
    """And nothing is held any more."""
    await s.client.forward(s.peer, UID, torch.zeros(1, WIDTH), timeout=SECONDS)
    with s.runtime.room(s.near.peer_id, MOST_BYTES // 2):
        pass


WRONG: dict[str, tuple[TensorHeader, str, type[PotluckError], str]] = {
    "unknown uid": (GOOD, "ffn.1", UnknownExpert, "does not have the expert ffn.1"),
    "unknown grid": (GOOD, "other.0", UnknownExpert, "other.0"),
    "a prefix": (GOOD, "ffn", UnknownExpert, "ffn"),
    "no uid": (GOOD, "FFN/0", WrongUid, "not the uid of an expert"),
    "wrong width": (header(2, WIDTH + 1), "ffn.0", WrongTensor, "needed are"),
    "wrong dimensions": (header(2, 1, WIDTH), "ffn.0", WrongTensor, "needed are"),
    "no dimensions": (header(), "ffn.0", WrongTensor, "needed are"),
    "wrong dtype": (header(2, WIDTH, dtype="int32"), "ffn.0", WrongTensor, "are int32"),
    "another floating dtype": (header(2, WIDTH, dtype="float64"), "ffn.0", WrongTensor, "float64"),
    "no rows": (header(0, WIDTH), "ffn.0", WrongTensor, "have 0 rows"),
    "too many rows": (header(4097, WIDTH), "ffn.0", WrongTensor, "4,097 rows"),
}
wrong_requests = pytest.mark.parametrize(
    ("inputs", "uid", "error", "said"), WRONG.values(), ids=WRONG
)


@wrong_requests
@on_both
async def test_a_call_for_what_is_not_here_is_refused_by_name(
    place: Neighbourhood, inputs: TensorHeader, uid: str, error: type[PotluckError], said: str
) -> None:
    async with served(place, [halving()]) as s:
        with pytest.raises(error, match=said) as refused:
            await ask(s, zeros(inputs, 64), uid)
        assert refused.value.surely_not_executed
        await still_serves(s)


@wrong_requests
@on_both
async def test_a_transfer_of_what_is_not_here_is_refused_before_it_is_accepted(
    place: Neighbourhood, inputs: TensorHeader, uid: str, error: type[PotluckError], said: str
) -> None:
    async with served(place, [halving()]) as s:
        with pytest.raises(error, match=said):
            await open_only(s, inputs, uid=uid)
        await still_serves(s)


@on_both
async def test_a_tensor_without_rows_is_refused_by_name_if_a_row_is_one_value(
    place: Neighbourhood,
) -> None:
    async with served(place, [ExpertBackend(UID, Halving(), Rows(()))]) as s:
        with pytest.raises(WrongTensor, match="needed are"):
            await ask(s, zeros(header()))
        with pytest.raises(WrongTensor, match="needed are"):
            await open_only(s, header())
        answer = await s.client.forward(s.peer, UID, torch.ones(3), timeout=SECONDS)
        assert answer.tolist() == [0.5] * 3


@on_both
async def test_gradients_must_be_like_the_inputs(place: Neighbourhood) -> None:
    async with served(place, [halving()]) as s:
        wrong = BackwardRequest(str(UID), zeros(GOOD), zeros(header(3, WIDTH)))
        with pytest.raises(WrongTensor, match="rows"):
            await s.asking.call(s.peer, BACKWARD, wrong, timeout=SECONDS)
        with pytest.raises(WrongTensor, match="rows"):
            await open_only(s, GOOD, header(3, WIDTH))
        wrong = BackwardRequest(str(UID), zeros(GOOD), zeros(header(2, 3)))
        with pytest.raises(WrongTensor, match="The gradients"):
            await s.asking.call(s.peer, BACKWARD, wrong, timeout=SECONDS)
        await still_serves(s)


def not_finite(value: float) -> EncodedTensor:
    return EncodedTensor(GOOD, memoryview(torch.full((2, WIDTH), value).numpy()).cast("B"))


BROKEN: dict[str, EncodedTensor] = {
    "NaN": not_finite(math.nan),
    "infinity": not_finite(math.inf),
    "too few bytes": zeros(GOOD, 8 * WIDTH - 1),
    "too many bytes": zeros(GOOD, 8 * WIDTH + 1),
    "no bytes": zeros(GOOD, 0),
    "a codec for another dtype": zeros(header(2, WIDTH, codec="float64")),
    "a scale out of range": EncodedTensor(
        header(2, WIDTH, codec="blockwise-int8"),
        memoryview(torch.full((2,), 1e38).numpy().tobytes() + bytes(2 * WIDTH)),
    ),
}


@pytest.mark.parametrize("inputs", BROKEN.values(), ids=BROKEN)
@on_both
async def test_a_tensor_that_no_honest_peer_sends_is_refused_and_its_sender_avoided(
    place: Neighbourhood, inputs: EncodedTensor
) -> None:
    backend = halving()
    async with served(place, [backend]) as s:
        with pytest.raises(MalformedMessage):
            await ask(s, inputs)
        assert s.answering.avoided_for(s.near.peer_id) > 0
        with s.runtime.room(s.near.peer_id, MOST_BYTES // 2):
            pass
    assert backend.statistics.forward_rows == 0


@on_both
async def test_values_that_are_not_finite_are_found_in_transfers_too(place: Neighbourhood) -> None:
    backend = halving()
    async with served(place, [backend]) as s:
        data = torch.zeros(LARGE, WIDTH)
        data[-1, -1] = math.nan
        with pytest.raises(MalformedMessage):
            await pour(s, header(LARGE, WIDTH), [memoryview(data.numpy()).cast("B")])
        assert s.answering.avoided_for(s.near.peer_id) > 0
    assert backend.statistics.forward_rows == 0


async def pour(s: Served, inputs: TensorHeader, pieces: Sequence[bytes | memoryview]) -> None:
    """Open a transfer, send these bytes in chunks, the closing, and wait for the answer."""
    opening = TransferOpening(str(UID), 60_000, inputs)
    async with s.asking.open_bulk(s.peer, TRANSFER, opening, timeout=SECONDS) as transfer:
        for piece in pieces:
            for start in range(0, len(piece), 1 << 20):
                await transfer.send_chunk(piece[start : start + (1 << 20)])
        await transfer.send_closing(Empty())
        while await next_chunk(transfer) is not None:
            pass
        await transfer.receive_closing()


NEEDED = 4 * LARGE * WIDTH

MISMEASURED = {
    "it ends too early": [bytes(NEEDED - 1)],
    "nothing comes": [],
    "a chunk is too long": [bytes(NEEDED + 1)],
    "a chunk too many": [bytes(NEEDED), b"x"],
}


@pytest.mark.parametrize("pieces", MISMEASURED.values(), ids=MISMEASURED)
@on_both
async def test_a_transfer_of_another_size_than_announced_is_refused(
    place: Neighbourhood, pieces: list[bytes]
) -> None:
    backend = halving()
    async with served(place, [backend]) as s:
        with pytest.raises((MalformedMessage, Unreachable)):
            await pour(s, header(LARGE, WIDTH), pieces)
        await until(lambda: s.answering.avoided_for(s.near.peer_id) > 0, PATIENCE_SECONDS)
        assert s.answering.statistics().transfers_open == 0
    assert backend.statistics.forward_rows == 0


HUGE = {
    "2^40 rows": header(1 << 40, WIDTH),
    "16 dimensions": header(*[1 << 40] * 16),
    "a row of 2^40 values": header(1, 1 << 40),
}


@pytest.mark.parametrize("inputs", HUGE.values(), ids=HUGE)
@on_both
async def test_huge_sizes_are_refused_before_any_memory_is_taken(
    place: Neighbourhood, inputs: TensorHeader
) -> None:
    async with served(place, [halving()]) as s:
        with pytest.raises((WrongTensor, MalformedMessage)):
            await open_only(s, inputs)
    async with served(place, [halving()]) as s:
        with pytest.raises((WrongTensor, MalformedMessage)):
            await ask(s, zeros(inputs, 64))


@on_both
async def test_a_batch_that_the_expert_takes_may_still_be_too_large_for_the_protocol(
    place: Neighbourhood,
) -> None:
    wide = ExpertBackend(UID, nn.Identity(), Rows((1 << 20,)))
    rows = LARGEST_TENSOR_BYTES // (4 << 20) + 1
    async with served(place, [wide]) as s:
        with pytest.raises(MalformedMessage):
            await open_only(s, header(rows, 1 << 20))


@on_both
async def test_a_request_that_declares_more_than_a_call_may_have_breaks_the_protocol(
    place: Neighbourhood,
) -> None:
    async with served(place, [halving()]) as s:
        stream = await s.near.open(s.peer, EXPERTS_PROTOCOL)
        await stream.send_all((LARGEST_UNARY_BYTES + (1 << 20)).to_bytes(4, "big") + b"\x01")
        await until(lambda: s.answering.avoided_for(s.near.peer_id) > 0, PATIENCE_SECONDS)
        assert s.answering.statistics().misbehaviours == 1


# ---- too much work


class Gate(nn.Module):
    """Holds the runtime until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.reached = threading.Event()

    def forward(self, rows: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(PATIENCE_SECONDS)
        return rows.clone()


@on_both
async def test_a_caller_is_told_when_the_server_is_busy(place: Neighbourhood) -> None:
    async with served(place, [halving()]) as s:
        with (
            s.runtime.room(s.near.peer_id, MOST_BYTES // 2),
            s.runtime.room(s.peer, MOST_BYTES // 2),
        ):
            for rows in (1, LARGE):
                with pytest.raises(Busy, match="as much work as it takes") as busy:
                    await s.client.forward(s.peer, UID, torch.zeros(rows, WIDTH), timeout=SECONDS)
                assert busy.value.surely_not_executed
        await still_serves(s)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, LARGE], ids=["call", "transfer"])
async def test_a_caller_whose_time_is_over_costs_the_device_nothing(rows: int) -> None:
    """On the real network: the device is really busy, in its own thread."""
    gate, backend = Gate(), halving()
    held = ExpertBackend(GRID.at(9), gate, ROWS)
    inputs = torch.zeros(rows, WIDTH)
    async with loopback() as place, served(place, [held, backend]) as s, until_open(gate) as asking:
        asking.start_soon(
            partial(s.client.forward, s.peer, GRID.at(9), inputs[:1], timeout=PATIENCE_SECONDS)
        )
        await until(gate.reached.is_set, PATIENCE_SECONDS)
        with pytest.raises(DeadlineExceeded):
            await s.client.forward(s.peer, UID, inputs, timeout=1)
        with trio.move_on_after(1) as patience:  # and the same with one that cancels
            await s.client.forward(s.peer, UID, inputs, timeout=PATIENCE_SECONDS)
        assert patience.cancelled_caught
        statistics = s.answering.statistics
        await until(lambda: statistics().requests_in_flight == 1, PATIENCE_SECONDS)
        await until(lambda: statistics().transfers_open == 0, PATIENCE_SECONDS)
        gate.open.set()
        await s.client.forward(s.peer, GRID.at(9), inputs[:1], timeout=PATIENCE_SECONDS)
    assert backend.statistics.forward_rows == 0


@asynccontextmanager
async def until_open(gate: Gate) -> AsyncIterator[trio.Nursery]:
    """A nursery; at its end, and if something fails, the gate is opened."""
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        finally:
            gate.open.set()


# ---- peers that break off


@pytest.mark.parametrize("sent", [0, 1, NEEDED // 2], ids=["no byte", "a byte", "half"])
@on_both
async def test_a_caller_that_vanishes_in_a_transfer_leaves_nothing_behind(
    place: Neighbourhood, sent: int
) -> None:
    backend = halving()

    async def break_off(s: Served) -> None:
        opening = TransferOpening(str(UID), 60_000, header(LARGE, WIDTH))
        async with s.asking.open_bulk(s.peer, TRANSFER, opening, timeout=SECONDS) as transfer:
            for start in range(0, sent, 1 << 20):
                await transfer.send_chunk(bytes(min(1 << 20, sent - start)))
            assert s.answering.statistics().transfers_open == 1
            await place.end(s.near)
            await next_chunk(transfer)

    async with served(place, [backend]) as s:
        with pytest.raises(PotluckError):
            await break_off(s)
        await until(lambda: s.answering.statistics().transfers_open == 0, PATIENCE_SECONDS)
        with s.runtime.room(s.near.peer_id, MOST_BYTES // 2):
            pass
    assert backend.statistics.forward_rows == 0


@on_both
async def test_a_transfer_ends_when_the_callers_time_is_over(place: Neighbourhood) -> None:
    async def dawdle(s: Served) -> None:
        opening = TransferOpening(str(UID), 500, header(LARGE, WIDTH))
        async with s.asking.open_bulk(s.peer, TRANSFER, opening, timeout=SECONDS) as transfer:
            await transfer.send_chunk(bytes(1 << 20))
            await next_chunk(transfer)

    async with served(place, [halving()]) as s:
        with pytest.raises(DeadlineExceeded, match="time for ffn"):
            await dawdle(s)
        await still_serves(s)
