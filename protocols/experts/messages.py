"""`/potluck/experts/1.0.0`: the messages between a trainer and a server of experts.

    forward    [uid, inputs]              ->  [outputs]          tensors in the messages
    backward   [uid, inputs, gradients]   ->  [gradients of the inputs]
    transfer   [uid, headers, time left]  ->  the same two, as a bulk transfer, for larger tensors
    info       [uids]                     ->  what each expert takes, and how far it is

An expert takes rows and gives back rows of the same shape. So a caller knows the shape of an answer
before it asks, and both sides check all sizes before they take memory. The codec of the inputs is
the codec of the answer.

`backward` changes the expert. It is never sent twice, unless the first one was certainly not
executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final

from msgspec import Meta
from torch import Tensor

from protocols.errors import MalformedMessage, PotluckError, RemoteMisbehaviour
from protocols.experts.grid import WrongUid
from protocols.rpc import (
    LARGEST_UNARY_BYTES,
    BulkMethod,
    Count,
    Empty,
    Message,
    Method,
    Milliseconds,
    Transfer,
)
from protocols.tensors import (
    CodecName,
    DtypeName,
    NotFinite,
    TensorHeader,
    check_header,
    decode,
    describe,
    encode,
    encoded_bytes,
)

EXPERTS_PROTOCOL: Final = "/potluck/experts/1.0.0"

LONGEST_UID = 64  # characters: a grid's name and four indices have 52 at most
LARGEST_TENSOR_BYTES = 32 << 20  # decoded; the paper's batches (2048 × 1024 float32) have 8 MiB
LARGEST_UNARY_TENSORS = LARGEST_UNARY_BYTES - 1024  # the rest is for the uid and the headers
MOST_INFOS = 256
MOST_ROW_DIMENSIONS = 8

UidText = Annotated[str, Meta(min_length=1, max_length=LONGEST_UID)]
Size = Annotated[int, Meta(ge=1, le=1 << 32)]


class UnknownExpert(PotluckError):
    """The server does not have this expert, or not any more."""

    surely_not_executed = True


class WrongTensor(PotluckError):
    """Tensors that this expert does not take: another shape or dtype, or too many rows."""

    exit_code = 2
    surely_not_executed = True


class BrokenTensor(MalformedMessage):
    """A peer sent a tensor that no honest peer sends: values that are not finite, bytes or a size
    that are not those of its header, or an answer that is not like the inputs.

    Raised where the tensor came in, and that side avoids the peer. To the peer it is told as any
    malformed message.
    """


ERRORS: Final[Mapping[str, type[PotluckError]]] = {
    "unknown-expert": UnknownExpert,
    "wrong-tensor": WrongTensor,
    "wrong-uid": WrongUid,
    "not-finite": NotFinite,
}


class Rows(Message, frozen=True):
    """The rows that an expert takes and gives back: a tensor is (rows, *shape)."""

    shape: Annotated[tuple[Size, ...], Meta(max_length=MOST_ROW_DIMENSIONS)]
    dtype: DtypeName = "float32"

    def __str__(self) -> str:
        return f"({', '.join(('rows', *map(str, self.shape)))}) {self.dtype}"


class EncodedTensor(Message, frozen=True, gc=False):
    """A tensor in a message."""

    header: TensorHeader
    data: Annotated[memoryview, Meta(max_length=LARGEST_UNARY_BYTES)]


class ForwardRequest(Message, frozen=True, gc=False):
    uid: UidText
    inputs: EncodedTensor


class BackwardRequest(Message, frozen=True, gc=False):
    """`gradients` are those of the outputs, in the shape of the inputs."""

    uid: UidText
    inputs: EncodedTensor
    gradients: EncodedTensor


class ExpertAnswer(Message, frozen=True, gc=False):
    """The outputs, or the gradients of the inputs."""

    tensor: EncodedTensor


class TransferOpening(Message, frozen=True):
    """A forward pass, or with `gradients` a backward pass. The caller waits for so long in all."""

    uid: UidText
    milliseconds: Milliseconds
    inputs: TensorHeader
    gradients: TensorHeader | None = None


class InfoRequest(Message, frozen=True):
    uids: Annotated[tuple[UidText, ...], Meta(max_length=MOST_INFOS)]


class ExpertInfo(Message, frozen=True):
    """What an expert takes, and how many steps its optimizer has made on this server."""

    uid: UidText
    rows: Rows
    largest_batch: Size
    steps: Count = 0


class InfoAnswer(Message, frozen=True):
    """Those of the experts that this server has."""

    experts: Annotated[tuple[ExpertInfo, ...], Meta(max_length=MOST_INFOS)]


FORWARD: Final = Method(
    EXPERTS_PROTOCOL,
    "forward",
    ForwardRequest,
    ExpertAnswer,
    LARGEST_UNARY_BYTES,
    LARGEST_UNARY_BYTES,
    errors=ERRORS,
    training=True,
)
BACKWARD: Final = Method(
    EXPERTS_PROTOCOL,
    "backward",
    BackwardRequest,
    ExpertAnswer,
    LARGEST_UNARY_BYTES,
    LARGEST_UNARY_BYTES,
    errors=ERRORS,
    training=True,
)
INFO: Final = Method(EXPERTS_PROTOCOL, "info", InfoRequest, InfoAnswer)
TRANSFER: Final = BulkMethod(
    EXPERTS_PROTOCOL,
    "transfer",
    TransferOpening,
    accepted=Empty,
    closing=Empty,
    closed=Empty,
    errors=ERRORS,
    training=True,
)


def encode_tensor(tensor: Tensor, codec: CodecName, name: str) -> EncodedTensor:
    """NotFinite, with this name, if a value is not finite or too large for the codec."""
    return EncodedTensor(describe(tensor, codec), memoryview(encode(tensor, codec, name=name)))


def decode_tensor(encoded: EncodedTensor, name: str) -> Tensor:
    """BrokenTensor, with this name, if the bytes are not what the header says, or if a value is not
    finite."""
    with _broken(name):
        return decode(encoded.header, encoded.data, limit_bytes=LARGEST_TENSOR_BYTES)


def tensor_bytes(header: TensorHeader) -> int:
    """The bytes of the whole tensor, encoded."""
    return encoded_bytes(header, header.values)


def check_fits(header: TensorHeader, rows: Rows, largest_batch: int, name: str) -> None:
    """WrongTensor unless a tensor with this header is one to `largest_batch` such rows.
    BrokenTensor if no honest peer sends such a header."""
    if not header.shape or header.shape[1:] != rows.shape or header.dtype != rows.dtype:
        raise WrongTensor(
            f"{name} have the shape {header.shape} and are {header.dtype}; needed are {rows}."
        )
    with _broken(name):
        check_header(header, LARGEST_TENSOR_BYTES)
    if not 1 <= header.shape[0] <= largest_batch:
        raise WrongTensor(
            f"{name} have {header.shape[0]:,} rows; this expert takes 1 to {largest_batch:,}.",
            advice="Send a large batch in parts.",
        )


@contextmanager
def _broken(name: str) -> Iterator[None]:
    try:
        yield
    except RemoteMisbehaviour as error:
        raise BrokenTensor(f"{name}: {error.what}") from None


async def send_tensor(transfer: Transfer[Any, Any, Any], data: memoryview) -> None:
    """Send the bytes of a tensor, in chunks."""
    for start in range(0, len(data), TRANSFER.chunk_limit_bytes):
        await transfer.send_chunk(data[start : start + TRANSFER.chunk_limit_bytes])


async def receive_tensors(
    transfer: Transfer[Any, Any, Any], headers: Mapping[str, TensorHeader]
) -> list[EncodedTensor]:
    """Receive the bytes of these tensors, by their names, and then the closing message. The headers
    must have been checked: the memory is taken at once."""
    tensors = [await _receive_tensor(transfer, header, name) for name, header in headers.items()]
    if await transfer.next_chunk_bytes() is not None:
        raise BrokenTensor(f"{', '.join(headers)}: more bytes came than the headers need.")
    await transfer.receive_closing()
    return tensors


async def _receive_tensor(
    transfer: Transfer[Any, Any, Any], header: TensorHeader, name: str
) -> EncodedTensor:
    data = bytearray(tensor_bytes(header))
    received = 0
    while received < len(data):
        size = await transfer.next_chunk_bytes()
        if size is None or size > len(data) - received:
            raise BrokenTensor(
                f"{name}: after {received:,} of {len(data):,} bytes came "
                + ("the end." if size is None else f"a chunk of {size:,}.")
            )
        with memoryview(data) as view, view[received:] as rest:
            await transfer.receive_chunk_into(rest)
        received += size
    return EncodedTensor(header, memoryview(data))
