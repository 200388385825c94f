"""The runtime: one thread that owns the device and works for all experts of this server.

    backend = ExpertBackend(uid, network, Rows((1024,)), optimizer)
    async with open_runtime([backend]) as runtime:
        with runtime.room(peer, size_bytes):                     # Busy, if there is none
            outputs = await runtime.work(Work(backend, inputs))

Requests of one expert and one kind that wait at the same time are computed as one batch, up to the
expert's `largest_batch` rows and `LARGEST_BATCH_BYTES`. The oldest request goes first, with those
that came after it, up to the first that does not fit. The thread never waits while a request does,
so nothing is deferred to fill a batch. Rows are put together as they are, without padding.

Promises:

- Only this thread uses the experts that are served, and their optimizers. (One that is made, or
  tried with a copy, is in a worker thread until it is added.) A forward pass changes nothing. A
  backward pass computes the forward pass again, gives back the gradients of the inputs, and makes
  one step of the expert's optimizer, with the gradient of the whole batch. That is the step that
  one computer would make with these rows. If that gradient is not finite, each request is computed
  alone and makes a step of its own, or none.
- Networks are in eval mode always: a dropout would make another function of the second pass, and
  the running statistics of a batch norm are not changed.
- A request whose caller gave up does not cost the device anything, if it has not begun.
- Requests that wait or are computed are limited in number and in bytes, as they came; one peer may
  hold half. A runtime that is paused takes none.
- An error of a request, or of an expert, ends these requests alone.
- `run` calls a function in this thread, before the next batch: the only way to read an expert that
  is served. Its statistics alone may be read anywhere.
- The end of the block waits for the batch under way (a pass cannot be interrupted), and for what
  `run` was given before. All others that wait get UnknownExpert.

In a simulation there is no thread: batches are computed in the event loop, and take no time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

import outcome
import torch
import trio
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protocols.blocking import in_thread, is_done_at_once
from protocols.errors import Busy, HandlerFailed, PotluckError, ProtocolMisuse, again
from protocols.experts.grid import Uid, parse_uid
from protocols.experts.messages import (
    LARGEST_TENSOR_BYTES,
    EncodedTensor,
    Rows,
    UnknownExpert,
    decode_tensor,
    encode_tensor,
)
from protocols.identity import PeerId
from protocols.tensors import NotFinite

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

log = logging.getLogger("potluck.experts")

LARGEST_BATCH = 4096  # rows: twice the paper's batch
LARGEST_BATCH_BYTES: Final = LARGEST_TENSOR_BYTES
"""The decoded inputs of one batch. A codec may send a hundredth of what it decodes to, so the bytes
of the requests that wait do not bound the memory that their batch takes."""
MOST_REQUESTS = 1024
MOST_BYTES = 384 << 20  # two largest backward passes of one peer: 2 × 3 × 32 MiB in its half
SHARE_OF_A_PEER = 0.5
NEW_TIMES_COUNT = 0.2  # of a batch's time, in the average that `load` uses


@dataclass
class ExpertStatistics:
    """What an expert has done on this server. `seconds` are those of the device. `steps` counts
    those before a copy was taken over, too."""

    forward_rows: int = 0
    backward_rows: int = 0
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0


class ExpertBackend:
    """One expert: its network, and how it learns. After it was given to a runtime, only the
    runtime's thread may use it.

    Without an optimizer it does not learn. `max_norm` limits the norm of the gradient of a step;
    `schedule` is stepped after each step of the optimizer.
    """

    def __init__(
        self,
        uid: Uid,
        network: nn.Module,
        rows: Rows,
        optimizer: Optimizer | None = None,
        *,
        schedule: LRScheduler | None = None,
        max_norm: float = math.inf,
        largest_batch: int = LARGEST_BATCH,
    ) -> None:
        self.uid = uid
        self.network = network.eval()
        self.rows = rows
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_norm = max_norm
        self.largest_batch = largest_batch
        self.statistics = ExpertStatistics()
        self.seconds_per_row = {False: 0.0, True: 0.0}
        """Of a forward and of a backward pass, lately; 0.0 before the first."""
        self._parameters = [one for one in network.parameters() if one.requires_grad]
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs, on the CPU. (rows, *shape), and the same back"""
        outputs = self._outputs(inputs.to(self._device))
        self.statistics.forward_rows += len(inputs)
        return outputs.to("cpu")

    def backward(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """The gradients of the inputs, on the CPU; makes a step.

        NotFinite, and no step, if the gradient of the parameters is not finite.
        """
        inputs = inputs.to(self._device).detach().requires_grad_()
        try:
            outputs = self._outputs(inputs)
            # outputs.backward(gradients) is the same, and would load torch's compiler: 0.4 s, 35 MB
            given = gradients.to(self._device).reshape(outputs.shape)
            (outputs * given).sum().backward()  # type: ignore[no-untyped-call]
            self._step()
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        self.statistics.backward_rows += len(inputs)
        gradient = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
        return gradient.to("cpu")

    def _outputs(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        if outputs.shape != inputs.shape or outputs.dtype != inputs.dtype:
            raise ProtocolMisuse(
                f"The network of {self.uid} makes {tuple(outputs.shape)} {outputs.dtype} of "
                f"{tuple(inputs.shape)} {inputs.dtype}; an expert gives back rows as it got them."
            )
        return outputs

    def _step(self) -> None:
        if self.optimizer is None:
            return
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        norm = get_total_norm(gradients)
        if not math.isfinite(norm):
            raise NotFinite(
                f"The gradient of {self.uid} is not finite; it has made no step.",
                why="The gradients that were sent are too large, or the expert has diverged.",
            )
        if norm > self.max_norm:
            clip_grads_with_norm_(self._parameters, self.max_norm, norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.statistics.steps += 1


class BatchLine(NamedTuple):
    """What can be computed in one batch: an expert, and forward or backward."""

    backend: ExpertBackend
    is_backward: bool

    @property
    def seconds_per_row(self) -> float:
        return self.backend.seconds_per_row[self.is_backward]

    def note_time(self, seconds: float, rows: int) -> None:
        """A batch of so many rows took so long."""
        self.backend.statistics.batches += 1
        self.backend.statistics.seconds += seconds
        times, new = self.backend.seconds_per_row, seconds / rows
        old = times[self.is_backward] or new
        times[self.is_backward] = old + NEW_TIMES_COUNT * (new - old)


Outcome = outcome.Value[EncodedTensor] | outcome.Error


class Work:
    """One request: a forward pass, or with `gradients` a backward pass.

    The headers must have been checked against the backend's rows.
    """

    def __init__(
        self,
        backend: ExpertBackend,
        inputs: EncodedTensor,
        gradients: EncodedTensor | None = None,
    ) -> None:
        self.line = BatchLine(backend, gradients is not None)
        self.inputs = inputs
        self.gradients = gradients
        self.rows: int = inputs.header.shape[0]
        self.decoded_bytes = inputs.header.decoded_bytes  # the gradients have as many
        self.done = trio.Event()
        self.outcome: Outcome | None = None

    @property
    def answer(self) -> EncodedTensor:
        """Once it is done. Raises the error, if there was one."""
        assert self.outcome is not None
        return self.outcome.unwrap()

    def end(self, result: Outcome) -> None:
        """For trio's thread."""
        self.outcome = result
        self.done.set()


class WorkQueue:
    """Work that waits, in the order in which it came. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._all: OrderedDict[Work, None] = OrderedDict()
        self._lines: dict[BatchLine, OrderedDict[Work, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._all)

    def add(self, work: Work) -> None:
        self._all[work] = None
        self._lines.setdefault(work.line, OrderedDict())[work] = None

    def remove(self, work: Work) -> None:
        """Nothing happens if it does not wait."""
        if work in self._all:
            del self._all[work]
            line = self._lines[work.line]
            del line[work]
            if not line:
                del self._lines[work.line]

    def take_batch(self) -> list[Work]:
        """The oldest work, with those that come after it in its line, up to the first that does
        not fit into the batch. Empty if nothing waits."""
        oldest = next(iter(self._all), None)
        if oldest is None:
            return []
        batch: list[Work] = []
        room, room_bytes = oldest.line.backend.largest_batch, LARGEST_BATCH_BYTES
        for work in self._lines[oldest.line]:
            if batch and (work.rows > room or work.decoded_bytes > room_bytes):
                break
            batch.append(work)
            room -= work.rows
            room_bytes -= work.decoded_bytes
        for work in batch:
            self.remove(work)
        return batch


Pair = tuple[Tensor, Tensor | None]  # inputs and gradients of one work


def compute(batch: Sequence[Work]) -> list[Outcome]:
    """Compute a batch of one line: the outcome of each work. Never raises."""
    line = batch[0].line
    outcomes: dict[Work, Outcome] = {}
    pairs: dict[Work, Pair] = {}
    for work in batch:
        decoded = _attempt(line, _decoded, work)
        if isinstance(decoded, outcome.Error):
            outcomes[work] = decoded
        else:
            pairs[work] = decoded.value
    answers = _pass(line, list(pairs.values()))
    for work, answer in zip(pairs, answers, strict=True):
        if isinstance(answer, outcome.Error):
            outcomes[work] = answer
        else:
            codec, name = work.inputs.header.codec, f"The answer of {line.backend.uid}"
            outcomes[work] = _attempt(line, encode_tensor, answer.value, codec, name)
    return [outcomes[work] for work in batch]


def _decoded(work: Work) -> Pair:
    uid = work.line.backend.uid
    inputs = decode_tensor(work.inputs, f"The inputs for {uid}")
    if work.gradients is None:
        return inputs, None
    return inputs, decode_tensor(work.gradients, f"The gradients for {uid}")


def _pass(line: BatchLine, pairs: Sequence[Pair]) -> list[outcome.Value[Tensor] | outcome.Error]:
    """One pass over all these rows. If a step is refused because its gradient is not finite, the
    requests are computed one by one, so that only the one with that gradient fails."""
    if not pairs:
        return []
    whole = _attempt(line, _whole, line, pairs)
    if isinstance(whole, outcome.Value):
        parts = torch.split(whole.value, [len(inputs) for inputs, _ in pairs])
        return [outcome.Value(part) for part in parts]
    if isinstance(whole.error, NotFinite) and len(pairs) > 1:
        return [answer for pair in pairs for answer in _pass(line, [pair])]
    assert isinstance(whole.error, PotluckError)
    return [outcome.Error(again(whole.error)) for _ in pairs]


def _whole(line: BatchLine, pairs: Sequence[Pair]) -> Tensor:
    inputs = _joined([inputs for inputs, _ in pairs])
    if not line.is_backward:
        return line.backend.forward(inputs)
    return line.backend.backward(inputs, _joined([g for _, g in pairs if g is not None]))


def _attempt(
    line: BatchLine, function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
) -> outcome.Value[Result] | outcome.Error:
    """What the function returns, or an error of ours; any other one is logged."""
    try:
        return outcome.Value(function(*arguments))
    except PotluckError as error:
        return outcome.Error(error)
    except Exception:
        log.exception("the expert %s failed", line.backend.uid)
        return outcome.Error(
            HandlerFailed(
                f"The expert {line.backend.uid} failed on this request.",
                why="It is a bug on that node, or its memory is full; its log has the details.",
            )
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@asynccontextmanager
async def open_runtime(backends: Iterable[ExpertBackend] = ()) -> AsyncIterator[Runtime]:
    """A runtime for the length of the block."""
    runtime = Runtime(trio.lowlevel.current_trio_token(), has_thread=not is_done_at_once())
    try:
        for backend in backends:
            runtime.add(backend)
        yield runtime
    finally:
        with trio.CancelScope(shield=True):
            await runtime.end()


class Runtime:
    """Made by `open_runtime`. All methods are for trio's thread."""

    def __init__(self, token: trio.lowlevel.TrioToken, *, has_thread: bool) -> None:
        self._token = token
        self._backends: dict[str, ExpertBackend] = {}
        self._requests: Counter[PeerId] = Counter()
        self._bytes: Counter[PeerId] = Counter()
        self._changed = threading.Condition()  # guards the four below
        self._queue = WorkQueue()
        self._under_way: list[Work] = []
        self._errands: deque[Callable[[], None]] = deque()
        self._ended = False
        self.paused = False
        """Whether all requests are answered with Busy."""
        self._thread: threading.Thread | None = None
        if has_thread:
            self._thread = threading.Thread(target=self._serve, name="experts")
            self._thread.start()

    # -- the experts

    def add(self, backend: ExpertBackend) -> None:
        """Serve this expert from now on."""
        name = str(backend.uid)
        if name in self._backends:
            raise ProtocolMisuse(f"This runtime has an expert {name} already.")
        self._backends[name] = backend

    def remove(self, uid: Uid) -> None:
        """Serve this expert no more. What waits for it gets UnknownExpert; a batch under way is
        answered."""
        backend = self._backends.pop(str(uid))
        with self._changed:
            removed = [work for work in self._queue if work.line.backend is backend]
            for work in removed:
                self._queue.remove(work)
        for work in removed:
            work.end(outcome.Error(_unknown(str(uid))))

    def find(self, name: str) -> ExpertBackend:
        """The expert with this uid. UnknownExpert if there is none, WrongUid if it is no uid."""
        backend = self._backends.get(name)
        if backend is None:
            raise _unknown(str(parse_uid(name)))
        return backend

    def get(self, name: str) -> ExpertBackend | None:
        return self._backends.get(name)

    def backends(self) -> tuple[ExpertBackend, ...]:
        return tuple(self._backends.values())

    # -- work

    @contextmanager
    def room(self, peer: PeerId, size_bytes: int) -> Iterator[None]:
        """Room for a request of this peer, with so many bytes in it and in its answer, until the
        block ends. Busy if there is none."""
        if self.paused:
            raise Busy("This server of experts is paused.", advice="Ask another one, or later.")
        requests, held = self._requests.total(), self._bytes.total()
        if (
            requests >= MOST_REQUESTS
            or held + size_bytes > MOST_BYTES
            or self._requests[peer] >= MOST_REQUESTS * SHARE_OF_A_PEER
            or self._bytes[peer] + size_bytes > MOST_BYTES * SHARE_OF_A_PEER
        ):
            raise Busy(
                "This server of experts has as much work as it takes.",
                why=f"{requests:,} requests with {held >> 20:,} MiB wait, some "
                f"{self.load():.1f} seconds of work.",
                advice="Ask another server, or later.",
            )
        self._requests[peer] += 1
        self._bytes[peer] += size_bytes
        try:
            yield
        finally:
            self._requests[peer] -= 1
            self._bytes[peer] -= size_bytes
            if not self._requests[peer]:
                del self._requests[peer], self._bytes[peer]

    async def work(self, work: Work) -> EncodedTensor:
        """Compute this and return the answer. Cancellation takes it out of the queue."""
        with self.begun(work):
            await work.done.wait()
        return work.answer

    @contextmanager
    def begun(self, work: Work) -> Iterator[None]:
        """Have this computed, unless the block ends before it begins. Then `work.done` is set."""
        backend = work.line.backend
        if self._backends.get(str(backend.uid)) is not backend:  # it was removed meanwhile
            raise _unknown(str(backend.uid))
        with self._changed:
            self._queue.add(work)
            self._changed.notify()
        if self._thread is None:
            self._token.run_sync_soon(self._serve_next)
        try:
            yield
        finally:
            if not work.done.is_set():
                with self._changed:
                    self._queue.remove(work)

    async def run(
        self, function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
    ) -> Result:
        """Call this where the batches are computed, before the next one. It runs to its end also
        if the caller is cancelled. ProtocolMisuse after the end of the runtime."""
        done = trio.Event()
        results: list[outcome.Outcome[Result]] = []

        def errand() -> None:
            results.append(outcome.capture(function, *arguments))
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(done.set)

        with self._changed:
            if self._ended:
                raise ProtocolMisuse("This runtime has ended.")
            self._errands.append(errand)
            self._changed.notify()
        if self._thread is None:
            self._token.run_sync_soon(self._run_errands)
        await done.wait()
        return results[0].unwrap()

    def load(self) -> float:
        """About how many seconds of work wait here, by the times of the last batches."""
        with self._changed:
            waiting = [*self._queue, *self._under_way]
        return math.fsum(work.rows * work.line.seconds_per_row for work in waiting)

    # -- the end

    async def end(self) -> None:
        """Take no more work, and wait for the batch under way."""
        self._backends.clear()
        with self._changed:
            self._ended = True
            waiting = list(self._queue)
            self._queue = WorkQueue()
            self._changed.notify()
        for work in waiting:
            work.end(outcome.Error(_unknown(str(work.line.backend.uid))))
        if self._thread is not None:
            await in_thread(self._thread.join)

    # -- the runtime's thread

    def _serve(self) -> None:
        while True:
            self._run_errands()
            with self._changed:
                while not self._ended and not len(self._queue) and not self._errands:
                    self._changed.wait()
                if self._errands:
                    continue
                if self._ended:
                    return
                batch = self._under_way = self._queue.take_batch()
            self._serve_batch(batch, time.perf_counter)

    def _serve_batch(self, batch: Sequence[Work], clock: Callable[[], float]) -> None:
        began = clock()
        outcomes = compute(batch)
        seconds = clock() - began
        batch[0].line.note_time(seconds, sum(work.rows for work in batch))
        with self._changed:
            self._under_way = []
        with suppress(trio.RunFinishedError):  # then nobody waits any more
            self._token.run_sync_soon(self._give, batch, outcomes)

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _serve_next(self) -> None:
        """In a simulation: in trio's thread."""
        batch = self._queue.take_batch()
        if batch:
            self._serve_batch(batch, trio.current_time)

    # -- trio's thread again

    def _give(self, batch: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
        for work, result in zip(batch, outcomes, strict=True):
            work.end(result)


def _unknown(name: str) -> UnknownExpert:
    return UnknownExpert(
        f"This server does not have the expert {name}.",
        why="It was never here, has moved to another server, or this server is leaving.",
        advice="Look it up in the directory again.",
    )
