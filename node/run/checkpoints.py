"""The checkpoints of a run in one folder: written, kept by a policy, and found again.

    checkpoints = Checkpoints(folder, KeepPolicy(keep_last=3, keep_every=1000))
    checkpoints.save(state, model={"name": "gpt", …})       # blocks: call it in a thread
    newest = checkpoints.newest()                           # whole and verified, or None

The `keep_last` newest and every epoch that `keep_every` divides are kept. The others are removed
only after a newer one is safely on the disk, so there is always one to start from. A broken
checkpoint is reported and skipped; it stays where it is, for a person to look at.

All of this waits for the disk. In a node, call it in a worker thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from node.core.wrong_use import WrongUse
from node.run.checkpoint_file import (
    MANIFEST_FILE,
    NAME,
    WRITING,
    Checkpoint,
    CheckpointBroken,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from node.run.safetensors_file import BrokenFile
from protocols.accumulation.training_state import TrainingState

log = logging.getLogger("potluck.checkpoints")

REMOVING = ".removing-"  # prefix of a folder's name while it is removed
BESIDE = "beside-"  # prefix of one that is kept for ever


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay.

    - `keep_last`: this many of the newest, at least one.
    - `keep_every`: epochs that are a multiple of this stay forever; 0: none.
    """

    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise WrongUse(
                f"keep_last={self.keep_last} and keep_every={self.keep_every} are impossible.",
                advice="Set keep_last to 1 or more, and keep_every to 0 or more.",
            )

    def surplus(self, epochs: list[int]) -> set[int]:
        """The epochs to remove."""
        newest = set(sorted(set(epochs), reverse=True)[: self.keep_last])
        every = self.keep_every
        return {one for one in epochs if one not in newest and not (every and one % every == 0)}


class Checkpoints:
    """The checkpoints in one folder. Only one process writes there."""

    def __init__(self, folder: Path, policy: KeepPolicy | None = None) -> None:
        self.folder = folder
        self.policy = policy or KeepPolicy()

    def paths(self) -> list[Path]:
        """All checkpoints, the newest first, whole or not."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = [one for one in self.folder.iterdir() if NAME.fullmatch(one.name)]
            return sorted(found, key=lambda one: (_epoch(one), _written(one)), reverse=True)
        return []

    def save(self, state: TrainingState, model: Mapping[str, Any] | None = None) -> Path:
        """Write this state, then remove what the policy does not keep. Returns its path.

        `model` is the settings that build the model, for `potluck export --format hf`.
        CheckpointFailed, with advice, if it could not be written; then all others are still there.
        """
        self.clean_up()
        written = datetime.now(UTC).isoformat(timespec="seconds")
        path = write_checkpoint(self.folder, state, model or {}, written)
        try:
            paths = self.paths()
        except OSError as error:
            log.warning("older checkpoints were not removed: %s", error)
            return path
        surplus = self.policy.surplus([_epoch(one) for one in paths])
        for one in paths:
            if _epoch(one) in surplus and one != path:
                self._remove(one)
        return path

    def newest(self, say: Callable[[str], None] = log.warning) -> Checkpoint | None:
        """The newest one that is whole; `say` is told about broken ones."""
        for path in self.paths():
            try:
                return read_checkpoint(path)
            except CheckpointBroken as error:
                say(f"passing over a checkpoint: {error.what}")
        return None

    def set_aside(self, taken: Path) -> Path | None:
        """If the last one that was written is of an earlier epoch than this one, from which a run
        goes on, it is of another line of steps: rename it, so that it is never removed. Returns its
        new path."""
        last = max(self.paths(), key=_said_written, default=taken)
        if _epoch(last) >= _epoch(taken):
            return None
        path = last.with_name(BESIDE + last.name)
        os.rename(last, path)
        return path

    def clean_up(self) -> None:
        """Remove folders that a crash left half written or half removed. Only for the writer."""
        with contextlib.suppress(OSError):
            for one in self.folder.iterdir():
                if one.name.startswith((WRITING, REMOVING)):
                    shutil.rmtree(one, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Other readers see it gone at once, even if deleting its files is interrupted."""
        grave = self.folder / f"{REMOVING}{secrets.token_hex(8)}"
        try:
            os.rename(path, grave)
            shutil.rmtree(grave)
        except OSError as error:
            log.warning("an old checkpoint is still there: %s (%s)", path, error.strerror)


def open_checkpoint(path: Path, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at this path, or the newest whole one if it is a folder of checkpoints.

    WrongUse if there is none, CheckpointBroken if it is not whole.
    """
    if (path / MANIFEST_FILE).is_file():
        return read_checkpoint(path)
    found = Checkpoints(path).newest(say)
    if found is None:
        raise WrongUse(
            f"There is no whole checkpoint at {path}.",
            advice="Name the folder of one checkpoint (it contains manifest.json), or of several.",
        )
    return found


def _epoch(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _said_written(path: Path) -> str:
    """When it was written, by its manifest: a copy of the folder may be newer. "" if unknown."""
    try:
        return read_manifest(path / MANIFEST_FILE).written
    except (BrokenFile, OSError):
        return ""


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
