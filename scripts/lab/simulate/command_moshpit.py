"""`scripts/simulate moshpit`: flags and output. moshpit.py does the simulating."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lab.plot import add_plot_flag, check_plot
from node.app.cli.output import Output
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from lab.simulate.moshpit import AveragingPlan
    from node.app.cli.parser import Subparsers
    from protocols.moshpit.grid import Grid

PEERS = 1024
ROUNDS = 10
SEED = 7
MOST_PEERS = 1_000_000  # ten seconds a round, and some hundred MB
MOST_ROUNDS = 10_000

METHODS = {
    "moshpit": "groups by the grid; the members of a group are in different groups next",
    "random": "as many groups as the grid has, chosen anew for each round",
    "allreduce": "all peers in one group; it starts again when one fails",
    "gossip": "on a ring, the mean with both neighbours",
    "pushsum": "each sends half of its value and weight to the peer 2^t places on",
}


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    width = max(len(name) for name in METHODS)
    methods = "\n".join(f"  {name:{width}}  {what}" for name, what in METHODS.items())
    parser = kinds.add_parser(
        "moshpit",
        help="averaging in groups: how fast a swarm comes to agree",
        description="Give each peer a random number and let all of them find the average in "
        "rounds, as in the experiment of the Moshpit paper. With --json, mean_squared_deviation "
        "says how far from it they are before the first round and after each. All methods begin "
        "with the same numbers and have the same failures. The same seed gives the same figures."
        "\n\n"
        f"{methods}",
        example="scripts/simulate moshpit --json\n"
        "scripts/simulate moshpit --method all --failure-rate 0.005\n"
        "scripts/simulate moshpit --peers 768 --failure-rate 0.005 --plot deviation.png",
    )
    parser.set_defaults(simulate=run)
    add_flag(parser, "--peers", positive_count, PEERS, "how many peers")
    add_flag(parser, "--rounds", positive_count, ROUNDS, "how many rounds")
    parser.add_argument(
        "--failure-rate",
        type=_probability,
        default=0.0,
        metavar="P",
        help="the probability that a peer is missing in a round; it is back in the next (0)",
    )
    parser.add_argument(
        "--on-failure",
        choices=("leave-out", "discard"),
        default="leave-out",
        help="the effect of a failure on a group: the others average without the peer, or the "
        "round has no result for the group (leave-out)",
    )
    parser.add_argument(
        "--method",
        action="append",
        choices=(*METHODS, "all"),
        metavar="METHOD",
        help="which of the methods above, or all; may be given several times (moshpit; all with"
        " --plot)",
    )
    parser.add_argument(
        "--grid",
        type=_grid,
        metavar="M,D",
        help="how wide the grid is and how many dimensions it has (32,2 if that is more than half"
        " full, else as few cells as hold all in groups of at most 32)",
    )
    parser.add_argument(
        "--first-index",
        choices=("cells", "numbered", "random"),
        default="cells",
        help="where peers begin: each in a random cell of its own, in the cell of its number, or "
        "in any cell, as real peers do, which have no numbers (cells)",
    )
    parser.add_argument(
        "--groups",
        type=positive_count,
        metavar="N",
        help="how many random groups there are (as many as the grid has)",
    )
    parser.add_argument(
        "--trials",
        type=positive_count,
        default=1,
        metavar="N",
        help="how many times to repeat it with other numbers and failures; the result is the "
        "mean (1)",
    )
    add_flag(parser, "--seed", int, SEED, "the seed of all random choices")
    add_plot_flag(parser, "the result")


def run(arguments: argparse.Namespace) -> int:
    from lab.simulate.moshpit import simulate
    from lab.simulate.moshpit_view import table, title

    output = Output.of(arguments)
    plan = _plan(arguments)
    if arguments.plot:
        check_plot(arguments.plot)
    result = simulate(plan)
    if arguments.plot:
        from lab.simulate.moshpit_view import draw

        draw(result["methods"], title(result), arguments.plot)
        output.say(f"wrote {arguments.plot}")
    output.data(result, table(result))
    return 0


def _plan(arguments: argparse.Namespace) -> AveragingPlan:
    from lab.simulate.moshpit import METHODS as KNOWN
    from lab.simulate.moshpit import AveragingPlan, usual_grid

    peers, groups = arguments.peers, arguments.groups
    if not 2 <= peers <= MOST_PEERS:
        raise WrongUse(f"{peers} peers cannot be simulated.", why=f"It is 2 to {MOST_PEERS:,}.")
    if arguments.rounds > MOST_ROUNDS:
        raise WrongUse(f"{arguments.rounds} rounds are too many.", why=f"At most {MOST_ROUNDS:,}.")
    if arguments.seed < 0:
        raise WrongUse("A seed is not negative.", advice="Take any number from 0.")
    if groups and groups > peers:
        raise WrongUse(f"{peers} peers cannot be in {groups} groups.", advice="Take fewer groups.")
    grid = arguments.grid or usual_grid(peers)
    if arguments.first_index != "random" and grid.cells < peers:
        raise WrongUse(
            f"{peers} peers do not find a cell each in a grid of {grid.cells} cells.",
            advice="Take a larger grid, or let them share cells: --first-index random.",
        )
    wanted = arguments.method or (["all"] if arguments.plot else ["moshpit"])
    return AveragingPlan(
        peers=peers,
        rounds=arguments.rounds,
        methods=KNOWN if "all" in wanted else tuple(dict.fromkeys(wanted)),
        grid=grid,
        first_index=arguments.first_index,
        random_groups=groups,
        failure_rate=arguments.failure_rate,
        discards=arguments.on_failure == "discard",
        trials=arguments.trials,
        seed=arguments.seed,
    )


def _probability(text: str) -> float:
    """An argparse type: from 0 to 1."""
    try:
        probability = float(text)
    except ValueError:
        probability = float("nan")
    if not 0 <= probability <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability, such as 0.005")
    return probability


def _grid(text: str) -> Grid:
    """An argparse type: the width and the number of dimensions, such as 32,2."""
    from protocols.moshpit.grid import Grid

    try:
        width, dimensions = map(int, text.split(","))
        return Grid(width, dimensions)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid, such as 32,2") from error
