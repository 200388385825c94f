"""`potluck page`: opens the run's page in the browser, or prints its address."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # no addresses that a browser can open


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "page",
        help="open the run's page in the browser, or print its address",
        description="Open the page of this node's run in a browser: the loss, the speed, who is "
        "there, the leaderboard. In a closed run the address has a key, which is good once and for "
        "ten minutes: the browser that opens it sees names and events for twelve hours, and "
        "strangers do not. A node serves the page if it was started by `potluck backbone`, or by "
        "`potluck run start` or `potluck join` with --http. Without a desktop, with --print or "
        "with --json the address is printed. Exit code 4 if no node here serves a page.",
        example="potluck page\npotluck page --print",
    )
    parser.add_argument("--print", action="store_true", help="only print the address")


def run(arguments: argparse.Namespace) -> int:
    import webbrowser

    from node.app.cli.configured import configuration_for
    from node.app.cli.exit_codes import DONE
    from node.core.control_client import ControlFailure, NoRunningNode, ask_once
    from protocols.errors import Unreachable

    socket = configuration_for(arguments).places.control_socket
    try:
        answer = ask_once(socket, "page address")
    except NoRunningNode as error:
        raise Unreachable(
            "No node is running here.",
            why=error.why,
            advice="`potluck backbone DIR` serves the page of a run. If it has a home of its own, "
            "name it: --home DIRECTORY.",
        ) from None
    except ControlFailure as error:
        if "does not know the command" not in error.what:
            raise
        raise Unreachable(
            "The node that runs here serves no page.",
            why="It was started without --http, is in no run (`potluck backbone --relay-only`), or "
            "is of an older version.",
            advice="`potluck run start` and `potluck join` serve the page with `--http "
            "127.0.0.1:8481`, and `potluck backbone DIR` always does.",
        ) from None
    url = for_a_browser(str(answer["url"]))
    output = Output.of(arguments)
    opened = (
        not (arguments.print or output.json)
        and has_a_desktop(sys.platform, os.environ)
        and webbrowser.open(url)
    )
    output.data({"url": url, "opened": opened}, url)
    return DONE


def for_a_browser(url: str) -> str:
    """The URL, with this machine's own address in place of one that means every address."""
    parts = urlsplit(url)
    host = EVERYWHERE.get(parts.hostname or "")
    if host is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def has_a_desktop(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether a browser with a window can be opened. A text browser would take the terminal."""
    if platform in ("darwin", "win32"):
        return True
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
