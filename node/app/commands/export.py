"""`potluck export CHECKPOINT`: write a checkpoint's model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from node.app.commands.output import Output

if TYPE_CHECKING:
    from node.app.commands.parser import Subparsers

FORMATS = {
    "safetensors": "one file of the parameters and buffers, by the names the model gives them",
    "torch": "the same as a state_dict, for torch.load(FILE, weights_only=True)",
    "hf": "a folder that from_pretrained of transformers reads, for models that it has",
}


def add_parser(subparsers: Subparsers) -> None:
    width = max(map(len, FORMATS))
    formats = "\n".join(f"  {name:{width}}  {what}" for name, what in FORMATS.items())
    parser = subparsers.add_parser(
        "export",
        help="write the model of a checkpoint for other programs",
        description="Take the model out of a checkpoint and write it in another format, without "
        "the optimizer and the counters. Of a folder with several checkpoints the newest whole "
        f"one is taken. Every byte is verified first.\n\n{formats}",
        example="potluck export checkpoints/epoch-0000000042-3fa9c1d2\n"
        "potluck export checkpoints --format hf --output my-gpt",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint's folder")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="safetensors",
        help="what to write (safetensors)",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="where to write it (named after the run and the epoch, in this folder)",
    )
    parser.add_argument(
        "--force", action="store_true", help="write over what is there under that name"
    )


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
