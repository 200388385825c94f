"""The trackers that a session's figures can be written to, as their owner names them. Pure.

    tracker = read_tracker("tensorboard:curves")      # WrongUse if it is none
    tracker.below(Path("/poem"))                  # …:/poem/curves

    jsonl:FILE            one JSON object a line for each step
    tensorboard:DIR       event files
    wandb[:PROJECT]       Weights & Biases; its own settings (WANDB_MODE=offline) hold
    mlflow:DIR or URL     MLflow's file store, or a tracking server

A tracker writes files and contacts addresses. So only the owner of a machine names its trackers,
and never a definition that came over the network (node/app/commands/run_start.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.core.wrong_use import WrongUse, nearest

JSONL, TENSORBOARD, WANDB, MLFLOW = KINDS = ("jsonl", "tensorboard", "wandb", "mlflow")

EXAMPLE: Final = "jsonl:steps.jsonl, tensorboard:curves, wandb:my-project or mlflow:mlruns"
DEFAULT_PROJECT: Final = "potluck"
LONGEST: Final = 4_096  # characters of one tracker: the longest path of Linux

_PROJECT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_URL = re.compile(r"https?://[^\s/@]+(/\S*)?")
_WITH_USER = re.compile(r"https?://[^/]*@")


@dataclass(frozen=True)
class NamedTracker:
    """`where`: the file, folder, project or URL. `folder`: where Weights & Biases has its files."""

    kind: str
    where: str
    folder: Path = Path()

    @property
    def is_path(self) -> bool:
        return self.kind != WANDB and not (self.kind == MLFLOW and _URL.fullmatch(self.where))

    @property
    def stays_below(self) -> bool:
        """Whether its path leads nowhere but into the folder that it is put below."""
        path = Path(self.where)
        leaves = path.is_absolute() or ".." in path.parts or self.where.startswith("~")
        return not (self.is_path and leaves)

    def below(self, folder: Path) -> NamedTracker:
        """With its path, if it is relative, below this folder. WrongUse if `~` leads nowhere."""
        if not self.is_path:
            return replace(self, folder=folder)
        try:
            path = Path(self.where).expanduser()
        except RuntimeError as error:
            raise _wrong(str(self), str(error)) from None
        return replace(self, where=str(folder / path), folder=folder)

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"


def read_tracker(text: str) -> NamedTracker:
    """WrongUse says what is wrong with the text, and what to write. Nothing on the disk is read."""
    kind, _, where = text.strip().partition(":")
    if kind not in KINDS:
        meant = nearest(kind, KINDS)
        raise _wrong(
            text, f"There is no tracker {kind[:40]!r}.", f"Did you mean {meant}? " * bool(meant)
        )
    if len(where) > LONGEST or not where.isprintable():
        raise _wrong(text, "It is too long, or has characters that cannot be printed.")
    if _WITH_USER.match(where):
        raise WrongUse(
            f"The URL of {kind} has a user or a password in it.",
            why="Everybody in a run can read its definition, and the log names trackers.",
            advice="Leave them out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.",
        )
    if kind == WANDB:
        where = where or DEFAULT_PROJECT
        if not _PROJECT.fullmatch(where):
            raise _wrong(text, "A project has up to 128 letters, digits, dots, dashes and _.")
    elif not where:
        what = {JSONL: "a file", TENSORBOARD: "a folder", MLFLOW: "a folder or a URL"}[kind]
        raise _wrong(text, f"It needs {what} after a colon.")
    elif "://" in where and not (kind == MLFLOW and _URL.fullmatch(where)):
        raise _wrong(text, "Only MLflow takes a URL, which begins with http:// or https://.")
    return NamedTracker(kind, where)


def _wrong(text: str, why: str, advice: str = "") -> WrongUse:
    return WrongUse(
        f"{text[:60]!r} is no tracker.", why=why, advice=f"{advice}Write for example {EXAMPLE}."
    )
