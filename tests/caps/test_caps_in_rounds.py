"""The caps that a node tells to others, and their use in a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.core.caps.devices import (
    NoSuchDevice,
    available_cores,
    check_threads,
    choose_device,
    device_as_written,
    devices_here,
    threads_as_written,
    use_threads,
)
from node.core.caps.settings import CAP_KEYS, Caps, caps_of
from node.core.configuration import read_configuration
from node.core.training_view import RunPeerView
from node.core.wrong_use import WrongUse
from node.training.watched import with_parts
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.events import Share, reduced_by
from protocols.identity import PeerId
from protocols.moshpit.plan import fractions_for


def test_a_limited_peer_reduces_less_for_others() -> None:
    rates = Caps(upload_bytes_per_second=2e6).planner_rates()
    others = [10e6, 10e6, 10e6]
    limited, *shares = fractions_for(
        [rates.up_bytes_per_second, *others], [10e6] * 4, [True] * 4, [True] * 4
    )
    alike, *_ = fractions_for([10e6, *others], [10e6] * 4, [True] * 4, [True] * 4)
    assert limited < alike
    assert limited < min(shares)


@pytest.mark.parametrize("contributes", [[True, True, True], [True, True, False]])
def test_an_unlimited_peer_is_soon_given_more_although_rounds_do_not_show_it_faster(
    contributes: list[bool],
) -> None:
    """All start as equals, since nothing is known of the others. Then each is known by what it has
    carried in the last round, which took as long as the limited one needed for its part."""
    limit = 2e6
    declared = Caps(upload_bytes_per_second=limit).planner_rates().up_bytes_per_second
    rates, parts = [declared, 0.0, 0.0], [0.0, 0.0, 0.0]
    for _ in range(4):
        parts = list(fractions_for(rates, [0.0] * 3, contributes, [True] * 3))
        sent = [one + (2 - one) * part for one, part in zip(contributes, parts, strict=True)]
        seconds = sent[0] / (0.95 * limit)
        rates = [declared, *(0.9 * one / seconds for one in sent[1:])]
    assert parts[0] < 0.02


def test_others_are_shown_the_rates_and_the_part_of_the_plan() -> None:
    keeper, free, capped, unseen = (PeerId(name) for name in ("keeper", "free", "capped", "new"))
    shares = (
        Share(keeper, 0.0, 140),
        Share(free, 32.0, 25, 9_000_000, 8_000_000),
        Share(capped, 32.0, 5, 1_800_000, 0),
    )
    assert reduced_by(shares) == {keeper: 0.7, free: 0.25, capped: 0.05}
    assert set(reduced_by((Share(free, 32.0), Share(capped, 32.0))).values()) == {0.0}
    shown = {
        one.peer: one
        for one in with_parts([RunPeerView(peer=capped), RunPeerView(peer=unseen)], shares)
    }
    assert shown[capped] == RunPeerView(peer=capped, up_bytes_per_second=1_800_000, reduces=0.05)
    assert shown[unseen] == RunPeerView(peer=unseen)


def test_a_plan_counts_on_less_than_the_limit_so_that_the_rest_goes_through_as_well() -> None:
    rates = Caps(upload_bytes_per_second=2e6, download_bytes_per_second=4e6).planner_rates()
    settings = CollaborationSettings(
        "poem",
        64,
        up_bytes_per_second=rates.up_bytes_per_second,
        down_bytes_per_second=rates.down_bytes_per_second,
    ).averager_settings()
    assert 1e6 < settings.up_bytes_per_second < 1.5e6
    assert 2e6 < settings.down_bytes_per_second < 3e6
    none = Caps().planner_rates()
    assert (none.up_bytes_per_second, none.down_bytes_per_second) == (0.0, 0.0)


def test_the_settings_file_says_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "potluck.toml").write_text(
        """
        [limits]
        device = "cpu"
        threads = 2
        compile = true
        max_memory = "8GB"
        max_device_memory = "12GB"
        offload = true
        upload_limit = "16Mbit/s"
        download_limit = "4MB/s"
        quota = "200GB/month"
        schedule = "22:00-07:00"
        when_idle = true
        """
    )
    caps = caps_of(read_configuration(environment={"POTLUCK_HOME": str(tmp_path)}))
    assert caps == Caps(
        device="cpu",
        threads=2,
        compile=True,
        memory_bytes=8 * 10**9,
        device_memory_bytes=12 * 10**9,
        offload=True,
        upload_bytes_per_second=2e6,
        download_bytes_per_second=4e6,
        quota_bytes=200 * 10**9,
        schedule="22:00-07:00",
        when_idle=True,
    )
    assert caps.words() == {
        "device": "cpu",
        "threads": "2",
        "max-memory": "at most 8 GB",
        "max-device-memory": "at most 12 GB",
        "upload-limit": "at most 2 MB/s",
        "download-limit": "at most 4 MB/s",
        "quota": "at most 200 GB a month",
        "schedule": "only 22:00-07:00",
        "when-idle": "only while nobody else needs this machine",
    }


def test_without_settings_nothing_is_limited(tmp_path: Path) -> None:
    configuration = read_configuration(environment={"POTLUCK_HOME": str(tmp_path)})
    assert caps_of(configuration) == Caps()
    assert Caps().words() == {}
    assert set(CAP_KEYS) <= set(configuration.values)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("gpu", "cuda"),
        ("gpu1", "cuda:1"),
        ("cuda1", "cuda:1"),
        ("cuda-0", "cuda:0"),
        ("CPUs", "cpu"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_name(text: str, meant: str) -> None:
    with pytest.raises(WrongUse) as caught:
        device_as_written(text)
    assert f"Did you mean {meant}?" in str(caught.value)


def test_devices_are_written_in_small_letters() -> None:
    assert [device_as_written(text) for text in ("CUDA:1", " cpu ", "MPS", "")] == [
        "cuda:1",
        "cpu",
        "mps",
        "auto",
    ]


@pytest.mark.parametrize("text", ["0", "-1", "1025", "two", "1.5", "²", "9" * 5000])
def test_an_invalid_number_of_threads_is_refused_with_the_number_of_cores(text: str) -> None:
    with pytest.raises(WrongUse, match=f"{available_cores()} processor cores"):
        threads_as_written(text)


def test_more_threads_than_there_are_cores_are_refused() -> None:
    check_threads(None)
    check_threads(1)
    with pytest.raises(WrongUse, match=r"1,000 threads .* It has \d+ processor cores?"):
        check_threads(1000)


def test_a_missing_device_is_refused_with_the_available_ones() -> None:
    with pytest.raises(NoSuchDevice, match=r"no device cuda:99 on this machine.*torch sees .*cpu"):
        choose_device("cuda:99")
    assert str(choose_device("cpu")) == "cpu"
    assert str(choose_device("auto")) == devices_here()[0]


def test_torch_computes_with_the_threads_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # so that it is put back
    before = torch.get_num_threads()
    try:
        assert use_threads(1) == torch.get_num_threads() == 1
        assert use_threads(None) == 1
    finally:
        torch.set_num_threads(before)
