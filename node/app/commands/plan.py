"""`potluck plan FILE.toml|-`: which peers should compute, which reduce, and how fast it is."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from protocols.moshpit.plan_strategy import PlannedPeers, Strategy

_FILE = """\
  values = 25_600_000      # of the vector that is averaged
  bytes_per_value = 4      # on the wire: 4, 2 for float16, about 1 for int8
  batch = 32_768           # samples per step
  group_size = 64          # as in the run's definition; may be left out
  [[peer]]
  name = "alice"
  samples_per_s = 40       # 0 for a peer without a GPU
  up_mbps = 200
  down_mbps = 200
  computes = true          # true, false, or "auto" for the plan to decide
  dial_out_only = false    # true for a peer that nobody can dial: it reduces nothing
  [[link]]                 # optional, as many as there are: one direction between two peers
  from = "alice"
  to = "bob"
  mbps = 10
  relayed = true           # may be left out: the two only meet through a relay, which carries as
                           # much as a circuit by default if mbps is left out"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="plan which peers compute and which average",
        description="Plan for given peers and links which of them should compute gradients, and "
        "how much each should reduce, for the most steps per second. Show how long a round takes, "
        "beside plain all-reduce and the best single parameter server. Nothing is sent to "
        "anybody. As many peers as group_size, or more, average by cohorts, as in a run: a hash "
        "of their names deals them out.\n\n"
        f"{_FILE}\n\n"
        "solve_ms is the time of the planning alone, without reading the file or loading the "
        "solver for [[link]].",
        example="potluck plan docs/plans/d.toml\npotluck plan --json - < docs/plans/d.toml",
    )
    parser.add_argument(
        "file", metavar="FILE", help="the file with the peers and links; - reads stdin"
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.plan_file import read_plan_file
    from node.app.views.plan_view import plan_lines

    collaboration = read_plan_file(arguments.file)
    strategy, solve_ms = _solve(collaboration)
    output = Output.of(arguments)
    text = "" if output.json else plan_lines(collaboration, strategy, solve_ms)
    output.data(_mapping(strategy, solve_ms), text)
    return 0


def _solve(collaboration: PlannedPeers) -> tuple[Strategy, float]:
    from protocols.moshpit.plan_strategy import best_strategy

    if collaboration.limits:
        # Not counted: a running node loads it once.
        import scipy.optimize
        import scipy.sparse  # noqa: F401

    began = time.perf_counter()
    strategy = best_strategy(collaboration)
    return strategy, (time.perf_counter() - began) * 1000


def _mapping(strategy: Strategy, solve_ms: float) -> dict[str, Any]:
    by_cohorts = {
        "heads_seconds": strategy.heads_seconds,
        "cohorts": [
            {
                "peers": list(one.members),  # the head first
                "round_seconds": one.round_seconds,
                "handing_down_seconds": one.handing_down_seconds,
            }
            for one in strategy.cohorts
        ],
    }
    return {
        "fractions": list(strategy.fractions),
        "computes": list(strategy.computes),
        "round_seconds": strategy.round_seconds,
        "allreduce_seconds": strategy.allreduce_seconds,
        "parameter_server_seconds": strategy.parameter_server_seconds,
        "steps_per_second": strategy.steps_per_second,
        "solve_ms": solve_ms,
        **(by_cohorts if strategy.cohorts else {}),
    }
