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

from collections.abc import Iterable, Mapping

from torch import Tensor

from protocols.moshpit.layout import CodecName, Layout


class Vector:
    """A flat float32 tensor on the CPU, and its layout."""

    layout: Layout
    values: Tensor

    def __init__(self, layout: Layout, values: Tensor) -> None:
        """Take the values as they lie. ProtocolMisuse if they do not fit the layout."""
        self.layout = layout
        self.values = values

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        codec: CodecName | Mapping[str, CodecName] = "none",
    ) -> Vector:
        """A copy of these tensors, in this order."""
        raise NotImplementedError

    def check_finite(self) -> None:
        """NotFinite, with the tensor's name, if a value is not finite or beyond its codec."""
        raise NotImplementedError

    def unpack(self, values: Tensor, into: Mapping[str, Tensor]) -> None:
        """Copy averaged values into tensors of the layout's names and sizes."""
        raise NotImplementedError
