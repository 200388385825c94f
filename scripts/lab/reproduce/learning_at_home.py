"""The claims of Learning@home. The layer, the trainer and the search are those of the product."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from lab import Talk
from lab.reproduce.claim import Claim, ClaimFigures, Condition, Picture

# -- section 4.1: throughput

KEPT: Final = 0.85  # of the throughput without delay, with many batches in flight
KEPT_SHORT: Final = 0.6  # the batches of the short form are too small to hide much
LOST: Final = 10.0  # times as slow naive model parallelism becomes: an order of magnitude
LOST_SHORT: Final = 3.0


def _throughput(short: bool, say: Talk) -> ClaimFigures:
    import trio

    from lab.bench.experts_delay import DelayEffort, measure_delays

    effort = (
        DelayEffort((0.0, 20.0), in_flight=32, seconds=1.0, width=128, inner=256, batch=64)
        if short
        else DelayEffort((0.0, 50.0, 100.0, 200.0))
    )
    result = trio.run(partial(measure_delays, effort, say))
    told, longest = result["delays"], result["delays"][-1]
    slower = 1.0 / longest["naive_kept"]
    alone = 1.0 / told[0]["naive_per_s"]
    added = 1.0 / longest["naive_per_s"] - alone
    kept, lost = (KEPT_SHORT, LOST_SHORT) if short else (KEPT, LOST)
    return ClaimFigures(
        ("delay, ms", f"{effort.in_flight} in flight, batches/s", "one at a time, batches/s"),
        [
            [f"{row['delay_ms']:g}", f"{row['async_per_s']:.2f}", f"{row['naive_per_s']:.2f}"]
            for row in told
        ],
        (
            Condition(
                f"with {longest['delay_ms']:g} ms, {longest['async_kept']:.0%} of the throughput "
                f"without delay are left ({kept:.0%} are asked for).",
                longest["async_kept"] >= kept,
            ),
            Condition(
                f"naive model parallelism becomes {slower:.0f} times as slow ({lost:g} times are "
                "asked for; the paper: by an order of magnitude).",
                slower >= lost,
                because=f"A batch computes for {alone:.2f} s on this processor, and the delays add "
                f"{added:.1f} s. They make it {lost:g} times as slow if it computes for less than "
                f"{added / (lost - 1):.2f} s, as on a GPU.",
            ),
        ),
        Picture(
            {
                f"{effort.in_flight} in flight": [(r["delay_ms"], r["async_per_s"]) for r in told],
                "one at a time": [(r["delay_ms"], r["naive_per_s"]) for r in told],
            },
            "mean delay of a call, ms",
            "batches per second",
            is_log=True,
        ),
    )


# -- section 4.2: convergence

WORSE: Final = 0.01  # of the held-out digits, than the dense network
LEARNT: Final = 0.5  # of the held-out digits; a tenth is luck


def _convergence(short: bool, say: Talk) -> ClaimFigures:
    import torch
    import trio

    from lab.bench.experts_convergence import in_flight
    from lab.bench.experts_tasks import Arm, DigitsTask, train

    torch.set_num_threads(1)  # there are threads enough
    batches = 240 if short else 3000
    arms = [Arm(1, 0.0, 1, 0.0)]
    for delay in (100.0,) if short else (100.0, 1000.0):
        arms += [
            Arm(experts, delay, in_flight(delay), 0.1)
            for experts in ((16,) if short else (4, 16, 64, 256))
        ]
    rows, finals = [], []
    lines = {}
    for arm in arms:
        name = "dense network" if arm.is_dense else f"{arm.experts} experts, {arm.delay_ms:g} ms"
        say(name)
        told = trio.run(
            partial(train, DigitsTask(), arm, seed=0, batches=batches, look_every=batches // 10)
        )
        finals.append(told["final"])
        lines[name] = told["curve"]
        rows.append(
            [name, f"{arm.failure_rate:.0%}", f"{told['final']:.4f}", f"{told['staleness']:.0f}"]
        )
    least = min(finals[1:])
    return ClaimFigures(
        ("model", "calls that fail", "right on held-out digits", "batches of staleness"),
        rows,
        (
            Condition(
                "every model learns in spite of delays and failures: "
                f"{min(finals):.2f} of the digits at the least ({LEARNT} are asked for).",
                min(finals) >= LEARNT,
            ),
            *(() if short else (_reaches_dense(finals[0], least),)),
        ),
        Picture(lines, "batches", "right on held-out digits"),
    )


def _reaches_dense(dense: float, least: float) -> Condition:
    return Condition(
        f"every mixture reaches the dense network but for {WORSE:g}: {least:.4f} at the least "
        f"beside {dense:.4f}.",
        least >= dense - WORSE,
    )


# -- section 3.2 and algorithm 1: the gate

CHOSEN: Final = 4
EXAMPLES: Final = 64
DEEP: Final = 2  # dimensions of each grid


def _gate(short: bool, say: Talk) -> ClaimFigures:
    rows, wrong = [], 0
    lines: dict[str, list[tuple[float | str, float]]] = {"search": []}
    most = 0.0
    sides = (4, 16, 64) if short else (4, 16, 64, 256)
    for side in sides:
        experts = side**DEEP
        say(f"{experts:,} experts")
        seconds, read, mistakes = _search(side, tries=5 if short else 20)
        wrong += mistakes
        most = max(most, read / (1 + CHOSEN * EXAMPLES))
        rows.append([f"{experts:,}", f"{read}", f"{read / experts:.2f}", f"{1000 * seconds:.2f}"])
        lines["search"].append((float(experts), 1000 * seconds))
    times = [seconds for _, seconds in lines["search"]]
    growth, more = times[-1] / times[0], (sides[-1] / sides[0]) ** DEEP
    return ClaimFigures(
        ("experts", "prefixes read for a batch", "prefixes for each expert", "ms for a batch"),
        rows,
        (
            Condition(
                f"{more:,.0f} times as many experts cost {growth:.1f} times the time, less than "
                f"their root ({more**0.5:.0f}).",
                growth < more**0.5,
            ),
            Condition(
                f"no search reads more than d k prefixes an example: {most:.0%} of that at most.",
                most <= 1.0,
            ),
            Condition("every search finds what a look at all experts finds.", not wrong),
        ),
        Picture(lines, "experts", "ms for a batch", is_log=True),
    )


def _search(side: int, tries: int) -> tuple[float, int, int]:
    """The fastest time of some searches, the prefixes that one read, and how many were wrong."""
    import torch

    from protocols.experts import BeamSearch, ExpertGrid, GridGate, Host
    from protocols.identity import PeerId

    grid = ExpertGrid("ffn", (side,) * DEEP)
    torch.manual_seed(side)
    gate = GridGate(32, grid)
    host = (Host(PeerId("server")),)
    below = dict.fromkeys(range(side), host)  # every cell has an expert
    fastest, most_read, wrong = float("inf"), 0, 0
    for _ in range(tries):
        with torch.no_grad():
            scores = gate(torch.randn(EXAMPLES, 32))
        began = time.perf_counter()
        search, read = BeamSearch(scores, CHOSEN, grid), 0
        while prefixes := search.wanted():
            read += len(prefixes)
            search.take(dict.fromkeys(prefixes, below))
        found = search.best()
        fastest = min(fastest, time.perf_counter() - began)
        most_read = max(most_read, read)
        everywhere = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
        best = everywhere.topk(CHOSEN, dim=1).indices.tolist()
        wrong += [[grid.at(at) for at in row] for row in best] != [
            [uid for uid, _ in row] for row in found
        ]
    return fastest, most_read, wrong


CLAIMS: Final = (
    Claim(
        "learning-throughput",
        "Learning@home, section 4.1 and figure 4; thesis, section 3.1",
        "Many batches in flight keep the throughput with delays up to 200 ms, where model "
        "parallelism falls by an order of magnitude (three regions: 300.8 against 7.23 examples "
        "per second).",
        "Two mixtures of 16 experts of 256 → 1,024 → 1,024 → 256 on one processor in place of 224 "
        "blocks of 1,024 → 4,096 on four GPUs, and batches of 256 in place of 2,048; in the short "
        "form smaller still, with 20 ms. Experts are in one process, and each call is late by an "
        "exponential time. Naive is one batch at a time through the same layers.",
        _throughput,
    ),
    Claim(
        "learning-convergence",
        "Learning@home, section 4.2 and figure 5; thesis, section 3.1",
        "Mixtures of which four experts are active reach what a dense network of equal compute "
        "reaches, with delays of 100 ms and 1 s and a tenth of the calls failing.",
        "Two mixtures in place of four, 1,797 digits of 8 × 8 pixels in place of MNIST, one seed "
        "of five. 4 to 256 experts; in the short form 16, with 100 ms and 240 batches in place of "
        "3,000, which are too few to compare a mixture with the dense network.",
        _convergence,
    ),
    Claim(
        "learning-gate",
        "Learning@home, section 3.2, and algorithm 1 of the supplement",
        "Finding the k best experts in a grid of d dimensions takes O(d k) readings of the "
        "directory for an example, however many experts there are.",
        "The search alone, without a directory: up to 65,536 experts, in the short form 4,096. "
        "`scripts/bench experts-search` measures it with real nodes.",
        _gate,
    ),
)
