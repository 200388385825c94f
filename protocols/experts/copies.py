"""Copies of experts: what is in one, and the files that a server keeps of them.

    form = CopyForm(make(uid))                   # what every copy of this kind of expert has
    snapshot = take_snapshot(backend)            # in the runtime's thread, between two batches
    kept = store.save(snapshot, form)            # ffn.3.17.safetensors
    restore(fresh_backend, store.path(uid), form)

A copy has the parameters and buffers of an expert, what its optimizer and its schedule remember,
and how many steps it has made. It is a file in the safetensors format, so reading one executes
nothing. All bytes on the wire and on disk are the same, and their BLAKE3 names the copy.

All servers of a run make their experts in the same way. So a server knows every tensor of a copy by
name, shape and dtype, and every number of the schedule, before it sees one. It learns them from a
spare expert that makes one step with gradients of zero (`CopyForm`). A copy is checked against that
before memory is taken for its tensors, and before anything of an expert is changed.

Values of the right shape may still be poison, such as a negative mean of squares. So `restore` lets
the expert make one trial step, and refuses a copy that makes values that are not finite.

An expert that has made no step needs no copy: its weights follow from the run's seed.
"""

from __future__ import annotations

import copy
import errno
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protocols.errors import MalformedMessage, PotluckError, ProtocolMisuse
from protocols.experts.grid import Uid, WrongUid, parse_uid
from protocols.experts.messages import UidText
from protocols.experts.runtime import ExpertBackend, ExpertStatistics
from protocols.identity import PeerId

log = logging.getLogger("potluck.experts")

DIGEST_BYTES: Final = 32
LARGEST_HEADER_BYTES: Final = 1 << 20  # an expert with 900 tensors has 100 KB
LARGEST_NUMBER: Final = 1e18  # of a schedule: steps, rates
MOST_STEPS: Final = 1 << 53
LONGEST_PEER_ID: Final = 128  # characters; those of today have 52
READ_BYTES: Final = 1 << 20
SUFFIX, DRAFT, REFUSED, ASIDE = ".safetensors", ".part", ".refused", ".aside"
METADATA = "potluck"

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class WrongCopy(PotluckError):
    """A copy of an expert of another kind (other tensors, shapes, dtypes or settings), or one with
    which an expert cannot learn."""

    surely_not_executed = True


class BrokenCopy(MalformedMessage):
    """Bytes that are no copy of any expert, or values that no server saves."""


# ---- what is in a copy


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says besides its tensors. `server`: the one that has saved the expert, as the
    file claims. `numbers`: of the optimizer's settings and of the schedule, by their paths."""

    uid: UidText
    server: Annotated[PeerId, Meta(max_length=LONGEST_PEER_ID)]
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)]
    numbers: dict[str, int | float]


@dataclass(frozen=True)
class ExpertSnapshot:
    """The values of an expert after one of its steps, on the CPU."""

    uid: Uid
    steps: int
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, int | float]


def take_snapshot(backend: ExpertBackend) -> ExpertSnapshot:
    """Call it in the runtime's thread: no batch is under way then."""
    tensors = {name: _own(tensor) for name, tensor in _network_tensors(backend).items()}
    for name, value in _statistics(backend).items():
        tensors[name] = _own(_as_tensor(value))
    return ExpertSnapshot(
        backend.uid, backend.statistics.steps, tensors, dict(_numbers(_plain(backend)))
    )


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: type[int] | type[float] | None = None
    """A plain number of an optimizer, which travels as a tensor."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {_DTYPES[self.dtype]}"


class CopyForm:
    """What a copy of one kind of expert has. `spare` is an expert of this kind that is not used
    for anything else."""

    def __init__(self, spare: ExpertBackend) -> None:
        self.learns = spare.optimizer is not None
        _step_with_zeros(spare)
        network, statistics = _network_tensors(spare), _statistics(spare)
        self.network = frozenset(network)
        self.tensors = {name: _spec_of(value) for name, value in (network | statistics).items()}
        self.numbers = frozenset(path for path, _ in _numbers(_plain(spare)))
        for name, spec in self.tensors.items():
            if spec.dtype not in _DTYPES:
                raise ProtocolMisuse(f"{name} is {spec.dtype}, which no copy of an expert can hold")
        self.largest_bytes = LARGEST_HEADER_BYTES + sum(one.bytes for one in self.tensors.values())

    def check(self, path: Path, uid: Uid) -> Label:
        """The label of the copy of this expert in this file, all of which is read. BrokenCopy or
        WrongCopy if it is none."""
        with _opened(path, self) as (file, label):
            if label.uid != str(uid):
                raise BrokenCopy(f"This is a copy of {label.uid}, not of {uid}.")
            for name in self._check_names(file, label):
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise BrokenCopy(f"{name} has values that are not finite.")
        return label

    def _check_names(self, file: Any, label: Label) -> list[str]:
        names = list(file.keys())
        if other := sorted(set(names) - self.tensors.keys()):
            raise WrongCopy(f"{other[0]} is in the copy, and not in the expert.")
        if missing := sorted(self.network - set(names)):
            raise WrongCopy(f"{missing[0]} is in the expert, and not in the copy.")
        for name in names:
            part, spec = file.get_slice(name), self.tensors[name]
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if (shape, dtype) != (spec.shape, _DTYPES[spec.dtype]):
                raise WrongCopy(f"{name} is {shape} {dtype} in the copy, and {spec} here.")
        if other := sorted(self.numbers ^ label.numbers.keys()):
            raise WrongCopy(f"The setting {other[0]} is not on both sides.")
        for name, number in label.numbers.items():
            if not -LARGEST_NUMBER <= number <= LARGEST_NUMBER:
                raise BrokenCopy(f"The setting {name} is {number}.")
        return names


def restore(backend: ExpertBackend, path: Path, form: CopyForm) -> None:
    """Give a fresh expert the values of a checked copy. WrongCopy if it cannot learn with them;
    OSError if the file cannot be read, and the errors of memory, say nothing about the copy."""
    try:
        _read(backend, path, form)
        rows = torch.ones(1, *backend.rows.shape, dtype=getattr(torch, backend.rows.dtype))
        outputs = [backend.forward(rows), backend.backward(rows, rows), backend.forward(rows)]
        if not all(bool(torch.isfinite(one).all()) for one in outputs):
            raise WrongCopy("What it computes is not finite.")
        _read(backend, path, form)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - of any network, with values that others chose
        raise WrongCopy(f"{backend.uid} cannot learn with this copy: {str(error)[:200]}") from None


def _read(backend: ExpertBackend, path: Path, form: CopyForm) -> None:
    with _opened(path, form) as (file, label):
        names = set(file.keys())
        with torch.no_grad():
            for name, tensor in _network_tensors(backend).items():
                tensor.copy_(file.get_tensor(name))
        if backend.optimizer is not None:
            numbers = label.numbers if backend.schedule is not None else {}
            _read_optimizer(backend.optimizer, file, names, numbers, form)
        if backend.schedule is not None:
            own = backend.schedule.state_dict()
            backend.schedule.load_state_dict(_with(own, label.numbers, "schedule"))
        backend.statistics = ExpertStatistics(steps=label.steps)


def _read_optimizer(
    optimizer: torch.optim.Optimizer,
    file: Any,
    names: set[str],
    numbers: Mapping[str, int | float],
    form: CopyForm,
) -> None:
    """Of the settings, only rates come from the copy, and only `numbers` with a schedule, which has
    changed them. The others are the run's, and it may change them."""
    statistics: dict[int, dict[str, Any]] = {}
    for name in names - form.network:
        _, number, key = name.split("/", 2)
        value, kind = file.get_tensor(name), form.tensors[name].number
        statistics.setdefault(int(number), {})[key] = kind(value.item()) if kind else value
    own = optimizer.state_dict()
    rates = {path: number for path, number in numbers.items() if path.endswith("/lr")}
    groups = _with(_groups(own), rates, "groups")
    for group, values in zip(own["param_groups"], groups, strict=True):
        group.update(values)
    optimizer.load_state_dict({**own, "state": statistics})
    # Torch casts statistics to the dtype of their parameter.
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for index, one in statistics.items():
        kept = optimizer.state[parameters[index]]
        for key, value in one.items():
            if isinstance(value, Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)


@contextmanager
def _opened(path: Path, form: CopyForm) -> Iterator[tuple[Any, Label]]:
    """The open file, and what it says besides its tensors. The header is bounded before it is
    read, and then the library checks that the tensors cover the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size > form.largest_bytes or length > min(size, LARGEST_HEADER_BYTES):
        raise BrokenCopy(f"It has {size:,} bytes, with a header of {length:,}.")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA, "")
            yield file, msgspec.json.decode(text, type=Label)
    except (SafetensorError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenCopy(f"It is no copy of an expert: {str(error)[:100]}.") from None


# ---- the values of an expert, by name


def _network_tensors(backend: ExpertBackend) -> dict[str, Tensor]:
    return {f"network/{name}": tensor for name, tensor in backend.network.state_dict().items()}


def _statistics(backend: ExpertBackend) -> dict[str, Tensor | int | float]:
    """What the optimizer remembers for each parameter: `optimizer/NUMBER/NAME`."""
    if backend.optimizer is None:
        return {}
    return {
        f"optimizer/{number}/{key}": value
        for number, one in backend.optimizer.state_dict()["state"].items()
        for key, value in one.items()
        if isinstance(value, Tensor | int | float) and not isinstance(value, bool)
    }


def _plain(backend: ExpertBackend) -> dict[str, Any]:
    """The settings of the optimizer, which a schedule changes, and the schedule."""
    return {
        "groups": _groups(backend.optimizer.state_dict()) if backend.optimizer else [],
        "schedule": backend.schedule.state_dict() if backend.schedule else {},
    }


def _groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state["param_groups"]
    ]


def _numbers(tree: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """All numbers in a tree, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _numbers(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _numbers(value, f"{path}/{index}")
    elif isinstance(tree, Tensor):
        raise ProtocolMisuse(f"{path} is a tensor; a copy of an expert has plain numbers there.")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, tree


def _with(tree: Any, numbers: Mapping[str, int | float], path: str) -> Any:
    """The same tree with these numbers."""
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)  # of the same type: a Counter, say
        changed.update({key: _with(one, numbers, f"{path}/{key}") for key, one in tree.items()})
        return changed
    if isinstance(tree, list | tuple):
        items = [_with(value, numbers, f"{path}/{index}") for index, value in enumerate(tree)]
        return type(tree)(items)
    return numbers.get(path, tree)


def _step_with_zeros(backend: ExpertBackend) -> None:
    """Now the optimizer has all that it ever remembers."""
    if backend.optimizer is None:
        return
    for group in backend.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    backend.optimizer.step()
    if backend.schedule is not None:
        backend.schedule.step()


def _spec_of(value: Tensor | int | float) -> _Spec:
    number = None if isinstance(value, Tensor) else type(value)
    tensor = _as_tensor(value)
    return _Spec(tuple(tensor.shape), tensor.dtype, number)


def _as_tensor(value: Tensor | int | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


# ---- the files of a server


@dataclass(frozen=True)
class KeptCopy:
    """A whole and checked copy, in a file of this server. `digest`: of all bytes of the file."""

    uid: Uid
    server: PeerId
    steps: int
    digest: bytes
    size: int


class CopyStore:
    """The copies in one folder: one file for each expert, hosted here or not.

    Invariant: a file with the name of an expert is whole, and was checked. While it is replaced,
    `find` returns None. All methods but `path`, `find` and `kept` read or write files: call them in
    a worker thread.
    """

    def __init__(self, folder: Path, server: PeerId, *, most_aside: int = 1) -> None:
        self._folder = folder
        self._server = server
        self._most_aside = most_aside
        self._kept: dict[Uid, KeptCopy] = {}

    def kept(self) -> tuple[KeptCopy, ...]:
        return tuple(self._kept.values())

    def find(self, uid: Uid) -> KeptCopy | None:
        return self._kept.get(uid)

    def path(self, uid: Uid) -> Path:
        return self._folder / f"{uid}{SUFFIX}"

    def open(self, copy: KeptCopy) -> BinaryIO:
        """The file of this very copy. OSError if it is gone, or was replaced by a newer one."""
        file = open(self.path(copy.uid), "rb")  # noqa: SIM115 - the caller closes it
        if self.find(copy.uid) != copy:
            file.close()
            raise FileNotFoundError(errno.ENOENT, "It was replaced.")
        return file

    def names(self) -> list[Uid]:
        """The experts of which there are files, after removing what was not finished."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in self._folder.iterdir():
            if path.suffix == DRAFT:
                path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                with suppress(WrongUid):
                    found.append(parse_uid(path.name.removesuffix(SUFFIX)))
        return sorted(found)

    def load(self, uid: Uid, form: CopyForm) -> None:
        """Check the file of this expert. If it does not fit, it is put aside, with a warning."""
        path = self.path(uid)
        try:
            self._kept[uid] = _described(path, uid, form.check(path, uid))
        except (WrongCopy, BrokenCopy) as error:
            aside = path.with_suffix(REFUSED)
            os.replace(path, aside)
            log.warning(
                "The copy of %s in this folder is not used: %s It is %s now.",
                uid, error.what, aside,
            )  # fmt: skip

    def save(self, snapshot: ExpertSnapshot, form: CopyForm) -> KeptCopy:
        """Write this snapshot in place of an earlier copy. Raises BrokenCopy if it is not finite,
        and OSError."""
        label = Label(str(snapshot.uid), self._server, snapshot.steps, dict(snapshot.numbers))
        metadata = {METADATA: msgspec.json.encode(label).decode()}
        with self.draft(snapshot.uid) as draft:
            try:
                save_file(dict(snapshot.tensors), draft, metadata)
            except SafetensorError as error:  # in place of the system's
                raise OSError(str(error)) from None
            return self.put(draft, snapshot.uid, form.check(draft, snapshot.uid))

    @contextmanager
    def draft(self, uid: Uid) -> Iterator[Path]:
        """The path of a new file, which is removed at the end of the block if it is still there."""
        path = self._folder / f"{uid}.{secrets.token_hex(8)}{DRAFT}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def put(self, draft: Path, uid: Uid, label: Label) -> KeptCopy:
        """Put this file, which was checked, in place of an earlier copy of this expert. One of more
        steps stays beside it: its server may have begun the expert anew by mistake."""
        kept = _described(draft, uid, label)
        earlier = self.find(uid)
        if earlier is not None and earlier.steps > kept.steps:
            self._put_aside(uid)
        with open(draft, "rb+") as file:
            os.fsync(file.fileno())
        before = self._kept.pop(uid, None)  # until the path has the new file
        try:
            os.replace(draft, self.path(uid))
            before = kept
        finally:
            if before is not None:
                self._kept[uid] = before
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return kept

    def put_own_aside(self, uid: Uid) -> None:
        """Keep the copy of this expert that this server has saved itself, if it is that one, beside
        another server's that replaces it: nothing proves that those steps were ever made. A person
        can use it. Of `most_aside` experts, the newest."""
        before = self.find(uid)
        if before is not None and before.server == self._server:
            self._put_aside(uid)

    def _put_aside(self, uid: Uid) -> None:
        shutil.copyfile(self.path(uid), self.path(uid).with_suffix(ASIDE))
        aside = sorted(self._folder.glob(f"*{ASIDE}"), key=lambda path: path.stat().st_mtime_ns)
        for path in aside[: -self._most_aside]:
            path.unlink(missing_ok=True)

    def remove(self, uid: Uid) -> None:
        self._kept.pop(uid, None)
        self.path(uid).unlink(missing_ok=True)


def _described(path: Path, uid: Uid, label: Label) -> KeptCopy:
    return KeptCopy(uid, label.server, label.steps, _digest_of(path), path.stat().st_size)


def _digest_of(path: Path) -> bytes:
    digest = blake3()
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.digest(DIGEST_BYTES)
