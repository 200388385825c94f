"""The page of `potluck demo`, opened in Chromium while the demo is played: pictures to look at, and
what the page said.

    seen = await watch_demo(folder)      # demo-05.png, demo-20.png, demo-40.png, demo-end.png
    seen.moments, seen.troubles, seen.told

The moments are seconds from when the backbone serves the page. `demo-end.png` is of the moment when
one volunteer was killed and the late one's samples count, which is later on a busy machine, and may
be earlier on a fast one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from lab.page.browser import Chromium, Tab, missing

MOMENTS: Final = (5, 20, 40)
AFTERWARDS_SECONDS: Final = 2.0  # the page has a newer list of peers every few seconds
PATIENCE_SECONDS: Final = 600.0  # alone on two cores the demo takes 40
END_SECONDS: Final = 10.0  # from SIGTERM to the end of the demo's processes
SIZE: Final = (1440, 1000)

ROOT: Final = Path(__file__).parents[3]
SAID: Final = """(() => {
  const text = (id) => document.getElementById(id).innerText;
  const rows = (id) =>
    [...document.querySelectorAll(`#${id} tbody tr`)].map((one) => one.innerText);
  return {
    step: text("step"), loss: text("loss"), fresh: text("fresh"), phase: text("phase"),
    curves: document.querySelectorAll("#loss-chart path.line").length,
    names: [...document.querySelectorAll("#people .who")].map((one) => one.firstChild.data),
    people: rows("people"), board: rows("board"), events: text("events"),
  };
})()"""


@dataclass
class DemoSeen:
    """`moments`: by picture, what the page said. `troubles`: errors in the browser's console, up to
    the last picture of a run that is not complete: then its peers leave, on a fast machine before
    the last picture, and the page cannot reach them. `told`: the demo's own events."""

    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser("demo", help="of the page of `potluck demo` while it is played")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.set_defaults(make=make)


def make(arguments: argparse.Namespace, _folder: Path) -> int:
    """The exit code: 1 if the page complained, or the demo failed."""
    if missing():
        print(f"{missing()}. Install Chromium (Debian: chromium).", file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    seen = trio.run(watch_demo, arguments.folder)
    print(json.dumps({"moments": seen.moments, "troubles": seen.troubles}, indent=2))
    return 1 if seen.troubles or not seen.told or seen.told[-1].get("failures", True) else 0


async def watch_demo(folder: Path) -> DemoSeen:
    seen = DemoSeen()
    news = trio.Condition()

    def has_told(*kinds: str) -> bool:
        return any(one.get("event") in kinds for one in seen.told)

    async def until_told(holds: Callable[[], bool]) -> None:
        async with news:
            while not holds():
                await news.wait()

    async def read(stdout: trio.abc.ReceiveStream) -> None:
        unread = b""
        async for piece in stdout:
            *lines, unread = (unread + piece).split(b"\n")
            async with news:
                seen.told += [json.loads(line) for line in lines]
                news.notify_all()

    def note(tab: Tab, name: str) -> None:
        tab.picture(folder / f"demo-{name}.png")
        seen.moments[name] = tab.evaluate(SAID)
        if seen.moments[name]["phase"] != "complete":
            seen.troubles = list(tab.troubles)

    async def look(browser: Chromium) -> None:
        await until_told(lambda: has_told("backbone"))
        began = trio.current_time()
        url = next(one["url"] for one in seen.told if one["event"] == "backbone")
        tab = await trio.to_thread.run_sync(opened, browser, url)
        async with trio.open_nursery() as nursery:
            turn = trio.Lock()  # the browser answers one at a time

            async def at(name: str) -> None:
                async with turn:
                    await trio.to_thread.run_sync(note, tab, name)

            async def at_the_end() -> None:
                await until_told(
                    lambda: has_told("killed", "spared") and has_told("caught_up", "too_late")
                )
                await trio.sleep(AFTERWARDS_SECONDS)
                await at("end")

            nursery.start_soon(at_the_end)
            for second in MOMENTS:
                await trio.sleep_until(began + second)
                await at(f"{second:02d}")

    with (
        tempfile.TemporaryDirectory(prefix="potluck-demo-") as place,
        Chromium.started() as browser,
        trio.fail_after(PATIENCE_SECONDS),
    ):
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "node", "demo", "--keep", "--json"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": place, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look, browser)
                await read(process.stdout)
                if not has_told("summary"):  # it has failed, and tells no more
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _ended(process)
    return seen


def opened(browser: Chromium, url: str) -> Tab:
    tab = browser.tab(width=SIZE[0], height=SIZE[1])
    tab.call("Emulation.setTimezoneOverride", timezoneId="UTC")
    tab.open(f"{url}/")
    return tab


async def _ended(process: trio.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    with trio.move_on_after(END_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
