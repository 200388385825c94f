"""The batches of a run: text in windows, pictures, built-in figures, or a trusted module's own.

    with open_batches(...) as batches:
        for batch in batches:        # on the device
            ...
        batches.position()           # where to continue from

Text and pictures are read by models/data in the mode for a stranger's data: nothing is read from
this machine's disk or fetched from its local network. A thread reads batches ahead; it has ended
when the block has.

The random numbers that make examples (masks, crops) depend on the peer and on its starting
position, so a restarted peer does not draw the same ones again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from models.data.batches import ImageBatches, WindowBatches
from models.data.clock import CLOSED, ReadingStopped
from models.data.events import OnEvent
from models.data.opening import open_data
from models.data.order import derived_seed
from models.data.position import Position
from models.data.reading_ahead import Batches as Readable
from models.data.reading_ahead import reading_ahead
from models.data.settings import DataSettings
from models.initial import SEEDS, seeded
from models.synthetic_images import synthetic_images
from models.trainable import Trainable, on_device, tensors_in
from node.run.trusted import NOT_OURS, BrokenModule, blamed_on

AHEAD = 4  # batches: these cover a server's pause of a second, and take a few megabytes at most
FIGURES = 1 << 40  # image numbers reserved for each peer, before the next peer's begin


class TrainingBatches(ABC):
    """An iterator over batches on the task's device, until its block is left."""

    _stopped = False

    def __iter__(self) -> Iterator[Any]:
        return self

    @abstractmethod
    def __next__(self) -> Any: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def position(self) -> Position | None:
        """The position after the batches given so far; None for a module's data, which has none."""

    def stop(self) -> None:
        """From any thread: anybody who waits for a batch, or asks for one, gets ReadingStopped."""
        self._stopped = True

    def close(self) -> None:
        """Release all resources; no batch comes after this."""
        self.stop()


BatchOf = Callable[[Any, torch.Generator], Any]
"""As the model's: a batch from windows of text, or from pictures."""


def _chance(seed: int, peer: str, position: Position | None) -> torch.Generator:
    begun = position.drawn if position is not None else 0
    return seeded(derived_seed(seed, peer, "batches", begun) % SEEDS)


class ReadBatches(TrainingBatches):
    """Text or pictures, read ahead by a thread."""

    def __init__(
        self,
        settings: DataSettings,
        device: torch.device,
        *,
        model: Trainable,
        batch_of: BatchOf,
        samples: int,
        seed: int,
        peer: str,
        position: Position | None,
        on_event: OnEvent,
    ) -> None:
        self._batch_of, self._device = batch_of, device
        self._chance = _chance(seed, peer, position)
        with ExitStack() as opening:
            self._data = opening.enter_context(
                open_data(
                    settings,
                    seed=seed,
                    peer=peer,
                    position=position,
                    window=model.window,
                    on_event=on_event,
                    from_strangers=True,
                )
            )
            batches: Readable[Any]
            if model.window:
                batches = WindowBatches(
                    self._data, rows=samples, window=model.window, vocabulary=model.vocabulary
                )
            else:
                shape = (3, model.side, model.side)
                batches = ImageBatches(self._data, rows=samples, shape=shape, classes=model.classes)
            self._ahead = opening.enter_context(reading_ahead(batches, AHEAD))
            self._open = opening.pop_all()

    def __next__(self) -> Any:
        batch: Any = next(self._ahead, None)
        if batch is None:  # the data has ended, or was closed while nobody waited
            if self._stopped:
                raise ReadingStopped(CLOSED)
            raise StopIteration
        return on_device(self._batch_of(batch, self._chance), self._device)

    def close(self) -> None:
        self._open.close()

    def position(self) -> Position:
        return self._ahead.position()

    def stop(self) -> None:
        super().stop()
        self._ahead.stop()


class FigureBatches(TrainingBatches):
    """The built-in images, which need no data: each peer draws numbers of its own."""

    def __init__(
        self,
        device: torch.device,
        *,
        batch_of: BatchOf,
        samples: int,
        seed: int,
        peer: str,
        position: Position | None,
    ) -> None:
        self._device, self._samples, self._seed = device, samples, seed
        self._batch_of, self._chance = batch_of, _chance(seed, peer, position)
        self._first = FIGURES * (derived_seed(seed, peer) % SEEDS)
        self._drawn = position.drawn if position is not None else 0

    def __next__(self) -> Any:
        if self._stopped:
            raise ReadingStopped(CLOSED)
        begin = self._first + self._drawn
        images = synthetic_images(self._seed, range(begin, begin + self._samples))
        self._drawn += self._samples
        return on_device(self._batch_of(images, self._chance), self._device)

    def position(self) -> Position:
        return Position([], self._drawn)


class ModuleBatches(TrainingBatches):
    """Batches from a trusted module. They have no position and start from the beginning."""

    def __init__(self, opened: Callable[[], Any], file: str, device: torch.device) -> None:
        self._file, self._device = file, device
        with blamed_on(file, "open_batches"):
            self._given = iter(opened())

    def __next__(self) -> Any:
        if self._stopped:
            raise ReadingStopped(CLOSED)
        with blamed_on(self._file, "the next batch of open_batches"):
            batch = next(self._given, None)
        if batch is None:
            raise BrokenModule(
                f"{self._file}: the batches of open_batches have ended.",
                why="A run's data has no end: the run ends after the steps of all peers together.",
                advice=f"open_batches has to start again by itself. {NOT_OURS}",
            )
        first = next(tensors_in(batch), None)
        if first is None or not first.dim() or not len(first):
            raise BrokenModule(
                f"{self._file}: a batch of open_batches has no samples in it.",
                why=f"It is a {type(batch).__name__}. A batch is a tensor, or a tuple, list or "
                "dict of tensors, with the samples along their first dimension.",
                advice=NOT_OURS,
            )
        return on_device(batch, self._device)

    def close(self) -> None:
        super().close()
        close = getattr(self._given, "close", None)
        if close is not None:
            with blamed_on(self._file, "closing the batches of open_batches"):
                close()

    def position(self) -> None:
        return None
