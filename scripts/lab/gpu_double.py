"""A device of torch that copies and waits as a GPU does, for machines without one.

    gpu_double.register()                        # once in a process
    model.to("gpudouble")                        # and everything else as with "cuda"
    torch.get_device_module("gpudouble").synchronize()

What is launched is queued in a stream and done by a thread of its own, one operation after the
other, while the caller goes on. An operation takes as long as the constants below say: by the bytes
that it reads and writes, or by those that it copies. `passing` gives the length of a pass of a
model, whose kernels are not imitated. Who waits, for an event, a stream or a value, waits until the
operation would have ended on such a GPU.

Promises: the values are real, and computed by torch. A result that is copied to the host is there
when its time has come, and not before, so that a wait that is missing is seen. Kernels of two
streams share the device: together they take as long as one after the other. Copies between host
and device go beside kernels. The device's memory is counted as torch.cuda counts it.

A processor is a thousand times slower than a GPU, and would be late with a large model. So the
memory is packed: where each `REPEATS` neighbours of a tensor are equal, one of them is kept, and
what is computed value by value is computed once for all. Anything else unpacks the tensor. This
loses nothing, but only a model that was made for it (size_task.py) is packed. A copy from the host
must see that it can be packed; above `CHECKED_WHOLE` values it looks at three of each `REPEATS`.

`lateness` is how long the double has stood idle because its host had to wait for it longer than for
a GPU, or to compute longer for a launch: what was measured took that much too long, and it is the
double's fault.

Easy to get wrong: the double takes the processor's time and the interpreter's lock for what it
does. It is small, as long as memory is packed, but not nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import count
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from protocols.tensors import GPUS

NAME: Final = "gpudouble"

# ---- what it imitates: about an H100 in a machine whose bus is PCIe of the fourth generation

MEMORY_BYTES_PER_SECOND: Final = 2e12
PINNED_BYTES_PER_SECOND: Final = 25e9
PAGEABLE_BYTES_PER_SECOND: Final = 6e9
LAUNCH_SECONDS: Final = 1e-5  # of the host, for each operation
LAUNCH_TENSOR_SECONDS: Final = 5e-7  # and for each of its tensors

REPEATS: Final = 256
CHECKED_WHOLE: Final = 1 << 22


def told() -> dict[str, float]:
    """The constants, for the result of a measurement."""
    return {
        "memory_bytes_per_s": MEMORY_BYTES_PER_SECOND,
        "pinned_bytes_per_s": PINNED_BYTES_PER_SECOND,
        "pageable_bytes_per_s": PAGEABLE_BYTES_PER_SECOND,
        "launch_s": LAUNCH_SECONDS,
        "launch_tensor_s": LAUNCH_TENSOR_SECONDS,
        "one_value_kept_of": REPEATS,
    }


# ---- its memory


class _Counted:
    """Bytes that a storage has, as long as it is. As with CUDA, they are free when the host needs
    them no more, though the queue may have work with them."""

    held, most = 0, 0
    _counting = threading.RLock()  # __del__ may be called within

    def __init__(self, size: int) -> None:
        self._bytes = size
        with _Counted._counting:
            _Counted.held += size
            _Counted.most = max(_Counted.most, _Counted.held)

    def __del__(self) -> None:
        with _Counted._counting:
            _Counted.held -= self._bytes


class _Memory:
    """What a storage holds. Its tensors are views of it, and know no more than where they begin.

    Invariant: the values are all, in order, if `is_packed` is false. Otherwise they are one of each
    `REPEATS`, and then those behind the last whole block."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.blocks, self._dtype = count, count // REPEATS, dtype
        self.is_packed = self.blocks > 0
        self._values: Tensor | None = None  # until they are asked for, as the most are never

    @property
    def values(self) -> Tensor:
        if self._values is None:
            self._values = torch.empty(self._packed(self.count), dtype=self._dtype)
        return self._values

    def become(self, values: Tensor) -> None:
        """These are the values from now on, packed or not."""
        self._values, self.is_packed = values, len(values) != self.count

    def unpack(self) -> Tensor:
        """All values, in memory that stays theirs."""
        if self.is_packed:
            blocks, rest = self.values[: self.blocks], self.values[self.blocks :]
            self.become(torch.cat([blocks.repeat_interleave(REPEATS), rest]))
        return self.values

    def packed(self, place: int, count: int) -> tuple[int, int, int] | None:
        """So many values from here on, among the packed ones: where their blocks begin, where the
        rest behind these does, and where it ends. None if they begin or end within a block."""
        whole, end = self.blocks * REPEATS, place + count
        if not self.is_packed or any(one < whole and one % REPEATS for one in (place, end)):
            return None
        return self._packed(place), self._packed(min(max(place, whole), end)), self._packed(end)

    def _packed(self, place: int) -> int:
        return place - min(place // REPEATS, self.blocks) * (REPEATS - 1)


class _View:
    """A tensor of the device as its queue knows it: where it is, without its torch object."""

    __slots__ = ("is_contiguous", "memory", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.memory: _Memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset, self.is_contiguous = int(tensor.storage_offset()), tensor.is_contiguous()

    @property
    def count(self) -> int:
        return self.shape.numel()

    def parts(self) -> tuple[Tensor, Tensor] | None:
        """One value of each block, and the values behind them, if it can be had so."""
        found = self.memory.packed(self.offset, self.count) if self.is_contiguous else None
        if found is None:
            return None
        start, middle, end = found
        return self.memory.values[start:middle], self.memory.values[middle:end]

    def flat(self) -> Tensor | None:
        """The same in one: what is computed value by value. A single value is as it is."""
        memory = self.memory
        if memory.blocks == 0 and self.is_contiguous:
            return self.whole().view(-1) if self.shape else self.whole()
        found = memory.packed(self.offset, self.count) if self.is_contiguous else None
        return None if found is None else memory.values[found[0] : found[2]]

    def whole(self) -> Tensor:
        return self.memory.unpack().as_strided(self.shape, self.stride, self.offset)


def _is_here(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _empty(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    tensor = torch._C._acc.create_empty_tensor(tuple(shape), dtype or torch.get_default_dtype())
    storage: Any = tensor.untyped_storage()
    storage.memory, storage.counted = _Memory(tensor.numel(), tensor.dtype), _Counted(tensor.nbytes)
    return tensor


def _empty_strided(
    shape: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    tensor = _empty(shape, dtype=dtype)
    return tensor if tuple(stride) == tensor.stride() else tensor.as_strided(shape, stride)


def forget_most() -> None:
    """As torch.cuda.reset_peak_memory_stats: the most memory is counted anew."""
    _Counted.most = _Counted.held


# ---- its clock and its queues


class _Mark:
    """A place in a queue. `at`: when a GPU would come to it, on the clock of the host."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.failure: Exception | None = None
        self.reached = threading.Event()

    def wait(self) -> None:
        began = time.monotonic()
        self.reached.wait()
        _late.seconds += max(0.0, time.monotonic() - max(began, self.at))
        if self.failure is not None:
            raise self.failure


class _Lateness(threading.local):
    """How much longer this thread has waited than for a GPU, and computed to launch something,
    since it last launched something in the first stream."""

    seconds = 0.0

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


_late = _Lateness()


def lateness() -> float:
    """Seconds in which a GPU would have computed in its first stream, and the double stood idle
    because its host had waited for it, or launched things, for too long. As long as there is
    something to do in the queue, nothing is lost."""
    return DoubleStream._all[0].lost_seconds if DoubleStream._all else 0.0


@dataclass(frozen=True, eq=False)
class _Operation:
    launched_at: float
    late: float
    seconds: float
    is_kernel: bool
    run: Callable[[], None]


class DoubleStream:
    """As torch.cuda.Stream: a queue, and the thread that does what is in it."""

    _all: Final[list[DoubleStream]] = []
    _sharing = threading.Lock()

    def __init__(self, *_: Any, **__: Any) -> None:
        self._queue: SimpleQueue[_Operation | _Mark] = SimpleQueue()
        self._free_at = self._computes_until = 0.0
        self.lost_seconds = 0.0
        self._failure: Exception | None = None
        with DoubleStream._sharing:
            DoubleStream._all.append(self)
        threading.Thread(target=self._serve, name="gpu double", daemon=True).start()

    def launch(self, run: Callable[[], None], seconds: float, *, is_kernel: bool = True) -> None:
        late = _late.taken() if self is DoubleStream._all[0] else 0.0
        self._queue.put(_Operation(time.monotonic(), late, seconds, is_kernel, run))

    def mark(self) -> _Mark:
        mark = _Mark()
        self._queue.put(mark)
        return mark

    def synchronize(self) -> None:
        self.mark().wait()

    def wait_event(self, event: DoubleEvent) -> None:
        mark = event.mark
        if mark is not None:
            self.launch(partial(self._wait_for, mark), 0.0)

    def wait_stream(self, stream: DoubleStream) -> None:
        self.launch(partial(self._wait_for, stream.mark()), 0.0)

    def record_event(self, event: DoubleEvent | None = None) -> DoubleEvent:
        event = DoubleEvent() if event is None else event
        event.record(self)
        return event

    def _wait_for(self, mark: _Mark) -> None:
        mark.reached.wait()
        self._free_at = max(self._free_at, mark.at)

    def _serve(self) -> None:
        while True:
            one = self._queue.get()
            while (wait := self._free_at - time.monotonic()) > 0.0:
                time.sleep(wait)  # another stream may have moved it meanwhile
            if isinstance(one, _Mark):
                one.at = max(one.at, self._free_at)
                one.failure, self._failure = self._failure, None
                one.reached.set()
                continue
            self._begin(one)
            try:
                one.run()
            except Exception as error:  # noqa: BLE001 - raised where somebody waits, as a GPU's are
                self._failure = self._failure or error

    def _begin(self, one: _Operation) -> None:
        """Count its time, and that which it takes from the kernels of other streams."""
        with DoubleStream._sharing:
            began = max(self._free_at, one.launched_at)
            self.lost_seconds += min(one.late, began - self._free_at)
            self._free_at = began + one.seconds
            if not one.is_kernel:
                return
            for other in DoubleStream._all:
                shared = min(one.seconds, other._computes_until - began)
                if other is not self and shared > 0.0:
                    other._free_at += shared
                    other._computes_until += shared
                    self._free_at += shared
            self._computes_until = self._free_at


class DoubleEvent:
    """As torch.cuda.Event."""

    def __init__(self, **_: Any) -> None:
        self.mark: _Mark | None = None

    def record(self, stream: DoubleStream | None = None) -> None:
        self.mark = (current_stream() if stream is None else stream).mark()

    def wait(self, stream: DoubleStream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached.is_set()

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.wait()

    def elapsed_time(self, end: DoubleEvent) -> float:
        """Milliseconds between two events that have happened."""
        assert self.mark is not None
        assert end.mark is not None
        return 1000 * (end.mark.at - self.mark.at)


class _OfThread(threading.local):
    stream: DoubleStream | None = None
    seconds: float | None = None


_of_thread = _OfThread()


def current_stream(*_: Any) -> DoubleStream:
    return _of_thread.stream or _default_stream()


def _default_stream() -> DoubleStream:
    return DoubleStream._all[0] if DoubleStream._all else DoubleStream()


@contextmanager
def stream(used: DoubleStream) -> Iterator[None]:
    before, _of_thread.stream = _of_thread.stream, used
    try:
        yield
    finally:
        _of_thread.stream = before


@contextmanager
def passing(seconds: float) -> Iterator[None]:
    """All that this thread launches within takes so long together."""
    before, _of_thread.seconds = _of_thread.seconds, seconds
    try:
        yield
    finally:
        left, _of_thread.seconds = _of_thread.seconds, before
        if left:
            current_stream().launch(lambda: None, left)


def _seconds_of(seconds: float) -> float:
    """How long this operation takes; within `passing` the first takes all of it."""
    given = _of_thread.seconds
    if given is None:
        return seconds
    _of_thread.seconds = 0.0
    return given


# ---- its operations


class _Kind:
    """What is to be known of one operation of torch."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name = schema.name.removeprefix("aten::")
        self._names = [one.name for one in schema.arguments]
        self._written = [
            one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write
        ]
        self._returns = len(schema.returns)
        self.is_by_value = (
            self.name.startswith(("_foreach_", "_fused_"))
            or self.name in ("zero_", "fill_")
            or torch.Tag.pointwise in op.tags
        )
        """Whether each value that comes out depends on one value of each tensor that goes in."""

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | kwargs

    def results(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """What the operation returns, and whether that is new, and not what it writes to."""
        if self._written:
            given = self.given(args, kwargs)
            results = [given[one] for one in self._written][: self._returns]
            return (results[0] if len(results) == 1 else tuple(results) or None), False
        if self.name == "_foreach_norm":
            return [_empty((), dtype=one.dtype) for one in args[0]], True
        if self.name.startswith("_foreach_"):
            return [_empty(one.shape, dtype=one.dtype) for one in args[0]], True
        if self.name == "cat" and not any(args[1:]):  # as `stack` of many single values does
            wide = sum(one.shape[0] for one in args[0]), *args[0][0].shape[1:]
            return _empty(wide, dtype=args[0][0].dtype), True
        args, kwargs = _mapped([args, kwargs], _meta, _META)
        return _mapped(op(*args, **kwargs), lambda one: _empty(one.shape, dtype=one.dtype)), True


_kind_of = cache(_Kind)


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation of torch: launch it, and return tensors for what it will have computed."""
    kind, views, moved, began = _kind_of(op), [], 0, time.thread_time()
    if kind.name == "_foreach_copy_" and not all(map(_is_here, [*args[0], *args[1]])):
        for into, source in zip(args[0], args[1], strict=True):
            into.copy_(source)
        return None
    result, is_new = kind.results(op, args, kwargs)

    def queued(one: Tensor) -> Tensor | _View:
        nonlocal moved
        if not _is_here(one):
            return one
        moved += one.nbytes
        views.append(view := _View(one))
        return view

    args, kwargs = _mapped([args, kwargs], queued, _CPU)
    outputs = [_View(one) for one in _tensors(result)] if is_new else []
    moved += sum(one.nbytes for one in _tensors(result))
    run = partial(_run, op, kind, args, kwargs, views, outputs)
    current_stream().launch(run, _seconds_of(moved / MEMORY_BYTES_PER_SECOND))
    of_gpu = LAUNCH_SECONDS + len(views) * LAUNCH_TENSOR_SECONDS
    _late.seconds += max(0.0, time.thread_time() - began - of_gpu)
    return result


_CPU, _META = torch.device("cpu"), torch.device("meta")


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _mapped(tree: Any, change: Callable[[Any], Any], device: torch.device | None = None) -> Any:
    """The same tree with other tensors, and with another device in place of ours."""
    if isinstance(tree, Tensor | _View):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(one, change, device) for one in tree])
    if isinstance(tree, dict):
        return {key: _mapped(one, change, device) for key, one in tree.items()}
    is_ours = isinstance(tree, torch.device) and tree.type == NAME
    return device if is_ours else tree


def _tensors(tree: Any) -> list[Any]:
    """All tensors of a tree."""
    found: list[Any] = []
    _mapped(tree, found.append)
    return found


def _run(
    op: Any, kind: _Kind, args: Any, kwargs: Any, views: Sequence[_View], outputs: Sequence[_View]
) -> None:
    """In the thread of a stream: compute it, on packed values if that can be."""
    is_packed = any(one.memory.is_packed for one in views)
    if is_packed and (norms := _norms(kind, args, kwargs)) is not None:
        _write(norms, outputs)
        return
    read: Callable[[_View], Tensor | None] = _View.whole
    if is_packed and kind.is_by_value:
        flat = {id(one): one.flat() for one in views}
        if all(one is not None for one in flat.values()):
            read = lambda one: flat[id(one)]  # noqa: E731
    args, kwargs = _mapped([args, kwargs], lambda one: read(one) if isinstance(one, _View) else one)
    _write(op(*args, **kwargs), outputs)


def _write(result: Any, outputs: Sequence[_View]) -> None:
    for view, values in zip(outputs, _tensors(result) if outputs else (), strict=True):
        view.memory.become(values.reshape(-1))


def _norms(kind: _Kind, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The norms of one tensor, or of each of some; None for any other operation."""
    given = kind.given(args, kwargs)
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    if kind.name == "_foreach_norm":
        parts = [one.parts() for one in given["self"]]
        if all(one is not None and not len(one[1]) for one in parts):
            blocks = [one[0] for one in parts if one is not None]
            found = list(torch._foreach_norm(blocks, order, dtype))
            if math.isfinite(order):
                torch._foreach_mul_(found, REPEATS ** (1.0 / order))
            return found
        return [_norm(one, order, dtype) for one in given["self"]]
    if kind.name == "linalg_vector_norm" and given.get("dim") is None and "out" in given:
        given["out"].whole().copy_(_norm(given["self"], order, dtype))
        return []
    return None


def _norm(view: _View, order: float, dtype: torch.dtype | None) -> Tensor:
    def norm(values: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
        return found

    parts = view.parts()
    if parts is None:
        return norm(view.whole())
    blocks, rest = parts
    found = [norm(blocks) * REPEATS ** (1.0 / order)] if len(blocks) else []
    if len(rest):
        found.append(norm(rest))
    return found[0] if len(found) == 1 else norm(torch.stack(found))


def _view_of(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation that makes a view: torch's own for tensors that have no memory."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), *args, **kwargs)


def _read(tensor: Tensor) -> Any:
    """`item()`: wait for the device."""
    view, found = _View(tensor), []
    current_stream().launch(lambda: found.append(view.whole().clone()), 0.0)
    current_stream().synchronize()
    return found[0].item()


def _copy(source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_`: on the device, or between it and the host. As with CUDA, pinned memory is needed to
    go on meanwhile."""
    used, bytes_moved = current_stream(), destination.nbytes
    if _is_here(source) and _is_here(destination):
        run = partial(_copy_here, _View(source), _View(destination))
        used.launch(run, _seconds_of(2 * bytes_moved / MEMORY_BYTES_PER_SECOND))
        return destination
    if _is_here(source):
        run, host = partial(_copy_to_host, _View(source), destination), destination
    else:
        run, host = partial(_copy_from_host, source, _View(destination)), source
    speed = PINNED_BYTES_PER_SECOND if host.is_pinned() else PAGEABLE_BYTES_PER_SECOND
    used.launch(run, bytes_moved / speed, is_kernel=False)
    if not (non_blocking and host.is_pinned()):
        used.synchronize()
    return destination


def _copy_here(source: _View, destination: _View) -> None:
    packed, into = source.flat(), destination.flat()
    if source.shape == destination.shape and packed is not None and into is not None:
        into.copy_(packed)
    else:
        destination.whole().copy_(source.whole())


def _copy_to_host(source: _View, host: Tensor) -> None:
    parts = source.parts()
    if parts is None or not host.is_contiguous() or host.numel() != source.count:
        host.detach().copy_(source.whole())
        return
    blocks, rest = parts
    flat = host.detach().view(-1)
    flat[: len(blocks) * REPEATS].view(-1, REPEATS).copy_(blocks[:, None])
    flat[len(blocks) * REPEATS :].copy_(rest)


_copied = count()


def _copy_from_host(host: Tensor, destination: _View) -> None:
    parts = destination.parts()
    if parts is not None and host.is_contiguous() and host.numel() == destination.count:
        blocks, rest = parts
        flat = host.detach().view(-1)
        theirs = flat[: len(blocks) * REPEATS].view(-1, REPEATS)
        if _are_blocks(theirs):
            blocks.copy_(theirs[:, 0])
            rest.copy_(flat[len(blocks) * REPEATS :])
            return
    destination.whole().copy_(host.detach())


def _are_blocks(values: Tensor) -> bool:
    """Whether all values of a row are equal; of a large tensor three of each are looked at."""
    if values.numel() <= CHECKED_WHOLE:
        return torch.equal(values, values[:, :1].expand_as(values))
    places = 1 + next(_copied) * 37 % (REPEATS - 1), REPEATS - 1
    return all(torch.equal(values[:, 0], values[:, one]) for one in places)


# ---- its place in torch


class _Module:
    """What `torch.get_device_module` returns: what torch and potluck ask torch.cuda for."""

    Stream, Event = DoubleStream, DoubleEvent
    stream, current_stream = staticmethod(stream), staticmethod(current_stream)

    @staticmethod
    def synchronize(*_: Any) -> None:
        for one in list(DoubleStream._all):
            one.synchronize()

    @staticmethod
    def max_memory_allocated(*_: Any) -> int:
        return _Counted.most

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        return _Counted.held

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The double draws nothing."""


_libraries: Final[list[Any]] = []


def register() -> None:
    """Make the device known to torch and to potluck, in this process and for good."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module())
    GPUS.add(NAME)
    library: Any = torch.library.Library  # without types
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    _libraries.extend((everything, aten))
    key = "PrivateUse1"
    everything.fallback(_compute, key)
    aten.impl("empty.memory_format", _empty, key)
    aten.impl("empty_strided", _empty_strided, key)
    aten.impl("_copy_from", _copy, key)
    aten.impl("_local_scalar_dense", _read, key)
    for name in ("view", "as_strided", "_reshape_alias"):
        aten.impl(name, partial(_view_of, getattr(torch.ops.aten, name).default), key)
    for full in torch._C._dispatch_get_all_op_names():
        # torch would do these one tensor after the other, which no GPU does
        if full.startswith(("aten::_foreach_", "aten::_fused_sgd", "aten::_fused_adam")):
            name, _, overload = full.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            aten.impl(full.removeprefix("aten::"), partial(_compute, op), key)
    _pin()


def _pin() -> None:
    """Let `pin_memory=True` make memory that the double takes for pinned."""

    def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if pin_memory:
                tensor.untyped_storage().is_pinned_here = True  # type: ignore[attr-defined]
            return tensor

        return made

    for name in ("empty", "zeros"):
        setattr(torch, name, pinning(getattr(torch, name)))

    def is_pinned(tensor: Tensor, *_: Any) -> bool:
        return getattr(tensor.untyped_storage(), "is_pinned_here", False)

    Tensor.is_pinned = is_pinned  # type: ignore[assignment,method-assign]
