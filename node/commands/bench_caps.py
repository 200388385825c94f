"""`potluck bench caps`: whether a volunteer's caps hold, measured from outside."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.caps.units import Measure
    from node.commands.parser import Subparsers

UPLOAD = "2MB/s"
DOWNLOAD = "2MB/s"
MEMORY = "650MB"
THREADS = 1
TRAIN_SECONDS = 60.0
PAUSE_SECONDS = 30.0
MIDNIGHT_SECONDS = 110.0


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count, positive_seconds

    parser = kinds.add_parser(
        "caps",
        help="whether a volunteer's caps hold, measured from outside (root, Linux)",
        description="Start a run of three real processes, each in a network namespace of its own: "
        "an organiser's peer that only keeps, a volunteer without caps, and one with all of them. "
        "Gradients of 25 MB travel as they are, so the caps bind. The kernel counts the capped "
        "one's packets, processor time and memory, its children's included, five times a second.\n"
        "\nIts schedule crosses midnight (in a time zone where that is near), closes and opens "
        "again; then it trains, and is paused. Told are the worst ten seconds of everything that "
        "has a cap, what the others are told of the caps and what the plan makes of them, what it "
        "does while it rests, and whether the others go on at their pace meanwhile.\n\n"
        "It needs root, Linux and iproute2, and takes some five minutes; nothing of it is left "
        "afterwards. Exit code 1 if a cap was exceeded by more than 5 %.",
        example="sudo potluck bench caps\nsudo potluck bench caps --upload-limit 1MB/s --json",
    )
    parser.add_argument("--upload-limit", default=UPLOAD, metavar="RATE", help=f"({UPLOAD})")
    parser.add_argument("--download-limit", default=DOWNLOAD, metavar="RATE", help=f"({DOWNLOAD})")
    parser.add_argument("--max-memory", default=MEMORY, metavar="SIZE", help=f"({MEMORY})")
    add_flag(parser, "--threads", positive_count, THREADS, "of the capped volunteer")
    training = "how long it trains between the schedule and the pause"
    add_flag(parser, "--seconds", positive_seconds, TRAIN_SECONDS, training, metavar="SECONDS")
    pause = "how long the pause is"
    add_flag(parser, "--pause", positive_seconds, PAUSE_SECONDS, pause, metavar="SECONDS")
    midnight = "when it is midnight, after the start; the schedule closes a minute later"
    add_flag(parser, "--midnight", positive_seconds, MIDNIGHT_SECONDS, midnight, metavar="SECONDS")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.own_network import check_own_networks
    from node.caps.units import Measure

    upload = _cap(arguments.upload_limit, Measure.RATE)
    download = _cap(arguments.download_limit, Measure.RATE)
    memory = _cap(arguments.max_memory, Measure.SIZE)
    check_own_networks()

    from node.bench.caps import CapsEffort, measure_caps
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = CapsEffort(
        upload=upload,
        download=download,
        threads=arguments.threads,
        memory=int(memory),
        train_seconds=arguments.seconds,
        pause_seconds=arguments.pause,
        midnight_in=arguments.midnight,
    )

    async def measure() -> int:
        result = await measure_caps(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["all_kept"] else 1

    return run_until_signal(measure)


def _cap(text: str, measure: Measure) -> float:
    from node.caps.units import amount

    found = amount(text, measure)
    if found is None:
        raise WrongUse("What has no limit has nothing to be measured against.")
    return found


def _lines(result: dict[str, Any]) -> str:
    from node.caps.units import in_words

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
