"""A run that does not fit is refused by what its few lines say, before anything else is fetched."""

from __future__ import annotations

import dataclasses
import math

import pytest

from node.core.caps.memory import TooLarge
from node.core.caps.settings import Caps
from node.run.costs import KEPT_APART, costs_of
from node.run.definition import RunDefinition, read_definition
from node.training.join.fit import Fit, check_any_fits, check_fits, machine_memory
from tests.runs.definitions import TEXT, changed, with_line

GB = 1_000_000_000
GPU = ("cuda:0",)
SMALL = read_definition(TEXT)
SIXTEEN_GIGABYTES = read_definition(
    changed("context = 16\nwidth = 16\nlayers = 1", "width = 4096\nlayers = 20")
)
MIDDLING = read_definition(
    changed("context = 16\nwidth = 16\nlayers = 1", "width = 1024\nlayers = 4")
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
    gpu_gb: float | None = None,
    gpu_cap_gb: float | None = None,
) -> int:
    return fit(
        definition,
        machine_gb,
        cap_gb=cap_gb,
        devices=devices,
        computes=computes,
        gpu_gb=gpu_gb,
        gpu_cap_gb=gpu_cap_gb,
    ).most_samples


def fit(
    definition: RunDefinition,
    machine_gb: float | None,
    *,
    cap_gb: float | None = None,
    devices: tuple[str, ...] = ("cpu",),
    computes: bool = True,
    gpu_gb: float | None = None,
    gpu_cap_gb: float | None = None,
) -> Fit:
    return check_fits(
        costs_of(definition),
        Caps(memory_bytes=in_bytes(cap_gb), device_memory_bytes=in_bytes(gpu_cap_gb)),
        devices,
        definition,
        computes=computes,
        machine_bytes=in_bytes(machine_gb),
        device_bytes=in_bytes(gpu_gb),
    )


def in_bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GB)


def test_a_cap_below_what_every_run_takes_is_told_before_anything_is_loaded() -> None:
    check_any_fits(Caps(), "poem")
    check_any_fits(Caps(memory_bytes=int(0.44 * GB)), "poem")
    with pytest.raises(TooLarge, match=r"more than 430 MB .* as every run .* may hold 300 MB"):
        check_any_fits(Caps(memory_bytes=int(0.3 * GB)), "poem")
    assert costs_of(SMALL).memory_bytes(0) > 0.43 * GB


def test_a_run_that_fits_computes_as_many_samples_at_once_as_it_says() -> None:
    assert most_samples(SMALL, 4) == most_samples(SMALL, None, cap_gb=4) == 4


def test_above_the_owners_cap_it_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"needs about 433 MB .* may hold 300 MB"):
        most_samples(SMALL, 4, cap_gb=0.3)


def test_the_results_of_steps_get_no_more_than_the_cap_leaves_beside_the_samples() -> None:
    """They took a state's size on top of it, and a newcomer's twice that."""
    costs = costs_of(MIDDLING)
    assert costs.results_bytes > 0.5 * GB
    assert fit(MIDDLING, 64).most_kept_bytes == math.inf  # its owner has said nothing
    least = costs.memory_bytes(1)
    for more in (0, 0.1 * GB, 0.5 * GB, 8 * GB):
        found = fit(MIDDLING, 64, cap_gb=(least + more) / GB)
        assert found.most_kept_bytes == pytest.approx(min(costs.results_bytes, more / 2), abs=1)
        held = costs.memory_bytes(found.most_samples) + found.most_kept_bytes
        assert held <= least + more + 1
        before_batches = costs.memory_bytes(0) + found.most_followed_bytes
        assert before_batches == pytest.approx(least + more, abs=1)


@pytest.mark.slow
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


def test_a_gpus_cap_or_its_size_cuts_the_batches_in_its_memory() -> None:
    costs, most = costs_of(HUNGRY_BATCHES), HUNGRY_BATCHES.training.samples_at_once
    room = int(most_samples(HUNGRY_BATCHES, 8, devices=GPU, gpu_cap_gb=2))
    assert 1 < room < most
    assert costs.gpu_bytes(room) <= 2 * GB < costs.gpu_bytes(room + 1)
    assert most_samples(HUNGRY_BATCHES, 8, devices=GPU, gpu_gb=2) == room
    assert most_samples(HUNGRY_BATCHES, 8, devices=GPU, gpu_gb=1, gpu_cap_gb=2) == room
    assert most_samples(HUNGRY_BATCHES, 8, devices=("cuda:0", "cuda:1"), gpu_gb=2) == 2 * room
    on_processor = most_samples(HUNGRY_BATCHES, 8)
    assert most_samples(HUNGRY_BATCHES, 8, gpu_cap_gb=0.3) == on_processor, "it has no other memory"


def test_a_model_that_does_not_fit_into_the_gpu_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(TooLarge, match=r"of a GPU's memory; this node may hold 40 GB") as caught:
        most_samples(SIXTEEN_GIGABYTES, 64, devices=GPU, gpu_gb=640, gpu_cap_gb=40)
    assert caught.value.why == "limits.max_device_memory (--max-device-memory) sets this limit."
    with pytest.raises(TooLarge, match="the GPU here has 80 GB"):
        most_samples(SIXTEEN_GIGABYTES, 64, devices=GPU, gpu_gb=80)
    assert most_samples(SIXTEEN_GIGABYTES, 64, devices=GPU, gpu_gb=80, gpu_cap_gb=640) == 4


def test_copies_that_stay_off_the_gpu_leave_room_there_and_need_the_machines() -> None:
    delayed = read_definition(
        changed("width = 16\nlayers = 1", "width = 1024\nlayers = 4").replace(
            b"[training]\n", b"[training]\ndelayed = true\n"
        )
    )
    for definition, left, taken in ((MIDDLING, 2, 0), (delayed, 5, 4)):
        costs = costs_of(definition)
        model = 4 * costs.parameters
        saved = costs.gpu_bytes(1) - costs.gpu_bytes(1, offload=True)
        assert saved == pytest.approx(KEPT_APART * left * model, abs=4)
        more = costs.memory_bytes(1, on_gpu=True, offload=True) - costs.memory_bytes(1, on_gpu=True)
        assert more == taken * model
    room = costs_of(MIDDLING).gpu_bytes(1, offload=True)
    caps = Caps(device_memory_bytes=room, offload=True)
    check_fits(costs_of(MIDDLING), caps, GPU, MIDDLING, machine_bytes=None)
    with pytest.raises(TooLarge, match="of a GPU's memory"):
        check_fits(
            costs_of(MIDDLING),
            dataclasses.replace(caps, offload=False),
            GPU,
            MIDDLING,
            machine_bytes=None,
        )


def test_a_gpu_that_shares_the_machines_memory_is_counted_in_it() -> None:
    shared = most_samples(HUNGRY_BATCHES, 8, cap_gb=2, devices=("mps",))
    assert shared == most_samples(HUNGRY_BATCHES, 8, cap_gb=2)


def test_a_sample_in_half_the_bits_keeps_fewer_bytes() -> None:
    full, half = costs_of(SMALL), costs_of(read_definition(with_line('precision = "bf16"')))
    assert half.sample_bytes < 0.9 * full.sample_bytes
    assert half.fixed_bytes > full.fixed_bytes, "autocast has a copy of the parameters"


def test_with_local_steps_what_a_coarse_codec_loses_takes_a_copy_of_the_parameters() -> None:
    def fixed(codec: str) -> tuple[int, int]:
        local = with_line("local_steps = 50") + f'[averaging]\ncodec = "{codec}"\n'.encode()
        costs = costs_of(read_definition(local))
        return costs.with_gpu.beside, 4 * costs.parameters

    (plain, _), (half, _), (coarse, copy) = map(fixed, ("none", "float16", "blockwise-int4"))
    assert plain == half
    assert coarse == plain + copy


def test_factors_of_gradients_take_a_copy_of_the_parameters_and_save_traffic() -> None:
    """What is not sent yet is kept; the factors are part of the state."""
    whole = costs_of(SMALL)
    short = costs_of(read_definition(TEXT + b"[averaging]\npowersgd_rank = 2\n"))
    assert short.with_gpu.beside == whole.with_gpu.beside + 4 * whole.parameters
    assert short.fixed_bytes > whole.fixed_bytes
    assert short.round_bytes < 0.6 * whole.round_bytes
    sent = 2 * (short.state_bytes - whole.state_bytes) // 4  # in float16
    assert 0 < sent < short.round_bytes / 2


def test_of_fragments_a_round_has_its_share_of_memory_samples_and_traffic() -> None:
    whole = costs_of(read_definition(with_line("local_steps = 50")))
    parts = costs_of(read_definition(with_line("local_steps = 50\nfragments = 5")))
    copy = 4 * whole.parameters
    saved = whole.with_gpu.beside - parts.with_gpu.beside
    assert saved == pytest.approx(2 * copy * 4 / 5, abs=1.0)
    assert 5 * parts.samples_per_round == whole.samples_per_round
    assert parts.round_bytes == pytest.approx(whole.round_bytes / 5, rel=0.01)
    hourly = [one.traffic(volunteers=8, samples_per_second=9.0) for one in (whole, parts)]
    assert hourly[0].up_bytes_per_hour == pytest.approx(hourly[1].up_bytes_per_hour, rel=0.01)


def test_the_owner_may_say_that_it_may_hold_more_than_there_is() -> None:
    assert most_samples(SIXTEEN_GIGABYTES, 8, cap_gb=640) == 4


def test_a_helper_without_samples_needs_no_memory_for_them() -> None:
    long = read_definition(
        changed("context = 16\nwidth = 16\nlayers = 1", "context = 65536\nwidth = 16\nlayers = 64")
    )
    with pytest.raises(TooLarge):
        most_samples(long, 2)
    most_samples(long, 2, computes=False)


def test_batches_are_made_smaller_to_fit_with_and_without_a_cap() -> None:
    capped, uncapped = most_samples(HUNGRY_BATCHES, 8, cap_gb=1), most_samples(HUNGRY_BATCHES, 1)
    assert 0.999 * uncapped < capped < uncapped  # the results of steps get a little of a cap
    assert 1 < capped < HUNGRY_BATCHES.training.samples_at_once


def test_this_machine_says_how_much_it_has() -> None:
    found = machine_memory()
    assert found is None or found > GB / 10
