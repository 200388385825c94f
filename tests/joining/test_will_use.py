"""Three lines: what a run will use of this machine and its network, and how to stop."""

from __future__ import annotations

import dataclasses

from node.joining.will_use import Use, three_lines

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


def test_they_say_what_the_owner_allows() -> None:
    caps = {
        "max-memory": "at most 4 GB",
        "upload-limit": "at most 2 MB/s",
        "quota": "at most 200 GB a month",
        "schedule": "only 22:00-07:00",
    }
    gpus = dataclasses.replace(USE, devices=("cuda:0", "cuda:1"), caps=caps)
    machine, network, stop = three_lines(gpus)
    assert "trains on cuda:0, cuda:1 (one peer)" in machine
    assert "memory (at most 4 GB)" in machine
    assert "(up at most 2 MB/s) (at most 200 GB a month)" in network
    assert stop.endswith("It trains only 22:00-07:00.")
