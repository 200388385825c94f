"""What potluck itself claims, measured with peers of the product on a simulated network."""

from __future__ import annotations

from functools import partial
from typing import Final

from lab import Talk
from lab.reproduce.claim import Claim, ClaimFigures, Condition, Picture

ONE_SET_OF_BITS: Final = "after every step all peers that made it hold the same bits"
BACK_SECONDS: Final = 30.0
COUNTED: Final = 0.85  # of the samples; those that the dead had not brought in are lost
KEPT_SPEED: Final = 0.9
USED: Final = 0.8  # of the time, on 10 Mb/s up
ABOVE_PLAN: Final = 1.15
OUT_SECONDS: Final = 60.0


def _survivors(short: bool, say: Talk) -> ClaimFigures:
    from lab.simulate.virtual_run import RunPlan, simulate
    from protocols.accumulation.tracker import FEWEST_THAT_WAIT

    rows, found = [], []
    for peers, deaths in ((8, 3),) if short else ((8, 3), (16, 4), (16, 8), (16, 12)):
        say(f"{deaths} of {peers} die")
        figures = simulate(RunPlan(peers=peers, steps=3, seed=7, deaths=deaths), say)
        found.append((peers, deaths, figures))
        rows.append(
            [f"{deaths} of {peers}", f"{figures['variants_max']}", f"{figures['back_s']:.1f}",
             f"{figures['counted_share']:.1%}"]
        )  # fmt: skip
    all_figures = [figures for _, _, figures in found]
    halved = [
        figures["back_s"]
        for peers, deaths, figures in found
        if peers >= FEWEST_THAT_WAIT and 2 * deaths >= peers
    ]
    latest = max(f["back_s"] for f in all_figures if f["back_s"] not in halved)
    counted = min(figures["counted_share"] for figures in all_figures)
    return ClaimFigures(
        (
            "killed at once",
            "sets of bits after a step",
            "s until all are in a step",
            "samples kept",
        ),
        rows,
        (
            Condition(
                f"{ONE_SET_OF_BITS}.",
                all(f["variants_max"] == f["histories_max"] == 1 for f in all_figures),
            ),
            Condition(
                f"all survivors are in a new step within {latest:.0f} s of virtual time, where "
                f"more than half of the run is left ({BACK_SECONDS:g} are allowed).",
                latest <= BACK_SECONDS,
            ),
            *(_waited(halved) if halved else ()),
            Condition(
                f"{counted:.0%} of the samples or more are in steps ({COUNTED:.0%} are asked for).",
                counted >= COUNTED,
            ),
        ),
        Picture(
            {"until all are back": [(f"{d} of {n}", f["back_s"]) for n, d, f in found]},
            "peers killed at once",
            "seconds",
        ),
    )


def _waited(seconds: list[float]) -> tuple[Condition]:
    """Runs that lost half of their peers, which may be a cut in the network as well."""
    from protocols.accumulation.tracker import WAITS_FOR_MOST_SECONDS as WAITS

    return (
        Condition(
            "where half or less is left of 16 peers or more, the run first waits two minutes, "
            f"because the network may be cut, and goes on after {max(seconds):.0f} s at most "
            f"({WAITS + BACK_SECONDS:g} are allowed).",
            min(seconds) >= WAITS and max(seconds) <= WAITS + BACK_SECONDS,
        ),
    )


def _joining(short: bool, say: Talk) -> ClaimFigures:
    from lab.simulate.virtual_run import RunPlan, simulate

    rows, found = [], []
    for peers, newcomers in ((6, 2),) if short else ((4, 4), (8, 4), (8, 8)):
        say(f"{newcomers} come to {peers}")
        figures = simulate(RunPlan(peers=peers, steps=5, seed=7, newcomers=newcomers), say)
        found.append((peers, newcomers, figures))
        rows.append(
            [f"{newcomers} to {peers}",
             f"{figures['newcomers_in_within_two_steps']} of {figures['newcomers_judged']}",
             f"{figures['calm_steps_per_minute']:.2f}", f"{figures['steps_per_minute']:.2f}"]
        )  # fmt: skip
    all_figures = [figures for _, _, figures in found]
    slowest = min(f["steps_per_minute"] / f["calm_steps_per_minute"] for f in all_figures)
    return ClaimFigures(
        ("newcomers", "in one of two steps", "steps/min before", "steps/min while they come"),
        rows,
        (
            Condition(f"{ONE_SET_OF_BITS}.", all(f["variants_max"] == 1 for f in all_figures)),
            Condition(
                "every newcomer is in one of the first two steps that end after it came (those "
                "that came just before the run's end are not counted).",
                all(
                    f["newcomers_in_within_two_steps"] == f["newcomers_judged"] >= n / 2
                    for _, n, f in found
                ),
            ),
            Condition(
                f"the run is not held up: {slowest:.2f} of its steps a minute at the least "
                f"({KEPT_SPEED} are asked for).",
                slowest >= KEPT_SPEED,
            ),
        ),
        Picture(
            {
                "before": [(f"{n} to {p}", f["calm_steps_per_minute"]) for p, n, f in found],
                "while they come": [(f"{n} to {p}", f["steps_per_minute"]) for p, n, f in found],
            },
            "newcomers",
            "steps a minute",
        ),
    )


def _home_links(short: bool, say: Talk) -> ClaimFigures:
    from lab.reproduce.virtual import computing_seconds, planned_step, step_seconds
    from lab.simulate.virtual_run import RunPlan, simulate

    rows, found = [], []
    for megabits in (10,) if short else (5, 10, 50):
        say(f"{megabits} Mb/s up")
        plan = RunPlan(
            peers=4 if short else 8,
            steps=3,
            seed=7,
            rates=1.0,
            parameters=300_000,
            step_seconds=30.0,
            upload_bytes_per_second=megabits * 1e6 / 8,
            download_bytes_per_second=megabits * 1e7 / 8,
        )
        seconds, planned = step_seconds(simulate(plan, say)), planned_step(plan)
        used = computing_seconds(plan) / seconds
        found.append((megabits, seconds / planned, used, computing_seconds(plan) / planned))
        rows.append([f"{megabits}", f"{planned:.1f}", f"{seconds:.1f}", f"{used:.1%}"])
    slowest = max(share for _, share, _, _ in found)
    at_ten = next(used for megabits, _, used, _ in found if megabits == 10)
    return ClaimFigures(
        ("Mb/s up", "plan: s per step", "run: s per step", "of the time spent computing"),
        rows,
        (
            Condition(
                f"with 10 Mb/s up the peers compute for {at_ten:.0%} of the time "
                f"({USED:.0%} are asked for).",
                at_ten >= USED,
            ),
            Condition(
                f"a step takes at most {slowest:.2f} times as long as planned ({ABOVE_PLAN} are "
                "allowed).",
                slowest <= ABOVE_PLAN,
            ),
        ),
        Picture(
            {
                "run": [(float(megabits), used) for megabits, _, used, _ in found],
                "plan": [(float(megabits), planned) for megabits, _, _, planned in found],
            },
            "upload, Mb/s",
            "share of the time spent computing",
        ),
    )


def _revocation(short: bool, say: Talk) -> ClaimFigures:
    import trio

    from lab.bench.revocation import RevocationEffort, measure_revocation

    effort = RevocationEffort(nodes=4, outlaws=1) if short else RevocationEffort(8, outlaws=2)
    told = trio.run(partial(measure_revocation, effort, say))
    spreads = {
        "it runs": told["spread"]["revocation_seconds"],
        "it is down": told["spread"]["revocation_seconds_server_down"],
    }
    slowest = max(spread["max"] for spread in spreads.values())
    said = told["refused_as_revoked_share"]
    return ClaimFigures(
        ("the auth server", "first node, s", "half of the nodes, s", "last node, s"),
        [
            [name, f"{spread['min']:.1f}", f"{spread['p50']:.1f}", f"{spread['max']:.1f}"]
            for name, spread in spreads.items()
        ],
        (
            Condition(
                f"all {effort.nodes} nodes refuse each of {told['outlaws']} revoked members "
                f"{slowest:.1f} s after the moderator's command began, or sooner "
                f"({OUT_SECONDS:g} are allowed).",
                slowest <= OUT_SECONDS,
            ),
            Condition(
                f"{said:.0%} of the refusals say that the member is revoked (more than half are "
                "asked for; the others come as a closed connection).",
                said > 0.5,
            ),
        ),
        Picture(
            {
                name: [("first node", spread["min"]), ("half of them", spread["p50"]),
                       ("last node", spread["max"])]
                for name, spread in spreads.items()
            },
            "nodes that refuse the revoked",
            "seconds after the command",
        ),
    )  # fmt: skip


CLAIMS: Final = (
    Claim(
        "potluck-survivors",
        "README",
        "Every peer that survives a round holds the same bits, also when many are killed at once, "
        "and the run goes on.",
        "A simulated network and virtual time; peers compute without computing, and have a "
        "thousand values. `scripts/bench survival --kill 50` kills real processes in the middle "
        "of a round. hivemind is not measured with it, for it is no part of potluck: when a peer "
        "of hivemind 1.1.12 was killed so, its survivors held 59 % of the values as averaged among "
        "themselves, 20 % with the dead peer's, and 21 % as their own, not averaged at all.",
        _survivors,
    ),
    Claim(
        "potluck-joining",
        "README; DeDLOC, section 3.1",
        "Newcomers get into a run while it trains, and hold nobody up.",
        "A simulated network and virtual time; a newcomer's state takes half a second. "
        "`scripts/bench newcomer` measures it with large states and real processes.",
        _joining,
    ),
    Claim(
        "potluck-revocation",
        "docs/moderators.md; DeDLOC, appendix I.5",
        "A moderator revokes a member, and within a minute every node refuses it, also while the "
        "auth server is down.",
        "Nothing is simulated: an auth server, `potluck auth revoke` and 8 nodes (4 in the short "
        "form) in real time with their usual intervals, on one machine and without TLS. Each "
        "revoked member ignores that and goes on asking every node. `scripts/bench revocation` "
        "measures it with more.",
        _revocation,
    ),
    Claim(
        "potluck-home-links",
        "docs/organisers.md, on `potluck plan`",
        "On the links of homes, peers spend most of the time computing, and a step takes little "
        "longer than planned.",
        "A simulated network and virtual time: 8 peers (4 in the short form), 300,000 values in "
        "float32, 30 s of computing a step, downloads ten times as fast as uploads. "
        "`sudo scripts/bench homes` trains with real peers on such links.",
        _home_links,
    ),
)
