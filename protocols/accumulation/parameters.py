"""The parameters that are trained: by name, in one order, and where each lies in a flat buffer.

    parameters = Parameters(model.named_parameters())
    flat = parameters.buffer()                     # room for one value of each
    for view, parameter in zip(parameters.views(flat), parameters.tensors, strict=True): ...

Promise: a parameter that an exchange could not average is refused here, by name, before anything is
sent.

Easy to get wrong: frozen parameters (`requires_grad=False`) are not included. They are not
averaged, but they belong to the state that a newcomer fetches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import Segment
from protocols.tensors import GPUS, CodecName

Codecs = CodecName | Mapping[str, CodecName]
"""One codec for all parameters, or codecs by name; the others travel without a codec."""


class Parameters:
    """Names and tensors, in the order in which the model gave them."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self.everything = list(named)
        """All parameters, with the frozen ones."""
        trained = [(name, one) for name, one in self.everything if one.requires_grad]
        _check(self.everything, trained)
        self.trained = tuple(trained)
        self.names = tuple(name for name, _ in trained)
        self.tensors = tuple(one for _, one in trained)
        self.dtype = self.tensors[0].dtype
        self.device = self.tensors[0].device
        ends = list(accumulate(one.numel() for one in self.tensors))
        self._starts = [0, *ends[:-1]]
        self.values = ends[-1]

    def buffer(self, extra: int = 0, *, on_host: bool = False) -> Tensor:
        """A flat tensor of zeros with room for all parameters, and for `extra` more values. On the
        host it is pinned if they are on a GPU."""
        size = self.values + extra
        if on_host:
            return torch.zeros(size, dtype=self.dtype, pin_memory=self.device.type in GPUS)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's stretch of a flat tensor, in the parameter's shape."""
        return [
            flat[start : start + one.numel()].view(one.shape)
            for start, one in zip(self._starts, self.tensors, strict=True)
        ]

    @torch.no_grad()
    def copy_into(self, flat: Tensor) -> Tensor:
        for view, one in zip(self.views(flat), self.tensors, strict=True):
            view.copy_(one)
        return flat

    @torch.no_grad()
    def copy_from(self, flat: Tensor) -> None:
        for view, one in zip(self.views(flat), self.tensors, strict=True):
            one.copy_(view)

    def segments(self, codec: Codecs) -> tuple[Segment, ...]:
        """The segments of a layout. `codec`: one for all, or by name (none for the others)."""
        named = {} if isinstance(codec, str) else dict(codec)
        unknown = sorted(set(named) - set(self.names))
        if unknown:
            raise ProtocolMisuse(
                f"Codecs are given for {', '.join(unknown)}, which the model does not train.",
                advice="Name parameters as `model.named_parameters()` does.",
            )
        rest = codec if isinstance(codec, str) else "none"
        codecs = [self.codec_of(named.get(name, rest)) for name in self.names]
        return tuple(
            Segment(name, one.numel(), its)
            for name, one, its in zip(self.names, self.tensors, codecs, strict=True)
        )

    def codec_of(self, codec: CodecName) -> CodecName:
        """The codec by its name for the parameters' type: `none` is `float64` for float64."""
        if self.dtype is not torch.float64:
            return codec
        if codec not in ("none", "float64"):
            raise ProtocolMisuse(
                f"The parameters are float64, and the codec is {codec}.",
                why="Values in double precision travel in double precision.",
                advice="Use a float32 model, or leave the codec out.",
            )
        return "float64"


def _check(
    everything: list[tuple[str, torch.nn.Parameter]], trained: list[tuple[str, torch.nn.Parameter]]
) -> None:
    names = [name for name, _ in everything]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if twice:
        raise ProtocolMisuse(
            f"Several parameters are called {', '.join(twice)}.",
            advice="Give `model.named_parameters()` of one model.",
        )
    if not trained:
        raise ProtocolMisuse(
            "There is no parameter to train.",
            why="No given parameter has requires_grad=True.",
            advice="Give `model.named_parameters()`, and freeze only what is not to be trained.",
        )
    first_name, first = trained[0]
    for name, one in trained:
        if one.dtype not in (torch.float32, torch.float64):
            raise ProtocolMisuse(
                f"{name} is {one.dtype}; parameters are kept in float32 (or float64).",
                why="Peers average and step in one precision, and a smaller one loses small steps.",
                advice='Keep the model in float32 and set precision="bf16" or "fp16".',
            )
        if one.dtype is not first.dtype or one.device != first.device:
            raise ProtocolMisuse(
                f"{name} is {one.dtype} on {one.device}, and {first_name} is {first.dtype} on "
                f"{first.device}.",
                why="The gradients are accumulated in one flat buffer.",
                advice="Give the model one floating-point type and one device.",
            )
        if one.layout is not torch.strided:
            raise ProtocolMisuse(f"{name} is a {one.layout} tensor; parameters must be dense.")


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)
