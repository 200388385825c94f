"""A device double that computes a pass in a twentieth of the time: it takes a twentieth of each
batch's samples. `python -m tests.processes.fast_device FLAGS…` is `potluck demo FLAGS…`, each of
whose processes has this double. `python fast_device.py PYTHON -m node.app.demo.child …` is one of
them."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

TIMES_AS_FAST: Final = 20
LARGEST_LOSS_RATIO: Final = 0.8
"""The demo asks for 0.6; but with the double a step learns from a twentieth of its samples."""

COMPUTING: Final = (["join"], ["backbone"], ["run", "check"])  # the others need no torch


def put_in_place() -> None:
    """Have the default model of this process computed by the double."""
    from models.gpt import GPT

    whole = GPT.loss

    def of_a_part(model: GPT, batch: Any) -> Any:
        return whole(model, batch[: -(-len(batch) // TIMES_AS_FAST)])

    GPT.loss = of_a_part  # type: ignore[method-assign]


def play(flags: list[str]) -> int:
    from node.app.demo import driver, story
    from node.app.main import main

    story.LARGEST_LOSS_RATIO = LARGEST_LOSS_RATIO  # type: ignore[misc]
    through = (sys.executable, str(Path(__file__).resolve()))
    driver.Child = partial(driver.Child, through=through)  # type: ignore[assignment,misc]
    return main(["demo", *flags])


def be_a_child(words: list[str]) -> None:
    _python, _m, module, parent, *arguments = words
    if any(arguments[: len(one)] == one for one in COMPUTING):
        put_in_place()
    sys.argv = [module, parent, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[2:3] == ["-m"]:
        be_a_child(sys.argv[1:])
    else:
        sys.exit(play(sys.argv[1:]))
