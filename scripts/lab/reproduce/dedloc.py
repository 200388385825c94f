"""The claims of DeDLOC (Distributed Deep Learning in Open Collaborations)."""

from __future__ import annotations

import random
import statistics
import tempfile
import tracemalloc
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lab import Talk
from lab.reproduce.claim import Claim, ClaimFigures, Condition, Picture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from models.albert import Albert
    from models.masking import MaskedBatch
    from models.swav import CropBatch, Swav
    from protocols.accumulation.accumulator import Contribution
    from protocols.accumulation.parameters import Parameters
    from protocols.moshpit.plan_strategy import PlannedPeers, Strategy

MEGABIT: Final = 1e6 / 8  # bytes

# -- table 1: averaging a ResNet-50

PLANS: Final = Path(__file__).parents[3] / "docs" / "plans"
TABLE_1: Final = {  # seconds: all-reduce, parameter server, theirs
    "A": ("8 x 1 Gb/s", 1.19, 4.73, 1.20),
    "B": ("16 x 0.2 Gb/s", 5.3, 39.6, 5.3),
    "C": ("A + B", 5.69, 14.1, 2.96),
    "D": ("B + 1 x 2.5 Gb/s", 5.3, 3.22, 3.18),
}
SAME_RATIO: Final = 0.15


SHAPED_SETUP: Final = "A"  # with eight peers one core keeps up
SHAPED_SECONDS: Final = 8.0  # of the plan's round
SHAPED_MBPS: Final = 12.0  # stand for 1 Gb/s
OTHER_WORK: Final = 2.0  # processes that wait for each core, before the rounds


def _averaging_time(short: bool, say: Talk) -> ClaimFigures:
    from node.app.plan_file import read_plan_file
    from protocols.moshpit.plan_strategy import best_strategy

    rows, apart = [], 0.0
    lines: dict[str, list[tuple[float | str, float]]] = {"paper": [], "plan": []}
    for name, (peers, all_reduce, server, theirs) in TABLE_1.items():
        plan = best_strategy(read_plan_file(str(PLANS / f"{name.lower()}.toml")))
        ours = plan.round_seconds
        ratios = (
            (all_reduce / theirs, plan.allreduce_seconds / ours),
            (server / theirs, plan.parameter_server_seconds / ours),
        )
        apart = max(apart, *(abs(our / paper - 1.0) for paper, our in ratios))
        rows.append(
            [
                f"{name}: {peers}",
                f"{all_reduce:g} / {server:g} / {theirs:g}",
                f"{plan.allreduce_seconds:.2f} / {plan.parameter_server_seconds:.2f} / {ours:.2f}",
                f"{ratios[0][0]:.2f} and {ratios[1][0]:.2f}",
                f"{ratios[0][1]:.2f} and {ratios[1][1]:.2f}",
            ]
        )
        lines["paper"].append((name, theirs))
        lines["plan"].append((name, ours))
    row, checks = ([], ()) if short else _on_shaped_links(say)
    return ClaimFigures(
        (
            "setup",
            "paper: all-reduce / server / theirs, s",
            "plan: the same, s",
            "paper: times as long as theirs",
            "plan: times as long as ours",
        ),
        [*rows, row] if row else rows,
        (
            Condition(
                "adaptive averaging gains as much as in the paper: all eight ratios are within "
                f"{SAME_RATIO:.0%} of the paper's (the furthest is {apart:.0%} off).",
                apart <= SAME_RATIO,
            ),
            *checks,
        ),
        Picture(lines, "setup of table 1", "seconds of an averaging"),
    )


def _other_work(machine: Mapping[str, Any]) -> str:
    """Why rounds took longer than their links need, if the machine had too much to do before."""
    load, cores = machine["load_1min"], machine["cores_usable"]
    if load <= OTHER_WORK * cores:
        return ""
    return (
        f"The processor had other work, a load of {load:g} for {cores} of its cores before they "
        "began, and peers have to encrypt as fast as their links carry."
    )


def _on_shaped_links(say: Talk) -> tuple[list[str], tuple[Condition, ...]]:
    """A row with real rounds over links of limited rate, or with the reason why there are none."""
    import trio

    from lab.bench.machine import machine_facts
    from lab.bench.own_network import NoOwnNetwork
    from lab.bench.processes import BenchFailed, failures_unwrapped
    from lab.bench.shaped import WAYS, ShapedEffort, measure_shaped, ratios

    name, all_reduce, server, theirs = TABLE_1[SHAPED_SETUP]
    label = f"{SHAPED_SETUP}: {name}, real rounds with {SHAPED_MBPS:g} Mb/s for 1 Gb/s"
    effort = ShapedEffort(SHAPED_SETUP, SHAPED_SECONDS, rounds=1, mbps_per_gigabit=SHAPED_MBPS)
    machine = machine_facts()
    try:
        with failures_unwrapped():
            told = trio.run(partial(measure_shaped, effort, say))
    except NoOwnNetwork as error:
        say(f"no shaped links: {error.what}")
        return [label, "", f"not measured: {error.what}", "", ""], ()
    except BenchFailed as error:
        say(f"{error.what} {error.why}")
        check = Condition(
            "real rounds over shaped links are done.", False, because=_other_work(machine)
        )
        return [label, "", f"not measured: {error.what}", "", ""], (check,)
    ours, *others = [told["ways"][way]["exchange_seconds_p50"] for way in WAYS]
    planned = [told["ways"][way]["predicted_seconds"] for way in WAYS]
    real = ratios([ours, *others])
    apart = max(abs(a / b - 1.0) for a, b in zip(real, ratios(planned), strict=True))
    row = [
        label,
        f"{all_reduce:g} / {server:g} / {theirs:g}",
        f"rounds: {others[0]:.1f} / {others[1]:.1f} / {ours:.1f}",
        f"{all_reduce / theirs:.2f} and {server / theirs:.2f}",
        f"rounds: {real[0]:.2f} and {real[1]:.2f}",
    ]
    return row, (
        Condition(
            f"real rounds over shaped links gain as much as the plan says of them: {real[0]:.2f} "
            f"and {real[1]:.2f}, within {apart:.0%} ({SAME_RATIO:.0%} are allowed).",
            apart <= SAME_RATIO,
            because=_other_work(machine),
        ),
    )


# -- section 4.2: ALBERT on links of unequal speed

ALBERT_VALUES: Final = 18_000_000  # ALBERT-large
ALBERT_BATCH: Final = 4096.0
SLOW_LINKS: Final = (*[200.0] * 4, *[100.0] * 8, *[50.0] * 4)  # Mb/s
PAPER_SLOWDOWN: Final = 2.5


def _albert(_short: bool, _say: Talk) -> ClaimFigures:
    slow = _planned(SLOW_LINKS)
    # With delayed updates a step takes the longer of computing and averaging. So the paper's
    # slowdown says how long its machines computed.
    computing = slow.allreduce_seconds / PAPER_SLOWDOWN
    helped = _planned(SLOW_LINKS, helpers=4)
    more = _planned((*SLOW_LINKS, *[100.0] * 8), helpers=4)

    def step(seconds: float, peers: int = 16) -> float:
        return max(computing * 16 / peers, seconds)

    fast = step(_planned((25_000.0,) * 16).allreduce_seconds)
    naive, balanced = step(slow.allreduce_seconds), step(slow.round_seconds)
    aided = step(helped.round_seconds)
    part_time = (aided + step(more.round_seconds, peers=24)) / 2  # half of the time each
    faster, aided_by = 1.0 - balanced / naive, 1.0 - aided / naive
    bound = ALBERT_VALUES * 4 / (min(SLOW_LINKS) * MEGABIT)
    figures = {
        "high bandwidth": ("1", fast),
        "slow links, equal parts": (f"{PAPER_SLOWDOWN} times as long", naive),
        "with load balancing": ("47 % less time", balanced),
        "with 4 helpers": ("over 60 % less time", aided),
        "with 8 part-time peers": ("74 % of the speed", part_time),
    }
    return ClaimFigures(
        ("setup", "paper", "plan: s per step", "times as long as high bandwidth"),
        [
            [name, paper, f"{seconds:.1f}", f"{seconds / fast:.2f}"]
            for name, (paper, seconds) in figures.items()
        ],
        (
            Condition(
                f"load balancing takes {faster:.0%} off the time of a step on slow links "
                "(the paper: 47 %).",
                abs(faster - 0.47) < 0.05,
            ),
            Condition(
                f"in the last setup the run has {fast / part_time:.0%} of the speed of the fast "
                "cluster (the paper: 74 %), which follows from the two figures above: neither "
                "helpers nor part-time peers change the plan.",
                abs(fast / part_time - 0.74) < 0.05,
            ),
            Condition(
                f"four helpers bring it to over 60 % (the plan: {aided_by:.0%}).",
                aided_by > 0.6,
                because=f"The peers at {min(SLOW_LINKS):g} Mb/s have to send a whole gradient and "
                f"receive a whole result in any case, which takes {bound:.1f} s; the plan without "
                f"helpers takes {slow.round_seconds:.1f} s, so no helper can shorten it. The "
                "paper does not say what else its helpers saved; a plan counts only bytes on links."
                if abs(aided / bound - 1.0) < 0.01
                else "",
            ),
        ),
        Picture(
            {"plan": [(name, seconds) for name, (_, seconds) in figures.items()]},
            "setup",
            "seconds of a step",
        ),
    )


def _planned(computing: Sequence[float], helpers: int = 0) -> Strategy:
    """The plan for an ALBERT with links of these speeds, in Mb/s. Helpers have 1 Gb/s."""
    from protocols.moshpit.plan_strategy import best_strategy

    return best_strategy(_peers_of(computing, helpers))


def _peers_of(computing: Sequence[float], helpers: int) -> PlannedPeers:
    from protocols.moshpit.plan_strategy import Computes, PlannedPeer, PlannedPeers

    peers = [
        PlannedPeer(f"peer {i:02}", 1.0, rate * MEGABIT, rate * MEGABIT, Computes.ALWAYS)
        for i, rate in enumerate(computing)
    ]
    peers += [
        PlannedPeer(f"helper {i}", 0.0, 1000 * MEGABIT, 1000 * MEGABIT, Computes.NEVER)
        for i in range(helpers)
    ]
    return PlannedPeers(ALBERT_VALUES * 4.0, ALBERT_BATCH, peers)


# -- figure 5: the time of a step by the number and kind of peers

STEP_TARGET: Final = 1280
SLOWEST: Final = 1.25  # times what the plan says
FASTEST: Final = 0.95


def _step_time(short: bool, say: Talk) -> ClaimFigures:
    from lab.reproduce.virtual import planned_step, step_seconds
    from lab.simulate.virtual_run import RunPlan, simulate

    steps = 2 if short else 8
    rows, shares = [], []
    lines: dict[str, list[tuple[float | str, float]]] = {}
    for kind, up in (("fast links", None), ("10 Mb/s up", 10 * MEGABIT)):
        for peers in (2, 4) if short else (4, 8, 16):
            plan = RunPlan(
                peers=peers,
                steps=steps,
                seed=7,
                rates=1.0,
                target=STEP_TARGET,
                parameters=1000 if up is None else 300_000,
                upload_bytes_per_second=up,
                download_bytes_per_second=None if up is None else 10 * up,
            )
            seconds, planned = step_seconds(simulate(plan, say)), planned_step(plan)
            shares.append(seconds / planned)
            rows.append([kind, f"{peers}", f"{planned:.1f}", f"{seconds:.1f}"])
            lines.setdefault(f"plan, {kind}", []).append((peers, planned))
            lines.setdefault(f"run, {kind}", []).append((peers, seconds))
    return ClaimFigures(
        ("peers", "how many", "plan: s per step", "run: s per step"),
        rows,
        (
            Condition(
                "a step takes what the plan says of the number and the links of the peers: "
                f"{min(shares):.2f} to {max(shares):.2f} times as long ({SLOWEST} are allowed).",
                max(shares) <= SLOWEST and min(shares) >= FASTEST,
            ),
            Condition(
                "more peers make shorter steps.",
                all(
                    later < earlier
                    for line in lines.values()
                    for (_, earlier), (_, later) in pairwise(line)
                ),
            ),
        ),
        Picture(lines, "peers", "seconds of a step"),
    )


# -- section 3.1: equivalence to large batches

EQUIVALENT: Final = 1e-5  # of the loss; rounding is smaller
PEERS: Final = {
    "1 peer": (64,),
    "4 equal peers": (16,) * 4,
    "5 unequal peers": (1, 3, 8, 20, 32),
    "peers that come and go": (),
}


def _equivalence(short: bool, say: Talk) -> ClaimFigures:
    from models.initial import seeded

    steps = 6 if short else 60
    albert = _small_albert()
    generator = seeded(1)
    batches = [
        albert.batch_of(windows, generator)
        for windows in islice(_windows(albert.window, 64), steps)
    ]
    alone = _trained(batches, None)
    rows, apart = [], 0.0
    lines = {"one machine": list(enumerate(alone))}
    for name, shares in PEERS.items():
        say(name)
        losses = _trained(batches, shares)
        apart = max(apart, *(abs(a - b) / a for a, b in zip(alone, losses, strict=True)))
        lines[name] = list(enumerate(losses))
        rows.append([name, f"{alone[-1]:.5f}", f"{losses[-1]:.5f}"])
    return ClaimFigures(
        ("who computes the batch", "loss of one machine", "loss of the peers"),
        rows,
        (
            Condition(
                f"the losses of all {steps} steps are those of one machine with the whole batch: "
                f"at most {apart:.0e} of them apart ({EQUIVALENT:.0e} are allowed).",
                apart <= EQUIVALENT,
            ),
            Condition(f"it learns: from {alone[0]:.2f} to {alone[-1]:.2f}.", alone[-1] < alone[0]),
        ),
        Picture(lines, "step", "loss"),
    )


def _small_albert() -> Albert:
    from models.albert import Albert, AlbertSettings

    settings = AlbertSettings(context=35, width=32, wide=64, embedding=16, layers=2, heads=2)
    return Albert(settings, seed=0)


def _windows(window: int, rows: int) -> Iterator[Tensor]:
    from models.data.batches import WindowBatches
    from models.data.opening import open_data

    with open_data(seed=1, window=window) as data:
        yield from WindowBatches(data, rows=rows, window=window)


def _trained(batches: Sequence[MaskedBatch], shares: Sequence[int] | None) -> list[float]:
    """The losses of the steps. `shares`: how many samples of a batch each peer computes; None is a
    plain loop on one machine, and none at all are other peers in every step."""
    from models.lamb import Lamb
    from protocols.accumulation.accumulator import Accumulator
    from protocols.accumulation.parameters import Parameters

    model, chance, losses = _small_albert(), random.Random(5), []
    optimizer = Lamb(model.parameters(), lr=5e-3)
    parameters = Parameters(model.named_parameters())
    for batch in batches:
        whole = len(batch.ids)
        optimizer.zero_grad()
        if shares is None:
            loss = model.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            losses.append(loss.item())
        else:
            given, total = [], 0.0
            first = 0
            for count in shares or _drawn(whole, chance):
                accumulator = Accumulator(parameters)
                for at in range(first, first + count, 8):  # in passes of a small machine
                    part = type(batch)(*(one[at : min(at + 8, first + count)] for one in batch))
                    model.zero_grad()
                    loss = model.loss(part)
                    loss.backward()  # type: ignore[no-untyped-call]
                    accumulator.add(len(part.ids))
                    total += loss.item() * len(part.ids)
                given.append(accumulator.take())
                first += count
            _take_mean(parameters, given)
            losses.append(total / whole)
        optimizer.step()
    return losses


def _take_mean(parameters: Parameters, given: Sequence[Contribution]) -> None:
    """Put the mean of the peers' gradients, weighted by samples, in the place of the own ones."""
    import torch

    whole = sum(one.samples for one in given)
    mean = sum(one.values.double() * one.samples for one in given) / whole
    views = parameters.views(torch.as_tensor(mean).float())
    for parameter, view in zip(parameters.tensors, views, strict=True):
        parameter.grad = view.clone()


def _drawn(samples: int, chance: random.Random) -> list[int]:
    """How many samples each of some peers computes, together all."""
    cuts = sorted(chance.sample(range(1, samples), chance.randint(0, 7)))
    return [later - earlier for earlier, later in pairwise([0, *cuts, samples])]


# -- section 4.1: the same for SwAV, whose codes are each peer's own

PICTURES: Final = 64  # of a step
QUEUE: Final = 32
SWAV_PEERS: Final = {
    "one peer": (64,),
    "two peers, 3 to 1": (48, 16),
    "five peers": (24, 16, 12, 8, 4),
}


def _swav(short: bool, say: Talk) -> ClaimFigures:
    from models.initial import seeded
    from models.synthetic_images import synthetic_images

    steps, swav, generator = 8 if short else 60, _small_swav(), seeded(1)
    batches = [
        swav.batch_of(synthetic_images(0, range(first, first + PICTURES)), generator)
        for first in range(0, PICTURES * steps, PICTURES)
    ]
    rows, apart = [], 0.0
    lines, falls = dict[str, list[tuple[float | str, float]]](), True
    whole = _swav_on_one_machine(batches, (PICTURES,))
    for name, shares in SWAV_PEERS.items():
        say(name)
        losses, alone = _swav_by_peers(batches, shares), _swav_on_one_machine(batches, shares)
        apart = max(apart, *(abs(a - b) / a for a, b in zip(alone, losses, strict=True)))
        falls = falls and losses[-1] < losses[0]
        lines[name] = list(enumerate(losses))
        rows.append([name, f"{losses[-1]:.5f}", f"{alone[-1]:.5f}", f"{whole[-1]:.5f}"])
    return ClaimFigures(
        ("who computes the batch", "the peers", "one machine, the peers' codes", "its own codes"),
        rows,
        (
            Condition(
                f"the losses of all {steps} steps are those of one machine that passes the whole "
                "batch through the network at once, with codes by peer: at most "
                f"{apart:.0e} of them apart ({EQUIVALENT:.0e} are allowed).",
                apart <= EQUIVALENT,
            ),
            Condition("the loss falls with each set of peers.", falls),
        ),
        Picture(lines, "step", "loss"),
    )


def _small_swav() -> Swav:
    from models.swav import Swav, SwavSettings

    return Swav(SwavSettings(large=16, small=8, small_crops=2, queue=QUEUE), seed=0)


def _swav_optimizer(swav: Swav) -> Optimizer:
    from models.registry import optimizer_factory

    lars = {"name": "lars", "lr": 4.0, "weight_decay": 1e-6, "trust": 0.001}
    return optimizer_factory(lars)(swav.named_parameters())


def _parts(batch: CropBatch, shares: Sequence[int]) -> list[CropBatch]:
    ends = list(accumulate(shares, initial=0))
    return [type(batch)(*(one[a:b] for one in batch)) for a, b in pairwise(ends)]


def _swav_by_peers(batches: Sequence[CropBatch], shares: Sequence[int]) -> list[float]:
    """The losses, with a queue at each peer and the product's accumulator."""
    import torch

    from protocols.accumulation.accumulator import Accumulator
    from protocols.accumulation.parameters import Parameters

    swav, losses = _small_swav(), []
    optimizer, parameters = _swav_optimizer(swav), Parameters(swav.named_parameters())
    queues = [torch.zeros_like(swav.queue) for _ in shares]
    for batch in batches:
        given, total = [], 0.0
        for part, queue in zip(_parts(batch, shares), queues, strict=True):
            accumulator = Accumulator(parameters)
            swav.queue.copy_(queue)  # the parameters are equal at all peers, and this is not
            swav.zero_grad()
            loss = swav.loss(part)
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            queue.copy_(swav.queue)
            accumulator.add(len(part.large))
            given.append(accumulator.take())
            total += loss.item() * len(part.large)
        _take_mean(parameters, given)
        optimizer.step()
        losses.append(total / len(batch.large))
    return losses


def _swav_on_one_machine(batches: Sequence[CropBatch], shares: Sequence[int]) -> list[float]:
    """The losses of a plain loop from the paper's formulas: one pass for all pictures of a step.
    Their codes are made for so many together, each time with the last ones of that place."""
    import torch

    from models.swav import LARGE, sinkhorn, swapped_loss

    swav, losses = _small_swav(), []
    optimizer, own = _swav_optimizer(swav), swav.settings
    earlier = [torch.empty(0, LARGE, own.features) for _ in shares]
    for batch in batches:
        optimizer.zero_grad()
        seen = [swav(crops.flatten(0, 1)).view(*crops.shape[:2], -1) for crops in batch]
        features = torch.cat(seen, dim=1)
        codes, large = [], features[:, :LARGE].detach()
        for place, part in enumerate(torch.split(large, list(shares))):
            queue = earlier[place] if len(earlier[place]) == QUEUE else earlier[place][:0]
            scores = swav.scores(torch.cat([part, queue])).detach()
            both = [sinkhorn(scores[:, crop], own.epsilon, own.rounds) for crop in range(LARGE)]
            codes.append(torch.stack(both, dim=1)[: len(part)])
            earlier[place] = torch.cat([part, earlier[place]])[:QUEUE]
        loss = swapped_loss(swav.scores(features), torch.cat(codes), own.temperature)
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- appendix C: the size of groups

COLLABORATIONS: Final = (16, 24, 64, 256, 1024)
FAILURE_RATES: Final = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5)
CLOSE_TO_BEST: Final = 1.05


def _group_size(short: bool, _say: Talk) -> ClaimFigures:
    from protocols.moshpit.group_size import best_group_size, rounds_needed

    def best(peers: int, rate: float) -> int:
        return best_group_size(peers, rate, most=peers)

    chance, tries, worst = random.Random(3), 400 if short else 4000, 0.0
    for peers, rate in ((24, 0.02), (64, 0.1), (256, 0.02)):
        # drawn for every number of rounds, with the smallest groups that need no more
        attempts = {
            size: rounds_needed(peers, size) * _drawn_attempts(size, rate, tries, chance)
            for size in {best_group_size(peers, other, peers) for other in FAILURE_RATES}
            if (1.0 - rate) ** size > 0.02  # the others fail for too long to be drawn
        }
        worst = max(worst, attempts[best(peers, rate)] / min(attempts.values()))
    return ClaimFigures(
        ("peers", *(f"p = {rate:g}" for rate in FAILURE_RATES)),
        [
            [f"{peers:,}", *(f"{best(peers, rate)}" for rate in FAILURE_RATES)]
            for peers in COLLABORATIONS
        ],
        (
            Condition(
                "one group of all is best for the 16 to 24 peers of the paper's experiments with "
                "failures up to 0.005 (the paper: m = n in all experiments).",
                all(best(n, p) == n for n in (16, 24) for p in FAILURE_RATES if p <= 0.005),
            ),
            Condition(
                "the more peers fail, the smaller the groups, down to groups of two.",
                all(
                    best(n, less) >= best(n, more)
                    for n in COLLABORATIONS
                    for less, more in pairwise(FAILURE_RATES)
                )
                and all(best(n, FAILURE_RATES[-1]) == 2 for n in COLLABORATIONS),
            ),
            Condition(
                "with drawn failures no other size needs fewer attempts, but for "
                f"{CLOSE_TO_BEST - 1:.0%}: the chosen one needs {worst:.2f} times the fewest.",
                worst <= CLOSE_TO_BEST,
            ),
        ),
        Picture(
            {
                f"{peers} peers": [
                    (f"{rate:g}", float(best(peers, rate))) for rate in FAILURE_RATES
                ]
                for peers in COLLABORATIONS
            },
            "failure rate",
            "best group size",
            is_log=True,
        ),
    )


def _drawn_attempts(size: int, rate: float, tries: int, chance: random.Random) -> float:
    """How many attempts a group needs until none of its members fails."""

    def attempts() -> int:
        count = 1
        while any(chance.random() < rate for _ in range(size)):
            count += 1
        return count

    return statistics.fmean(attempts() for _ in range(tries))


# -- section 3.3: streaming and mixing

MIXED: Final = (0.23, 0.77)
BUFFER: Final = 1000
DOCUMENT_BYTES: Final = 2000
MORE_MEMORY: Final = 1.2


def _streaming(short: bool, say: Talk) -> ClaimFigures:
    sizes = (16, 64) if short else (16, 64, 256)
    rows, peaks, shares = [], [], []
    for megabytes in sizes:
        say(f"{megabytes} MB")
        peak, share = _streamed(megabytes)
        peaks.append(peak)
        shares.append(share)
        rows.append([f"{megabytes} MB", f"{peak / 1e6:.2f} MB", f"{share:.3f}"])
    growth, off = max(peaks) / peaks[0], max(abs(share - MIXED[0]) for share in shares)
    return ClaimFigures(
        ("data", "memory at most", f"share of the first source (paper: {MIXED[0]})"),
        rows,
        (
            Condition(
                f"{sizes[-1] // sizes[0]} times the data takes {growth:.2f} times the memory "
                f"({MORE_MEMORY} are allowed).",
                growth <= MORE_MEMORY,
            ),
            Condition(
                f"two sources are mixed as asked for, within 0.02 ({off:.3f}).",
                off <= 0.02,
            ),
        ),
        Picture(
            {
                "memory": [
                    (float(size), peak / 1e6) for size, peak in zip(sizes, peaks, strict=True)
                ]
            },
            "data, MB",
            "memory, MB",
        ),
    )


def _streamed(megabytes: int) -> tuple[int, float]:
    """The most memory that reading as many examples as there are took, and the first's share."""
    from models.data.opening import open_data
    from models.data.settings import DataSettings, SourceSettings

    documents = megabytes * 1_000_000 // DOCUMENT_BYTES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in ("first", "second"):
            (folder / source).mkdir()
            for shard in range(4):
                with (folder / source / f"{shard}.txt").open("w", encoding="utf-8") as file:
                    for number in range(documents // 8):
                        file.write(f"{source} {shard} {number} ".ljust(DOCUMENT_BYTES - 1, "x"))
                        file.write("\n")
        settings = DataSettings(
            source=tuple(
                SourceSettings("text", paths=(f"{source}/*.txt",), probability=share, name=source)
                for source, share in zip(("first", "second"), MIXED, strict=True)
            ),
            shuffle_examples=BUFFER,
        )
        tracemalloc.start()
        with open_data(settings, seed=7, peer="a", folder=folder) as data:
            of_first = sum(
                example.content.startswith(b"first") for example in islice(data, documents)
            )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak, of_first / documents


CLAIMS: Final = (
    Claim(
        "dedloc-averaging-time",
        "DeDLOC, section 4.1 and table 1",
        "Adaptive averaging is as fast as all-reduce among equal peers, and nearly twice as fast "
        "in a mixed collaboration; it is never slower than a parameter server.",
        "The paper measured rounds on real links; these are the seconds of the plan, which counts "
        "the vector's bytes. So the seconds differ and the ratios are compared. In full, and as "
        "root on Linux, setup A is also averaged for real, by processes in networks of their own "
        "with links of 12 Mb/s; `sudo scripts/bench shaped` measures the other setups so.",
        _averaging_time,
    ),
    Claim(
        "dedloc-albert",
        "DeDLOC, section 4.2 and figure 4",
        "On slow and unequal links ALBERT-large trains 2.5 times slower than in a fast cluster; "
        "load balancing makes that 47 % faster, four helpers over 60 %, and with eight part-time "
        "peers it has 74 % of the cluster's speed.",
        "By the plan of the product, with 18 million float32 values; nothing is trained. The "
        "machines compute as fast as the paper's 2.5 implies, so that figure is not checked.",
        _albert,
    ),
    Claim(
        "dedloc-step-time",
        "DeDLOC, section 4.2 and figure 5",
        "The time between steps falls with the number of peers. The paper has curves and no "
        "numbers; here they are compared with the plan.",
        "Peers of the product on a simulated network in virtual time, which compute without "
        "computing: 4 to 16 peers, in the short form up to 8; a thousand values, or 300,000 on "
        "links of 10 Mb/s up and 100 Mb/s down.",
        _step_time,
    ),
    Claim(
        "dedloc-equivalence",
        "DeDLOC, section 3.1; thesis, section 3.3",
        "Whichever peers compute the samples of a batch, the training is that of one machine with "
        "the whole batch.",
        "ALBERT with 32 values a layer in place of 1,024, batches of 64 in place of 4,096, on the "
        "source code of Python, with LAMB; 60 steps, in the short form 6. The gradients are those "
        "of the product's accumulator, and their mean is taken here.",
        _equivalence,
    ),
    Claim(
        "dedloc-equivalence-swav",
        "DeDLOC, sections 3.1 and 4.1",
        "The same for SwAV with a queue at each peer: whichever peers compute the pictures of a "
        "batch, the training is that of one machine with the whole batch, which makes the codes of "
        "each peer's pictures with that peer's queue. (The paper trains SwAV so, and claims the "
        "equivalence in general. A machine that makes its codes of the whole batch is in the last "
        "column: it has other codes, and so another loss.)",
        "A residual network of 23,320 parameters on built-in figures in place of ResNet-50 on "
        "ImageNet, batches of 64 in place of 32,768, queues of 32 in place of 3,840, 32 prototypes "
        "in place of 3,000, 2 + 2 crops in place of 2 + 6, norms that are not over the batch; the "
        "loss, LARS and the codes are the paper's. 60 steps, in the short form 8. The gradients "
        "are those of the product's accumulator, and their mean is taken here.",
        _swav,
    ),
    Claim(
        "dedloc-group-size",
        "DeDLOC, appendix C and figure 8",
        "The best size of groups follows from the failure rate: all peers if they are few and "
        "reliable, smaller groups the more of them fail.",
        "Nothing. Figure 8 has colours and no numbers; the sizes are the product's, and drawn "
        "failures confirm some.",
        _group_size,
    ),
    Claim(
        "dedloc-streaming",
        "DeDLOC, section 3.3 and appendix I.4",
        "Data are streamed and shuffled in a buffer, and two sets are mixed with probabilities of "
        "0.23 and 0.77, in memory that does not grow with the data.",
        "Up to 256 MB of synthetic text on disk, in the short form 64, and a buffer of 1,000 "
        "examples in place of 10,000.",
        _streaming,
    ),
)
