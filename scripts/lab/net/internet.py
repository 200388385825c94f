"""The internet of a laboratory: the segment that all public addresses are on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.bench.own_network import NetworkCommandFailed
from lab.net.addresses import numbers
from lab.net.namespace import Namespace

SWITCH = Path(__file__).with_name("frame_switch.py")


class Internet:
    """An `Outlet` that delays frames by half a round trip. frame_switch.py carries them."""

    def __init__(self, namespace: Namespace, round_trip_seconds: float) -> None:
        self.namespace = namespace
        self.lines = numbers("public addresses in a laboratory")
        self._interfaces = numbers("cables to the internet")
        self._switch = subprocess.Popen(
            # neither its environment nor what is installed concerns it
            namespace.command(
                [sys.executable, "-I", "-S", str(SWITCH), str(round_trip_seconds / 2)]
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,  # an order is a line
            start_new_session=True,  # a terminal's Ctrl-C is for the owner
        )

    def new_interface(self) -> str:
        return f"line{next(self._interfaces)}"

    def connect(self, interface: str) -> None:
        self._order("attach", interface)

    def disconnect(self, interface: str) -> None:
        self._order("detach", interface)

    def close(self) -> None:
        self._switch.kill()
        self._switch.communicate()

    def _order(self, order: str, interface: str) -> None:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        try:
            self._switch.stdin.write(f"{order} {interface}\n")
            answer = self._switch.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer != "done":
            raise NetworkCommandFailed(
                f"The laboratory's internet could not {order} {interface}.",
                why=answer or "Its process has ended; its own words are on stderr.",
            )
