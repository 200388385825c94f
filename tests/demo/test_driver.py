"""The demo on machines on which the run is over before its late volunteer is in a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

from node.app.demo import driver
from node.app.demo.driver import EARLY, KILLED, LATE, Demo
from node.app.demo.processes import Child, Event
from node.app.demo.story import KILL_AT_STEP, STEPS

PATIENCE_SECONDS = 20.0  # the demo itself waits for four minutes for each part


class Script(Child):
    """A process that takes no time: it prints everything at once and ends. But the one that is to
    be killed waits for that, if it has not made all steps."""

    steps: dict[str, int]

    def start(self) -> None:
        self._killed = trio.Event()

    def kill(self) -> bool:
        still_ran = self.exit_code is None
        self.may_end = True
        self._killed.set()
        return still_ran

    async def read(self, take: Callable[[Child, Event], None]) -> None:
        for event in self._events():
            self.events.append(event)
            take(self, event)
        if self.name == KILLED and self.steps[self.name] < STEPS:
            await self._killed.wait()
            self.exit_code = -9
            return
        take(self, {"event": "left"})
        self.exit_code = 0

    def _events(self) -> Iterator[Event]:
        yield {"event": "measured", "samples_per_second": 1e9}
        late = self.name == LATE
        yield {"event": "began", "epoch": STEPS if late else 0}
        for epoch in range(self.steps[self.name]):
            share = {"peer": self.name, "samples": 32}
            yield {
                "event": "step_taken",
                "epoch": epoch,
                "own_samples": 32,
                "members": list(EARLY),
                "shares": [share],
                "history": "h",
                "loss": 2.0,
            }
        if late:
            yield {"event": "run_complete", "epoch": STEPS, "parameters": "5f0c"}


@pytest.fixture
def backbone() -> Iterator[str]:
    """Where something says that it is healthy."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def trained(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, steps: dict[str, int]
) -> tuple[Demo, list[str]]:
    """The part of the demo in which they train, each for so many steps, and its messages."""
    told: list[str] = []
    codes = dict.fromkeys((*EARLY, LATE), "code")
    demo = Demo(folder, lambda event, _words: told.append(event["event"]))
    monkeypatch.setattr(driver, "Child", Script)
    monkeypatch.setattr(Script, "steps", steps, raising=False)

    async def main() -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as demo._nursery:
                await demo._train("invite", codes, url)

    trio.run(main)
    return demo, told


def test_a_run_that_is_over_before_the_late_one_is_in_a_step_ends_and_says_so(
    tmp_path: Path, backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {**dict.fromkeys(EARLY, STEPS), LATE: 0}
    demo, told = trained(tmp_path, backbone, monkeypatch, steps)
    assert [one for one in told if one != "step"] == [
        "joining",
        "training",
        "late",
        "spared",
        "health",
        "too_late",
        "complete",
    ]
    assert not demo._story.contributions()[-1]["killed"]
    assert all(one.killed_at is None for one in demo._story.people.values())


def test_a_volunteer_that_is_still_there_is_killed_and_the_late_one_may_miss_all_steps(
    tmp_path: Path, backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {**dict.fromkeys(EARLY, KILL_AT_STEP), LATE: 0}
    demo, told = trained(tmp_path, backbone, monkeypatch, steps)
    assert {"killed", "too_late", "complete"} <= {*told}
    assert demo._story.person(KILLED).killed_at == KILL_AT_STEP
