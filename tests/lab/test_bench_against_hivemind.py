"""`scripts/bench-against-hivemind` holds each averaging to the bars of its size."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "bench-against-hivemind"


@pytest.mark.parametrize(
    ("peers", "numel", "codec", "figure", "share"),
    [
        (4, 10_000_000, "none", "aggregate_s_p50", 0.35),
        (4, 10_000_000, "none", "cpu_s", 0.35),
        (4, 124_000_000, "float16", "aggregate_s_p50", 0.3),
        (2, 25_000_000, "none", "aggregate_s_p50", 0.6),
    ],
)
def test_an_averaging_meets_its_bar_with_this_share_of_hivemind_and_no_more(
    peers: int, numel: int, codec: str, figure: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = SourceFileLoader("bench_against_hivemind", str(PATH))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    bench = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, bench)  # for its dataclasses
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(bench)
    subject = bench.averaging(Namespace(peers=peers, numel=numel, codec=codec))
    (bar,) = (one for one in subject.bars if one.figure == figure)
    assert bench.judge(bar, [share], [1.0])["met"] is True
    assert bench.judge(bar, [share + 0.01], [1.0])["met"] is False
