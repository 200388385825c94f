"""`python -m lab bench …`, `simulate …` and `reproduce …`, with the habits of `potluck`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from lab.bench import command as bench
from lab.reproduce import command as reproduce
from lab.simulate import command as simulate
from node.app.cli.catalogue import Run, add_flags_of_all
from node.app.cli.parser import CommandParser
from node.app.main import main


class Program(NamedTuple):
    parser: Callable[[Iterable[str]], CommandParser]
    kinds: Collection[str]
    run: Run


PROGRAMS: Final[Mapping[str, Program]] = {
    "bench": Program(bench.parser, bench.KINDS, bench.run),
    "simulate": Program(simulate.parser, simulate.KINDS, simulate.run),
    "reproduce": Program(reproduce.parser, reproduce.KINDS, reproduce.run),
}


def parser_of(program: str, kind: str = "") -> CommandParser:
    """The parser of `scripts/bench` and the others, with this kind alone if it has it."""
    make, kinds, _ = PROGRAMS[program]
    parser = make([kind] if kind in kinds else kinds)
    add_flags_of_all(parser)
    return parser


def parse(argv: Sequence[str]) -> tuple[Run, argparse.Namespace]:
    """The function that runs this command line, and its arguments. WrongUse for a wrong one."""
    program, *words = argv
    named = next((word for word in words if not word.startswith("-")), "")
    return PROGRAMS[program].run, parser_of(program, named).parse_args(words)


if __name__ == "__main__":
    sys.exit(main(parse=parse))
