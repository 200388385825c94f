"""What a peer keeps beyond a plain training loop is the table in docs/organisers.md.

Two peers train together, on the processor or on a device double. Whenever one of them brings a
batch or has made a step, the tensors that are alive are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from node.run.costs import KeptCopies, copies_of
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.events import ParametersAveraged, StepTaken
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.state_serving import StateServer
from tests.accumulation.device_double import (
    DOUBLE,
    Alive,
    bytes_alive,
    count_only_new_objects,
    device_double,
)
from tests.accumulation.training_peers import SETTINGS, training_world, wait_for_company

PAGE: Final = Path(__file__).parents[2] / "docs" / "organisers.md"
PARAMETERS: Final = 16
VALUES: Final = 1 << 20  # of all of them
MODEL_BYTES: Final = 4 * VALUES
EACH_BYTES: Final = MODEL_BYTES // PARAMETERS
EACH: Final = (256, 256)  # 65,536 values
STEPS: Final = 4
WARM_UP: Final = 2
PEERS: Final = 2
PLAIN: Final = 3  # copies of a plain loop: parameters, gradients, and the momentum of SGD
STATISTICS: Final = 1
RANK: Final = 4
FRAGMENTS: Final = 2  # each larger than the scratch in which gradients are checked


@pytest.fixture(autouse=True)
def no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of milliseconds the peers seem to be behind one another, and each would keep a copy
    of its state for the other, as donors do for newcomers. The table does not count that."""
    monkeypatch.setattr(StateServer, "needed", lambda _self: None)


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "`delayed`": {"delayed": True},
    "`local_steps`": {"local_steps": 2},
    "`local_steps`, `fragments=F`": {"local_steps": 4, "fragments": FRAGMENTS},
    "`powersgd_rank`": {"powersgd_rank": RANK},
    "`delayed`, `powersgd_rank`": {"delayed": True, "powersgd_rank": RANK},
    "`offload`": {"offload": True},
    "`delayed`, `offload`": {"delayed": True, "offload": True},
    "`local_steps`, `offload`": {"local_steps": 2, "offload": True},
}
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.soak] if "powersgd" in mode else [])
        for mode in OPTIONS
    ],
)
async def test_a_peer_with_a_gpu_keeps_what_the_table_says(mode: str) -> None:
    with device_double():
        kept = await most_alive(OPTIONS[mode], DOUBLE)
    told = documented()[mode]
    assert kept.double == pytest.approx(PLAIN + told.on_gpu, abs=0.1)
    assert kept.cpu == pytest.approx(told.beside_gpu, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "none",
        "`delayed`",
        "`local_steps`",
        "`local_steps`, `fragments=F`",
        pytest.param("`powersgd_rank`", marks=pytest.mark.soak),
        pytest.param("`delayed`, `powersgd_rank`", marks=pytest.mark.soak),
    ],
)
async def test_a_peer_without_one_keeps_what_the_table_says(mode: str) -> None:
    kept = await most_alive(OPTIONS[mode], torch.device("cpu"))
    assert kept.cpu == pytest.approx(PLAIN + documented()[mode].on_processor, abs=0.1)


@pytest.mark.slow
async def test_more_is_held_while_parameters_are_averaged() -> None:
    with device_double():
        kept = await most_alive({"average_parameters_every": 1}, DOUBLE)
    told = documented()["`average_parameters_every`"]
    assert kept.cpu == pytest.approx(told.beside_gpu + told.while_averaging, abs=0.1)
    assert kept.double == pytest.approx(PLAIN + told.on_gpu, abs=0.1)
    kept = await most_alive({"average_parameters_every": 1}, torch.device("cpu"))
    most = told.on_processor + told.while_averaging
    assert kept.cpu == pytest.approx(PLAIN + most, abs=0.1)


def test_the_costs_that_volunteers_are_told_count_these_copies() -> None:
    usual = {"delayed": False, "local_steps": 1, "parameters_every": 0, "offload": False}
    for mode, told in documented().items():
        options = usual | OPTIONS.get(mode, {"parameters_every": 1})
        assert copies_of(**options, statistics=STATISTICS) == told, mode


async def most_alive(options: dict[str, Any], device: torch.device) -> Alive:
    """The most tensors alive at once after the first steps, in copies of a peer's parameters."""
    seen: list[Alive] = []
    counted = partial(is_counted, flat=MODEL_BYTES // options.get("fragments", 1))

    def watched(bridge: Bridge) -> Callable[[object], None]:
        tell = bridge.tell

        def told(event: Any) -> None:
            if isinstance(event, StepTaken | ParametersAveraged) and event.epoch >= WARM_UP:
                seen.append(bytes_alive(counted))
            tell(event)

        return told

    def loop(bridge: Bridge, peer: int) -> None:
        bridge.tell = watched(bridge)  # type: ignore[method-assign]
        model = [nn.Parameter(torch.ones(EACH).to(device)) for _ in range(PARAMETERS)]
        named = [(f"p{number}", one) for number, one in enumerate(model)]
        optimizer = CollaborativeOptimizer(named, SGD, bridge, max_norm=1.0, **options)
        wait_for_company(bridge, PEERS - 1)
        while optimizer.epoch < STEPS:
            for one in model:
                if one.grad is None:
                    one.grad = torch.full(EACH, 1.0 + peer).to(device)
            seen.append(bytes_alive(counted))
            optimizer.step(samples=8)
        optimizer.finish()

    settings = replace(SETTINGS, target_batch=8 * PEERS)
    count_only_new_objects()
    async with training_world() as world:
        await world.train(await world.peers(PEERS, settings), loop)
    size = PEERS * MODEL_BYTES
    return Alive(max(one.cpu for one in seen) / size, max(one.double for one in seen) / size)


def is_counted(size: int, flat: int) -> bool:
    """Tensors of a parameter's size, and flat buffers of all or of a fragment; not the parts of a
    round, and no scratch of a fixed size."""
    return size == EACH_BYTES or size > flat * 3 // 4


def documented() -> dict[str, KeptCopies]:
    """The table, by its first column."""
    table = PAGE.read_text("utf-8").split("#### What each option keeps in memory")[1]
    row = r"^\| (.+?) \| (\d.*?) \| (\d.*?) \| (\d.*?) \|$"
    rows = re.findall(row, table.split("\n\n")[2], re.MULTILINE)
    return {mode: _copies(*words) for mode, *words in rows}


def _copies(on_processor: str, on_gpu: str, beside_gpu: str) -> KeptCopies:
    moved = STATISTICS if "without the optimizer's statistics" in on_gpu else 0
    assert ("and the optimizer's statistics" in beside_gpu) == bool(moved)
    more = re.search(r"and (\d) more while parameters are averaged", beside_gpu)
    of_fragment = 2 / FRAGMENTS
    assert ("+ 2/F" in on_processor) == ("+ 2/F" in beside_gpu)
    return KeptCopies(
        int(on_processor[0]) + (of_fragment if "+ 2/F" in on_processor else 0),
        int(on_gpu[0]) - moved,
        int(beside_gpu[0]) + moved + (of_fragment if "+ 2/F" in beside_gpu else 0),
        0 if more is None else int(more[1]),
    )
