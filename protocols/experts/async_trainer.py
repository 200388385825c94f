"""Training with many batches in flight, so that latency costs staleness and not throughput.

    trainer = AsyncTrainer(model, loss_of)          # loss_of(model, batch) is the mean loss
    for done in trainer.run(batches):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()                            # with the gradients of this batch
        optimizer.zero_grad()
        print(done.loss)

It is the usual loop of PyTorch, in the thread that calls it, the owner. In each turn of the loop
the gradients of one batch have been added to the model's `.grad`, as by `backward()`, in the order
in which the batches are ready. Meanwhile the other batches are under way in threads, most of which
wait for experts (layer.py). The optimizer is the owner's business, and so is how often it steps:
one step for several turns makes one large batch of theirs, and the gradients fewer steps old.

Promises: a batch computes with the parameters of one moment, that of its beginning, whatever the
owner does to them meanwhile; with `in_flight=1` these are the newest. Batches are drawn from the
iterable by the owner alone, and only when there is room for them. A batch without a result
(`TooFewExperts`) is counted and dropped. Any other error is raised by `run`, also the one of an
ended portal. No thread outlives `run`.

Memory: each batch in flight holds its activations, and the parameters of its moment if no other
batch shares them; on its way back also its gradients. These are of the model's own parameters, and
not of the experts.

Easy to get wrong:

- Each thread has a copy of the model. A module that changes itself in `forward`, such as a batch
  norm, changes that copy and not the model.
- To leave the loop early waits for the batches in flight. The end of the portal does not.
- torch computes in several threads for each thread that calls it: `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from torch import Tensor, nn

from protocols.errors import again
from protocols.experts.layer import TooFewExperts

IN_FLIGHT = 64  # as in the paper

PATIENCE_SECONDS = 300.0  # a backbone restarts, or the owner's own router, in less

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 2.0
"""A thread rests after a dropped batch, twice as long after each further one. If all experts are
away, the batches would otherwise be used up in no time. The end of `run` waits for a rest."""

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class DoneBatch(Generic[Batch]):
    """A batch whose gradients have been added. `staleness` is the number of turns of the loop since
    the moment whose parameters it was computed with."""

    batch: Batch
    loss: float
    staleness: int


class AsyncTrainer(Generic[Batch]):
    """Its methods are for one thread.

    - `loss_of`: called in many threads, each time with a copy of the model that is its own.
    - `in_flight`: how many batches are under way at once.
    - `patience_seconds`: when every batch has been dropped for so long, `run` raises the last
      TooFewExperts.
    - `tell_dropped`: is told of each batch that was dropped, in the owner's thread.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module, Batch], Tensor],
        *,
        in_flight: int = IN_FLIGHT,
        patience_seconds: float = PATIENCE_SECONDS,
        tell_dropped: Callable[[TooFewExperts], None] = lambda _: None,
    ) -> None:
        self.dropped = 0
        """Batches without a result so far."""
        self._model, self._loss_of = model, loss_of
        self._in_flight, self._patience_seconds = in_flight, patience_seconds
        self._tell_dropped = tell_dropped

    def run(self, batches: Iterable[Batch]) -> Generator[DoneBatch[Batch]]:
        """Compute the gradients of all batches. It ends when all are done or dropped."""
        source = iter(batches)
        turn, flying, last_success = 0, 0, time.monotonic()
        parameters = list(self._model.parameters())
        values = _copies(parameters)
        with _Workers[Batch](self._model, self._loss_of) as workers:
            while True:
                while flying < self._in_flight:
                    try:
                        batch = next(source)
                    except StopIteration:
                        break
                    workers.begin(_Task(batch, values, turn))
                    flying += 1
                if not flying:
                    return
                task, result = workers.finished()
                flying -= 1
                match result:
                    case _Gradients(loss, gradients):
                        last_success = time.monotonic()
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            _add(parameter, gradient)
                        yield DoneBatch(task.batch, loss, turn - task.turn)
                        turn += 1
                        values = _copies(parameters)
                    case TooFewExperts():
                        self.dropped += 1
                        self._tell_dropped(result)
                        if time.monotonic() - last_success >= self._patience_seconds:
                            raise again(result)
                    case _:
                        raise result


def _copies(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad += gradient


@dataclass(frozen=True, eq=False)
class _Task(Generic[Batch]):
    """A batch, with the parameters that it is computed with, which nobody changes."""

    batch: Batch
    values: list[Tensor]
    turn: int


@dataclass(frozen=True, eq=False)
class _Gradients:
    loss: float
    gradients: list[Tensor | None]


class _Workers(Generic[Batch]):
    """The threads, as many as there are tasks at once. They end with the block."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Batch], Tensor]) -> None:
        self._model, self._loss_of = model, loss_of
        self._tasks = SimpleQueue[_Task[Batch] | None]()
        self._results = SimpleQueue[tuple[_Task[Batch], _Gradients | Exception]]()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._ending = threading.Event()

    def __enter__(self) -> _Workers[Batch]:
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def begin(self, task: _Task[Batch]) -> None:
        self._tasks.put(task)
        self._busy += 1
        if self._busy > len(self._threads):
            replica = copy.deepcopy(self._model)
            name = f"potluck batch {len(self._threads) + 1}"
            thread = threading.Thread(target=self._work, args=(replica,), name=name)
            self._threads.append(thread)
            thread.start()

    def finished(self) -> tuple[_Task[Batch], _Gradients | Exception]:
        """The next task that is ready, with its result. Waits."""
        ready = self._results.get()
        self._busy -= 1
        return ready

    # -- in each thread

    def _work(self, replica: nn.Module) -> None:
        parameters = list(replica.parameters())
        pause = FIRST_PAUSE_SECONDS
        while (task := self._tasks.get()) is not None:
            if self._ending.is_set():
                continue
            result: _Gradients | Exception
            try:
                result = self._compute(replica, parameters, task)
                pause = FIRST_PAUSE_SECONDS
            except TooFewExperts as error:
                result = error
                self._ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001 - raised in the owner's thread
                result = error
            self._results.put((task, result))

    def _compute(
        self, replica: nn.Module, parameters: list[nn.Parameter], task: _Task[Batch]
    ) -> _Gradients:
        for parameter, value in zip(parameters, task.values, strict=True):
            parameter.data, parameter.grad = value, None
        loss = self._loss_of(replica, task.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return _Gradients(float(loss.detach()), gradients)
