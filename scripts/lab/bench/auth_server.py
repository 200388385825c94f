"""`scripts/bench auth-server`: how many passes a second the auth server gives, and how promptly.

A server process as it is in use (`potluck auth serve`: TLS, SQLite on disk, each commit synced)
and a process of volunteers with a key and a kept connection each. Every pass is a whole renewal:
a signed challenge, a token checked, its row and the log's row on the disk, token and pass signed.

"100 clients" is measured in two ways, because they answer two questions:

- `passes_per_s`, `saturated_ms_*`: each renews again as soon as it has its pass. This measures the
  throughput. Latency at saturation is just clients divided by passes per second.
- `paced_ms_*`: all together PACED_PER_SECOND, evenly. This measures how long a volunteer waits
  under the required load. A request's time counts from when it was due.

A fast disk makes the result look better, and a temporary folder may be memory. So the time of a
synced write to this disk is measured too, and printed with the result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from auth.server.moderation import Moderation
from auth.server.store import create_store, open_store
from lab import Talk
from lab.bench.closed_run import write_certificate
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchProcess, open_process
from node.app.auth_places import find_auth_places

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

RUN = "bench"
PACED_PER_SECOND = 300.0  # the bar
WARM_UP_SECONDS = 1.0
ACTOR = "local:bench"
SYNCED_WRITES = 50
NO_LIMIT = 1_000_000  # all volunteers of the bench share one address


@dataclass(frozen=True)
class AuthServerEffort:
    """How much is measured."""

    clients: int = 100
    seconds: float = 10.0

    @staticmethod
    def of(*, clients: int, quick: bool) -> AuthServerEffort:
        return AuthServerEffort(clients, 2.0 if quick else 10.0)


async def measure_auth_server(
    effort: AuthServerEffort, folder: Path | None = None, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures, and what they were measured on. `folder` says on which disk."""
    machine = machine_facts()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=folder) as name:
        home = Path(name)
        synced_ms = await trio.to_thread.run_sync(_synced_write_ms, home)
        target = await trio.to_thread.run_sync(_prepare, home, effort.clients)
        words = ["-m", "node", "auth", "serve", "--json", "--home", str(home)]
        environment = {**os.environ, "POTLUCK_HOME": str(home)}
        async with (
            open_process("the auth server", words, environment) as server,
            open_process("the volunteers", ["-m", "lab.bench.auth_volunteers"]) as volunteers,
        ):
            port = int(server.introduction["listening"][0].rsplit(":", 1)[1])
            say(f"{effort.clients} volunteers join")
            await volunteers.ask("join", count=effort.clients, port=port, **target)
            await volunteers.ask("renew_without_pause", seconds=WARM_UP_SECONDS)
            say(f"as fast as it goes, for {effort.seconds:g} s")
            before = _cpu_seconds(server)
            fast = await volunteers.ask("renew_without_pause", seconds=effort.seconds)
            spent = _cpu_seconds(server) - before
            say(f"{PACED_PER_SECOND:g} a second, for {effort.seconds:g} s")
            before = _cpu_seconds(server)
            paced = await volunteers.ask(
                "renew_at_pace", seconds=effort.seconds, per_second=PACED_PER_SECOND
            )
            paced_spent = _cpu_seconds(server) - before
    return {
        "passes_per_s": round(fast["per_second"]),
        "saturated_ms_p50": fast["ms"]["p50"],
        "saturated_ms_p99": fast["ms"]["p99"],
        "paced_ms_p50": paced["ms"]["p50"],
        "paced_ms_p99": paced["ms"]["p99"],
        "cpu_ms_per_pass": round(1000 * spent / fast["passes"], 3),
        "paced_server_cpu_share": round(paced_spent / effort.seconds, 2),
        "synced_write_ms": synced_ms,
        "passes_verified": paced["verified"],
        "spread": {"saturated_ms": fast["ms"], "paced_ms": paced["ms"]},
        "settings": {**vars(effort), "paced_per_second": PACED_PER_SECOND},
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def _prepare(home: Path, clients: int) -> dict[str, Any]:
    """A server's settings, state and certificate; returns what volunteers need to know."""
    places = find_auth_places({"POTLUCK_HOME": str(home)})
    made = create_store(places.folder, RUN, actor=ACTOR)
    with open_store(places.folder) as store:
        code = Moderation(store).code_new(uses=clients, actor=ACTOR).code
    write_certificate(home, "127.0.0.1")
    text = (
        f'run = "{RUN}"\npublic_url = "https://127.0.0.1:8443"\n'
        '[server]\nlisten = ["127.0.0.1:0"]\n'
        'certificate = "certificate.pem"\ncertificate_key = "key.pem"\n'
        f"connections = {2 * clients}\nconnections_per_address = {2 * clients}\n"
        f"[limits]\nconnections_per_minute_per_address = {NO_LIMIT}\n"
        f"requests_per_minute_per_address = {NO_LIMIT}\n"
        f"logins_per_hour_per_address = {NO_LIMIT}\nrenewals_per_hour_per_account = {NO_LIMIT}\n"
    )
    places.settings_file.write_text(text, encoding="utf-8")
    return {
        "authority": str(home / "certificate.pem"),
        "run": RUN,
        "fingerprint": made.fingerprint,
        "code": code,
    }


def _synced_write_ms(folder: Path) -> float:
    """The median time of a small synced write to this disk."""
    milliseconds = []
    with (folder / "synced").open("wb", buffering=0) as file:
        for _ in range(SYNCED_WRITES):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            milliseconds.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(milliseconds), 3)


def _cpu_seconds(process: BenchProcess) -> float:
    """The process's CPU time so far; 0.0 if the system does not report it."""
    if sys.platform != "linux":
        return 0.0
    fields = Path(f"/proc/{process.process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lines_of(result: Mapping[str, Any]) -> str:
    """The figures for a person."""
    words = {
        "passes_per_s": "passes a second, each client renewing without a pause",
        "saturated_ms_p50": "from request to pass at that load",
        "saturated_ms_p99": "",
        "paced_ms_p50": f"from request to pass at {PACED_PER_SECOND:g} a second",
        "paced_ms_p99": "",
        "cpu_ms_per_pass": "processor time of the server for one pass",
        "synced_write_ms": "until a small write is on this disk",
    }
    return "\n".join(
        f"{name:18}  {result[name]:>9,}  {what}".rstrip() for name, what in words.items()
    )


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "auth-server",
        help="access passes from an auth server on this machine",
        description="Start an auth server in a process of its own, with TLS, SQLite on disk and "
        "each commit synced, and many clients in another, each with a key and a "
        "connection; and measure renewals. Each pass is a whole renewal. Some are "
        "verified as a node does it.\n\n"
        "  passes_per_s      each client renews again as soon as it has its pass\n"
        "  saturated_ms_p99  from request to pass at that load: mostly waiting for "
        "the others\n"
        "  paced_ms_p99      from request to pass at 300 passes a second, all "
        "clients together\n"
        "  cpu_ms_per_pass   processor time of the server for one pass",
        example="scripts/bench auth-server --json\nscripts/bench auth-server --quick --clients 10",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--clients", positive_count, 100, "how many clients")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIRECTORY",
        help="the folder for the database, to choose the disk (the temporary folder)",
    )
    parser.add_argument("--quick", action="store_true", help="measure less: rough figures")


def run(arguments: argparse.Namespace) -> int:
    effort = AuthServerEffort.of(clients=arguments.clients, quick=arguments.quick)

    return report(arguments, partial(measure_auth_server, effort, arguments.folder), lines_of)
