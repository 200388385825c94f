"""The run's page as pictures for docs/pictures, taken in Chromium.

A scene (scenes.py) is served as a backbone serves a run, and a browser without a window opens it.
Fonts differ between machines, so no test compares these pictures; the tests of the page ask the
browser what it shows (tests/page/test_in_browser.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from lab.page.browser import Chromium, Tab, missing
from lab.page.scenes import PageScene, served
from node.app.page import RunPage

SIZES: Final = {"phone": (390, 844), "laptop": (1280, 860), "wide": (1920, 1080)}
STATES: Final[dict[str, Callable[[], PageScene]]] = {
    "training": lambda: PageScene(peers=6),
    "begins": lambda: PageScene(peers=1, steps=0),
    "backbone-gone": lambda: PageScene(peers=6),
    "200-peers": lambda: PageScene(peers=200, steps=3_000),
    "hostile-names": lambda: PageScene(peers=8, hostile=True),
}


@dataclass(frozen=True)
class PageView:
    """`whole`: from the top to the end of the page, and not only what the window shows."""

    state: str
    size: str
    dark: bool = False
    whole: bool = True


PICTURES: Final = {
    "page-laptop.webp": PageView("training", "laptop"),
    "page-wide-dark.webp": PageView("200-peers", "wide", dark=True, whole=False),
    "page-phone.webp": PageView("training", "phone", whole=False),
    "page-phone-dark.webp": PageView("backbone-gone", "phone", dark=True, whole=False),
    "page-hostile.webp": PageView("hostile-names", "laptop", dark=True),
}

QUALITY: Final = 60  # of webp: letters stay sharp, at half the size of png
HAS_NEWS: Final = (
    "document.getElementById('fresh').textContent === 'live'"
    " && !document.getElementById('main').hasAttribute('aria-busy')"
)
IS_STALE: Final = "!document.getElementById('stale').hidden"


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser("page", help="of the run's page, with Chromium")
    parser.add_argument("picture", type=Path, nargs="?", help="one file to write, and no others")
    parser.add_argument("--state", choices=STATES, default="training")
    parser.add_argument("--size", choices=SIZES, default="laptop")
    parser.add_argument("--dark", action="store_true", help="for a browser that likes it dark")
    parser.add_argument("--window", action="store_true", help="only what fits into the window")
    parser.set_defaults(make=make)


def make(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit code."""
    if missing():
        print(f"{missing()}. Install Chromium (Debian: chromium).", file=sys.stderr)
        return 1
    views = {folder / name: view for name, view in PICTURES.items()}
    if arguments.picture is not None:
        chosen = PageView(arguments.state, arguments.size, arguments.dark, not arguments.window)
        views = {arguments.picture: chosen}
    with Chromium.started() as browser:
        for path, view in views.items():
            trio.run(take, browser, view, path)
    return 0


async def take(browser: Chromium, view: PageView, path: Path) -> None:
    """Write the picture. Its format is that of the file's name: webp or png."""
    width, height = SIZES[view.size]

    def opened(url: str) -> Tab:
        tab = browser.tab(width=width, height=height, dark=view.dark, phone=view.size == "phone")
        tab.call("Emulation.setTimezoneOverride", timezoneId="UTC")
        tab.open(f"{url}/")
        tab.wait_for(HAS_NEWS)
        return tab

    def shot(tab: Tab, wanted: str) -> None:
        tab.wait_for(wanted)
        tab.wait_for("document.getAnimations().length === 0")  # the bars have their lengths
        tab.picture(path, whole=view.whole, quality=QUALITY)

    async with served(RunPage(STATES[view.state]().source())) as url:
        tab = await trio.to_thread.run_sync(opened, url)
        if view.state != "backbone-gone":
            await trio.to_thread.run_sync(shot, tab, HAS_NEWS)
    if view.state == "backbone-gone":
        await trio.to_thread.run_sync(shot, tab, IS_STALE)
    await trio.to_thread.run_sync(tab.close)
