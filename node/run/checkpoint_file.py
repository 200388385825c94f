"""One checkpoint on disk: a folder with the tensors and a small manifest.

    epoch-0000000042-3fa9c1d2/state.safetensors     all tensors of the state
    epoch-0000000042-3fa9c1d2/manifest.json         run, epoch, digest, settings of the model, …

A checkpoint is written to a folder under another name, synced to the disk and renamed, so a folder
of this name is whole, also after a power cut. Reading trusts nothing: names, sizes and types are
checked before memory is allocated, and the digest of the tensors must match the manifest's.

Renaming is not enough. The files, the folder they are in and its parent all have to be synced, in
this order, or a crash can leave a name without its bytes.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from node.core.disk_trouble import disk_trouble
from node.run.safetensors_file import BrokenFile, read_header, read_tensor, write_safetensors
from protocols.accumulation.state_manifest import MOST_TENSORS, Manifest, offsets_of
from protocols.accumulation.training_state import TrainingState
from protocols.errors import PotluckError
from protocols.tensors import raw_bytes

FORMAT = "potluck checkpoint 1"
STATE_FILE, MANIFEST_FILE = "state.safetensors", "manifest.json"
LARGEST_MANIFEST_BYTES = 8 << 20  # the metadata of a state in base64, and a few lines
WRITING = ".writing-"  # prefix of an unfinished folder's name
FOLDER_MODE, FILE_MODE = 0o700, 0o600

NAME = re.compile(r"epoch-(\d{10})-([0-9a-f]{8})")


class CheckpointBroken(PotluckError):
    """The folder is not a whole checkpoint."""


class CheckpointFailed(PotluckError):
    """A checkpoint could not be written. The earlier ones are unchanged."""


class CheckpointManifest(msgspec.Struct, forbid_unknown_fields=True):
    """manifest.json: everything that is not in the safetensors file, for people and for loading."""

    format: str
    run: str
    epoch: int
    history: str
    digest: str
    signature: str
    optimizer: str
    torch: str
    written: str
    bytes: int
    piece_bytes: int
    metadata: str
    model: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified. `model` is the settings that build the model."""

    path: Path
    state: TrainingState
    model: Mapping[str, Any]
    torch: str


def name_of_checkpoint(state: TrainingState) -> str:
    return f"epoch-{state.epoch:010d}-{state.digest.hex()[:8]}"


def write_checkpoint(
    folder: Path, state: TrainingState, model: Mapping[str, Any], written: str
) -> Path:
    """Write a checkpoint into this folder and return its path. Blocks for as long as the disk
    needs.

    CheckpointFailed if the disk is full or cannot be written to; then nothing is left of it. The
    folder is made where it is missing, but its parent is not: if somebody has removed a run's
    folder, it does not come back with checkpoints and no definition.
    """
    final = folder / name_of_checkpoint(state)
    draft = folder / f"{WRITING}{secrets.token_hex(8)}"
    try:
        if final.exists():
            return final
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        _check_room(folder, len(state.memory))
        draft.mkdir(mode=FOLDER_MODE)
        with _new_file(draft / STATE_FILE) as file:
            tensors = [(spec, raw_bytes(state.tensor(spec.name))) for spec in state.specs]
            write_safetensors(file, tensors, {"format": "pt"})
            _sync(file)
        with _new_file(draft / MANIFEST_FILE) as file:
            manifest = _manifest_of(state, model, written)
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            _sync(file)
        sync_folder(draft)
        draft.rename(final)
        sync_folder(folder)
    except OSError as error:
        why, advice = disk_trouble(error, folder)
        raise CheckpointFailed(
            f"The checkpoint of epoch {state.epoch} was not written to {folder}.",
            why=why,
            advice=f"{advice} Older checkpoints are unchanged.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(draft)
    return final


def read_checkpoint(path: Path) -> Checkpoint:
    """The verified checkpoint in this folder; else CheckpointBroken, which names the folder."""
    try:
        manifest = read_manifest(path / MANIFEST_FILE)
        with _own_file(path / STATE_FILE) as file:
            state = _read_state(file, manifest)
    except BrokenFile as error:
        raise CheckpointBroken(
            f"{path} is not a whole checkpoint: {error.what}",
            why="It was copied only in part or changed, or the disk has lost a part of it.",
            advice="Choose another checkpoint.",
        ) from None
    except OSError as error:
        raise CheckpointBroken(f"{path} cannot be read: {error.strerror}.") from None
    return Checkpoint(path, state, manifest.model, manifest.torch)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_of(
    state: TrainingState, model: Mapping[str, Any], written: str
) -> CheckpointManifest:
    import torch

    return CheckpointManifest(
        format=FORMAT,
        run=state.run,
        epoch=state.epoch,
        history=state.history.hex(),
        digest=state.digest.hex(),
        signature=state.signature.digest.hex(),
        optimizer=state.signature.optimizer,
        torch=str(torch.__version__),
        written=written,
        bytes=len(state.memory),
        piece_bytes=state.manifest.piece_bytes,
        metadata=base64.b64encode(state.metadata).decode(),
        model=dict(model),
    )


def read_manifest(path: Path) -> CheckpointManifest:
    """BrokenFile if it is none, OSError if it is not there."""
    with _own_file(path) as file:
        text = file.read(LARGEST_MANIFEST_BYTES + 1)
    if len(text) > LARGEST_MANIFEST_BYTES:
        raise BrokenFile(f"{path.name} has more than {LARGEST_MANIFEST_BYTES:,} bytes.")
    try:
        manifest = msgspec.json.decode(text, type=CheckpointManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenFile(f"{path.name} cannot be read: {str(error)[:100]}.") from None
    if manifest.format != FORMAT:
        raise BrokenFile(f"It has the format {manifest.format[:40]!r}, not {FORMAT!r}.")
    return manifest


def _read_state(file: BinaryIO, manifest: CheckpointManifest) -> TrainingState:
    import torch

    header = read_header(file)
    if len(header.tensors) > MOST_TENSORS:
        raise BrokenFile(f"It has {len(header.tensors):,} tensors.")
    try:
        unnamed = Manifest(
            run=manifest.run,
            epoch=manifest.epoch,
            history=bytes.fromhex(manifest.history),
            signature=bytes.fromhex(manifest.signature),
            optimizer=manifest.optimizer,
            tensors=header.tensors,
            metadata=base64.b64decode(manifest.metadata, validate=True),
            piece_bytes=manifest.piece_bytes,
            pieces=b"",
        )
        wanted = bytes.fromhex(manifest.digest)
        checked = msgspec.convert(msgspec.to_builtins(unnamed, builtin_types=(bytes,)), Manifest)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise BrokenFile(f"{MANIFEST_FILE} has {str(error)[:100]}.") from None
    try:
        memory = torch.zeros(checked.stream_bytes, dtype=torch.uint8)
    except RuntimeError:  # torch raises this when there is no more memory
        raise BrokenFile(f"Its {checked.stream_bytes:,} bytes do not fit into memory.") from None
    stream = raw_bytes(memory)
    for spec, start in zip(header.tensors, offsets_of(header.tensors), strict=True):
        read_tensor(file, header, spec.name, stream[start : start + spec.bytes])
    state = TrainingState(checked, memory)
    if state.digest != wanted:
        raise BrokenFile("Its bytes do not match the digest in its manifest.")
    if state.signature.digest != checked.signature:
        raise BrokenFile("Its tensors do not match the model in its manifest.")
    return state


def _new_file(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return open(os.open(path, flags, FILE_MODE), "wb")


def _own_file(path: Path) -> BinaryIO:
    """Open a regular file at exactly this path; BrokenFile for a link, a pipe, or nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenFile(f"It has no {path.name}.") from None
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - its user closes it
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise BrokenFile(f"{path.name} is not an ordinary file.")
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_room(folder: Path, needed: int) -> None:
    """Raise before gigabytes are written in vain."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
