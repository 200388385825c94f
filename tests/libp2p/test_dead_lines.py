"""Lines that carry nothing, and lines that are only full, with real nodes and real TCP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from queue import Empty, Queue
from threading import Thread
from typing import Any

import pytest

from lab.net import Machine, NetworkLab, RouterKind, missing_for_lab
from node.net.transport.keep_alive import (
    BEAT_SECONDS,
    DOUBTED_SECONDS,
    EARLY_MEASUREMENTS,
    UNACKNOWLEDGED_SECONDS,
)
from tests.waiting import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(bool(missing_for_lab()), reason=missing_for_lab() or "the lab is there"),
]

MEGABIT = 1e6
EARLY_SECONDS = (EARLY_MEASUREMENTS + 1) * BEAT_SECONDS
"""Then an idle link has nothing on its way: the pings of its first beats are answered."""

FULL_SECONDS = 20.0  # three times as long as a dead link is left in place
NOTICED_SECONDS = UNACKNOWLEDGED_SECONDS + 3.0
"""With up to a second until the first bytes are sent, a beat, and a second for a busy machine."""


class LinePeer:
    """One `line_peer` on a machine, and what it prints."""

    def __init__(self, machine: Machine) -> None:
        words = [sys.executable, "-m", "tests.libp2p.line_peer", machine.address]
        self._process = machine.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines: Queue[dict[str, Any]] = Queue()
        Thread(target=self._read, daemon=True).start()
        self.address = str(self._lines.get(timeout=PATIENCE_SECONDS)["listens"])

    @property
    def peer(self) -> str:
        return self.address.rpartition("/")[2]

    def tell(self, **said: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(said), file=self._process.stdin, flush=True)

    def next_change(self, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """queue.Empty if no link changes within this time."""
        return self._lines.get(timeout=seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(round_trip_seconds=0.05) as lab:
        yield lab


def linked(home: Machine, *others: Machine) -> list[LinePeer]:
    """A peer at home, and one on each of these machines that it has a link to."""
    near, *far = (LinePeer(one) for one in (home, *others))
    for one in far:
        near.tell(know=[one.address])
        assert near.next_change()["reach"] == "direct"
        assert one.next_change()["reach"] == "direct"
    return [near, *far]


def test_a_router_that_forgets_is_noticed_on_all_links_soon_after_the_first(
    lab: NetworkLab,
) -> None:
    home = lab.home("home", RouterKind.PORT_RESTRICTED)
    near, busy, idle = linked(home, lab.host("busy"), lab.host("idle"))
    near.tell(fill=busy.peer)
    time.sleep(EARLY_SECONDS)  # and both kernels hold bulk that the other has not acknowledged
    home.router.forget()
    forgot_at = time.monotonic()
    first, second = near.next_change(), near.next_change()
    assert (first["peer"], second["peer"]) == (busy.peer, idle.peer)
    assert first["at"] - forgot_at <= NOTICED_SECONDS
    assert second["at"] - first["at"] <= DOUBTED_SECONDS + 3.0
    assert busy.next_change()["at"] - forgot_at <= NOTICED_SECONDS


def test_a_line_of_a_megabit_that_is_full_both_ways_is_not_taken_for_dead(lab: NetworkLab) -> None:
    home = lab.home(
        "home",
        RouterKind.PORT_RESTRICTED,
        upload_bits_per_second=MEGABIT,
        download_bits_per_second=MEGABIT,
    )
    near, busy, idle = linked(home, lab.host("busy"), lab.host("idle"))
    near.tell(fill=busy.peer)
    with pytest.raises(Empty):  # neither the link that is full, nor the one whose pings wait behind
        near.next_change(FULL_SECONDS)
    for far in (busy, idle):
        with pytest.raises(Empty):
            far.next_change(0.1)
