"""The claims of Learning@home. The layer, the trainer and the search are those of the product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

from lab import Talk
from lab.reproduce.claim import Claim, ClaimFigures, Condition, Picture

# -- section 4.1: throughput

KEPT: Final = 0.85  # of the throughput without delay, with many batches in flight
KEPT_SHORT: Final = 0.6  # the batches of the short form are too small to hide much
LOST: Final = 10.0  # times as slow naive model parallelism becomes: an order of magnitude
LOST_SHORT: Final = 3.0
PASSES: Final = 4  # of a batch: two mixtures, forward and backward


def _throughput(short: bool, say: Talk) -> ClaimFigures:
    import trio

    from lab.bench.experts_delay import DelayEffort, measure_delays

    effort = (
        DelayEffort((0.0, 20.0), 16, seconds=0.5, turns=3, width=128, inner=256, batch=64)
        if short
        else DelayEffort((0.0, 50.0, 100.0, 200.0), seconds=12.0, turns=3, inner=384)
    )
    result = trio.run(partial(measure_delays, effort, say))
    told, longest = result["delays"], result["delays"][-1]
    # Other work on the machine makes computing longer, and delays not. So the processor's time.
    alone = result["naive_processor_s"]
    added = 1.0 / longest["naive_per_s"] - 1.0 / told[0]["naive_per_s"]
    slower = 1.0 + added / alone
    by_one = 1.0 + PASSES * longest["delay_ms"] / 1000.0 / alone
    kept, lost = (KEPT_SHORT, LOST_SHORT) if short else (KEPT, LOST)
    return ClaimFigures(
        ("delay, ms", f"{effort.in_flight} in flight, batches/s", "one at a time, batches/s"),
        [
            [f"{row['delay_ms']:g}", f"{row['async_per_s']:.2f}", f"{row['naive_per_s']:.2f}"]
            for row in told
        ],
        (
            keeps_throughput(told, kept),
            Condition(
                f"naive model parallelism becomes {slower:.0f} times as slow ({lost:g} times are "
                "asked for; the paper: by an order of magnitude): the processor computes "
                f"{alone:.3f} s for a batch, and the delays add {added:.2f} s. A pass waits for "
                "the slowest of 16 calls here; one mean delay for each would make it "
                f"{by_one:.0f} times as slow.",
                slower >= lost,
                because=f"They make it {lost:g} times as slow if a batch computes for less than "
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


def keeps_throughput(told: Sequence[Mapping[str, float]], kept: float) -> Condition:
    """With every delay: the claim is of all up to the longest. What is lost may not be waiting, but
    more work of the processor for each batch: more calls come back one by one, and each wakes a
    thread. The paper's processors do that beside their GPUs."""
    least = min(told[1:], key=lambda row: row["async_kept"])  # the first is without delay
    work, less = least["async_processor_s"], told[0]["async_processor_s"]
    waits_for_nothing = least["async_kept"] * work >= kept * less
    return Condition(
        f"with delays up to {told[-1]['delay_ms']:g} ms, {least['async_kept']:.1%} of the "
        f"throughput without delay are left at the least, with {least['delay_ms']:g} ms "
        f"({kept:.0%} are asked for).",
        least["async_kept"] >= kept,
        because=f"A batch then takes {work:.3f} s of the processor in place of {less:.3f} s. So "
        f"this works for {least['async_kept'] * work / less:.0%} as long as without delay, and "
        "does not wait."
        if waits_for_nothing
        else "",
    )


# -- section 4.2: convergence

WORSE: Final = 0.01  # of the held-out digits
LEARNT: Final = 0.5  # of the held-out digits; a tenth is luck
FAILING: Final = 0.1  # of the calls, where there are delays
MOST: Final = 0.5  # of what a mixture lacks, for a reason that is not the delays

Trained = Mapping[tuple[int, float], Mapping[str, Any]]
"""What was measured, by the number of experts (1 is the dense network) and the delay."""


def _convergence(short: bool, say: Talk) -> ClaimFigures:
    import torch
    import trio

    from lab.bench.experts_convergence import in_flight
    from lab.bench.experts_tasks import Arm, DigitsTask, train

    torch.set_num_threads(1)  # there are threads enough
    batches = 100 if short else 1500
    sizes, delays = ((16,), (100.0,)) if short else ((4, 16, 64, 256), (100.0, 1000.0))
    trained = dict[tuple[int, float], dict[str, Any]]()
    rows, lines = [], {}
    for experts, delay in product((1, *sizes), delays if short else (0.0, *delays)):
        # without an expert of four the dense network has no result
        rate = FAILING if delay and experts > 1 else 0.0
        arm = Arm(experts, delay, in_flight(delay), rate)
        name = f"{'dense network' if arm.is_dense else f'{experts} experts'}, {delay:g} ms"
        task = DigitsTask(begins_as_identity=not arm.is_dense)  # the better start for each
        told = trio.run(
            partial(train, task, arm, seed=0, batches=batches, look_every=batches // 10)
        )
        say(f"{name}: {told['final']:.4f}")
        trained[experts, delay] = told
        lines[name] = told["curve"]
        rows.append(
            [name, f"{rate:.0%}", f"{told['final']:.4f}", f"{told['training_loss']:.3f}",
             f"{told['staleness']:.0f}"]
        )  # fmt: skip
    least = min(told["final"] for told in trained.values())
    return ClaimFigures(
        ("model", "calls that fail", "right on held-out digits", "loss in training",
         "batches of staleness"),
        rows,
        (
            Condition(
                "every model learns in spite of delays and failures: "
                f"{least:.2f} of the digits at the least ({LEARNT} are asked for).",
                least >= LEARNT,
            ),
            *(() if short else _beside_others(trained)),
        ),
        Picture(lines, "batches", "right on held-out digits"),
    )  # fmt: skip


def _beside_others(trained: Trained) -> tuple[Condition, ...]:
    return costs_little(trained), as_good_as_dense_when_late(trained), reaches_dense(trained)


def costs_little(trained: Trained) -> Condition:
    """Each mixture beside the same one that is trained in the ordinary way."""
    costs = {
        (experts, delay): trained[experts, 0.0]["final"] - told["final"]
        for (experts, delay), told in trained.items()
        if delay
    }
    dense = max(cost for (experts, _), cost in costs.items() if experts == 1)
    mixtures = [cost for (experts, _), cost in costs.items() if experts > 1]
    mean = statistics.fmean(mixtures)
    return Condition(
        f"delays and failures cost the mixtures {mean:.3f} of the held-out digits in the mean, "
        f"and {max(mixtures):.3f} at most, beside the same mixtures without them ({WORSE:g} are "
        f"allowed in the mean). Delays alone cost the dense network up to {dense:.3f}.",
        mean <= WORSE,
    )


def as_good_as_dense_when_late(trained: Trained) -> Condition:
    """The paper's own comparison: all models are trained with the same delay."""
    longest = max(delay for _, delay in trained)
    dense = trained[1, longest]["final"]
    least = min(told["final"] for (e, delay), told in trained.items() if e > 1 and delay == longest)
    return Condition(
        f"with {longest:g} ms every mixture reaches the dense network that has this delay, too, "
        f"but for {WORSE:g}: {least:.4f} at the least beside {dense:.4f}, though a tenth of the "
        "mixtures' calls fail.",
        least >= dense - WORSE,
    )


def reaches_dense(trained: Trained) -> Condition:
    dense = trained[1, 0.0]
    finals = {key: told["final"] for key, told in trained.items() if key[0] > 1}
    behind = sorted({e for (e, _), final in finals.items() if final < dense["final"] - WORSE})
    return Condition(
        f"every mixture reaches the dense network but for {WORSE:g}: {min(finals.values()):.4f} "
        f"at the least beside {dense['final']:.4f}.",
        not behind,
        because=_why_behind(behind, trained),
    )


def _why_behind(behind: Sequence[int], trained: Trained) -> str:
    """Why these mixtures are behind, if their figures without delays and failures show it."""
    from lab.bench.experts_tasks import ACTIVE, DIGITS_TO_LEARN

    dense = trained[1, 0.0]
    calm = {experts: trained[experts, 0.0] for experts in behind}
    overfit = [e for e in behind if calm[e]["training_loss"] <= dense["training_loss"]]
    for experts in behind:
        lacking = dense["final"] - calm[experts]["final"]
        worst = min(told["final"] for key, told in trained.items() if key[0] == experts)
        if lacking < (dense["final"] - worst) * MOST:
            return ""
        if lacking > WORSE and experts not in overfit:
            return ""
    finals = _listed([f"{told['final']:.4f}" for told in calm.values()])
    why = (
        f"Most of that is there without delays and failures, too: so those of {_listed(behind)} "
        f"experts have {finals}."
    )
    if overfit:
        losses = _listed([f"{calm[experts]['training_loss']:.3f}" for experts in overfit])
        why += (
            f" Those of {_listed(overfit)} have learnt the digits that they train on better than "
            f"the dense network, with losses of {losses} beside {dense['training_loss']:.3f}. They "
            f"lack more digits: of {DIGITS_TO_LEARN:,}, an expert of {overfit[-1]} gets "
            f"{ACTIVE * DIGITS_TO_LEARN / overfit[-1]:.0f}, where MNIST has 60,000."
        )
    return why


def _listed(things: Sequence[object]) -> str:
    words = [str(thing) for thing in things]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
        (
            "experts",
            "prefixes read for a batch",
            "prefixes for each expert",
            "processor's ms for a batch",
        ),
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
        Picture(lines, "experts", "processor's ms for a batch", is_log=True),
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
        began = time.thread_time()  # other work of the machine does not count
        search, read = BeamSearch(scores, CHOSEN, grid), 0
        while prefixes := search.wanted():
            read += len(prefixes)
            search.take(dict.fromkeys(prefixes, below))
        found = search.best()
        fastest = min(fastest, time.thread_time() - began)
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
        "Two mixtures of 16 experts of 256 → 384 → 384 → 256 on one processor in place of 224 "
        "blocks of 1,024 → 4,096 on four GPUs, and batches of 256 in place of 2,048; in the short "
        "form smaller still, with 20 ms. So a pass computes for 20 to 35 ms, as in the paper: its "
        "103 GFLOP forward, and three times as many backward, are 12 and 35 ms at the 8.9 TFLOPS "
        "of its GPU. Experts are in one process, and each call is late by an exponential time. "
        "Naive is one batch at a time through the same layers. All delays are measured three times "
        "in turn, and the figures are medians. How many times as slow naive becomes is counted "
        "with the processor's time for a batch, so that other work on the machine does not count "
        "as computing.",
        _throughput,
    ),
    Claim(
        "learning-convergence",
        "Learning@home, section 4.2 and figure 5; thesis, section 3.1",
        "Mixtures of which four experts are active reach what a dense network of equal compute "
        "reaches, with delays of 100 ms and 1 s and a tenth of the calls failing.",
        "1,797 digits of 8 × 8 pixels in place of MNIST, one seed of five, 1,500 batches of four. "
        "4 to 256 experts of a 16th of the paper's width, each with a quarter of the dense "
        "network's multiplications; in the short form 16, with 100 ms and 100 batches, which are "
        "too few to compare a mixture with the dense network. The output layer of each expert "
        "begins with zeros; as potluck builds experts, with random ones, 256 experts came to 0.92 "
        "after 1,000 batches without delays. The dense network begins as potluck builds it, which "
        "is no worse for it.",
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
