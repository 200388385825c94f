"""The loss of a run's model through torch's compiler (`training.compile`), where that works.

    compiled = CompiledLoss(model.loss)
    loss = compiled(batch)                  # the first call takes tens of seconds
    compiled.give_up(error)                 # from now on the caller uses model.loss itself

The method is compiled, and not the module: `torch.compile(model)` would give all parameters other
names, and with them other checkpoints, states and digests.

A machine may be unable to compile: without a C++ compiler, on an old GPU, with a model that torch's
compiler does not understand. That is no reason to stay out of a run, because compiled and plain
passes differ in rounding only. RunTask.compute makes the pass again without it, and `take_trouble`
says why.

Promises: one compilation serves all batches of two samples and more, because their number is marked
as one that changes. A batch of one sample takes another. (torch itself stops compiling a function
again after some tries, and computes it as it is.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from models.trainable import tensors_in

INDUCTOR = "inductor"
"""torch's own compiler, which makes C++ or Triton of a model."""

LONGEST_REASON = 200  # of an error's text, which may be pages

SEVERAL_DEVICES = "several GPUs compute one batch"
EXPERTS = "a run with experts waits for others in the middle of a pass"


class CompiledLoss:
    """`is_used` is False once this has been given up. `backend`: as torch.compile takes it.
    `trouble`: why it is given up from the beginning."""

    def __init__(
        self,
        loss: Callable[[Any], Tensor],
        *,
        backend: str | Callable[..., Any] = INDUCTOR,
        trouble: str = "",
    ) -> None:
        self._loss, self._backend = loss, backend
        self._compiled: Callable[[Any], Tensor] | None = None
        self._trouble = trouble
        self.is_used = not trouble

    def __call__(self, batch: Any) -> Tensor:
        if self._compiled is None:  # here, because it loads the compiler, and may fail
            self._compiled = torch.compile(self._loss, backend=self._backend)
        for tensor in tensors_in(batch):
            if tensor.dim() > 0:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._compiled(batch)

    def give_up(self, error: Exception) -> None:
        """Use it no more: this was raised by a pass which works without it."""
        self._compiled = None
        self._trouble, self.is_used = _why(error), False

    def take_trouble(self) -> str:
        """A sentence about why the model is not compiled, once; empty if it is."""
        why, self._trouble = self._trouble, ""
        return f"This machine trains without compiling the model, because {why}." if why else ""


def _why(error: Exception) -> str:
    """Half a sentence. The errors are known by name: they are in modules that need not be there."""
    names = {type(one).__name__: one for one in _chain(error)}
    text = f"{error}"
    if "InvalidCxxCompiler" in names or "InvalidCxxCompiler" in text:
        return "it has no C++ compiler (g++ or clang++)"
    if "TritonMissing" in names or "TritonMissing" in text:
        return "torch's compiler needs Triton for this GPU, which is not installed"
    if "GPUTooOldForTriton" in names or "GPUTooOldForTriton" in text:
        return "its GPU is too old for torch's compiler"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}"[:LONGEST_REASON].rstrip(".")
    return f"torch's compiler failed ({said})"


def without_tracebacks(error: Exception) -> Exception:
    """This error, no longer holding what was in use when it was raised."""
    for one in _chain(error):
        one.with_traceback(None)
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
