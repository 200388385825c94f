"""`scripts/bench lighthouse`: what Lighthouse says of the run's page, on a phone and on a desktop.

Lighthouse opens the page in Chromium and rates how fast it is, whether everybody can use it, and
whether it keeps to what is good practice. It is a program of npm's, and no part of potluck: it is
only used where it is installed. The page is that of a run with many peers (lab/page/scenes.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed
from lab.page.browser import found as chromium
from lab.page.browser import missing
from lab.page.scenes import PageScene, served
from node.app.page import RunPage
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

PEERS: Final = 200
STEPS: Final = 3_000
LEAST: Final = 95
CATEGORIES: Final = ("performance", "accessibility", "best-practices")
DEVICES: Final = ("phone", "desktop")
SLOWDOWN: Final = 4.0
"""Of the processor, for a phone: Lighthouse's own choice, for a desktop with an index of 1,500."""
AUDIT_SECONDS: Final = 240.0


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import positive_count, positive_number

    parser = kinds.add_parser(
        "lighthouse",
        help="what Lighthouse says of the run's page",
        description="Serve the page of a run with many peers, and have Lighthouse rate it in "
        "Chromium, as a phone on a slow link and as a desktop. Exit code 1 if one of performance, "
        f"accessibility and best practices has less than {LEAST} of 100. It needs Chromium and "
        "Lighthouse: `npm install lighthouse` in a folder of your own, and --program.",
        example="scripts/bench lighthouse\n"
        "scripts/bench lighthouse --program ~/lh/node_modules/.bin/lighthouse --json",
    )
    parser.add_argument(
        "--program", type=Path, metavar="FILE", help="Lighthouse, if it is not on the path"
    )
    parser.add_argument(
        "--peers", type=positive_count, default=PEERS, metavar="N", help=f"of the run ({PEERS})"
    )
    parser.add_argument(
        "--slowdown",
        type=positive_number,
        default=SLOWDOWN,
        metavar="X",
        help=f"how many times as fast as a phone this machine is ({SLOWDOWN:g}, which is right for "
        "an index of about 1,500 in Lighthouse's report; at 300, 1 is)",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    program = program_of(arguments.program)

    async def measure(talk: Talk) -> dict[str, Any]:
        return await rate(program, arguments.peers, arguments.slowdown, talk)

    return report(arguments, measure, lines)


def program_of(chosen: Path | None) -> str:
    """Where Lighthouse is; WrongUse, with what to install, if it or Chromium is not there."""
    if missing():
        raise WrongUse(
            "There is no browser for Lighthouse.",
            why=f"{missing()}.",
            advice="Install Chromium (Debian: chromium).",
        )
    program = shutil.which("lighthouse" if chosen is None else str(chosen.absolute()))
    if program is None:
        raise WrongUse(
            "Lighthouse is not there.",
            why=f"{'It is not on the path' if chosen is None else f'{chosen} is no program'}.",
            advice="It needs Node.js and npm (Debian: nodejs, npm). Type `npm install "
            "lighthouse@12` in a folder of your own (newer ones need Node.js 22), and name "
            "node_modules/.bin/lighthouse there with --program.",
        )
    return program


async def rate(program: str, peers: int, slowdown: float, talk: Talk) -> dict[str, Any]:
    flags_of = {
        "phone": f"--throttling.cpuSlowdownMultiplier={slowdown:g}",
        "desktop": "--preset=desktop",
    }
    found = {}
    async with served(RunPage(PageScene(peers=peers, steps=STEPS).source())) as url:
        for device, flag in flags_of.items():
            talk(f"Lighthouse looks at the page as a {device} does")
            found[device] = rated(await _asked(program, url, flag))
    scores = [one for device in found.values() for one in device["scores"].values()]
    return {
        "peers": peers,
        "slowdown": slowdown,
        **found,
        "lowest": min(scores),
        "met": min(scores) >= LEAST,
        "machine": machine_facts(),
    }


def rated(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Of Lighthouse's report: each score of 100, and the names of what was found wanting in it."""
    scores, wanting = {}, {}
    for name in CATEGORIES:
        category = answer["categories"][name]
        scores[name] = round(100 * (category["score"] or 0.0))
        counted = [one["id"] for one in category["auditRefs"] if one["weight"]]
        audits = {one: answer["audits"][one] for one in counted}
        wanting[name] = {
            one: audit.get("displayValue") or audit["title"]
            for one, audit in audits.items()
            if audit["score"] is not None and audit["score"] < 1
        }
    index = round(answer["environment"]["benchmarkIndex"])
    return {"scores": scores, "wanting": wanting, "index": index}


async def _asked(program: str, url: str, flag: str) -> dict[str, Any]:
    command = [
        program, f"{url}/", "--quiet", "--output=json", "--output-path=stdout",
        f"--only-categories={','.join(CATEGORIES)}",
        "--chrome-flags=--headless=new --no-sandbox --disable-dev-shm-usage", flag,
    ]  # fmt: skip
    environment = {**os.environ, "CHROME_PATH": chromium() or ""}
    with trio.move_on_after(AUDIT_SECONDS):
        done = await trio.run_process(
            command, env=environment, capture_stdout=True, capture_stderr=True, check=False
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise BenchFailed(
                "Lighthouse gave no report.", why=done.stderr.decode(errors="replace")[-500:]
            ) from None
        return answer
    raise BenchFailed(f"Lighthouse did not finish within {AUDIT_SECONDS:g} s.")


def lines(result: dict[str, Any]) -> str:
    """For people."""
    told = []
    for device in DEVICES:
        one = result[device]
        scores = ", ".join(f"{name} {score}" for name, score in one["scores"].items())
        told.append(f"as a {device}: {scores} (the machine's index is {one['index']})")
        told += [
            f"  {name}: {audit}: {words}"
            for name, wanting in one["wanting"].items()
            for audit, words in wanting.items()
        ]
    return "\n".join(told)
