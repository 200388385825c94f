"""The bench of codecs has the sums of the product, and its figures are what they say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench.codec_convergence import (
    CodecTrial,
    PeersExchange,
    _codecs,
    _ranks,
    arms_of,
    summary,
)
from protocols.moshpit.layout import Layout, Segment
from tests.commands.console import laboratory, laboratory_here, objects


def run(
    codec: str,
    seed: int,
    final: float,
    *,
    feeds_back: bool = True,
    fragments: int = 1,
    rank: int | None = None,
) -> dict[str, Any]:
    return {
        "name": CodecTrial(codec, feeds_back, fragments, rank).name,  # type: ignore[arg-type]
        "codec": codec,
        "feeds_back": feeds_back,
        "fragments": fragments,
        "rank": rank,
        "seed": seed,
        "final": final,
        "bytes_of_a_round": 400 if codec == "none" else 53,
        "bytes_at_once": (400 if codec == "none" else 53) // fragments,
    }


def test_each_training_is_compared_with_that_of_the_same_samples_without_a_codec() -> None:
    runs = [
        run("none", 0, 2.0),
        run("blockwise-int4", 0, 2.02),
        run("none", 1, 1.0),
        run("blockwise-int4", 1, 0.99),
        run("blockwise-int4", 1, 1.5, feeds_back=False),
        run("none", 1, 0.9, fragments=2),
    ]
    plain, coarse, without, parts = summary(runs)
    assert (plain["final"], plain["share_worse"], plain["share_of_bytes"]) == (1.5, 0.0, 1.0)
    assert (coarse["seeds"], coarse["share_worse"], coarse["share_worse_most"]) == (2, 0.0, 0.01)
    assert coarse["share_of_bytes"] == 0.1325
    assert (without["name"], without["share_worse"]) == ("blockwise-int4, no feedback", 0.5)
    assert (parts["name"], parts["share_worse"]) == ("none, 2 fragments", -0.1)
    assert (parts["share_of_bytes"], parts["share_at_once"]) == (1.0, 0.5)


def test_factors_are_compared_with_whole_gradients() -> None:
    arms = arms_of((), ranks=(8, 16))
    assert [arm.name for arm in arms] == [
        "none", "gradients", "gradients, PowerSGD of rank 8", "gradients, PowerSGD of rank 16"
    ]  # fmt: skip
    runs = [run("none", 0, 3.0), run("none", 0, 2.0, rank=0), run("none", 0, 2.1, rank=8)]
    assert [one["share_worse"] for one in summary(runs)] == [0.0, 0.0, 0.05]


@pytest.mark.parametrize("text", ["", "8,", "-1", "two"])
def test_what_is_no_rank_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="are not ranks, such as 8,16"):
        _ranks(text)
    assert _ranks("0") == ()


def test_a_coarse_codec_is_tried_without_feedback_too() -> None:
    arms = arms_of(("float16", "blockwise-int4"), fragments=4)
    assert [arm.name for arm in arms] == [
        "none", "float16", "blockwise-int4", "blockwise-int4, no feedback", "none, 4 fragments"
    ]  # fmt: skip


def test_a_sparse_codec_is_tried_in_fragments_too() -> None:
    arms = arms_of(("blockwise-int8", "sparse-sign"), fragments=2)
    assert [arm.name for arm in arms if arm.fragments > 1] == [
        "none, 2 fragments",
        "sparse-sign, 2 fragments",
    ]


@pytest.mark.parametrize("text", ["", "int4", "none,,float16", "float64"])
def test_what_is_no_codec_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="are not codecs, such as none, float16"):
        _codecs(text)


def test_all_peers_get_the_same_mean() -> None:
    layout = Layout((Segment("a", 5_001, "blockwise-int4"), Segment("b", 300, "none")))
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(layout.values, generator=generator) for _ in range(3)]
    exchange = PeersExchange(layout, 3)
    results = exchange.averages(sources)
    assert all(torch.equal(one, results[0]) for one in results)
    mean = torch.stack(sources).mean(0)
    torch.testing.assert_close(results[0][5_001:], mean[5_001:])
    error = float((results[0][:5_001] - mean[:5_001]).norm() / mean[:5_001].norm())
    assert 0.05 < error < 0.3  # that of four bits, twice
    assert exchange.bytes == 4 * 40 + 2_501 + 1_200
    assert sum(one.values for one in exchange.sent_by(0).chunks(layout)) == layout.values - 2_048


def test_all_peers_get_the_same_sparse_mean_in_a_hundredth_of_the_bytes() -> None:
    layout = Layout((Segment("a", 100_000, "sparse-sign"),))
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(layout.values, generator=generator) for _ in range(3)]
    for one in sources:
        for place in (0, 1, 3):
            one[place::4] = 0.0
    exchange = PeersExchange(layout, 3)
    results = exchange.averages(sources)
    assert all(torch.equal(one, results[0]) for one in results)
    assert int(results[0].count_nonzero()) == 25_000
    assert bool((results[0][2::4] != 0.0).all())
    assert 100 * exchange.bytes < 4 * 100_000


def test_local_steps_that_fragments_do_not_divide_are_refused(tmp_path: Path) -> None:
    result = laboratory_here("bench", "codecs", "--local-steps", "5", home=tmp_path)
    assert result.returncode == 2
    assert "--local-steps 5 cannot be divided among --fragments 2" in result.stderr


@pytest.mark.slow
def test_codecs_are_compared_and_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = laboratory(
        "bench", "codecs", "--json", "--quick", "--codecs", "blockwise-int4", "--peers", "2",
        "--ranks", "4", "--plot", str(plot), home=tmp_path,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stderr  # whether the bar is met is no test's affair
    (told,) = objects(result.stdout)
    assert told["met"] == (result.returncode == 0)
    plain, coarse, without, parts, whole, factors = told["arms"]
    assert (whole["rank"], whole["share_worse"], whole["share_of_bytes"]) == (0, 0.0, 1.0)
    assert (factors["rank"], factors["final"] != whole["final"]) == (4, True)
    assert factors["share_of_bytes"] < 0.12
    assert (parts["codec"], parts["fragments"], parts["share_of_bytes"]) == ("none", 2, 1.0)
    assert 0.5 <= parts["share_at_once"] < 0.6
    assert parts["final"] != plain["final"]
    assert (plain["codec"], plain["share_worse"]) == ("none", 0.0)
    assert coarse["feeds_back"]
    assert not without["feeds_back"]
    assert coarse["final"] != without["final"]
    assert coarse["share_of_bytes"] == pytest.approx(0.133, abs=0.001)
    first, last = told["runs"][0]["curve"][0], told["runs"][0]["curve"][-1]
    assert last[1] < first[1]
    assert plot.read_bytes().startswith(b"<?xml")
