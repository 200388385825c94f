"""`scripts/bench caps`: the worst ten seconds, the part of a plan, a midnight that is near."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from lab.bench.caps import midnight_at
from lab.bench.caps_figures import plan_figures, rest_of, waited_share
from lab.bench.caps_lab import Told
from lab.bench.caps_meter import (
    Meter,
    MeterReading,
    family,
    network_bytes,
    over,
    used_between,
    worst_window,
)


def readings(sent: list[int], every: float = 1.0) -> list[MeterReading]:
    return [MeterReading(every * i, 0.0, 100, one, 2 * one) for i, one in enumerate(sent)]


def test_the_worst_window_may_begin_anywhere() -> None:
    sent = [0] * 7 + [50 * i for i in range(11)] + [500] * 20
    assert worst_window(readings(sent), "sent_bytes") == 50.0
    assert worst_window(readings(sent), "received_bytes") == 100.0
    assert over(50.0, 40.0) == pytest.approx(0.25)


def test_a_window_that_is_not_whole_says_nothing() -> None:
    assert worst_window(readings([0, 1000]), "sent_bytes") == 0.0
    assert worst_window([], "sent_bytes") == 0.0


def test_a_rest_is_looked_at_without_its_edges() -> None:
    sent = [10_000 * i for i in range(10)] + [90_000] * 21
    rest = rest_of(readings(sent), paused=10.0, opens=30.0)
    assert (rest.seconds, rest.sent_per_second, rest.is_rest) == (20.0, 0.0, True)
    assert used_between(readings(sent), 0.0, 5.0, "sent_bytes") == 50_000
    assert not rest_of(readings([50_000 * i for i in range(40)]), 10.0, 30.0).is_rest


def share(peer: str, samples: float, averaged_bytes: int) -> Told:
    return {"peer": peer, "samples": samples, "averaged_bytes": averaged_bytes}


def test_the_parts_are_those_of_the_steps_with_both() -> None:
    told: list[Told] = [
        {"event": "step_taken", "shares": [share("free", 32.0, 100), share("capped", 32.0, 20)]},
        {"event": "step_taken", "shares": [share("free", 32.0, 100)]},
        {"event": "paused"},
    ]
    plan = plan_figures(told, "free", "capped")
    assert (plan["rounds"], plan["capped_reduces"], plan["kept"]) == (
        1,
        pytest.approx(1 / 6, abs=1e-4),
        True,
    )


def test_a_peer_that_waits_between_steps_is_seen() -> None:
    told = [{"event": "step_taken", "at": 10.0 * i, "waiting_seconds": 2.5} for i in range(5)]
    assert waited_share(told, 0.0, 40.0) == 0.25
    assert waited_share(told, 5.0, 12.0) == 0.0


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="needs time.tzset")
@pytest.mark.parametrize("moment", [1_795_333_139.0, 1_795_300_000.0, 0.0, 43_200.0, 43_201.0])
def test_a_midnight_is_made_by_a_time_zone(moment: float, monkeypatch: pytest.MonkeyPatch) -> None:
    midnight = midnight_at(moment)
    with monkeypatch.context() as changed:
        changed.setenv("TZ", midnight.zone)
        time.tzset()
        shown = datetime.fromtimestamp(moment)
    time.tzset()
    assert (shown.hour, shown.minute, shown.second) == (0, 0, 0)
    assert (midnight.closes_at, midnight.opens_at) == (moment + 60.0, moment + 120.0)
    assert midnight.schedule == "00:02-00:01"


def test_traffic_is_counted_without_the_frames_of_the_interface() -> None:
    table = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
        "    lo: 999 9 0 0 0 0 0 0 999 9 0 0 0 0 0 0\n"
        "  eth0: 3028 2 0 0 0 0 0 0 1114 1 0 0 0 0 0 0\n"
    )
    assert network_bytes(table) == (1100, 3000)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_process_is_looked_at_from_outside() -> None:
    own = Path("/proc") / str(os.getpid())
    assert own in family(own)
    before = Meter(os.getpid()).look(0.0)
    began = time.process_time()
    while time.process_time() - began < 0.03:
        pass
    after = Meter(os.getpid()).look(1.0)
    assert after.processor_seconds - before.processor_seconds >= 0.01
    assert after.memory_bytes > 1_000_000
