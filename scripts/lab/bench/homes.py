"""`scripts/bench homes`: do peers at home, with large models, keep their GPUs busy?

Some peers train one model with local steps, exchanged in fragments beside the steps (Streaming
DiLoCo). Each has a network of its own on a cable with a rate up and a rate down (cables.py). A pass
is a pause of a given length that leaves gradients of real parameters behind (size_task.py): it
stands for a GPU, so that many peers fit on few cores.

    utilisation    the share of its time in which a peer's GPU computes; the least of all peers
    bytes          that a peer sends and receives in an hour: IP packets, with all that potluck
                   sends beside the values
    uncompressed   the bytes of a second run, with the same passes, without a codec, and over links
                   that are no limit to it

A machine that is too small for all parameters gets fewer of them: `scale` times fewer, over links
that are as many times slower. So an exchange takes the same share of the time. What potluck sends
beside the values (who is there, how far they are, how a round is agreed) is not smaller, and so has
`scale` times its share of the link and of the bytes. The bytes are therefore also told for the full
size: the values' times `scale`, and the others as they are.

The processor's own work at an exchange (encoding, the outer step, mixing) is `scale` times smaller,
too, and so is the time that it takes: at the full size it is seconds for each exchange.

The inner steps are those of SGD. On the machine of a volunteer they are the GPU's work, and here
they would take the time of processors that all peers share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.caps_meter import network_bytes
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.newcomer import UNLIMITED_MBPS
from lab.bench.own_network import check_own_networks
from lab.bench.processes import BenchFailed
from lab.bench.training import measure_steps
from lab.bench.training_swarm import GLANCE_SECONDS, Training, TrainingSwarm, open_training_swarm
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from node.app.cli.parser import Subparsers
    from protocols.tensors.codecs import Codec

BATCH: Final = 16
BAR_UTILISATION: Final = 0.95
BAR_TIMES_FEWER: Final = 100.0  # of a sparse codec
BYTES_PER_PARAMETER: Final = 44
"""In a peer's memory: its own, their gradients, those of a pass, theta_start and momentum (4 each),
and what is under way; measured with fragments of a half."""
WARM_UP_STEPS: Final = 1
PATIENCE: Final = 8.0  # times the length of a step, before the bench gives up
LEAST_STEP_SECONDS: Final = 60.0  # of patience


@dataclass(frozen=True)
class HomesEffort:
    """`seconds`: between two exchanges, each of one fragment, which are `passes` inner steps; so a
    fragment is exchanged again after `fragments` times as long. `steps`: exchanges measured."""

    parameters: int = 1_000_000_000
    scale: float = 40.0
    peers: int = 8
    fragments: int = 2
    seconds: float = 30.0
    passes: int = 12
    steps: int = 4
    up_mbps: float = 100.0
    down_mbps: float = 100.0
    codec: str = "sparse-sign"

    @property
    def here(self) -> int:
        """The parameters of the model in this bench."""
        return round(self.parameters / self.scale)

    @property
    def needed_bytes(self) -> int:
        return self.peers * BYTES_PER_PARAMETER * self.here

    @property
    def is_sparse(self) -> bool:
        return _codec(self.codec).is_sparse

    def training(self, *, compressed: bool) -> Training:
        up, down = UNLIMITED_MBPS, UNLIMITED_MBPS
        if compressed:
            up, down = self.up_mbps / self.scale, self.down_mbps / self.scale
        return Training(
            target_batch=self.peers * BATCH,
            task={"parameters": self.here, "batch": BATCH, "tokens": BATCH, "sgd": True},
            manner={
                "local_steps": self.passes * self.fragments,
                "fragments": self.fragments,
                "pass_seconds": self.seconds / self.passes,
                "digests_from": WARM_UP_STEPS + self.steps + 1 if compressed else None,
            },
            codec=self.codec if compressed else "none",
            link_mbps=down,
            up_mbps=up,
        )

    def value_bytes(self, codec: str) -> float:
        """Of the encoded values alone that a peer sends in a step, if parts are equal: its own to
        the others, and the average of its part to each of them."""
        encoded = _codec(codec).encoded_bytes(self.here) / self.fragments
        return 2 * encoded * (self.peers - 1) / self.peers


def _codec(name: str) -> Codec:
    from protocols.tensors.codecs import CODECS

    codecs: Mapping[str, Codec] = dict(CODECS.items())
    return codecs[name]


async def measure_homes(effort: HomesEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    check_own_networks()
    machine, began = machine_facts(), time.monotonic()
    result = await _run(effort, say, compressed=True)
    load = os.getloadavg()[0]
    plain = await _run(effort, say, compressed=False)
    sent, plain_sent = (one["bytes_per_hour"]["sent"] for one in (result, plain))
    full = at_full_size(effort, result, effort.codec)
    plain_full = at_full_size(effort, plain, "none")
    # in an exchange: a run whose exchanges are late sends less in an hour
    late = result["step_s"] / plain["step_s"]
    times_fewer = plain_sent / (sent * late)
    at_size = plain_full / (full * late)
    few_enough = not effort.is_sparse or at_size >= BAR_TIMES_FEWER
    return result | {
        "bytes_per_hour_uncompressed": plain["bytes_per_hour"],
        "bytes_per_hour_full_size": {
            "sent": round(full),
            "sent_uncompressed": round(plain_full),
        },
        "times_fewer": round(times_fewer, 1),
        "times_fewer_full_size": round(at_size, 1),
        "parameters_here": effort.here,
        "scale": effort.scale,
        "bars": {"utilisation": BAR_UTILISATION}
        | ({"times_fewer_full_size": BAR_TIMES_FEWER} if effort.is_sparse else {}),
        "met": result["utilisation"] >= BAR_UTILISATION and result["same_bits"] and few_enough,
        "load_1min_measured": round(load, 2),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def at_full_size(effort: HomesEffort, run: Mapping[str, Any], codec: str) -> float:
    """What a peer with all parameters would send in an hour, by a run with those here."""
    values = effort.value_bytes(codec) * 3600 / float(run["step_s"])
    return values * effort.scale + max(0.0, float(run["bytes_per_hour"]["sent"]) - values)


async def _run(effort: HomesEffort, say: Talk, *, compressed: bool) -> dict[str, Any]:
    """One run: its figures, and whether all peers hold the same bits after it was measured."""
    warm_up, steps = WARM_UP_STEPS, effort.steps
    patience = LEAST_STEP_SECONDS + PATIENCE * effort.seconds
    training = effort.training(compressed=compressed)
    say(f"{effort.peers} peers, {training.codec}, {effort.here:,} parameters")
    async with open_training_swarm(training) as swarm:
        await swarm.start_together({} for _ in range(effort.peers))
        await swarm.until_epoch(warm_up, patience * (warm_up + 1))
        before = _traffic(swarm)
        figures = await measure_steps(swarm, warm_up, steps, patience, say)
        after = _traffic(swarm)
        taken = swarm.lines(swarm.living[0], "StepTaken")
        step_seconds = _step_seconds(taken, warm_up, steps)
        hours = figures["steps"] * step_seconds / 3600
        sent = [(after[peer][0] - before[peer][0]) / hours for peer in after]
        received = [(after[peer][1] - before[peer][1]) / hours for peer in after]
        same_bits = not compressed or await _same_bits(swarm, patience)
        memory = (await swarm.ask_all("totals")).values()
    kept = ("utilisation", "utilisation_mean", "where", "waiting", "cores_used", "steps")
    return {name: figures[name] for name in (*kept, "complete", "averaging_s_p50")} | {
        "bytes_per_hour": {
            "sent": round(statistics.mean(sent)),
            "received": round(statistics.mean(received)),
        },
        "step_s": round(step_seconds, 3),
        "same_bits": same_bits and not figures["failures"],
        "failures": figures["failures"],
        "most_memory_bytes": max(one["most_memory_bytes"] for one in memory),
    }


def _step_seconds(taken: Sequence[Mapping[str, Any]], first: int, steps: int) -> float:
    """The mean time from one step to the next, of those that were measured."""
    at = {line["epoch"]: line["at"] for line in taken}
    ends = [at[epoch] for epoch in sorted(at) if first - 1 <= epoch < first + steps]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def _traffic(swarm: TrainingSwarm) -> dict[int, tuple[int, int]]:
    """The bytes that each peer has sent and received so far."""
    return {
        life.number: network_bytes(Path(f"/proc/{life.process.process_id}/net/dev").read_text())
        for life in swarm.living
    }


async def _same_bits(swarm: TrainingSwarm, seconds: float) -> bool:
    """Whether the states of all peers are the same after some step, once all have told one."""
    try:
        with trio.fail_after(seconds):
            while True:
                told = swarm.audit().digests.values()
                whole = [one for one in told if sum(map(len, one.values())) == len(swarm.living)]
                if whole:
                    return all(
                        len({digest for all_told in one.values() for digest in all_told}) == 1
                        for one in whole
                    )
                await trio.sleep(GLANCE_SECONDS)
    except trio.TooSlowError:
        raise BenchFailed(
            f"Not all peers have told the digest of one state within {seconds:g} seconds.",
            why="Some of them do not make the run's steps, or this machine is busy.",
            advice="Run it again on an idle machine, with a larger --scale or fewer --peers.",
        ) from None


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_number

    parser = kinds.add_parser(
        "homes",
        help="peers at home keep their GPUs busy with a large model",
        description="Have some peers train a large model with local steps that are exchanged in "
        "fragments, each in a network of its own with a home's link. A pass is a pause of a given "
        "length that leaves gradients behind, as a GPU would. Measured are the share of its time "
        "in which each GPU computes, and the bytes that a peer sends and receives in an hour; then "
        "those of the same run without a codec. With --scale, the model is so many times smaller "
        "and the links as many times slower, so that all peers fit into one machine; the "
        "processor's own work at an exchange is smaller, too.\n\n"
        "It needs Linux and root. The exit code is 1 if a GPU computes less than "
        f"{BAR_UTILISATION:g} of the time, if the peers do not hold the same bits, or if a sparse "
        f"codec sends less than {BAR_TIMES_FEWER:g} times fewer bytes at the full size.",
        example="scripts/bench homes --json\n"
        "scripts/bench homes --up 20 --codec sparse-sign\n"
        "scripts/bench homes --params 1e8 --scale 4 --peers 4",
    )
    parser.set_defaults(measure=run)
    scale = "by how much the model is smaller and the links are slower"
    apart = "between two exchanges, each of one fragment"
    add_flag(parser, "--params", positive_number, 1e9, "parameters of the model")
    add_flag(parser, "--scale", positive_number, 40.0, scale)
    add_flag(parser, "--peers", positive_count, 8, "how many peers")
    add_flag(parser, "--fragments", positive_count, 2, "in how many parts it is exchanged")
    add_flag(parser, "--seconds", positive_number, 30.0, apart)
    add_flag(parser, "--passes", positive_count, 12, "inner steps in that time")
    add_flag(parser, "--steps", positive_count, 4, "how many exchanges are measured")
    add_flag(parser, "--up", positive_number, 100.0, "rate of each peer's link, up, in Mb/s")
    add_flag(parser, "--down", positive_number, 100.0, "and down")
    add_flag(parser, "--codec", str, "sparse-sign", "how values are encoded", metavar="CODEC")


def run(arguments: argparse.Namespace) -> int:
    from protocols.tensors import CODECS

    effort = HomesEffort(
        parameters=round(arguments.params),
        scale=arguments.scale,
        peers=arguments.peers,
        fragments=arguments.fragments,
        seconds=arguments.seconds,
        passes=arguments.passes,
        steps=arguments.steps,
        up_mbps=arguments.up,
        down_mbps=arguments.down,
        codec=arguments.codec,
    )
    if effort.codec not in CODECS:
        raise WrongUse(
            f"There is no codec {effort.codec}.", advice=f"Take one of {', '.join(CODECS)}."
        )
    if effort.needed_bytes / 2**30 > (memory := machine_facts()["memory_GiB"]):
        raise WrongUse(
            f"That takes about {effort.needed_bytes / 2**30:,.0f} GiB of memory, and this machine "
            f"has {memory:,.0f}.",
            advice="Take a larger --scale, or fewer --peers.",
        )
    check_own_networks()
    return report(arguments, partial(measure_homes, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    settings, load = result["settings"], result["load_1min_measured"]
    sent, received = (result["bytes_per_hour"][way] / 1e6 for way in ("sent", "received"))
    full = result["bytes_per_hour_full_size"]
    where = ", ".join(f"{name} {share:.1%}" for name, share in result["where"].items())
    lines = [
        f"{settings['peers']} homes with {settings['up_mbps']:g} Mb/s up and "
        f"{settings['down_mbps']:g} down, {settings['parameters']:,} parameters in "
        f"{settings['fragments']} fragments, {settings['codec']}",
        f"scaled       {result['scale']:g} times fewer parameters ({result['parameters_here']:,}) "
        "over links as many times slower",
        f"GPUs         compute {result['utilisation']:.1%} of the time or more "
        f"(mean {result['utilisation_mean']:.1%}); {where}",
        f"exchanges    {result['averaging_s_p50']} s, one every {result['step_s']} s; "
        f"{result['complete']:.0%} of them with all peers",
        f"bytes        a peer sends {sent:,.1f} MB in an hour and receives {received:,.1f}; "
        f"without a codec {result['bytes_per_hour_uncompressed']['sent'] / 1e6:,.1f}, "
        f"{result['times_fewer']:g} times as many in an exchange",
        f"full size    it would send {full['sent'] / 1e6:,.0f} MB in an hour; without a codec "
        f"{full['sent_uncompressed'] / 1e6:,.0f}, {result['times_fewer_full_size']:g} times as "
        "many in an exchange",
        f"the bits     are {'the same at all' if result['same_bits'] else 'NOT THE SAME'}",
        f"this machine {result['cores_used']} cores used by the peers, load {load}",
    ]
    lines += [f"failed: {one}" for one in result["failures"]]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
