"""`scripts/bench outage`: its troubles, its figures from the reports, and, as root, all of it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import trio

from lab.bench.closed_run import Heard
from lab.bench.outage import (
    USUAL,
    NetworkTrouble,
    OutageEffort,
    differing_steps,
    measure_outage,
    trouble,
)
from node.app.demo.processes import Child
from node.core.wrong_use import WrongUse


def heard(folder: Path, *steps: tuple[int, str]) -> Heard:
    child = Child("somebody", ["join"], home=folder, folder=folder)
    told = [
        (1.0, {"event": "step_taken", "epoch": one, "history": of, "members": ()})
        for one, of in steps
    ]
    return Heard(child, 0.0, [*told])


def test_a_trouble_is_a_kind_and_seconds() -> None:
    assert trouble("pulled:60") == NetworkTrouble("pulled", 60.0)
    assert [str(trouble(one)) for one in USUAL] == list(USUAL)
    for wrong in ("pulled", "pulled:", "pulled:-1", "burnt:3", "pulled:3 s"):
        with pytest.raises(WrongUse, match="is no trouble"):
            trouble(wrong)


def test_histories_are_one_where_all_tell_the_same_of_an_epoch(tmp_path: Path) -> None:
    ann = heard(tmp_path, (1, "aa"), (2, "bb"))
    assert differing_steps([ann, heard(tmp_path, (2, "bb"), (3, "cc"))]) == []
    (told,) = differing_steps([ann, heard(tmp_path, (2, "xx"))])
    assert told == {"epoch": 2, "told": [["somebody of 1"], ["somebody of 1"]]}


def can_build_labs() -> bool:
    programs = ("ip", "unshare", "nsenter")
    return sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, programs))


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.skipif(not can_build_labs(), reason="needs root, Linux and iproute2")
async def test_peers_that_were_away_come_back_by_themselves() -> None:
    """F3, F8, F18"""
    with trio.fail_after(600):
        told = await measure_outage(OutageEffort([trouble(one) for one in USUAL]))
    assert told["met"], told["troubles"]
