"""`potluck bench outage`: a volunteer's network goes, its machine sleeps, its address changes.

Three volunteers train in a closed run, each in a network of its own (outage_links.py). One of them
is hit by one trouble after another (`TROUBLES`), for some seconds each:

    stopped     its process is stopped, as by a lid that is closed
    pulled      its interface is down
    swallowed   its interface is up, and nothing arrives anywhere
    moved       its address is another one from now on

Nobody helps it back. Measured is how long after the end of the trouble others have made a step with
samples of it (`back_seconds`), what it has told meanwhile, and what became of the others: the
longest time without a step of theirs, and whether all who tell of an epoch tell the same history of
it, which is a digest over all steps (`differing_steps`).

Easy to get wrong: a step takes its time, and nobody is in one before it is over. So what a step of
this run takes is told beside it.
"""

from __future__ import annotations

import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import trio

from node.bench.closed_run import ClosedRun, Heard, Size, accepted, open_closed_run
from node.bench.machine import machine_facts
from node.bench.outage_links import Cables, open_cables
from node.wrong_use import WrongUse

OTHERS: Final = ("ann", "ben")
VICTIM: Final = "cleo"
BAR_SECONDS: Final = 30.0  # half of the minute in which a volunteer is to contribute
BETWEEN_SECONDS: Final = 4.0  # of ordinary training, before the next trouble
TOLD: Final = (
    "network_lost",
    "network_back",
    "fell_behind",
    "caught_up",
    "round_failed",
    "gradients_dropped",
    "fetching_failed",
    "left",
)

TROUBLES: Final = ("stopped", "pulled", "swallowed", "moved")

Talk = Callable[[str], None]


@dataclass(frozen=True)
class Trouble:
    kind: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.seconds:g}"


def trouble(text: str) -> Trouble:
    """`pulled:60`; WrongUse if it is none."""
    found = re.fullmatch(r"([a-z]+):([0-9]{1,5}(?:\.[0-9]+)?)", text)
    if found is None or found[1] not in TROUBLES:
        raise WrongUse(
            f"{text!r} is no trouble.",
            why=f"It has to be one of {', '.join(TROUBLES)}, a colon, and seconds.",
            advice="Such as pulled:60.",
        )
    return Trouble(found[1], float(found[2]))


@dataclass(frozen=True)
class OutageEffort:
    troubles: Sequence[Trouble]
    size: Size = field(default_factory=lambda: Size(width=64, layers=2, batch=512))


@dataclass(frozen=True)
class _Lab:
    run: ClosedRun
    cables: Cables
    others: list[Heard]
    victim: Heard


async def measure_outage(effort: OutageEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures. BenchFailed if somebody does not come back at all."""
    began, machine = time.monotonic(), machine_facts()
    told = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        async with (
            open_cables((*OTHERS, VICTIM)) as cables,
            open_closed_run(Path(folder), effort.size.definition(), cables.hub) as run,
        ):
            say(f"{len(OTHERS) + 1} volunteers join")
            everybody = [await _joined(run, cables, name) for name in (*OTHERS, VICTIM)]
            lab = _Lab(run, cables, everybody[:-1], everybody[-1])
            for one in effort.troubles:
                say(f"{VICTIM} is {one.kind} for {one.seconds:g} s")
                told.append(await _hit(lab, one))
    return {
        "troubles": told,
        "met": all(one["met"] for one in told),
        "bar_seconds": BAR_SECONDS,
        "machine": machine,
        "bench_seconds": round(time.monotonic() - began, 1),
    }


async def _joined(run: ClosedRun, cables: Cables, name: str) -> Heard:
    code = await run.code_for(name)
    one = run.join(name, code, place=cables.place_of(name))
    if name == OTHERS[0]:  # the first of all: nobody is there who could accept anything
        await run.until(lambda: bool(one.all("step_taken")), f"the first step of {name}", one)
    else:
        await run.until(lambda: accepted(one) is not None, f"the first samples of {name}", one)
    return one


async def _hit(lab: _Lab, one: Trouble) -> dict[str, Any]:
    victim, others = lab.victim, lab.others
    everybody = [*others, victim]
    await trio.sleep(BETWEEN_SECONDS)
    before = len(victim.events)
    seen = [len(other.events) for other in others]
    began = time.monotonic()
    await _begin(lab, one)
    await trio.sleep(one.seconds)
    await _end(lab, one)
    ended = time.monotonic()

    def is_back() -> bool:
        return any(
            at > ended and event["own_samples"] and len(event["members"]) > 1
            for at, event in victim.all("step_taken", before)
        )

    await lab.run.until(is_back, f"the end of {one}", *everybody)
    back = time.monotonic()
    gaps = [_longest_gap(other, began, back) for other in others]
    failed = sum(
        len(other.all("round_failed", start)) for other, start in zip(others, seen, strict=True)
    )
    since = [
        replace(each, events=each.events[start:])
        for each, start in zip(everybody, [*seen, before], strict=True)
    ]
    figures: dict[str, Any] = {
        "trouble": str(one),
        "back_seconds": round(back - ended, 2),
        "told": [
            _line(at - began, event) for at, event in victim.events[before:] if _matters(event)
        ],
        "others_longest_without_step_seconds": round(max(gaps), 2),
        "others_step_seconds": round(
            statistics.median(_step_seconds(other) for other in others), 2
        ),
        "others_rounds_failed": failed,
        "differing_steps": differing_steps(since),
    }
    figures["met"] = not figures["differing_steps"] and figures["back_seconds"] <= BAR_SECONDS
    return figures


async def _begin(lab: _Lab, one: Trouble) -> None:
    match one.kind:
        case "stopped":
            lab.victim.child.send_signal(signal.SIGSTOP)
        case "pulled":
            await lab.cables.pull(VICTIM)
        case "swallowed":
            await lab.cables.swallow(VICTIM)
        case _:
            await lab.cables.move(VICTIM)


async def _end(lab: _Lab, one: Trouble) -> None:
    if one.kind == "stopped":
        lab.victim.child.send_signal(signal.SIGCONT)
    else:
        await lab.cables.plug(VICTIM)


def differing_steps(everybody: Iterable[Heard]) -> list[dict[str, Any]]:
    """The epochs of which not all tell the same: who tells what, and with how many members."""
    told: dict[int, dict[str, list[str]]] = {}
    for one in everybody:
        for _, event in one.all("step_taken"):
            of_epoch = told.setdefault(int(event["epoch"]), {})
            who = f"{one.child.name} of {max(1, len(event['members']))}"
            of_epoch.setdefault(event["history"], []).append(who)
    return [
        {"epoch": epoch, "told": list(of_epoch.values())}
        for epoch, of_epoch in sorted(told.items())
        if len(of_epoch) > 1
    ]


def _matters(event: dict[str, Any]) -> bool:
    return event.get("event") in TOLD


def _line(seconds: float, event: dict[str, Any]) -> str:
    words = event.get("reason") or event.get("seconds") or ""
    return f"{seconds:.1f} s: {event['event']} {words}".strip()


def _longest_gap(one: Heard, since: float, until: float) -> float:
    moments = [at for at, _ in one.all("step_taken") if since <= at <= until]
    return max(later - earlier for earlier, later in pairwise([since, *moments, until]))


def _step_seconds(one: Heard) -> float:
    moments = [at for at, _ in one.all("step_taken")]
    between = [later - earlier for earlier, later in pairwise(moments)]
    return statistics.median(between) if between else 0.0
