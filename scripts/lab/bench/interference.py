"""`scripts/bench interference`: how a bulk transfer slows the training in the same process.

One process, the guest house, trains in a thread while its node runs in another: the arrangement of
every volunteer. Another process sends to it (or is sent to) at a given rate, over the whole path of
a real network. The training's steps are counted in short windows that take turns, so that other
work of the machine affects all of them alike:

    alone       nothing is transferred
    elsewhere   the same bytes at the same rate, between two other processes: the cost of a node in
                a process of its own
    receiving   into the process that trains
    sending     out of it

`kept` is the rate beside the transfer as a share of the rate alone; the bar is on it. The process
at the other end needs CPU time too, which a volunteer's machine does not spend. If the training's
threads leave it no core, its CPU time is taken off the rate alone (`spared`), and the output says
so.

On a busy machine the ratio of two windows says little. Look at the spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.pouring import CHUNK_BYTES
from lab.bench.processes import BenchProcess, introduce, open_peer, open_process
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

BAR_KEPT = 0.9
MEGABYTE = 1_000_000
GUEST = ("-m", "lab.bench.interference_guest")
ARMS = ("alone", "elsewhere", "receiving", "sending")
WINDOW_TRIES = 10  # on a machine that is so busy that no step fits into one
SETTLE_SECONDS = 1.0  # the first steps of a training warm caches up


@dataclass(frozen=True)
class InterferenceEffort:
    """`megabytes` are transferred per second; `threads` are torch's, in the training."""

    megabytes: float = 50.0
    seconds: float = 1.0
    turns: int = 15
    threads: int = 1
    width: int = 128
    layers: int = 4
    batch: int = 8


@dataclass
class Window:
    """One stretch of time, of one arm."""

    steps_per_second: float
    megabytes_per_second: float
    others_cores: float  # that the processes at the other end kept busy


@dataclass
class _Seen:
    windows: dict[str, list[Window]] = field(default_factory=lambda: {arm: [] for arm in ARMS})


async def measure_interference(
    effort: InterferenceEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The rates of each arm, what is kept of them, and whether the bar is met."""
    machine, began = machine_facts(), time.monotonic()
    async with AsyncExitStack() as stack:
        guest = await stack.enter_async_context(open_process("the training process", GUEST))
        sender = await stack.enter_async_context(open_peer("the process at the other end"))
        stranger = await stack.enter_async_context(open_peer("a third process"))
        house = _House(guest, sender, stranger, effort)
        await house.settle()
        seen = _Seen()
        for turn in range(effort.turns):
            say(f"turn {turn + 1} of {effort.turns}")
            for arm in ARMS:
                seen.windows[arm].append(await house.window(arm))
    return figures_of(seen.windows, effort.threads, machine["cores_usable"]) | {
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


class _House:
    """The three processes, introduced to one another, and the training that never stops."""

    def __init__(
        self,
        guest: BenchProcess,
        sender: BenchProcess,
        stranger: BenchProcess,
        effort: InterferenceEffort,
    ) -> None:
        self._guest, self._sender, self._stranger = guest, sender, stranger
        self._effort = effort
        self._chunks = max(1, round(effort.megabytes * MEGABYTE * effort.seconds / CHUNK_BYTES))
        self._peers: dict[str, str] = {}

    async def settle(self) -> None:
        self._peers = {
            "elsewhere": await introduce(self._sender, self._stranger),
            "receiving": await introduce(self._sender, self._guest),
            "sending": await introduce(self._guest, self._sender),
        }
        for arm in self._peers:
            await self._pour(arm)
        effort = self._effort
        await self._guest.ask(
            "train",
            threads=effort.threads,
            width=effort.width,
            layers=effort.layers,
            batch=effort.batch,
        )
        await trio.sleep(SETTLE_SECONDS)

    async def window(self, arm: str) -> Window:
        """The next one; of the training alone, with which others are compared, one in which a step
        lies whole."""
        for _ in range(WINDOW_TRIES):
            window = await self._window(arm)
            if arm != "alone" or window.steps_per_second > 0.0:
                return window
        raise PotluckError(
            "The training made no step in a window of the bench.",
            why=f"{WINDOW_TRIES} windows of {self._effort.seconds:g} s were too short for one on "
            "this machine, which has other work.",
            advice="Give it longer windows (--seconds), a smaller model (--width), or a quieter "
            "machine.",
        )

    async def _window(self, arm: str) -> Window:
        others = await self._others_cpu()
        began, carried = time.monotonic(), 0.0
        if arm == "alone":
            await trio.sleep(self._effort.seconds)
        else:
            carried = await self._pour(arm)
        ended = time.monotonic()
        steps = await self._guest.ask("rate", began=began, ended=ended)
        spent = await self._others_cpu() - others
        return Window(steps["steps_per_second"], carried, spent / (ended - began))

    async def _pour(self, arm: str) -> float:
        """Transfer for one window; the megabytes per second that it came to."""
        source = self._guest if arm == "sending" else self._sender
        poured = await source.ask(
            "pour_paced",
            peer=self._peers[arm],
            chunks=self._chunks,
            bytes_per_second=self._effort.megabytes * MEGABYTE,
        )
        return float(poured["bytes"] / (poured["ended"] - poured["began"]) / MEGABYTE)

    async def _others_cpu(self) -> float:
        asked = [await process.ask("cpu") for process in (self._sender, self._stranger)]
        return float(sum(answer["seconds"] for answer in asked))


def figures_of(windows: dict[str, list[Window]], threads: int, cores: int | None) -> dict[str, Any]:
    """Medians, the shares that are kept, and the bar."""
    alone = [window.steps_per_second for window in windows["alone"]]
    arms = {}
    for arm, seen in windows.items():
        rates = [window.steps_per_second for window in seen]
        others = statistics.median(window.others_cores for window in seen)
        spared = spared_share(threads, cores, others)
        kept = [rate / (one * spared) for rate, one in zip(rates, alone, strict=True)]
        arms[arm] = {
            "steps_per_s": round(statistics.median(rates), 2),
            "kept": round(statistics.median(kept), 3),
            "kept_least": round(min(kept), 3),
            "kept_most": round(max(kept), 3),
            "MB_per_s": round(statistics.median(one.megabytes_per_second for one in seen), 1),
            "others_cores": round(others, 3),
            "spared": round(spared, 3),
        }
    beside = [arms["receiving"]["kept"], arms["sending"]["kept"]]
    return {
        "kept": min(beside),
        "bar_kept": BAR_KEPT,
        "step_ms": round(1000 / statistics.median(alone), 1),
        "met": min(beside) >= BAR_KEPT,
        "arms": arms,
    }


def spared_share(threads: int, cores: int | None, others: float) -> float:
    """The share of the training's cores that the other processes leave: 1 if there are others."""
    if cores is None or threads < cores:
        return 1.0
    return max(0.0, cores - others) / cores


# Flags and output


WHAT = {
    "alone": "nothing is transferred",
    "elsewhere": "the same bytes between two other processes",
    "receiving": "into the process that trains",
    "sending": "out of the process that trains",
}


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_number, positive_seconds

    arms = "\n".join(f"  {arm:9}  {what}" for arm, what in WHAT.items())
    parser = kinds.add_parser(
        "interference",
        help="what a transfer costs the training in the same process",
        description="Train a small model in a thread of a process whose node receives or sends "
        "at a steady rate at the same time, and count the steps per second. Short windows of these "
        f"kinds take turns:\n\n{arms}\n\n"
        "`kept` is the rate beside the transfer as a share of the rate alone. If the training's "
        "threads take every core, the CPU time of the process at the other end is taken off the "
        "rate alone, because it would not be spent on a volunteer's machine. Figures are medians. "
        "The exit code is 1 if less than 0.9 is kept.",
        example="scripts/bench interference --json\n"
        "scripts/bench interference --threads 2\n"
        "scripts/bench interference --width 64 --batch 2",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--megabytes", positive_number, 50.0, "megabytes transferred per second")
    add_flag(parser, "--threads", positive_count, 1, "how many threads train")
    add_flag(parser, "--width", positive_count, 128, "the width of the model")
    add_flag(parser, "--layers", positive_count, 4, "how many layers the model has")
    add_flag(parser, "--batch", positive_count, 8, "samples of a step")
    add_flag(parser, "--turns", positive_count, 15, "how many windows of each kind")
    how_long = "how long each window is"
    add_flag(parser, "--seconds", positive_seconds, 1.0, how_long, metavar="SECONDS")


def run(arguments: argparse.Namespace) -> int:
    effort = InterferenceEffort(
        megabytes=arguments.megabytes,
        seconds=arguments.seconds,
        turns=arguments.turns,
        threads=arguments.threads,
        width=arguments.width,
        layers=arguments.layers,
        batch=arguments.batch,
    )

    return report(arguments, partial(measure_interference, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = [f"{'':10}{'steps/s':>9}{'kept':>8}{'least':>8}{'most':>8}{'MB/s':>8}"]
    for arm, told in result["arms"].items():
        lines.append(
            f"{arm:10}{told['steps_per_s']:>9}{told['kept']:>8}{told['kept_least']:>8}"
            f"{told['kept_most']:>8}{told['MB_per_s']:>8}  {WHAT[arm]}"
        )
    lines.append(
        f"A step takes {result['step_ms']} ms alone; {result['kept']} is kept "
        f"(at least {result['bar_kept']:g})."
    )
    return "\n".join(lines)
