"""The values that are averaged: one flat float32 tensor, and the layout that says what they are.

    vector = Vector.of(model.named_parameters(), codec="float16")
    vector = Vector.of(gradients, codec={"embedding.weight": "blockwise-int8"})   # others: none
    vector.check_finite()                                  # NotFinite names the tensor
    vector.unpack(outcome.result, into=parameters)

Promise: `of` copies every tensor once, from whatever device and floating dtype. `check_finite`
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

_LARGEST: dict[CodecName, float] = {
    "none": LARGEST_AVERAGED,
    "float16": 65_519.0,  # the largest float32 that is rounded to 65,504 and not to infinity
    "bfloat16": LARGEST_AVERAGED,
    "blockwise-int8": LARGEST_AVERAGED,  # its own limit is 3.37e38
}


class Vector:
    """A flat float32 tensor on the CPU, and its layout."""

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
        """A copy of these tensors, in this order; `codec` for all, or by name (others: none)."""
        named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        for name, tensor in named:
            if not tensor.dtype.is_floating_point:
                raise ProtocolMisuse(
                    f"{name} is {tensor.dtype}, which has no average.",
                    advice="Leave it out, or make it a floating-point tensor.",
                )
        if not isinstance(codec, str):
            unknown = set(codec) - {name for name, _ in named}
            if unknown:
                raise ProtocolMisuse(f"Codecs are given for {sorted(unknown)}, which are not here.")
        layout = Layout(
            tuple(
                Segment(
                    name,
                    tensor.numel(),
                    codec if isinstance(codec, str) else codec.get(name, "none"),
                )
                for name, tensor in named
            )
        )
        values = torch.empty(layout.values, dtype=torch.float32)
        at = 0
        for _, tensor in named:
            values[at : at + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            at += tensor.numel()
        return Vector(layout, values)

    def check_finite(self) -> None:
        """NotFinite, with the tensor's name, if a value is not finite or beyond its codec."""
        for run in self.layout.runs:
            if not within(self.values[run.start : run.stop], _LARGEST[run.codec]):
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
        largest = _LARGEST[codec]
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


def check_values(layout: Layout, values: Tensor, what: str) -> None:
    """ProtocolMisuse unless these are as many float32 values, in one piece, as the layout has."""
    if values.dtype is not torch.float32:
        raise ProtocolMisuse(f"{what} must be float32, not {values.dtype}.")
    if values.device.type != "cpu" or not values.is_contiguous():
        raise ProtocolMisuse(f"{what} must lie in one piece in the CPU's memory.")
    if values.dim() != 1 or values.numel() != layout.values:
        raise ProtocolMisuse(
            f"{what} must be {layout.values:,} in one dimension, as the layout says, "
            f"not {tuple(values.shape)}."
        )
