"""`potluck run start`: the organiser's first peer of a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_start(actions: Subparsers) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    raise NotImplementedError
