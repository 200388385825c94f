"""Calls of experts as a trainer makes them, on both networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import trio

from protocols.errors import DeadlineExceeded, ProtocolNotServed, Unreachable
from protocols.experts import ExpertClient, ExpertInfo, WrongTensor
from protocols.experts.messages import (
    BACKWARD,
    FORWARD,
    LARGEST_TENSOR_BYTES,
    LARGEST_UNARY_TENSORS,
    TRANSFER,
    BackwardRequest,
    BrokenTensor,
    EncodedTensor,
    ExpertAnswer,
    ForwardRequest,
    TransferOpening,
    encode_tensor,
    send_tensor,
)
from protocols.experts.runtime import LARGEST_BATCH
from protocols.experts.server import ExpertTransfer
from protocols.guard import Caller
from protocols.rpc import Empty, open_rpc
from protocols.tensors import CODECS, CodecName, NotFinite, TensorHeader
from tests.chunks import next_chunk
from tests.contract.neighbourhood import Neighbourhood, on_both
from tests.experts.serving import GRID, LARGE, ROWS, UID, WIDTH, feed_forward, halving, served
from tests.waiting import PATIENCE_SECONDS, until

both_sizes = pytest.mark.parametrize("rows", [3, LARGE], ids=["call", "transfer"])

TOLERANCES: dict[CodecName, float] = {
    "none": 0.0,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "blockwise-int8": 5e-2,
    "blockwise-float8": 4e-1,
    "blockwise-int4": 5e-1,  # twice 4 / 13.9
}


def test_the_large_batch_is_one_that_no_call_can_bring() -> None:
    assert LARGE * WIDTH * 4 > LARGEST_UNARY_TENSORS > 3 * WIDTH * 4


@pytest.mark.slow
@both_sizes
@on_both
async def test_forward_and_backward_are_those_of_the_network(
    place: Neighbourhood, rows: int
) -> None:
    backend = feed_forward()
    network = copy.deepcopy(backend.network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    inputs, gradients = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    async with served(place, [backend]) as s:
        outputs = await s.client.forward(s.peer, UID, inputs, timeout=60)
        input_gradients = await s.client.backward(s.peer, UID, inputs, gradients, timeout=60)
        again = await s.client.forward(s.peer, UID, inputs, timeout=60)
    alone = inputs.clone().requires_grad_()
    expected = network(alone)
    expected.backward(gradients)
    optimizer.step()
    # not bit for bit: torch adds in an order that depends on its threads at that moment
    torch.testing.assert_close(outputs, expected.detach(), rtol=1e-5, atol=1e-5)
    assert alone.grad is not None
    torch.testing.assert_close(input_gradients, alone.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, network(inputs).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", TOLERANCES)
@both_sizes
@on_both
async def test_the_codec_is_the_callers_choice(
    place: Neighbourhood, rows: int, codec: CodecName
) -> None:
    most = 3 if codec != "none" else 1  # large with few bytes for each value, too
    inputs = torch.randn(most * rows, WIDTH).clamp(-4, 4)
    async with served(place, [halving(learns=False)]) as s:
        outputs = await s.client.forward(s.peer, UID, inputs, codec=codec, timeout=60)
        gradients = await s.client.backward(s.peer, UID, inputs, inputs, codec=codec, timeout=60)
    tolerance = TOLERANCES[codec]
    torch.testing.assert_close(outputs, inputs / 2, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients, inputs / 2, rtol=tolerance, atol=tolerance)
    assert outputs.dtype == torch.float32


def test_every_codec_for_float32_is_tried_here() -> None:
    other = {one for one in CODECS if CODECS[one].is_sparse} | {"float64"}
    assert {*TOLERANCES, *other} == set(get_args(CodecName))


@on_both
async def test_many_calls_at_once_get_their_own_answers(place: Neighbourhood) -> None:
    async with served(place, [halving(0), feed_forward(1)]) as s:

        async def ask(number: int) -> None:
            inputs = torch.full((1 + number % 3, WIDTH), float(number))
            outputs = await s.client.forward(s.peer, UID, inputs, timeout=60)
            assert torch.equal(outputs, inputs / 2)

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(ask, number)
    assert s.runtime.backends() == ()


@on_both
async def test_info_says_what_each_expert_takes_and_leaves_out_unknown_ones(
    place: Neighbourhood,
) -> None:
    async with served(place, [halving(0), halving(1)]) as s:
        inputs = torch.zeros(1, WIDTH)
        await s.client.backward(s.peer, GRID.at(1), inputs, inputs, timeout=60)
        known = await s.client.info(s.peer, [GRID.at(1), GRID.at(2)], timeout=60)
    assert known == {GRID.at(1): ExpertInfo("ffn.1", ROWS, 4096, 1)}


@both_sizes
@on_both
async def test_values_that_are_not_finite_are_not_sent(place: Neighbourhood, rows: int) -> None:
    inputs, good = torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)
    inputs[-1, -1] = math.inf
    async with served(place, [halving()]) as s:
        with pytest.raises(NotFinite, match=r"The inputs for ffn\.0"):
            await s.client.forward(s.peer, UID, inputs, timeout=60)
        with pytest.raises(NotFinite, match=r"The gradients for ffn\.0"):
            await s.client.backward(s.peer, UID, good, inputs, timeout=60)
        with pytest.raises(NotFinite, match="float16 cannot encode"):
            await s.client.forward(s.peer, UID, good + 1e6, codec="float16", timeout=60)
        assert s.answering.statistics().requests_served == 0
        assert s.answering.statistics().transfers_served == 0


@on_both
async def test_what_no_server_takes_is_not_sent(place: Neighbourhood) -> None:
    async with served(place, [halving()]) as s:
        too_wide = torch.zeros(1, LARGEST_TENSOR_BYTES // 4 + 1)
        with pytest.raises(WrongTensor, match="narrower"):
            await s.client.forward(s.peer, UID, too_wide, timeout=60)
        two, three = torch.zeros(2, WIDTH), torch.zeros(3, WIDTH)
        with pytest.raises(WrongTensor, match="not of the inputs' shape"):
            await s.client.backward(s.peer, UID, two, three, timeout=60)


@pytest.mark.slow
@on_both
async def test_a_batch_that_is_too_large_for_a_server_is_sent_in_parts(
    place: Neighbourhood,
) -> None:
    backend = halving(learns=False)
    inputs = torch.randn(2 * LARGEST_BATCH + 1, WIDTH)
    async with served(place, [backend]) as s:
        outputs = await s.client.forward(s.peer, UID, inputs, timeout=60)
        gradients = await s.client.backward(s.peer, UID, inputs, inputs, timeout=60)
        assert torch.equal(outputs, inputs / 2)
        assert torch.equal(gradients, inputs / 2)
        assert backend.statistics.batches == 6


@on_both
async def test_a_value_in_any_part_that_cannot_be_sent_is_found_before_the_first_is_sent(
    place: Neighbourhood,
) -> None:
    inputs = torch.zeros(LARGEST_BATCH + 1, WIDTH)
    inputs[-1, 0] = float("nan")
    backend = halving()
    async with served(place, [backend]) as s:
        with pytest.raises(NotFinite) as error:
            await s.client.backward(s.peer, UID, inputs, torch.zeros_like(inputs), timeout=60)
    assert error.value.surely_not_executed
    assert not backend.statistics.batches


@on_both
async def test_a_peer_that_serves_no_experts_says_so(place: Neighbourhood) -> None:
    near, far = await place.pair()
    async with open_rpc(near) as asking, open_rpc(far):
        inputs = torch.zeros(1, WIDTH)
        with pytest.raises(ProtocolNotServed) as error:
            await ExpertClient(asking).forward(far.peer_id, UID, inputs, timeout=60)
        assert error.value.surely_not_executed


# ---- servers that lie


def lie(rows: int, *, codec: CodecName = "none", fill: float = 0.0, cut: int = 0) -> EncodedTensor:
    header = TensorHeader((rows, WIDTH), "float32", codec)
    data = memoryview(torch.full((rows, WIDTH), fill).numpy()).cast("B")
    return EncodedTensor(header, data[: len(data) - cut])


LIES = {
    "not finite": lambda rows: lie(rows, fill=math.nan),
    "too few bytes": lambda rows: lie(rows, cut=4),
    "too few rows": lambda rows: lie(rows - 1),
    "too many rows": lambda rows: lie(rows + 1),
}


@pytest.mark.parametrize("told", LIES.values(), ids=LIES)
@both_sizes
@on_both
async def test_a_server_that_lies_is_named_and_avoided(
    place: Neighbourhood, rows: int, told: Callable[[int], EncodedTensor]
) -> None:
    answer = told(rows)

    async def call(_caller: Caller, _request: ForwardRequest) -> ExpertAnswer:
        return ExpertAnswer(answer)

    async def move(_caller: Caller, transfer: ExpertTransfer, _opening: TransferOpening) -> None:
        await transfer.accept(Empty())
        while await next_chunk(transfer) is not None:
            pass
        await send_tensor(transfer, answer.data)
        await transfer.finish(Empty())

    near, far = await place.pair()
    async with open_rpc(near) as asking, open_rpc(far) as answering:
        answering.serve(FORWARD, call)
        answering.serve_bulk(TRANSFER, move)
        client, inputs = ExpertClient(asking), torch.zeros(rows, WIDTH)
        with pytest.raises(BrokenTensor, match=r"The answer of ffn\.0"):
            await client.forward(far.peer_id, UID, inputs, timeout=60)
        assert asking.avoided_for(far.peer_id) > 0


@on_both
async def test_an_answer_in_another_codec_is_a_lie(place: Neighbourhood) -> None:
    inputs = torch.zeros(2, WIDTH)

    async def call(_caller: Caller, _request: ForwardRequest) -> ExpertAnswer:
        return ExpertAnswer(encode_tensor(inputs, "float16", "values"))

    near, far = await place.pair()
    async with open_rpc(near) as asking, open_rpc(far) as answering:
        answering.serve(FORWARD, call)
        with pytest.raises(BrokenTensor):
            await ExpertClient(asking).forward(far.peer_id, UID, inputs, timeout=60)


# ---- time, and the end of a peer


@pytest.mark.slow
@both_sizes
@on_both
async def test_the_timeout_covers_everything(place: Neighbourhood, rows: int) -> None:
    """The expert's server never computes."""
    near, far = await place.pair()

    async def call(_caller: Caller, _request: ForwardRequest) -> ExpertAnswer:
        await trio.sleep_forever()
        raise AssertionError

    async def move(_caller: Caller, transfer: ExpertTransfer, _opening: TransferOpening) -> None:
        await transfer.accept(Empty())
        while await next_chunk(transfer) is not None:
            pass
        await trio.sleep_forever()

    async with open_rpc(near) as asking, open_rpc(far) as answering:
        answering.serve(FORWARD, call)
        answering.serve_bulk(TRANSFER, move)
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded) as error:
            await ExpertClient(asking).forward(
                far.peer_id, UID, torch.zeros(rows, WIDTH), timeout=2
            )
        assert trio.current_time() - began >= 2
        assert not error.value.surely_not_executed
        await until(lambda: answering.statistics().requests_in_flight == 0, PATIENCE_SECONDS)


@both_sizes
@on_both
async def test_a_server_that_vanishes_ends_the_call_at_once(
    place: Neighbourhood, rows: int
) -> None:
    near, far = await place.pair()
    arrived = trio.Event()

    async def call(_caller: Caller, _request: ForwardRequest) -> ExpertAnswer:
        arrived.set()
        await trio.sleep_forever()
        raise AssertionError

    async def move(_caller: Caller, transfer: ExpertTransfer, _opening: TransferOpening) -> None:
        await transfer.accept(Empty())
        await next_chunk(transfer)
        arrived.set()
        await trio.sleep_forever()

    async with open_rpc(near) as asking, open_rpc(far) as answering, trio.open_nursery() as nursery:
        answering.serve(FORWARD, call)
        answering.serve_bulk(TRANSFER, move)

        async def vanish() -> None:
            await arrived.wait()
            await place.end(far)

        nursery.start_soon(vanish)
        with pytest.raises(Unreachable) as error:
            await ExpertClient(asking).forward(
                far.peer_id, UID, torch.zeros(rows, WIDTH), timeout=PATIENCE_SECONDS
            )
        assert not error.value.surely_not_executed


@pytest.mark.parametrize("rows", [3, LARGE // 2], ids=["call", "transfer"])
@on_both
async def test_a_backward_pass_whose_answer_is_lost_is_not_made_again(
    place: Neighbourhood, rows: int
) -> None:
    near, far = await place.pair()
    made = 0

    async def make_and_hang_up() -> None:
        nonlocal made
        made += 1
        await far.disconnect(near.peer_id)

    async def call(_caller: Caller, _request: BackwardRequest) -> ExpertAnswer:
        await make_and_hang_up()
        raise AssertionError

    async def move(_caller: Caller, transfer: ExpertTransfer, _opening: TransferOpening) -> None:
        await transfer.accept(Empty())
        while await next_chunk(transfer) is not None:
            pass
        await make_and_hang_up()

    async with open_rpc(near) as asking, open_rpc(far) as answering:
        answering.serve(FORWARD, _echo)
        answering.serve(BACKWARD, call)
        answering.serve_bulk(TRANSFER, move)
        client, inputs = ExpertClient(asking), torch.zeros(rows, WIDTH)
        await client.forward(far.peer_id, UID, inputs[:1], timeout=60)  # so there is a stream
        with pytest.raises(Unreachable) as error:
            await client.backward(far.peer_id, UID, inputs, inputs, timeout=60)
        assert not error.value.surely_not_executed
    assert made == 1


async def _echo(_caller: Caller, request: ForwardRequest) -> ExpertAnswer:
    return ExpertAnswer(request.inputs)
