"""`scripts/bench caps`: whether a volunteer's caps hold, measured by the kernel from outside.

Three real processes: an organiser's peer that only keeps, a volunteer without caps, and one with
all of them, in a run whose gradients are tens of megabytes and uncompressed, so that the caps bind.
The capped one is watched through a schedule that crosses midnight, closes and opens again, and
through a pause in the middle of the training.

Measured the whole time: the capped process's packets at its interface, its CPU time and its memory,
with all its children's. Figures are of the worst ten seconds anywhere.

Midnight has to come at the right time. So the capped process is given a time zone in which it is
near; its clock is unchanged.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.caps_figures import (
    OVER,
    REST_PROCESSOR_SHARE,
    MeasuredRest,
    plan_figures,
    rate_figures,
    rest_of,
    waited_share,
)
from lab.bench.caps_lab import HOST, LabPeer, Told, host_of, listen_on, open_lab
from lab.bench.caps_meter import MeterReading, most_memory, over, used_between, worst_window
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.own_network import check_own_networks
from lab.bench.processes import BenchFailed
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.core.caps.units import Measure

START_SECONDS: Final = 120.0
ACCEPTED_SECONDS: Final = 180.0
LEEWAY_SECONDS: Final = 20.0  # for what should happen at a moment
WAITED: Final = 0.1  # the part of the others' time that a pause may make them wait more
MINUTE: Final = 60.0
CLOSED: Final = "00:01", "00:02"  # of the schedule that is open for all the rest of the day

DEFINITION: Final = """\
[run]
name = "caps"
[model]
name = "gpt"
size = "tiny"
context = 32
width = 512
layers = 2
heads = 8
[optimizer]
name = "sgd"
lr = 0.05
[training]
batch = {batch}
samples_at_once = 64
delayed = true
[averaging]
codec = "none"
grace_seconds = 5.0
"""
"""25 MB of gradients, which need 13 s over the capped link, and a batch that takes one core longer
than that; otherwise a rested peer could never catch up with those that trained on."""


@dataclass(frozen=True)
class CapsEffort:
    """The caps, and how long each part is watched."""

    upload: float = 2e6
    download: float = 2e6
    threads: int = 1
    memory: int = 650_000_000
    batch: int = 1536
    midnight_in: float = 110.0  # seconds after the capped process is started
    train_seconds: float = 60.0  # before the pause
    pause_seconds: float = 30.0


@dataclass(frozen=True)
class Midnight:
    """Of the capped process: its moment (seconds since 1970), and the time zone that makes it so.
    The schedule is closed from one minute after it to two."""

    at: float
    zone: str
    schedule: str = f"{CLOSED[1]}-{CLOSED[0]}"

    @property
    def closes_at(self) -> float:
        return self.at + MINUTE

    @property
    def opens_at(self) -> float:
        return self.at + 2 * MINUTE


def midnight_at(moment: float) -> Midnight:
    """A time zone (as POSIX writes it) in which that moment is midnight."""
    west = int(moment) % 86_400
    west -= 86_400 if west > 43_200 else 0
    hours, rest = divmod(abs(west), 3600)
    sign = "-" if west < 0 else ""
    return Midnight(float(int(moment)), f"LAB{sign}{hours}:{rest // 60:02}:{rest % 60:02}")


async def measure_caps(effort: CapsEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures. BenchFailed if a part could not be observed at all."""
    check_own_networks()
    machine, began = machine_facts(), time.monotonic()
    with TemporaryDirectory(prefix="potluck-caps-") as folder:
        async with (
            open_lab(Path(folder), ("organiser", "free", "capped")) as (organiser, free, capped),
            trio.open_nursery() as nursery,
        ):
            stage = _Stage(effort, organiser, free, capped, nursery, say)
            figures = await stage.play()
            nursery.cancel_scope.cancel()
    kept = {name: one["kept"] for name, one in figures.items() if "kept" in one}
    return {
        **figures,
        "kept": kept,
        "all_kept": all(kept.values()),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine,
    }


@dataclass
class _Stage:
    effort: CapsEffort
    organiser: LabPeer
    free: LabPeer
    capped: LabPeer
    nursery: trio.Nursery
    say: Talk

    async def play(self) -> dict[str, Any]:
        """All parts in order."""
        self.say("starting the organiser and a volunteer without caps")
        invite = await self._start_run()
        self.say("starting the volunteer with caps")
        midnight = midnight_at(time.time() + self.effort.midnight_in)
        await self._start_capped(invite, midnight)
        await self.capped.until(_is("first_samples_accepted"), "trained", ACCEPTED_SECONDS)
        self.say("waiting for the schedule to cross midnight, close and open")
        schedule = await self._see_schedule(midnight)
        self.say("training")
        await trio.sleep(self.effort.train_seconds)
        told = await self._what_is_told()
        self.say(f"pausing for {self.effort.pause_seconds:g} s")
        pause = await self._see_pause()
        self.say("leaving")
        await self.capped.keeper.ask("end")
        await self.free.keeper.ask("end")
        return {
            **self._traffic(),
            "plan": plan_figures(self.organiser.told, told["free_peer"], told["capped_peer"]),
            "told": told,
            "processor": self._processor(),
            "memory": self._memory(),
            "schedule": schedule,
            "pause": pause,
        }

    async def _start_run(self) -> str:
        run = self.organiser.folder / "run"
        await self.organiser.command("run", "init", str(run))
        (run / "run.toml").write_text(DEFINITION.format(batch=self.effort.batch))
        words = ["run", "start", str(run), "--keep-only", *listen_on(HOST)]
        await self.organiser.begin(self.nursery, words, _ONE_THREAD)
        started = await self.organiser.until(_is("started"), "started", START_SECONDS)
        invite = str(started["invite"])
        words = ["join", *listen_on(host_of(2))]
        await self.free.begin(self.nursery, words, {**_ONE_THREAD, "POTLUCK_INVITE": invite})
        await self.free.until(_is("began"), "begun", START_SECONDS)
        return invite

    async def _start_capped(self, invite: str, midnight: Midnight) -> None:
        effort = self.effort
        caps = {
            "--upload-limit": f"{effort.upload:.0f}B/s",
            "--download-limit": f"{effort.download:.0f}B/s",
            "--threads": f"{effort.threads}",
            "--max-memory": f"{effort.memory}B",
            "--schedule": midnight.schedule,
        }
        words = ["join", *listen_on(host_of(3))]
        words += [word for pair in caps.items() for word in pair]
        environment = {"POTLUCK_INVITE": invite, "TZ": midnight.zone}
        await self.capped.begin(self.nursery, words, environment)

    async def _see_schedule(self, midnight: Midnight) -> dict[str, Any]:
        """It trains over midnight, rests for the minute in which it is closed, and goes on."""
        to_monotonic = time.monotonic() - time.time()
        closes, opens = midnight.closes_at + to_monotonic, midnight.opens_at + to_monotonic
        paused = await self._paused(opens - time.monotonic())
        late = paused["at"] - closes
        rest = await self._rest(paused, opens)
        again = await self._accepted_again(opens)
        return {
            "schedule": midnight.schedule,
            "trained_over_midnight": self._trained_at(midnight.at),
            "closed_after_seconds": round(late, 2),
            "opened_after_seconds": round(rest.resumed_at - opens, 2),
            **rest.figures(),
            "accepted_again_after_seconds": round(again["at"] - opens, 1),
            "kept": rest.is_rest and 0.0 <= late <= LEEWAY_SECONDS,
        }

    def _trained_at(self, moment: float) -> bool:
        """Whether it computed in the ten seconds around that time of the day."""
        at = time.monotonic() - (time.time() - moment)
        used = used_between(self._readings(), at - 5.0, at + 5.0, "processor_seconds")
        return used > 10.0 * REST_PROCESSOR_SHARE

    async def _see_pause(self) -> dict[str, Any]:
        seconds = self.effort.pause_seconds
        typed = time.monotonic()
        answer = await self.capped.command("pause", "--for", f"{seconds:g}s")
        answered = time.monotonic()
        paused = await self._paused(seconds, after=typed)
        rest = await self._rest(paused, answered + seconds)
        again = await self._accepted_again(answered + seconds)
        before = waited_share(self.free.told, typed - self.effort.train_seconds, typed)
        meanwhile = waited_share(self.free.told, paused["at"], again["at"])
        return {
            "words": answer["words"],
            "began_after_seconds": round(paused["at"] - typed, 2),
            "ended_after_seconds": round(rest.resumed_at - answered - seconds, 2),
            **rest.figures(),
            "others_waited_percent_before": round(100 * before, 1),
            "others_waited_percent_meanwhile": round(100 * meanwhile, 1),
            "accepted_again_after_seconds": round(again["at"] - answered - seconds, 1),
            "kept": rest.is_rest and meanwhile <= before + WAITED,
        }

    async def _paused(self, seconds: float, after: float = 0.0) -> Told:
        return await self.capped.until(_is("paused"), "paused", seconds, after)

    async def _rest(self, paused: Told, opens: float) -> MeasuredRest:
        """Its use from then until it may go on, which it reports when it has caught up."""
        seconds = opens - time.monotonic() + ACCEPTED_SECONDS
        resumed = await self.capped.until(_is("resumed"), "gone on", seconds, paused["at"])
        return rest_of(self._readings(), paused["at"], opens, resumed["at"])

    async def _accepted_again(self, after: float) -> Told:
        def is_accepted(one: Told) -> bool:
            return bool(one["event"] == "step_taken" and one["own_samples"])

        return await self.capped.until(is_accepted, "trained again", ACCEPTED_SECONDS, after)

    async def _what_is_told(self) -> dict[str, Any]:
        """The messages about the capped volunteer at the one without caps."""
        capped = (await self.capped.command("status"))["peer_id"]
        free = (await self.free.command("status"))["peer_id"]
        seen = (await self.free.command("peers"))["peers"]
        found = next((one for one in seen if one["peer"] == capped), None)
        if found is None:
            raise BenchFailed("free does not know the capped peer.", why=f"It knows {seen}.")
        up, down = found["up_bytes_per_second"], found["down_bytes_per_second"]
        return {
            "capped_peer": capped,
            "free_peer": free,
            "up_bytes_per_second": up,
            "down_bytes_per_second": down,
            "reduces": found["reduces"],
            "kept": 0 < up <= self.effort.upload and 0 < down <= self.effort.download,
        }

    def _traffic(self) -> dict[str, Any]:
        readings, effort = self._readings(), self.effort
        up, down = worst_window(readings, "sent_bytes"), worst_window(readings, "received_bytes")
        return {
            "upload": rate_figures(up, effort.upload),
            "download": rate_figures(down, effort.download),
        }

    def _processor(self) -> dict[str, Any]:
        worst = worst_window(self._readings(), "processor_seconds")
        return {
            "threads": self.effort.threads,
            "worst_cores": round(worst, 3),
            "over_percent": round(100 * over(worst, self.effort.threads), 1),
            "kept": over(worst, self.effort.threads) <= OVER,
        }

    def _memory(self) -> dict[str, Any]:
        most, cap = most_memory(self._readings()), self.effort.memory
        measured = next((one for one in self.capped.told if one["event"] == "measured"), {})
        return {
            "cap": cap,
            "most_bytes": most,
            "over_percent": round(100 * over(most, cap), 1),
            "samples_at_once": measured.get("micro_batch"),
            "kept": over(most, cap) <= OVER,
        }

    def _readings(self) -> list[MeterReading]:
        assert self.capped.meter is not None
        return self.capped.meter.readings


_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}


def _is(event: str) -> Callable[[Told], bool]:
    return lambda one: bool(one["event"] == event)


# Flags and output


UPLOAD = "2MB/s"
DOWNLOAD = "2MB/s"
MEMORY = "650MB"
THREADS = 1
TRAIN_SECONDS = 60.0
PAUSE_SECONDS = 30.0
MIDNIGHT_SECONDS = 110.0


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_seconds

    parser = kinds.add_parser(
        "caps",
        help="whether a volunteer's caps hold, measured from outside (root, Linux)",
        description="Start a run of three real processes, each in a network namespace of its "
        "own: an organiser's peer that only keeps, a volunteer without caps, and one "
        "with all of them. Gradients of 25 MB travel uncompressed, so that the caps "
        "matter. The kernel's counts of the capped volunteer's packets, processor "
        "time and memory, with its children, are read five times a second.\n\n"
        "Its schedule crosses midnight (in a time zone where midnight is near), "
        "closes and opens again. Then it trains, and is paused. The result has the "
        "worst ten seconds of each figure that has a cap, the caps as the others "
        "know them and as the plan uses them, the volunteer's activity while it "
        "rests, and whether the others keep their pace then.\n\n"
        "It needs root, Linux and iproute2, takes about five minutes, and leaves "
        "nothing behind. The exit code is 1 if a cap was exceeded by more than 5 %.",
        example="sudo scripts/bench caps\nsudo scripts/bench caps --upload-limit 1MB/s --json",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "--upload-limit", default=UPLOAD, metavar="RATE", help=f"the cap of its upload ({UPLOAD})"
    )
    parser.add_argument(
        "--download-limit",
        default=DOWNLOAD,
        metavar="RATE",
        help=f"the cap of its download ({DOWNLOAD})",
    )
    parser.add_argument(
        "--max-memory", default=MEMORY, metavar="SIZE", help=f"the cap of its memory ({MEMORY})"
    )
    add_flag(
        parser, "--threads", positive_count, THREADS, "how many threads the capped volunteer has"
    )
    training = "how long the capped volunteer trains between the schedule and the pause"
    add_flag(parser, "--seconds", positive_seconds, TRAIN_SECONDS, training, metavar="SECONDS")
    pause = "how long the pause is"
    add_flag(parser, "--pause", positive_seconds, PAUSE_SECONDS, pause, metavar="SECONDS")
    midnight = "how long after the start it is midnight; the schedule closes a minute later"
    add_flag(parser, "--midnight", positive_seconds, MIDNIGHT_SECONDS, midnight, metavar="SECONDS")


def run(arguments: argparse.Namespace) -> int:
    from lab.bench.own_network import check_own_networks
    from node.core.caps.units import Measure

    upload = _cap(arguments.upload_limit, Measure.RATE)
    download = _cap(arguments.download_limit, Measure.RATE)
    memory = _cap(arguments.max_memory, Measure.SIZE)
    check_own_networks()

    effort = CapsEffort(
        upload=upload,
        download=download,
        threads=arguments.threads,
        memory=int(memory),
        train_seconds=arguments.seconds,
        pause_seconds=arguments.pause,
        midnight_in=arguments.midnight,
    )

    return report(
        arguments, partial(measure_caps, effort), _lines, lambda result: bool(result["all_kept"])
    )


def _cap(text: str, measure: Measure) -> float:
    from node.core.caps.units import amount

    found = amount(text, measure)
    if found is None:
        raise WrongUse("A cap that is not set cannot be measured.")
    return found


def _lines(result: dict[str, Any]) -> str:
    from node.core.caps.units import in_words

    lines = []
    for way in ("upload", "download"):
        one = result[way]
        rates = f"{in_words(one['worst_bytes_per_second'])}/s of {in_words(one['limit'])}/s"
        lines.append(f"{way:10}{rates} in the worst ten seconds ({one['over_percent']:+.1f} %)")
    processor, memory, plan = result["processor"], result["memory"], result["plan"]
    lines += [
        f"{'threads':10}{processor['worst_cores']:.2f} cores of {processor['threads']} in the "
        f"worst ten seconds ({processor['over_percent']:+.1f} %)",
        f"{'memory':10}{in_words(memory['most_bytes'])} of {in_words(memory['cap'])} at most "
        f"({memory['over_percent']:+.1f} %), {memory['samples_at_once']} samples at once",
        f"{'plan':10}the capped peer reduces {plan['capped_reduces']:.1%} of the vector, the other "
        f"{plan['free_reduces']:.1%}",
    ]
    for name in ("schedule", "pause"):
        rest = result[name]
        lines.append(
            f"{name:10}{rest['rest_seconds']:.1f} s with "
            f"{rest['processor_percent_of_a_core']:.1f} % of a core, "
            f"{in_words(rest['sent_bytes_per_second'])}/s sent, "
            f"{in_words(rest['received_bytes_per_second'])}/s received; memory from "
            f"{in_words(rest['memory_before'])} to {in_words(rest['memory_meanwhile'])}; accepted "
            f"again after {rest['accepted_again_after_seconds']:.1f} s"
        )
    missed = [name for name, kept in result["kept"].items() if not kept]
    lines.append(f"not kept: {', '.join(missed)}" if missed else "all were kept")
    return "\n".join(lines)
