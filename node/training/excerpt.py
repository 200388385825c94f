"""A text that the model writes while it is trained, for whoever looks at the screen.

    excerpt = excerpt_of(task)                 # None if the model writes no bytes
    session.writes = excerpt.after_a_batch()   # the newest text

It grows by a byte between two batches. The parameters change meanwhile, so a text is not by one
state of the model. A byte costs a pass forward over one sample, which a large model makes slowly:
then it is written after every so many batches.

Promises: it takes at most `SHARE` of the time, however large the model is, and no random number of
the training. If no byte can be written, nothing is, and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from models.data.settings import DataSettings
from models.gpt import GPT
from models.initial import seeded

if TYPE_CHECKING:
    from node.run.building import RunTask

SHARE: Final = 0.01  # of the time
LENGTH: Final = 200  # bytes: a few lines on a screen
PROMPT: Final = b"\n"
BYTES: Final = 256  # the vocabulary of a model whose ids are bytes
TEMPERATURE: Final = 0.8  # a little randomness: the likeliest of all is a space


def excerpt_of(task: RunTask) -> Excerpt | None:
    """None if the ids of the model are no bytes, or if it computes with the experts of others."""
    model = task.model
    if type(model) is not GPT or model.settings.vocabulary != BYTES:
        return None
    if isinstance(task.data, DataSettings) and task.data.tokenizer is not None:
        return None
    return Excerpt(model)


class Excerpt:
    """For the training thread. Invariant: `_spent` seconds were taken since `_began`."""

    def __init__(self, model: GPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._clock = model, clock
        self._random = seeded(0)
        self._began, self._spent = clock(), 0.0
        self._written = bytearray()
        self._last = b""

    def after_a_batch(self) -> str:
        """Write a byte, if it is time for one. Gives the last whole text; the first one as far as
        it goes."""
        began = self._clock()
        if self._spent <= SHARE * (began - self._began):
            if len(self._written) >= LENGTH:
                self._last = bytes(self._written)
                self._written.clear()
            self._write()
            self._spent += self._clock() - began
        return (self._last or bytes(self._written)).decode("utf-8", "replace")

    def _write(self) -> None:
        text = PROMPT + self._written
        try:
            self._written += bytes(
                self._model.generate(text, 1, generator=self._random, temperature=TEMPERATURE)
            )
        except (MemoryError, RuntimeError):  # no room, or no finite probability: begin anew
            self._written.clear()
