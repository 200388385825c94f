"""`potluck bench state`: fetching a state from peers, of which one dies and one lies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

MEGABYTES = 100.0
MEGABITS = 40.0
ROUNDS = 5
PAIRS = 12
PARTS = ("shaped", "speed", "training", "newcomers")
NEWCOMERS = 2
STEP_SECONDS = 0.28
NEWCOMERS_MEGABYTES = 3.6
BAR_SECONDS = 10.0
BAR = 0.9  # of what the links carry
BAR_OF_ALONE = 0.95


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count, positive_number

    parser = kinds.add_parser(
        "state",
        help="fetching a state from peers, of which one dies and one lies",
        description="Have a newcomer fetch a state from three real peers on this machine, behind "
        "links of a known rate. Half-way one of them is killed and another begins to corrupt what "
        "it sends. Then the same from three, and from one, without limits; and from one that "
        "trains meanwhile, at the pace of those who do. And some newcomers at once in a run that "
        "makes its steps meanwhile.\n\n"
        "  of_what_the_links_carry  the time the links would need, by the time it took\n"
        "  liar_named               whether the peer that corrupted was found and named\n"
        "  training_donor           steps per second of a donor that trains, of those alone\n"
        "  three_donors, one_donor  MiB per second without limits, CPU seconds of all, and what\n"
        "                           naming a state by its digest takes\n"
        "  newcomers                after how long each had a part in a step, who was told that\n"
        "                           it is too slow, and how much longer the passes of the peer\n"
        "                           took that served them\n\n"
        f"Exit code 1 if the state is not verified, the liar not named, less than {BAR:g} of "
        f"what the links carry was used, a donor that trains makes less than {BAR_OF_ALONE:g} "
        f"of its steps, or a newcomer is not in after {BAR_SECONDS:g} s.",
        example="potluck bench state --json\n"
        "potluck bench state --megabytes 20 --rounds 1\n"
        "potluck bench state --only training\n"
        "potluck bench state --only newcomers --newcomers 5 --step-seconds 0.5",
    )
    link = "what each donor's link carries, in Mb/s"
    rounds = "how many fetches without limits are measured, after a first one"
    add_flag(parser, "--megabytes", positive_number, MEGABYTES, "how large the state is")
    add_flag(parser, "--megabits", positive_number, MEGABITS, link)
    add_flag(parser, "--rounds", positive_count, ROUNDS, rounds)
    pairs = "how often a donor that trains serves, and trains alone for as long"
    add_flag(parser, "--pairs", positive_count, PAIRS, pairs)
    add_flag(parser, "--newcomers", positive_count, NEWCOMERS, "how many come at once")
    seconds = "how long the run's steps take before they come"
    add_flag(parser, "--step-seconds", positive_number, STEP_SECONDS, seconds)
    size = "how large the state is that they take"
    add_flag(parser, "--newcomers-megabytes", positive_number, NEWCOMERS_MEGABYTES, size)
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        help="measure this part only; may be given several times (all four)",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.bench.newcomers import NewcomersEffort
    from node.bench.state import StateEffort, measure_state
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = StateEffort(
        state_bytes=round(arguments.megabytes * 1e6),
        link_bytes_per_second=arguments.megabits * 1e6 / 8,
        rounds=arguments.rounds,
        pairs=arguments.pairs,
        parts=tuple(dict.fromkeys(arguments.only or PARTS)),
        newcomers=NewcomersEffort(
            arguments.newcomers,
            arguments.step_seconds,
            round(arguments.newcomers_megabytes * 1e6),
        ),
    )

    async def measure() -> int:
        result = await measure_state(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    if (shaped := result.get("shaped")) is not None:
        lines += [
            f"one killed, one lying: {shaped['fetch_s']:.2f} s, "
            f"{shaped['of_what_the_links_carry'] * 100:.1f} % of what the links carry, "
            f"{'verified' if shaped['verified'] else 'NOT VERIFIED'}",
            f"undisturbed: {shaped['undisturbed_s']:.2f} s, "
            f"{shaped['undisturbed_of_what_the_links_carry'] * 100:.1f} % of what the links carry",
            f"the liar: {shaped['liar']}: {shaped['liar_did'] or 'NOT NAMED'}",
        ]
    if (training := result.get("training_donor")) is not None:
        lines.append(
            f"a donor that trains: {training['of_alone_p50'] * 100:.1f} % of its steps alone "
            f"({training['spread']['min'] * 100:.1f} to {training['spread']['max'] * 100:.1f}), "
            f"serving {training['served_MB_per_s']:.1f} MB/s"
        )
    for name in ("three_donors", "one_donor"):
        if (figures := result.get(name)) is not None:
            lines.append(
                f"{name.replace('_', ' ')} without limits: {figures['MiB_per_s_p50']:.1f} MiB/s "
                f"({figures['spread']['min']:.1f} to {figures['spread']['max']:.1f}), "
                f"{figures['cpu_s']:.2f} CPU s, the first {figures['first_fetch_s']:.2f} s, "
                f"digest {figures['digest_s'] * 1000:.0f} ms"
            )
    if (newcomers := result.get("newcomers")) is not None:
        seconds = ", ".join(f"{one:.1f}" for one in newcomers["in_after_s"]) or "never"
        lines.append(
            f"{newcomers['newcomers']} newcomers at once: in after {seconds} s, "
            f"{newcomers['never_in']} not in, {len(newcomers['told_too_slow_s'])} told too slow, "
            f"passes of the peer that served {newcomers['slowdown'] * 100:+.1f} %"
        )
    machine = result["machine"]
    lines.append(f"{machine['processor']}, {machine['cores_usable']} cores, {result['seconds']} s")
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
