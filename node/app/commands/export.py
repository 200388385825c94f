"""`potluck export CHECKPOINT`: write a checkpoint's model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

FORMATS = {
    "safetensors": "one file with the parameters and buffers, under the model's names",
    "torch": "the same as a state_dict, for torch.load(FILE, weights_only=True)",
    "hf": "a folder for from_pretrained of transformers, for models that it has",
}


def add_parser(subparsers: Subparsers) -> None:
    width = max(map(len, FORMATS))
    formats = "\n".join(f"  {name:{width}}  {what}" for name, what in FORMATS.items())
    parser = subparsers.add_parser(
        "export",
        help="convert a checkpoint's model for other programs",
        description="Write the model of a checkpoint in another format, without the optimizer and "
        "the counters. From a folder with several checkpoints it takes the newest whole one. It "
        f"verifies every byte first.\n\n{formats}",
        example="potluck export checkpoints/epoch-0000000042-3fa9c1d2\n"
        "potluck export checkpoints --format hf --output my-gpt",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint's folder")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="safetensors",
        help="the format to write (safetensors)",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="the file or folder to write (named after the run and the epoch, in this folder)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file or export")


def run(arguments: argparse.Namespace) -> int:
    from node.run.checkpoints import open_checkpoint
    from node.run.exporting import export_checkpoint

    output = Output.of(arguments)
    checkpoint = open_checkpoint(arguments.checkpoint, output.say)
    exported = export_checkpoint(
        checkpoint, arguments.format, arguments.output, force=arguments.force
    )
    state = checkpoint.state
    output.data(
        {
            "checkpoint": str(checkpoint.path),
            "run": state.run,
            "epoch": state.epoch,
            "digest": state.digest.hex(),
            "format": arguments.format,
            "output": str(exported.path),
            "tensors": exported.tensors,
            "bytes": exported.bytes,
        },
        f"wrote {exported.path}: {exported.tensors:,} tensors, {exported.bytes / 1e6:,.1f} MB, "
        f"of epoch {state.epoch} of {state.run}",
    )
    return 0
