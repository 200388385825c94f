"""The answering side of `/potluck/experts/1.0.0`.

    async with open_runtime(backends) as runtime:
        serve_experts(rpc, runtime)

A request is checked before it takes any memory besides its own message: a uid of the grammar, an
expert that is here, the shape and dtype of its rows, the size of the batch, and room for it all. A
tensor that no honest caller sends (values that are not finite, bytes that are not those of the
header) is misbehaviour: the caller is named in the log and avoided for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from protocols.errors import DeadlineExceeded
from protocols.experts.messages import (
    BACKWARD,
    EXPERTS_PROTOCOL,
    FORWARD,
    INFO,
    TRANSFER,
    BackwardRequest,
    BrokenTensor,
    EncodedTensor,
    ExpertAnswer,
    ExpertInfo,
    ForwardRequest,
    InfoAnswer,
    InfoRequest,
    TransferOpening,
    WrongTensor,
    check_fits,
    receive_tensors,
    send_tensor,
    tensor_bytes,
)
from protocols.experts.runtime import ExpertBackend, Runtime, Work
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc import Empty, Rpc, Transfer
from protocols.tensors import TensorHeader

LONGEST_TRANSFER_SECONDS = 300.0  # 64 MiB at 2 Mbit/s; it holds room of the runtime meanwhile
ALIVE_SECONDS = 1.0  # how soon a caller that has gone away is noticed while its work waits

ExpertTransfer = Transfer[Empty, Empty, Empty]


def serve_experts(rpc: Rpc, runtime: Runtime) -> None:
    """Answer for the experts of this runtime. Call it only once. After the end of the runtime, no
    expert is known."""
    server = ExpertServer(rpc, runtime)
    rpc.serve(FORWARD, server.forward)
    rpc.serve(BACKWARD, server.backward)
    rpc.serve(INFO, server.info)
    rpc.serve_bulk(TRANSFER, server.transfer)


class ExpertServer:
    """The handlers. Made by `serve_experts`."""

    def __init__(self, rpc: Rpc, runtime: Runtime) -> None:
        self._rpc = rpc
        self._runtime = runtime

    async def forward(self, caller: Caller, request: ForwardRequest) -> ExpertAnswer:
        return await self._answer(caller, request.uid, request.inputs, None)

    async def backward(self, caller: Caller, request: BackwardRequest) -> ExpertAnswer:
        return await self._answer(caller, request.uid, request.inputs, request.gradients)

    async def _answer(
        self, caller: Caller, uid: str, inputs: EncodedTensor, gradients: EncodedTensor | None
    ) -> ExpertAnswer:
        with self._blaming(caller):
            return ExpertAnswer(await compute(self._runtime, caller.peer, uid, inputs, gradients))

    def info(self, _caller: Caller, request: InfoRequest) -> InfoAnswer:
        found = [self._runtime.get(uid) for uid in dict.fromkeys(request.uids)]
        return InfoAnswer(
            tuple(
                ExpertInfo(
                    str(backend.uid), backend.rows, backend.largest_batch, backend.statistics.steps
                )
                for backend in found
                if backend is not None
            )
        )

    async def transfer(
        self, caller: Caller, transfer: ExpertTransfer, opening: TransferOpening
    ) -> None:
        seconds = min(opening.milliseconds / 1000.0, LONGEST_TRANSFER_SECONDS)
        with self._blaming(caller), trio.move_on_after(seconds):
            return await self._transfer(caller, transfer, opening)
        raise DeadlineExceeded(f"The caller's time for {opening.uid} is over.")

    async def _transfer(
        self, caller: Caller, transfer: ExpertTransfer, opening: TransferOpening
    ) -> None:
        backend = self._runtime.find(opening.uid)
        headers = _headers(opening.inputs, opening.gradients)
        with self._runtime.room(caller.peer, _request_bytes(backend, headers)):
            await transfer.accept(Empty())
            tensors = await receive_tensors(transfer, headers)
            answer = await self._work(transfer, Work(backend, *tensors))
            await send_tensor(transfer, answer.data)
            await transfer.finish(Empty())

    async def _work(self, transfer: ExpertTransfer, work: Work) -> EncodedTensor:
        """Compute this. Tell the caller meanwhile that we are still here; if it is not, this raises
        Unreachable, and the work is taken back."""
        with self._runtime.begun(work):
            while not work.done.is_set():
                with trio.move_on_after(ALIVE_SECONDS) as patience:
                    await work.done.wait()
                if patience.cancelled_caught:
                    await transfer.say_alive(ALIVE_SECONDS / 2)
        return work.answer

    @contextmanager
    def _blaming(self, caller: Caller) -> Iterator[None]:
        try:
            yield
        except BrokenTensor as error:
            self._rpc.blame(caller.peer, EXPERTS_PROTOCOL, error)
            raise


async def compute(
    runtime: Runtime,
    peer: PeerId,
    uid: str,
    inputs: EncodedTensor,
    gradients: EncodedTensor | None = None,
) -> EncodedTensor:
    """Check a request of this peer, and compute it."""
    backend = runtime.find(uid)
    headers = _headers(inputs.header, gradients.header if gradients else None)
    with runtime.room(peer, _request_bytes(backend, headers)):
        return await runtime.work(Work(backend, inputs, gradients))


def _headers(inputs: TensorHeader, gradients: TensorHeader | None) -> dict[str, TensorHeader]:
    if gradients is None:
        return {"The inputs": inputs}
    return {"The inputs": inputs, "The gradients": gradients}


def _request_bytes(backend: ExpertBackend, headers: dict[str, TensorHeader]) -> int:
    """The bytes of a request and its answer, encoded; its headers are checked first."""
    for name, header in headers.items():
        check_fits(header, backend.rows, backend.largest_batch, name)
    rows = {header.shape[0] for header in headers.values()}
    if len(rows) > 1:
        raise WrongTensor(f"The inputs and the gradients have {rows} rows.")
    sizes = [tensor_bytes(header) for header in headers.values()]
    return sum(sizes) + sizes[0]
