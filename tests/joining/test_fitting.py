"""A run that does not fit is refused by what its few lines say, before anything else is fetched."""

from __future__ import annotations

import pytest

from node.caps.memory import TooLarge
from node.caps.settings import Caps
from node.joining.fitting import check_any_fits, check_fits, machine_memory
from node.run.costs import costs_of
from node.run.definition import RunDefinition, read_definition
from tests.runs.definitions import TEXT, changed, with_line

GB = 1_000_000_000
GPU = ("cuda:0",)
SMALL = read_definition(TEXT)
SIXTEEN_GIGABYTES = read_definition(
    changed("context = 16\nwidth = 16\nlayers = 1", "width = 4096\nlayers = 20")
)
LARGEST = read_definition(
    changed(
        "context = 16\nwidth = 16\nlayers = 1\nheads = 2",
        "context = 65536\nwidth = 16384\nlayers = 256\nheads = 2\nvocabulary = 1000000",
    )
)
HUNGRY_BATCHES = read_definition(
    changed("batch = 64\nsamples_at_once = 4", "batch = 1048576\nsamples_at_once = 1048576")
)


def most_samples(
    definition: RunDefinition,
    machine_gb: float | None,
    *,
    cap_gb: float | None = None,
    devices: tuple[str, ...] = ("cpu",),
    computes: bool = True,
) -> int:
    return check_fits(
        costs_of(definition),
        Caps(memory_bytes=None if cap_gb is None else int(cap_gb * GB)),
        devices,
        definition,
        computes=computes,
        machine_bytes=None if machine_gb is None else int(machine_gb * GB),
    )


def test_a_cap_below_what_every_run_takes_is_told_before_anything_is_loaded() -> None:
    check_any_fits(Caps(), "poem")
    check_any_fits(Caps(memory_bytes=int(0.44 * GB)), "poem")
    with pytest.raises(TooLarge, match=r"more than 430 MB .* as every run .* may hold 300 MB"):
        check_any_fits(Caps(memory_bytes=int(0.3 * GB)), "poem")
    assert costs_of(SMALL).memory_bytes(0) > 0.43 * GB


def test_what_fits_computes_as_many_samples_at_once_as_the_run_says() -> None:
    assert most_samples(SMALL, 4) == most_samples(SMALL, None, cap_gb=4) == 4


def test_above_the_owners_cap_it_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"needs about 432 MB .* may hold 300 MB"):
        most_samples(SMALL, 4, cap_gb=0.3)


def test_without_a_cap_it_is_the_machine_that_it_has_to_fit() -> None:
    for definition in (SIXTEEN_GIGABYTES, LARGEST):
        with pytest.raises(TooLarge, match="this machine has 8 GB") as caught:
            most_samples(definition, 8)
        assert "Nothing was downloaded" in caught.value.advice
        assert caught.value.exit_code == 3


def test_where_a_gpu_computes_the_machine_has_to_hold_what_a_round_reads_and_writes() -> None:
    assert most_samples(SIXTEEN_GIGABYTES, 40, devices=GPU) == 4
    with pytest.raises(TooLarge, match=r"needs about 33\.\d GB of memory; this machine has 24 GB"):
        most_samples(SIXTEEN_GIGABYTES, 24, devices=GPU)
    assert costs_of(SIXTEEN_GIGABYTES).gpu_bytes(1) > 100 * GB, "and that is the GPU's"


def test_a_cap_does_not_cut_batches_that_are_in_the_gpus_memory() -> None:
    most = HUNGRY_BATCHES.training.samples_at_once
    assert most_samples(HUNGRY_BATCHES, 8, cap_gb=2, devices=GPU) == most
    assert most_samples(HUNGRY_BATCHES, 8, cap_gb=2) < most
    with pytest.raises(TooLarge, match=r"needs about 1\.1\d GB .* may hold 1 GB"):
        most_samples(HUNGRY_BATCHES, 8, cap_gb=1, devices=GPU)


def test_a_gpu_that_shares_the_machines_memory_is_counted_in_it() -> None:
    shared = most_samples(HUNGRY_BATCHES, 8, cap_gb=2, devices=("mps",))
    assert shared == most_samples(HUNGRY_BATCHES, 8, cap_gb=2)


def test_a_sample_in_half_the_bits_keeps_fewer_bytes() -> None:
    full, half = costs_of(SMALL), costs_of(read_definition(with_line('precision = "bf16"')))
    assert half.sample_bytes < 0.9 * full.sample_bytes
    assert half.fixed_bytes > full.fixed_bytes, "autocast has a copy of the parameters"


def test_the_owner_may_say_that_it_may_hold_more_than_there_is() -> None:
    assert most_samples(SIXTEEN_GIGABYTES, 8, cap_gb=640) == 4


def test_who_brings_no_samples_needs_no_memory_for_any() -> None:
    long = read_definition(
        changed("context = 16\nwidth = 16\nlayers = 1", "context = 65536\nwidth = 16\nlayers = 64")
    )
    with pytest.raises(TooLarge):
        most_samples(long, 2)
    most_samples(long, 2, computes=False)


def test_batches_are_made_smaller_to_fit_with_and_without_a_cap() -> None:
    capped, uncapped = most_samples(HUNGRY_BATCHES, 8, cap_gb=1), most_samples(HUNGRY_BATCHES, 1)
    assert capped == uncapped
    assert 1 < capped < HUNGRY_BATCHES.training.samples_at_once


def test_this_machine_says_how_much_it_has() -> None:
    found = machine_memory()
    assert found is None or found > GB / 10
