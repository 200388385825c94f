"""The asking side of `/potluck/experts/1.0.0`.

    client = ExpertClient(rpc)
    outputs = await client.forward(peer, uid, inputs, codec="float16", timeout=5)
    input_gradients = await client.backward(peer, uid, inputs, gradients, timeout=5)

Tensors are (rows, *shape), on the CPU, of the expert's dtype; answers have the shape of the inputs.
Inputs must not be changed while a call is under way. `timeout` covers everything, connecting
included.

The codec loses what it loses on the way there and on the way back. NotFinite is raised here, before
anything is sent, for values that are not finite or too large for it; then it says
`surely_not_executed`.

A `backward` makes a step of the expert. It is sent once; it may be sent again only if the error
says `surely_not_executed`, as Busy, UnknownExpert and WrongTensor do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, TypeVarTuple, Unpack

import trio
from torch import Tensor

from protocols.blocking import in_thread
from protocols.errors import DeadlineExceeded
from protocols.experts.grid import Uid
from protocols.experts.messages import (
    BACKWARD,
    EXPERTS_PROTOCOL,
    FORWARD,
    INFO,
    LARGEST_TENSOR_BYTES,
    LARGEST_UNARY_TENSORS,
    TRANSFER,
    BackwardRequest,
    BrokenTensor,
    EncodedTensor,
    ExpertInfo,
    ForwardRequest,
    InfoRequest,
    TransferOpening,
    WrongTensor,
    decode_tensor,
    encode_tensor,
    receive_tensors,
    send_tensor,
)
from protocols.experts.runtime import Runtime
from protocols.experts.server import compute
from protocols.identity import PeerId
from protocols.rpc import LONGEST_MILLISECONDS, Empty, Rpc
from protocols.tensors import CodecName, NotFinite, TensorHeader

LARGEST_AT_ONCE = 1 << 20  # bytes of a tensor: up to a millisecond in the event loop

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class ExpertClient:
    """Calls experts on other peers."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self.own: Runtime | None = None
        """The experts of this node itself, if it serves any: a node cannot call itself."""

    async def forward(
        self,
        peer: PeerId,
        uid: Uid,
        inputs: Tensor,
        *,
        codec: CodecName = "none",
        timeout: float,
    ) -> Tensor:
        """What the expert makes of these rows.

        Raises NotFinite, UnknownExpert, WrongTensor, Busy, and the errors of `rpc.call`.
        """
        return await self._call(peer, uid, [inputs], codec, timeout)

    async def backward(
        self,
        peer: PeerId,
        uid: Uid,
        inputs: Tensor,
        gradients: Tensor,
        *,
        codec: CodecName = "none",
        timeout: float,
    ) -> Tensor:
        """The gradients of the inputs, for these gradients of the outputs. The expert makes a
        step. Raises the same errors as `forward`."""
        return await self._call(peer, uid, [inputs, gradients], codec, timeout)

    async def info(
        self, peer: PeerId, uids: Iterable[Uid], *, timeout: float
    ) -> dict[Uid, ExpertInfo]:
        """What those of these experts take that this peer has. Up to 256 at once."""
        asked = {str(uid): uid for uid in uids}
        answer = await self._rpc.call(peer, INFO, InfoRequest(tuple(asked)), timeout=timeout)
        return {asked[info.uid]: info for info in answer.experts if info.uid in asked}

    async def _call(
        self, peer: PeerId, uid: Uid, tensors: list[Tensor], codec: CodecName, timeout: float
    ) -> Tensor:
        _check(uid, tensors)
        size = tensors[0].nbytes
        names = (f"The inputs for {uid}", f"The gradients for {uid}")
        encoded = [
            await _off_the_loop(size, _encoded, tensor, codec, name)
            for name, tensor in zip(names, tensors, strict=False)
        ]
        try:
            if self.own is not None and peer == self._rpc.network.peer_id:
                answer = await self._compute(self.own, uid, encoded, timeout)
            elif sum(len(one.data) for one in encoded) <= LARGEST_UNARY_TENSORS:
                answer = await self._ask(peer, uid, encoded, timeout)
            else:
                answer = await self._transfer(peer, uid, encoded, timeout)
            return await _decoded(answer, encoded[0].header, f"The answer of {uid}")
        except BrokenTensor as error:
            self._rpc.blame(peer, EXPERTS_PROTOCOL, error)
            raise

    async def _compute(
        self, own: Runtime, uid: Uid, encoded: list[EncodedTensor], timeout: float
    ) -> EncodedTensor:
        with trio.move_on_after(timeout):
            return await compute(own, self._rpc.network.peer_id, str(uid), *encoded)
        raise DeadlineExceeded(
            f"This node did not compute {uid} within {timeout:g} seconds.", why="It is busy."
        )

    async def _ask(
        self, peer: PeerId, uid: Uid, encoded: list[EncodedTensor], timeout: float
    ) -> EncodedTensor:
        if len(encoded) == 1:
            forward = ForwardRequest(str(uid), *encoded)
            return (await self._rpc.call(peer, FORWARD, forward, timeout=timeout)).tensor
        backward = BackwardRequest(str(uid), *encoded)
        return (await self._rpc.call(peer, BACKWARD, backward, timeout=timeout)).tensor

    async def _transfer(
        self, peer: PeerId, uid: Uid, encoded: list[EncodedTensor], timeout: float
    ) -> EncodedTensor:
        headers = [one.header for one in encoded]
        milliseconds = int(min(timeout * 1000.0, LONGEST_MILLISECONDS))
        opening = TransferOpening(str(uid), milliseconds, *headers)
        with trio.move_on_after(timeout):
            async with self._rpc.open_bulk(peer, TRANSFER, opening, timeout=timeout) as transfer:
                for one in encoded:
                    await send_tensor(transfer, one.data)
                await transfer.send_closing(Empty())
                expected = {f"The answer of {uid}": headers[0]}
                (answer,) = await receive_tensors(transfer, expected)
            return answer
        raise DeadlineExceeded(
            f"{peer} did not answer for {uid} within {timeout:g} seconds.",
            why="It is busy or stopped, or the link is too slow for tensors of this size.",
        )


def _encoded(tensor: Tensor, codec: CodecName, name: str) -> EncodedTensor:
    """A NotFinite of ours says that nothing was sent; one of the server does not."""
    try:
        return encode_tensor(tensor, codec, name)
    except NotFinite as error:
        error.surely_not_executed = True
        raise


def _check(uid: Uid, tensors: Sequence[Tensor]) -> None:
    """What no server takes is not sent."""
    inputs = tensors[0]
    if inputs.nbytes > LARGEST_TENSOR_BYTES:
        raise WrongTensor(
            f"The inputs for {uid} have {inputs.nbytes:,} bytes; at most "
            f"{LARGEST_TENSOR_BYTES:,} are sent at once.",
            advice="Send the batch in parts.",
        )
    if any(one.shape != inputs.shape or one.dtype != inputs.dtype for one in tensors):
        raise WrongTensor(f"The gradients for {uid} are not of the inputs' shape and dtype.")


async def _decoded(answer: EncodedTensor, expected: TensorHeader, name: str) -> Tensor:
    if answer.header != expected:
        raise BrokenTensor(f"{name}: {answer.header} came, and {expected} was due.")
    return await _off_the_loop(expected.decoded_bytes, decode_tensor, answer, name)


async def _off_the_loop(
    size_bytes: int,
    function: Callable[[Unpack[Arguments]], Result],
    *arguments: *Arguments,
) -> Result:
    """Call a function that reads so many bytes; in a thread if that takes long."""
    if size_bytes <= LARGEST_AT_ONCE:
        return function(*arguments)
    return await in_thread(function, *arguments)
