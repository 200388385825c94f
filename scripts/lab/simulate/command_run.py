"""`scripts/simulate run`: flags and output. virtual_run.py does the simulating."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lab import NOTHING_MEASURED
from lab.plot import add_plot_flag, check_plot
from lab.simulate.command_dht import share
from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.output import Output
from node.core.caps.units import Measure, amount
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from lab.simulate.virtual_run import RunPlan
    from node.app.cli.parser import Subparsers

PEERS = 16
MOST_PEERS = 2048  # hours of one core
STEPS = 20
SEED = 7
LATENCY_SECONDS = 0.02
PARAMETERS = 1000
STEP_SECONDS = 10.0
BATCH_SECONDS = 1.0
BATCH_SAMPLES = 8
GROUP_SIZE = 64
LARGEST_GROUP = 256

FIGURES = {
    "variants_max": "how many different sets of parameters the peers had after any one step: 1 "
    "is the promise; variants has the number for each step",
    "histories_max": "with how many different histories any one epoch was reached: 1 is the "
    "promise, more is a fork",
    "steps_per_minute": "in virtual time; calm_steps_per_minute is for the calm steps before any "
    "peer died or came",
    "longest_gap_s": "the longest time without a new step",
    "stopped": "whether a signal ended it; then the figures cover the time until then",
    "counted_share": "of all samples that were computed for these steps, the share that is in them",
    "share_in_step_min, …_p50": "share of the living peers that were in a step",
    "without_place": "living peers at the end that only followed the last step: their cohort has "
    "more peers than --group-size, since a hash deals peers to cohorts",
    "liars_named": "of the liars, those whose samples did not count at some honest peer; all other "
    "figures of steps are of the honest peers",
    "back_s": "from the end of --deaths or --partition until all who live were in a new step",
    "newcomers_in_within_two_steps": "newcomers that were in the first or the second step that "
    "ended after they came; newcomer_steps says for each in "
    "which step it was, and newcomers_never_in how many saw "
    "both and were in none",
    "commit_s_p50, …_max": "from the sample that completes the target batch, or the step's samples "
    "if these are fewer, to a peer's step",
    "calls_per_s_p50": "calls of one peer to the directory",
    "sent_bytes_per_s_p50": "all bytes that one peer sends; control_bytes_per_s_p50 is without the "
    "values that it sends in rounds, and hottest_bytes_per_s for the peer that sent the most",
    "cpu_ms_per_s": "processor time per peer and virtual second, with the simulated network; "
    "this, memory_MiB (of the process, per peer) and wall_seconds do not depend on the seed alone",
}


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, number_or_zero, positive_count, positive_seconds

    width = max(len(name) for name in FIGURES)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in FIGURES.items())
    parser = kinds.add_parser(
        "run",
        help="whole training runs: peers that train, die and come",
        description="Let peers train together in virtual time, with the lifecycle, the progress, "
        "the directory and the averaging of real nodes, on a simulated network. A batch takes "
        "virtual time and no processor time, and a newcomer's state takes half a second. After "
        "every step it is checked that all peers hold the same bits. If they do not, or if the "
        f"steps were not made, the exit code is {FAILED}. The same seed gives the same run."
        f"\n\n{figures}",
        example="scripts/simulate run --peers 16 --steps 5\n"
        "scripts/simulate run --peers 64 --churn 600 --json\n"
        "scripts/simulate run --peers 64 --up 1Mbit/s\n"
        "scripts/simulate run --peers 16,64,256 --plot sizes.svg",
    )
    parser.set_defaults(simulate=run)
    add_flag(
        parser,
        "--peers",
        _counts,
        str(PEERS),
        "how many peers; several numbers with commas between them are runs one after the other",
        metavar="N",
    )
    add_flag(parser, "--steps", positive_count, STEPS, "how many steps are judged")
    parser.add_argument(
        "--churn",
        type=positive_seconds,
        metavar="SECONDS",
        help="let peers die at random, after this time on average, and let a new one come for "
        "each; five calm steps come before that (nobody dies)",
    )
    add_flag(
        parser, "--newcomers", _whole, 0, "how many more newcomers come, spread over the steps"
    )
    add_flag(
        parser, "--deaths", _whole, 0, "how many peers die at the same moment, after the first step"
    )
    for flag, what in (
        ("--partition", "cut this share of the peers off for a minute, after the first step"),
        (
            "--liars",
            "let this share of the peers lie, each in one of seven ways, after the calm steps",
        ),
        ("--dial-out", "let this share of the peers only dial out"),
    ):
        add_flag(parser, flag, share, 0.0, what, metavar="SHARE")
    parser.add_argument(
        "--rates",
        type=_factor,
        metavar="FACTOR",
        help="let the fastest peer compute this many times as fast as the slowest (1.7)",
    )
    add_flag(
        parser,
        "--latency",
        number_or_zero,
        LATENCY_SECONDS,
        "the delay of every link, one way",
        metavar="SECONDS",
    )
    for flag, way in (("--up", "upload"), ("--down", "download")):
        parser.add_argument(
            flag,
            type=_rate,
            metavar="RATE",
            help=f"the rate of each peer's {way}, for example 1Mbit/s (no limit)",
        )
    add_flag(
        parser, "--parameters", positive_count, PARAMETERS, "how many parameters the model has"
    )
    parser.add_argument(
        "--target",
        type=positive_count,
        metavar="SAMPLES",
        help="how many samples a step has; by default as many as all peers compute in "
        "--step-seconds",
    )
    add_flag(
        parser,
        "--step-seconds",
        positive_seconds,
        STEP_SECONDS,
        "how long all peers together compute for a step",
        metavar="SECONDS",
    )
    add_flag(
        parser,
        "--batch-seconds",
        positive_seconds,
        BATCH_SECONDS,
        "how long a peer computes a batch; each peer has its own time, up to a quarter shorter "
        "or longer",
        metavar="SECONDS",
    )
    add_flag(parser, "--batch", positive_count, BATCH_SAMPLES, "samples of a batch")
    add_flag(
        parser,
        "--group-size",
        positive_count,
        GROUP_SIZE,
        "how many peers may be in one group; more average by cohorts",
    )
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="let more peers take part, over a grid, as a definition may ask for",
    )
    add_flag(parser, "--seed", int, SEED, "the seed of all random choices")
    add_plot_flag(parser, "the costs over the number of peers")


def run(arguments: argparse.Namespace) -> int:
    plans = [_plan(arguments, peers) for peers in arguments.peers]
    if arguments.plot:
        if len(plans) == 1:
            raise WrongUse(
                "--plot compares runs of several sizes, and this is one.",
                advice="Name several, such as --peers 16,64,256.",
            )
        check_plot(arguments.plot)
    output = Output.of(arguments)
    if len(plans) == 1:
        code, figures = _simulated(
            plans[0], output, lambda figures: output.data(figures, _table(figures))
        )
        return code if figures else _nothing(output, code)
    code, runs = DONE, []
    for plan in plans:
        ended, figures = _simulated(plan, output, lambda _: None)
        runs += [figures] if figures else []
        code = code or ended
        if not figures or figures["stopped"]:
            break
    if not runs:
        return _nothing(output, code)
    from lab.simulate.run_view import by_peers, draw, growth

    output.data({"runs": runs, "growth": growth(runs)}, by_peers(runs))
    if arguments.plot:  # after the figures, which are not lost if the file cannot be written
        draw(runs, arguments.plot)
        output.say(f"wrote {arguments.plot}")
    return code


def _nothing(output: Output, code: int) -> int:
    output.say(NOTHING_MEASURED)
    return code


def _simulated(
    plan: RunPlan, output: Output, show: Callable[[dict[str, Any]], None]
) -> tuple[int, dict[str, Any]]:
    """The exit code and the figures of one run. `show` gets them as soon as they are there."""
    import trio

    from lab.simulate.virtual_run import Figures, broken_promises, simulate
    from node.app.cli.interruption import run_until_signal

    stop = trio.Event()
    code = DONE

    def tell(figures: Figures) -> None:
        nonlocal code
        show(figures)
        if figures["stopped"]:
            output.say(f"Stopped after {figures['steps']} of {figures['steps_wanted']} steps.")
        for one in broken_promises(figures):
            output.say(one)
            code = FAILED

    def leave() -> bool:
        stop.set()
        return True

    def run_under(main: Callable[[], Awaitable[Figures]], clock: trio.abc.Clock) -> Figures:
        figures: Figures = {}

        async def keep_figures() -> int:
            figures.update(await main())
            return code

        nonlocal code
        code = run_until_signal(keep_figures, leave=leave, clock=clock)
        return figures

    with _without_the_peers_words():
        figures = simulate(plan, output.say, tell=tell, stop=stop, run=run_under)
    return code, figures


@contextmanager
def _without_the_peers_words() -> Iterator[None]:
    """Silences the peers: each of many warns of every other that dies, and the figures tell it."""
    log = logging.getLogger("potluck")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _plan(arguments: argparse.Namespace, peers: int) -> RunPlan:
    if not 2 <= peers <= MOST_PEERS:
        raise WrongUse(
            f"A run of {peers} cannot be simulated.", why=f"It has 2 to {MOST_PEERS:,} peers."
        )
    if not 2 <= arguments.group_size <= LARGEST_GROUP:
        raise WrongUse(f"A group has 2 to {LARGEST_GROUP} members.")
    _check_places(arguments, peers + arguments.newcomers)
    from lab.simulate.virtual_run import RunPlan

    return RunPlan(
        peers=peers,
        steps=arguments.steps,
        seed=arguments.seed,
        mean_life_seconds=arguments.churn,
        newcomers=arguments.newcomers,
        deaths=arguments.deaths,
        partition=arguments.partition,
        liars=arguments.liars,
        dial_out=arguments.dial_out,
        rates=arguments.rates,
        latency_seconds=arguments.latency,
        upload_bytes_per_second=arguments.up,
        download_bytes_per_second=arguments.down,
        parameters=arguments.parameters,
        target=arguments.target,
        step_seconds=arguments.step_seconds,
        batch_seconds=arguments.batch_seconds,
        batch_samples=arguments.batch,
        group_size=arguments.group_size,
        approximate=arguments.approximate,
    )


def _check_places(arguments: argparse.Namespace, peers: int) -> None:
    """WrongUse if so many peers cannot all take part: those beyond the groups only follow."""
    from protocols.moshpit.cohorts import SMALLEST_GROUP, settled_count

    size = arguments.group_size
    cohorts = settled_count(peers, size)
    if arguments.approximate or peers <= cohorts * size:
        return
    why = f"They would be {cohorts} cohorts." if cohorts > 1 else "They would be one group."
    if size < SMALLEST_GROUP:
        why = f"Only groups of {SMALLEST_GROUP} or more make cohorts."
    raise WrongUse(
        f"{peers:,} peers are too many for groups of {size}.",
        why=f"{why} Those beyond a group have no place in the run, and only follow it.",
        advice=f"Take a larger --group-size, up to {LARGEST_GROUP}, fewer peers, or --approximate.",
    )


def _rate(text: str) -> float | None:
    """An argparse type: a link's capacity in bytes per second; None is without limit."""
    try:
        return amount(text, Measure.RATE)
    except WrongUse as error:
        told = " ".join(part for part in (error.why, error.advice, error.what) if part)
        raise argparse.ArgumentTypeError(told.removesuffix(".")) from error  # argparse ends it


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of peers."""
    from node.app.cli.parser import positive_count

    return tuple(map(positive_count, text.split(",")))


def _factor(text: str) -> float:
    """An argparse type: how many times as fast."""
    from node.app.cli.parser import positive_number

    factor = positive_number(text)
    if factor < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return factor


def _whole(text: str) -> int:
    """An argparse type: a whole number from zero."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from zero")
    return int(text)


def _table(figures: dict[str, Any]) -> str:
    rows = {
        name: value
        for name, value in figures.items()
        if value is not None and not isinstance(value, list) and name != "trace"
    }
    width = max(len(name) for name in rows)
    return "\n".join(
        f"{name:{width}}  {value:,}" if isinstance(value, int) else f"{name:{width}}  {value:,g}"
        for name, value in rows.items()
    )
