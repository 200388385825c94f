"""The model of a checkpoint in formats that other programs read.

The output appears whole under its name, or not at all: it is written next to its place and renamed.
Of what was there before, only a file, or a folder with nothing but an exported model in it, is
replaced. Any other folder may be somebody's home.

`torch` files are zipped pickles, which is how torch itself keeps tensors. They are only written
here, never read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from node.core.disk_trouble import disk_trouble
from node.core.wrong_use import WrongUse
from node.run.checkpoint_file import Checkpoint, sync_folder
from node.run.safetensors_file import write_safetensors
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = {"safetensors": ".safetensors", "torch": ".pt", "hf": "-hf"}
CONFIG_FILE, TENSORS_FILE = "config.json", "model.safetensors"  # in a folder of `hf`

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")  # a run's name may come from anybody


class ExportFailed(PotluckError):
    """The model could not be written."""


@dataclass(frozen=True)
class Exported:
    path: Path
    tensors: int
    bytes: int


def export_checkpoint(
    checkpoint: Checkpoint, format: str, output: Path | None, *, force: bool = False
) -> Exported:
    """Write the model of a checkpoint. WrongUse if the output exists and `force` is not set, or if
    it is a folder that is no earlier export."""
    state = checkpoint.state
    if output is None:
        run = _UNSAFE.sub("-", state.run).strip(".-") or "model"
        output = Path(f"{run}-epoch-{state.epoch}{SUFFIX[format]}")
    is_export = format == "hf" and output.name not in ("", "..") and _is_export(output)
    if _is_folder(output) and not is_export:
        raise WrongUse(
            f"{output} is a folder.",
            why="No folder is removed, except one with nothing but an export of --format hf in it.",
            advice=f"Choose another --output: {output / f'model{SUFFIX[format]}'}, for example.",
        )
    if os.path.lexists(output) and not force:
        raise WrongUse(
            f"{output} exists already.", advice="Choose another --output, or add --force."
        )
    tensors = state.model_tensors()
    config: dict[str, object] = {}
    if format == "hf":
        config, tensors = _for_transformers(checkpoint, tensors)
    about = {"format": "pt", "run": state.run, "epoch": str(state.epoch)}

    def write(draft: Path) -> None:
        if format == "torch":
            import torch

            torch.save({name: one.clone() for name, one in tensors.items()}, draft)
            return
        file = draft
        if format == "hf":
            draft.mkdir()
            (draft / CONFIG_FILE).write_bytes(
                msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
            )
            file = draft / TENSORS_FILE
        _write_tensors(file, tensors, {"format": "pt"} if format == "hf" else about)

    _appear(output, write)
    return Exported(output, len(tensors), sum(one.nbytes for one in tensors.values()))


def _for_transformers(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    from models.hf_export import hf_export

    if not checkpoint.model:
        raise WrongUse(
            "This checkpoint does not contain the settings of its model.",
            why="A loop with its own model wrote it, and transformers does not know that model.",
            advice="Export it with --format safetensors.",
        )
    files = hf_export(checkpoint.model, tensors)
    return files.config, files.tensors


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    from protocols.accumulation.training_state import spec_of
    from protocols.tensors import raw_bytes

    kept = {name: one.detach().contiguous() for name, one in tensors.items()}
    with open(path, "xb") as file:
        write_safetensors(
            file, [(spec_of(name, one), raw_bytes(one)) for name, one in kept.items()], about
        )
        file.flush()
        os.fsync(file.fileno())


def _appear(output: Path, write: Callable[[Path], None]) -> None:
    """Write next to the place, then rename: an interruption leaves no half-written output."""
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        if _is_folder(output):
            _remove_export(output)
        os.replace(draft, output)
        sync_folder(output.parent)
    except OSError as error:
        why, advice = disk_trouble(error, output.parent)
        raise ExportFailed(f"{output} was not written.", why=why, advice=advice) from None
    except RuntimeError as error:  # torch raises this when its zip file could not be written
        raise ExportFailed(f"{output} was not written.", why=str(error)[:200]) from None
    finally:
        with contextlib.suppress(OSError):
            _remove_export(draft) if _is_folder(draft) else draft.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_export(folder: Path) -> bool:
    try:
        return {one.name for one in folder.iterdir()} == {CONFIG_FILE, TENSORS_FILE}
    except OSError:  # no folder, or one that may not be read
        return False


def _remove_export(folder: Path) -> None:
    """OSError if there is anything else in it."""
    for name in (CONFIG_FILE, TENSORS_FILE):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()
