"""A device double: tensors that say they are on another device, for machines without a GPU.

    with device_double():
        model.to(DOUBLE)                        # everything is computed as ever, on the processor
        bytes_alive(is_counted)                 # Alive(cpu=..., double=...)

Its memory is the processor's, and so are its results, to the bit. But code that asks a tensor where
it is takes its path for a GPU, and an operation on tensors of both kinds fails as torch's does.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import pytest
import torch
from torch import Tensor

DOUBLE: Final = torch.device("meta")
"""A device that every build of torch knows by name."""

ALONE: Final = threading.Lock()
ALONE_SECONDS: Final = 0.5
"""More than a count of all objects takes; and how long a count waits for a thread that computes."""

COMPUTING: Final = threading.RLock()
"""Held while anything is computed on the double: that releases the interpreter's lock, and whoever
looks at a tensor meanwhile may crash."""

COPIES: Final = ("copy_", "_foreach_copy_", "to")  # may have tensors of both kinds


class OnDouble(Tensor):
    """A tensor on the double."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DOUBLE

    is_meta = False  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with COMPUTING, torch._C.DisableTorchFunctionSubclass():
            if name == "to":
                return _moved(*args, **kwargs)
            if name not in COPIES:
                _check_together(name, [*args, *kwargs.values()])
            kwargs.pop("device", None)
            found = func(*args, **kwargs)
            is_in_place = name.endswith("_") and not name.endswith("__")
            return found if is_in_place else _on_double(found)


def _on_double(found: Any) -> Any:
    if isinstance(found, tuple | list):
        return type(found)(_on_double(one) for one in found)
    if isinstance(found, Tensor) and not isinstance(found, OnDouble):
        return found.as_subclass(OnDouble)
    return found


def _moved(tensor: Tensor, where: Any = None, *rest: Any, **named: Any) -> Tensor:
    """`to` of a tensor on the double."""
    where = named.pop("device", where)
    plain = tensor.as_subclass(Tensor)
    if not isinstance(where, str | torch.device):
        return plain.to(where, *rest, **named).as_subclass(OnDouble)
    if torch.device(where) == DOUBLE:
        return plain.to("cpu", *rest, **named).as_subclass(OnDouble)
    return plain.to("cpu", *rest, **(named | {"copy": True}))


def _check_together(name: str, values: Iterable[Any]) -> None:
    """Tensors of both kinds cannot be computed with, but single values can."""
    kinds = {isinstance(one, OnDouble) for one in _tensors(values) if one.dim()}
    if len(kinds) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)


@contextmanager
def device_double() -> Iterator[None]:
    """During the block torch makes tensors on the double, in any thread."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("zeros", "empty"):
            patch.setattr(torch, name, _made_by(getattr(torch, name)))
        patch.setattr(Tensor, "to", _moving(Tensor.to))
        yield


def _moving(move: Any) -> Any:
    @wraps(move)  # torch tells `__torch_function__` this name
    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        where = kwargs.get("device", args[0] if args else None)
        is_to_it = isinstance(where, str | torch.device) and torch.device(where) == DOUBLE
        if is_to_it and not isinstance(tensor, OnDouble):
            return tensor.clone().as_subclass(OnDouble)
        return move(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    return moved


def _made_by(make: Any) -> Any:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        there = device is not None and torch.device(device) == DOUBLE
        found: Tensor = make(*args, device=None if there else device, **kwargs)
        return found.as_subclass(OnDouble) if there else found

    return made


@dataclass(frozen=True)
class Alive:
    cpu: float
    double: float


def count_only_new_objects() -> None:
    """From now on only tensors that are made from now on are counted, which takes milliseconds. The
    older objects stay set aside: they would slow down all tests that come later."""
    gc.collect()
    gc.freeze()


def bytes_alive(is_counted: Callable[[int], bool]) -> Alive:
    """The bytes of the tensors' memory, by where it is, of those whose size is counted."""
    found: dict[int, tuple[bool, int]] = {}
    with no_other_thread(), COMPUTING:
        gc.collect()
        for one in gc.get_objects():
            if not issubclass(type(one), Tensor):
                continue
            is_there = isinstance(one, OnDouble)
            own = [one, one.grad] if is_there and one.is_leaf and one.grad is not None else [one]
            for storage in (part.untyped_storage() for part in own):
                where, size = storage.data_ptr(), storage.nbytes()
                if is_counted(size):
                    found[where] = is_there or found.get(where, (False, 0))[0], size
    sizes = dict.fromkeys((False, True), 0)
    for is_there, size in found.values():
        sizes[is_there] += size
    return Alive(cpu=sizes[False], double=sizes[True])


@contextmanager
def no_other_thread() -> Iterator[None]:
    """Within the block no other thread runs Python code. Otherwise a thread that goes on meanwhile
    would drop gradients that are found, and make new ones that are found, too."""
    with ALONE:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(ALONE_SECONDS)
        try:
            # A thread that waits already does so for the usual time. It runs now, if it must.
            began = time.perf_counter()
            while time.perf_counter() - began < 2 * usual:
                pass
            yield
        finally:
            sys.setswitchinterval(usual)
