"""HTTP beside a peer of a run: the run's page, /metrics, /healthz and /readyz.

    http = RunHttp(address, "poem", organiser, invite=lambda node: "potluck-run:…")
    train_in_foreground(configuration, part, output, beside=http.serve)

`potluck backbone`, `run start --http` and `join --http` serve the same. It comes up before the run
is entered, and ends with the node. The history of the page is kept in the home (`runs/`), so it is
there again right after a restart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

from auth.server.settings import ListenAddress
from node.app.backbone import BackboneHealth, BackboneRecord, KeptRun, serve_backbone
from node.app.cli.line_queue import LineQueue
from node.app.page import LatestBoard, PageSource, RunPage
from node.core.control import Answering
from node.core.node import Node
from node.training.history_file import open_history
from node.training.session import TrainingSession

if TYPE_CHECKING:
    from node.run.definition import RunDefinition

PAGE_ADDRESS: Final = "page address"
"""The control command that answers with the page's URL."""


def _no_trouble() -> str:
    return ""


def _no_invite(_node: Node) -> str:
    return ""


@dataclass(frozen=True)
class RunHttp:
    """`organiser`: the fingerprint of the key that defines the run. `checkpoint_seconds`: between
    two checkpoints, if this peer keeps them. `folder_trouble`: that of the run's folder, for an
    organiser's peer. `invite`: what the page shows to those who want to join."""

    address: ListenAddress
    run: str
    organiser: str
    checkpoint_seconds: float = math.inf
    folder_trouble: Callable[[], str] | None = None
    invite: Callable[[Node], str] = _no_invite
    definition: RunDefinition | None = None
    """If it is known from the start, as at an organiser's peer."""

    async def serve(self, node: Node, session: TrainingSession, lines: LineQueue) -> None:
        """Serve until cancelled. CannotServeHttp if it cannot."""
        record = BackboneRecord(checkpoint_seconds=self.checkpoint_seconds, clock=time.monotonic)
        session.follow(record.take)
        kept = KeptRun(record, session.view, self.folder_trouble or _no_trouble)
        health = BackboneHealth(node.status, node.network.traffic, kept)
        file = node.configuration.places.runs_folder / f"{self.run}-{self.organiser}.history"

        def ailing(troubles: tuple[str, ...]) -> None:
            session.troubles = troubles
            session.changed()

        def listening(url: str) -> None:
            async def answer(_details: Mapping[str, Any], answering: Answering) -> None:
                await answering({"url": page.link(url)})

            node.control.add(PAGE_ADDRESS, answer)
            lines.data(
                {"event": "serving_http", "url": url},
                f"{url}/ is the run's page; {url}/metrics, {url}/healthz and {url}/readyz show the "
                "state of this peer",
            )

        board = LatestBoard(lambda: session.leaderboard)
        async with open_history(file, session, target=self._target(session)) as history:
            page = RunPage(
                PageSource(
                    session.view,
                    history,
                    lambda: session.definition or self.definition,
                    lambda: session.costs,
                    node.network.wall_time,
                    is_closed=node.membership is not None,
                    healthy=lambda: None if session.troubles is None else not session.troubles,
                    invite=lambda: self.invite(node),
                    board=lambda: board.board,
                )
            )
            async with trio.open_nursery() as nursery:
                if self.folder_trouble is not None:
                    nursery.start_soon(health.watch, ailing)
                nursery.start_soon(page.run)
                nursery.start_soon(board.run, page)
                await serve_backbone(self.address, health, listening, page)

    def _target(self, session: TrainingSession) -> Callable[[], int]:
        """Gives the samples of a step; 0 before the definition is known."""

        def target() -> int:
            definition = session.definition or self.definition
            if definition is None:
                return 0
            return definition.training.step_samples

        return target
