"""The values that are averaged: one flat tensor, and the layout that says what they are.

    vector = Vector.of(model.named_parameters(), codec="float16")
    vector = Vector.of(gradients, codec={"embedding.weight": "blockwise-int8"})   # others: none
    vector = Vector.of(gradients, codec="float64")         # all of it, and all sums, in float64
    vector.check_finite()                                  # NotFinite names the tensor
    vector.unpack(outcome.result, into=parameters)

Promise: `of` copies every tensor once, from whatever device and floating dtype, into float32; or
into float64 where a tensor asks for the codec float64, which all of them have then. `check_finite`
also finds what its codec could not carry, so that nothing of a bad vector is ever sent.

Easy to get wrong: `Vector(layout, values)` does not copy. Whoever made the values must not write
to them while they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import CodecName, Layout, Segment
from protocols.tensor_codecs import NotFinite, within

LARGEST_AVERAGED = 1.75 * 2.0**127
"""Values of a vector go up to this, which is 2.98e38: at the very edge of float32 (3.4e38) the
rounding of a weighted sum could make an average infinite that should not be."""

LARGEST_CARRIED: Mapping[CodecName, float] = {
    "none": LARGEST_AVERAGED,
    "float64": 1.75 * 2.0**1023,  # as LARGEST_AVERAGED, of float64
    "float16": 65_519.0,  # the largest float32 that is rounded to 65,504 and not to infinity
    "bfloat16": LARGEST_AVERAGED,
    "blockwise-int8": LARGEST_AVERAGED,  # its own limit is 3.37e38
}
"""Up to which values each codec carries what is averaged."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Vector:
    """A flat tensor on the CPU, of the layout's dtype, and its layout."""

    def __init__(self, layout: Layout, values: Tensor) -> None:
        """Take the values as they lie. ProtocolMisuse if they do not fit the layout."""
        check_values(layout, values, "A vector's values")
        self.layout = layout
        self.values = values.detach()

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        codec: CodecName | Mapping[str, CodecName] = "none",
    ) -> Vector:
        """A copy of these tensors, in this order; `codec` for all, or by name.

        Those that are not named have the codec none, or float64 if that is the codec of one.
        """
        named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        for name, tensor in named:
            if not tensor.dtype.is_floating_point:
                raise ProtocolMisuse(
                    f"{name} is {tensor.dtype}, which has no average.",
                    advice="Leave it out, or make it a floating-point tensor.",
                )
        layout = layout_of(((name, tensor.numel()) for name, tensor in named), codec)
        values = torch.empty(layout.values, dtype=_DTYPES[layout.dtype])
        at = 0
        for _, tensor in named:
            values[at : at + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            at += tensor.numel()
        return Vector(layout, values)

    def check_finite(self) -> None:
        """NotFinite, with the tensor's name, if a value is not finite or beyond its codec."""
        for run in self.layout.runs:
            if not within(self.values[run.start : run.stop], LARGEST_CARRIED[run.codec]):
                raise self._not_finite(run.start, run.stop, run.codec)

    def unpack(self, values: Tensor, into: Mapping[str, Tensor]) -> None:
        """Copy averaged values into tensors of the layout's names and sizes."""
        check_values(self.layout, values, "What is unpacked")
        if set(into) != {segment.name for segment in self.layout.segments}:
            raise ProtocolMisuse("A vector is unpacked into tensors of exactly its own names.")
        for segment, start, stop in self._places():
            target = into[segment.name]
            if target.numel() != segment.values:
                raise ProtocolMisuse(
                    f"{segment.name} has {target.numel():,} values; "
                    f"{segment.values:,} were averaged."
                )
            with torch.no_grad():
                target.copy_(values[start:stop].view(target.shape))

    def _places(self) -> Iterator[tuple[Segment, int, int]]:
        at = 0
        for segment in self.layout.segments:
            yield segment, at, at + segment.values
            at += segment.values

    def _not_finite(self, start: int, stop: int, codec: CodecName) -> NotFinite:
        """Name the first tensor of this stretch that is to blame, and where in it."""
        largest = LARGEST_CARRIED[codec]
        for segment, first, last in self._places():
            values = self.values[first:last]
            if not start <= first < stop or within(values, largest):
                continue
            bad = ~(values.abs() <= largest)
            at = int(torch.nonzero(bad)[0].item())
            return NotFinite(
                f"{segment.name} has {int(bad.sum().item()):,} values that {codec} cannot carry; "
                f"the first is {values[at].item()!r} at {at:,} of {segment.values:,}.",
                why="The loss has diverged, or the values are too large for this codec.",
                advice="Hold these values back, or choose a codec with a wider range.",
            )
        raise AssertionError("a value that is not finite is in one of the tensors")


def layout_of(
    named: Iterable[tuple[str, int]], codec: CodecName | Mapping[str, CodecName] = "none"
) -> Layout:
    """The layout of tensors of these names and sizes; ProtocolMisuse as `Vector.of`."""
    sizes = list(named)
    if isinstance(codec, str):
        return Layout(tuple(Segment(name, values, codec) for name, values in sizes))
    unknown = set(codec) - {name for name, _ in sizes}
    if unknown:
        raise ProtocolMisuse(f"Codecs are given for {sorted(unknown)}, which are not here.")
    others: CodecName = "float64" if "float64" in codec.values() else "none"
    return Layout(tuple(Segment(name, values, codec.get(name, others)) for name, values in sizes))


def check_values(layout: Layout, values: Tensor, what: str) -> None:
    """ProtocolMisuse unless these are as many values, in one piece, as the layout has, of its
    dtype."""
    if values.dtype is not _DTYPES[layout.dtype]:
        raise ProtocolMisuse(
            f"{what} must be {layout.dtype}, not {values.dtype}.",
            advice="float64 values have the codec float64; all others are averaged in float32.",
        )
    if values.device.type != "cpu" or not values.is_contiguous():
        raise ProtocolMisuse(f"{what} must lie in one piece in the CPU's memory.")
    if values.dim() != 1 or values.numel() != layout.values:
        raise ProtocolMisuse(
            f"{what} must be {layout.values:,} in one dimension, as the layout says, "
            f"not {tuple(values.shape)}."
        )
