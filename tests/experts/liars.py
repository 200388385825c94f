"""Servers of experts that answer everything but what they should.

Each is a way to serve: it takes the calls of `/potluck/experts/1.0.0` and counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import trio

from protocols.experts import EXPERTS_PROTOCOL, ExpertBackend
from protocols.experts.messages import (
    BACKWARD,
    FORWARD,
    BackwardRequest,
    EncodedTensor,
    ExpertAnswer,
    ForwardRequest,
    encode_tensor,
)
from protocols.guard import Caller
from protocols.network import Stream
from protocols.rpc import Rpc
from protocols.tensors import TensorHeader

Request = ForwardRequest | BackwardRequest
Lie = Callable[[TensorHeader], EncodedTensor]  # from the header of the inputs

MOST_BYTES_OF_A_REQUEST = 1 << 16


class Liar:
    """A server whose answers are made by `lie`."""

    def __init__(self, lie: Lie) -> None:
        self.calls = 0
        self._lie = lie

    async def __call__(self, rpc: Rpc, _backends: Sequence[ExpertBackend]) -> None:
        def answer(_caller: Caller, request: Request) -> ExpertAnswer:
            self.calls += 1
            return ExpertAnswer(self._lie(request.inputs.header))

        rpc.serve(FORWARD, answer)
        rpc.serve(BACKWARD, answer)
        await trio.sleep_forever()


class Cutter:
    """A server that begins an answer and closes the stream."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, rpc: Rpc, _backends: Sequence[ExpertBackend]) -> None:
        async def answer(stream: Stream) -> None:
            await stream.receive_some(MOST_BYTES_OF_A_REQUEST)
            self.calls += 1
            await stream.send_all(b"\x02\x00")

        rpc.network.serve(EXPERTS_PROTOCOL, answer)
        await trio.sleep_forever()


class Mute:
    """A server that takes every call and never answers."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, rpc: Rpc, _backends: Sequence[ExpertBackend]) -> None:
        async def answer(_caller: Caller, _request: Request) -> ExpertAnswer:
            self.calls += 1
            await trio.sleep_forever()

        rpc.serve(FORWARD, answer)
        rpc.serve(BACKWARD, answer)
        await trio.sleep_forever()


class Unteachable:
    """A server that answers forward passes, after some seconds, and takes no gradients: it fails,
    or never answers.

    `calls` are those that bring gradients.
    """

    def __init__(self, *, mute: bool, seconds: float = 0.0) -> None:
        self.calls = 0
        self._mute, self._seconds = mute, seconds

    async def __call__(self, rpc: Rpc, _backends: Sequence[ExpertBackend]) -> None:
        async def backward(_caller: Caller, _request: BackwardRequest) -> ExpertAnswer:
            self.calls += 1
            if self._mute:
                await trio.sleep_forever()
            raise RuntimeError("No.")

        async def forward(_caller: Caller, request: ForwardRequest) -> ExpertAnswer:
            await trio.sleep(self._seconds)
            return ExpertAnswer(request.inputs)

        rpc.serve(FORWARD, forward)
        rpc.serve(BACKWARD, backward)
        await trio.sleep_forever()


def filled(value: float) -> Lie:
    return lambda header: encode_tensor(torch.full(header.shape, value), "none", "a lie")


def not_a_number(header: TensorHeader) -> EncodedTensor:
    return EncodedTensor(header, memoryview(b"\xff" * 4 * header.values))


def wider(header: TensorHeader) -> EncodedTensor:
    rows, width = header.shape
    return encode_tensor(torch.zeros(rows, width + 1), "none", "a lie")


def shorter_than_it_says(header: TensorHeader) -> EncodedTensor:
    return EncodedTensor(header, memoryview(bytes(4 * header.values - 4)))


def garbage(header: TensorHeader) -> EncodedTensor:
    return EncodedTensor(header, memoryview(b"not a tensor at all"))


def denying(error: type[Exception]) -> Lie:
    def lie(_header: TensorHeader) -> EncodedTensor:
        raise error("No.")

    return lie
