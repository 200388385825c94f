"""`potluck backbone --relay-only`: a node in no run that relays, dials back, and is one to join
through.

    return relay_in_foreground(configuration, address, output)

It is shown as training is (screen/): on a terminal as a screen with its circuits, its traffic and
the peers that are linked with it, else as lines, or objects for programs. torch is not imported.
Ctrl-C and SIGTERM end it at once: nothing here has to be finished.
"""

from __future__ import annotations

import time

import trio
from msgspec.structs import replace

from auth.server.settings import ListenAddress
from node.app.backbone import BackboneHealth, serve_backbone
from node.app.cli.exit_codes import DONE
from node.app.cli.interruption import at_hard_exit, run_until_signal
from node.app.cli.log_output import log_to_stderr
from node.app.cli.output import Output
from node.app.link_report import counted, introduce
from node.app.screen import Display, display_for, happening_of, show_to_the_end
from node.app.views.status_view import in_one_line
from node.core.configuration import Configuration
from node.core.descriptor_limit import raise_descriptor_limit
from node.core.failure import CommandFailure
from node.core.node import Node
from node.core.status import memory_in_use
from node.core.traffic_meter import TrafficMeter
from node.core.training_view import RunPeerView, TrainerPhase, TrainerView
from node.net import check_listening
from node.training.happenings import STARTING
from node.training.words import said_of
from protocols.identity import PeerId

VIEW_SECONDS = 1.0  # between two views


def relay_in_foreground(
    configuration: Configuration, address: ListenAddress, output: Output
) -> int:
    """Returns the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    log_to_stderr(debug=output.debug)
    raise_descriptor_limit()
    check_listening(configuration.listen_addresses)
    with display_for(output) as display:
        relaying = Relaying(configuration, address, display)
        return run_until_signal(relaying.run, terminated=DONE)


class Relaying:
    """One session, as the display shows it."""

    def __init__(
        self, configuration: Configuration, address: ListenAddress, display: Display
    ) -> None:
        self._configuration, self._address, self._display = configuration, address, display
        self._began = time.monotonic()
        self._meter = TrafficMeter(None, None)
        self._view = TrainerView(keeps_only=True, relays_only=True, doing=STARTING)

    async def run(self) -> int:
        self._show(self._view)
        return await show_to_the_end(self._display, self._relay, self._failed, lambda: False)

    async def _relay(self) -> None:
        node, lines = Node(self._configuration), self._display.lines
        with at_hard_exit(node.remove_run_files):
            async with node:
                self._display.meet(node)
                introduce(node, lines)
                member = node.status().membership
                if not member.open:  # it was logged in before
                    lines.say(in_one_line(member))
                lines.say(f"{self._purpose()} Ctrl-C ends it.")
                health = BackboneHealth(node.status, node.network.traffic)
                async with counted(node, lines), trio.open_nursery() as nursery:
                    nursery.start_soon(health.watch, self._ailing)
                    nursery.start_soon(self._follow, node)
                    await serve_backbone(self._address, health, self._listening)

    def _purpose(self) -> str:
        whom = "members of its run" if self._configuration.relays_for_members else "everybody"
        return f"relaying for {whom}. Others use it with --bootstrap ADDRESS."

    def _listening(self, url: str) -> None:
        self._display.lines.data(
            {"event": "serving_http", "url": url},
            f"{url}/metrics, {url}/healthz and {url}/readyz show the state of this peer",
        )

    async def _follow(self, node: Node) -> None:
        """Show the state of the node every second, forever."""
        status = node.status()
        self._view = replace(
            self._view,
            peer=status.peer_id,
            phase=TrainerPhase.RELAYING,
            doing=self._purpose(),
            advice="Its addresses are in the panel “printed” (tab), and in the scrollback.",
        )
        while True:
            traffic = node.network.traffic()
            self._meter.note(time.monotonic(), traffic.sent_bytes, traffic.received_bytes)
            self._show(replace(self._view, peers=peers_of(node), traffic=self._meter.view()))
            await trio.sleep(VIEW_SECONDS)

    def _ailing(self, troubles: tuple[str, ...]) -> None:
        self._view = replace(self._view, troubles=troubles)

    def _show(self, view: TrainerView) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        self._view = replace(
            view,
            session_seconds=seconds,
            phase_seconds=seconds,
            memory_bytes=memory_in_use(),
        )
        self._display.shown.show(self._view)

    def _failed(self, failure: CommandFailure) -> None:
        failed = happening_of(failure)
        phase = TrainerPhase.REFUSED if failed.refused else TrainerPhase.FAILED
        doing = " ".join(said_of(failed))
        self._show(replace(self._view, phase=phase, doing=doing, advice=failed.advice))


def peers_of(node: Node) -> tuple[RunPeerView, ...]:
    """The peers that are linked with the node: they ask it."""
    member = node.membership

    def name(peer: PeerId) -> str:
        shown = None if member is None else member.access.shown_by(peer)
        return "" if shown is None else shown.username

    return tuple(
        RunPeerView(
            peer=one.peer,
            name=name(one.peer),
            reach=one.way,
            round_trip_ms=None
            if one.round_trip_seconds is None
            else round(one.round_trip_seconds * 1000, 1),
        )
        for one in node.network.links()
    )
