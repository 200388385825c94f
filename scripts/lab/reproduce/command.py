"""`scripts/reproduce [NAME …]`: flags, output and files. The claims have modules of their own."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lab import NOTHING_MEASURED
from lab.bench.processes import BenchFailed, failures_unwrapped
from lab.plot import check_plot
from lab.reproduce import dedloc, learning_at_home, moshpit, own
from lab.reproduce.claim import Bearing, Claim
from lab.reproduce.page import Circumstances, PageEntry, write_page
from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.output import Output
from node.app.cli.parser import CommandParser
from node.app.main import Stopped
from node.core.wrong_use import WrongUse, nearest

CLAIMS: Final[tuple[Claim, ...]] = (
    *learning_at_home.CLAIMS,
    *moshpit.CLAIMS,
    *dedloc.CLAIMS,
    *own.CLAIMS,
)
KINDS: Final = ()  # there are no subcommands: a claim is an argument
DOCS: Final = Path(__file__).parents[3] / "docs"


def parser(_kinds: Iterable[str] = KINDS) -> CommandParser:
    program = CommandParser(
        prog="scripts/reproduce",
        description="Measure the claims of the papers that potluck is built on. Without a name the "
        "claims are listed. For each that is named, the figures are printed beside the paper's, "
        "and it is said whether the claim holds and what was scaled down.\n\n"
        "The full form also writes docs/results.md of this checkout, with a plot for each claim in "
        "docs/pictures/results; claims that were not measured keep what stands there. The exit "
        "code is 1 if a claim neither holds nor deviates for a reason that its figures show.",
        example="scripts/reproduce\n"
        "scripts/reproduce moshpit-averaging --short\n"
        "scripts/reproduce --all",
    )
    program.add_argument(
        "names", nargs="*", metavar="NAME", help="a claim, by the name in the list"
    )
    program.add_argument("--all", action="store_true", help="measure all claims")
    program.add_argument(
        "--short",
        action="store_true",
        help="measure less, in minutes for all claims; without a name all are measured",
    )
    program.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="write results.md and the plots into this folder (docs; none with --short)",
    )
    return program


def run(arguments: argparse.Namespace) -> int:
    output = Output.of(arguments)
    chosen = _chosen(arguments)
    if not chosen:
        output.data(
            {"claims": [{"name": claim.name, "source": claim.source} for claim in CLAIMS]},
            _listed(CLAIMS),
        )
        return DONE
    folder: Path | None = arguments.into or (None if arguments.short else DOCS)
    if folder is not None:
        check_plot(folder / "plot.svg")
    began, verdicts = time.monotonic(), Counter[Bearing]()
    for claim in chosen:
        try:
            entry = _measured(claim, output, is_short=arguments.short)
        except Stopped:
            output.say(NOTHING_MEASURED)
            raise
        except BenchFailed as error:  # the others are measured all the same
            output.say(f"{claim.name} was not measured. {error.what} {error.why}".rstrip())
            verdicts[Bearing.FAILS] += 1
            continue
        output.data(entry.as_mapping(), entry.as_text())
        if folder is not None:
            write_page(folder, entry, order=[one.name for one in CLAIMS])
        verdicts[entry.finding.verdict] += 1
    code = FAILED if verdicts[Bearing.FAILS] else DONE
    output.say(_summary(verdicts, time.monotonic() - began, code))
    return code


def _summary(verdicts: Counter[Bearing], seconds: float, code: int) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{verdicts.total()} measured in {minutes} min {rest} s: {verdicts[Bearing.HOLDS]} hold, "
        f"{verdicts[Bearing.EXPLAINED]} deviate for a reason that their figures show, and "
        f"{verdicts[Bearing.FAILS]} fail. The exit code is {code}."
    )


def _chosen(arguments: argparse.Namespace) -> tuple[Claim, ...]:
    known = {claim.name: claim for claim in CLAIMS}
    for name in arguments.names:
        if name not in known:
            near = nearest(name, known)
            raise WrongUse(
                f"No claim is called {name!r}.",
                advice=f"Did you mean {near}?" if near else "scripts/reproduce lists them.",
            )
    if arguments.names and arguments.all:
        raise WrongUse("--all measures every claim, so no name goes with it.")
    if arguments.all or (arguments.short and not arguments.names):
        return CLAIMS
    return tuple(known[name] for name in dict.fromkeys(arguments.names))


def _measured(claim: Claim, output: Output, *, is_short: bool) -> PageEntry:
    output.say(f"{claim.name}:")
    began = time.monotonic()
    with failures_unwrapped():
        finding = claim.measure(is_short, output.say)
    seconds = time.monotonic() - began
    return PageEntry(claim, finding, Circumstances.of_now(seconds, is_short=is_short))


def _listed(claims: Iterable[Claim]) -> str:
    return "\n\n".join(f"{claim.name}\n  {claim.says}\n  ({claim.source})" for claim in claims)
