"""Three lines: what a run will use of this machine and its network, and how to stop."""

from __future__ import annotations

import dataclasses
import re

from node.core.caps.settings import Caps
from node.run.costs import costs_of
from node.run.definition import read_definition
from node.training.join import participation
from node.training.join.fit import Fit, Use, beside_training, serving_lines, three_lines
from node.training.join.participation import Participation
from tests.runs.definitions import changed

USE = Use(
    run="poem",
    description="Poems in Bengali",
    devices=("cpu",),
    threads=2,
    memory_bytes=363_000_000,
    state_bytes=5_250_000,
    disk_bytes=5_250_000,
    round_bytes=1_790_000,
    caps={},
)


def test_they_say_devices_memory_disk_traffic_and_how_to_stop() -> None:
    machine, network, stop = three_lines(USE)
    assert machine == (
        "poem (Poems in Bengali): trains on the processor with 2 threads, with about 363 MB of "
        "memory and 5.25 MB of disk"
    )
    assert network == (
        "network: 5.25 MB to begin with, then about 1.79 MB each way for every step of the run"
    )
    assert "Ctrl-C leaves within five seconds" in stop


def test_the_gpus_memory_is_told_apart_from_the_machines() -> None:
    gpu = dataclasses.replace(USE, devices=("cuda:0",), gpu_bytes=11 * 10**9)
    assert "about 363 MB of memory, 11 GB of the GPU's and 5.25 MB" in three_lines(gpu)[0]


def test_experts_on_a_gpu_take_its_memory() -> None:
    caps = {"max-memory": "at most 4 GB", "max-device-memory": "at most 12 GB"}
    for devices, words in (
        (("cpu",), "about 2 GB of memory (at most 4 GB)"),
        (("cuda:0",), "about 2 GB of the GPU's memory (at most 12 GB)"),
    ):
        use = dataclasses.replace(USE, devices=devices, caps=caps)
        assert words in serving_lines(use, 8, 2 * 10**9, 10**9)[0]
    assert "2 GB more of the GPU's memory" in beside_training(8, 2 * 10**9, ("cuda:0",))


def test_of_a_large_model_on_a_gpu_the_machine_holds_the_smaller_part() -> None:
    definition = read_definition(changed("width = 16\nlayers = 1", "width = 1024\nlayers = 24"))
    part, costs = Participation("poem", ""), costs_of(definition)
    machine = participation._lines(part, definition, Caps(), ("cuda:0",), 2, costs, Fit(4), None)[0]
    told = re.search(r"about ([\d.]+) GB of memory, ([\d.]+) GB of the GPU's", machine)
    assert told is not None, machine
    assert 2 * float(told[1]) < costs.memory_bytes(4) / 1e9 < 1.3 * float(told[2])


def test_they_say_what_the_owner_allows() -> None:
    caps = {
        "max-memory": "at most 4 GB",
        "max-device-memory": "at most 12 GB",
        "upload-limit": "at most 2 MB/s",
        "quota": "at most 200 GB a month",
        "schedule": "only 22:00-07:00",
    }
    gpus = dataclasses.replace(
        USE,
        devices=("cuda:0", "cuda:1"),
        caps=caps,
        memory_bytes=1_700_000_000,
        gpu_bytes=11 * 10**9,
    )
    machine, network, stop = three_lines(gpus)
    assert "trains on cuda:0, cuda:1 (one peer)" in machine
    assert (
        "about 1.7 GB of memory (at most 4 GB), 11 GB of the first GPU's (at most 12 GB) and "
        "5.25 MB of" in machine
    )
    assert "(up at most 2 MB/s) (at most 200 GB a month)" in network
    assert stop.endswith("It trains only 22:00-07:00.")
