"""Runs in several states, for the page: made up, and the same each time."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from auth.server.settings import ListenAddress
from node.app.backbone import BackboneHealth, serve_backbone
from node.app.page import PageSource, RunPage
from node.core.status import DirectoryStatus, NodeStatus
from node.core.training_view import (
    BatchView,
    ContributionView,
    RunPeerView,
    TrainerPhase,
    TrainerView,
)
from node.run.definition import RunDefinition, read_definition
from node.training.credit import Board, Rank
from node.training.happenings import PeerCame, PeerWent
from node.training.history import RunHistory
from protocols.accumulation.events import CheckpointSaved, Share, StepTaken
from protocols.identity import PeerId
from protocols.network import TrafficFacts

LISTENS = NodeStatus(addresses=("/ip4/127.0.0.1/tcp/1",), directory=DirectoryStatus(joined="alone"))
NOW = 1_795_000_000.0
TARGET = 2048
LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
NAMES = ("Ada", "Grace", "Emmy", "kitchen-pc", "Sophie", "lab 3", "Žofie", "Мария", "阿美", "attic")
HOSTILE = (
    "</script><script>window.bad = 1</script>",
    "<img src=x onerror=window.bad=1>",
    "\u202egnirts desrever",
    "javascript:window.bad=1//",
    "a" * 24,
    "{{constructor}}",
    "W" * 24,  # broad letters
    "漢" * 24,
)

DEFINITION = """
format = 1
[run]
name = "poem"
description = "A small language model for old poems, by everybody who likes to help"
[model]
name = "gpt"
[data]
name = "text"
[optimizer]
name = "adamw"
[training]
batch = 2048
steps = 4000
"""


def peer_id(number: int) -> PeerId:
    """One that looks like a peer's."""
    chosen = random.Random(number)
    return PeerId("12D3KooW" + "".join(chosen.choice(LETTERS) for _ in range(44)))


@dataclass
class PageScene:
    """A run that can go on: `tick` moves it by a second."""

    peers: int = 4
    steps: int = 900
    hostile: bool = False
    closed: bool = False
    page_table: str = ""
    now: float = 0.0
    view: TrainerView = field(default_factory=TrainerView)

    def __post_init__(self) -> None:
        self.chosen = random.Random(7)
        self.history = RunHistory(
            target=lambda: TARGET, clock=lambda: self.now, wall_clock=lambda: NOW + self.now
        )
        self.definition: RunDefinition = read_definition((DEFINITION + self.page_table).encode())
        self.others = [self._peer(number) for number in range(1, self.peers)]
        if self.peers > 1:
            self.history.look(self.others)
        for epoch in range(self.steps):
            self.now += 2.0 + self.chosen.random()
            self.step(epoch)
            if epoch % 8 == 0:
                self.history.look(self.others[: 1 + epoch // 4])
        self.history.look(self.others)
        self.look()

    def _peer(self, number: int) -> RunPeerView:
        names = HOSTILE if self.hostile else NAMES
        return RunPeerView(
            peer=peer_id(number),
            name=names[number % len(names)] if self.hostile else "",
            said_name=names[number % len(names)],
            role="auxiliary" if number % 9 == 8 else "trains",
            device=("" if number % 9 == 8 else ("cpu", "cuda", "cuda", "mps")[number % 4]),
            reach=("direct", "punched", "relayed", "none")[number % 4],
            epoch=self.steps,
            samples=40 * number,
            samples_per_second=18.0 + 7.3 * (number % 5),
            round_trip_ms=12.0 + 9.1 * (number % 7),
            reduces=1.0 / self.peers,
            ignored="it boasts" if number % 50 == 49 else "",
        )

    def step(self, epoch: int, loss: float | None = None) -> None:
        if loss is None:
            curve = 1.9 + 3.6 * math.exp(-epoch / 160) + 0.9 * math.exp(-epoch / 900)
            loss = curve * (1 + self.chosen.gauss(0.0, 0.015))
        each = TARGET / max(1, self.peers - 1)
        shares = tuple(
            Share(
                PeerId(one.peer),
                round(each * (0.6 + 0.8 * self.chosen.random())),
                round(1e6 * (1 + number % 3)),
            )
            for number, one in enumerate(self.others)
        )
        if shares:
            shares = (*shares, Share(peer_id(0), 0.0, 2_000_000))
        step = StepTaken(
            epoch=epoch, samples=float(TARGET), own_samples=0,
            members=tuple(one.peer for one in shares), left_out=(), history=b"",
            accumulating_seconds=1.9, averaging_seconds=0.6, waiting_seconds=0.1,
            stepping_seconds=0.0, shares=shares, loss=loss,
        )  # fmt: skip
        self.history.take(step)
        if epoch % 100 == 99:
            self.history.take(CheckpointSaved(epoch + 1, "/secret/place", 412_345_678, 1.0))
        if epoch % 150 == 20 and self.others:
            one = self.others[epoch % len(self.others)]
            self.history.take(PeerCame(one.peer, one.reach))
        if epoch % 300 == 299:
            self.history.take(PeerWent(peer_id(999)))
        self.look()

    def look(self) -> None:
        last = self.history.curve.last
        step = 0 if last is None else last.step
        self.view = TrainerView(
            run="poem", peer=peer_id(0), name="backbone", keeps_only=True,
            phase=TrainerPhase.KEEPING if step else TrainerPhase.PREPARING,
            session_seconds=self.now, epoch=step, steps=4000,
            seconds_left=(4000 - step) * 2.5 if step > 3 else None,
            loss=None if last is None else last.loss, loss_step=step,
            batch=BatchView(
                samples=1290.0 if step else 0.0, target=TARGET,
                samples_per_second=812.4 if step else 0.0,
                seconds_to_step=0.9 if step else None,
            ),
            contribution=ContributionView(), peers=tuple(self.others),
        )  # fmt: skip

    def board(self) -> Board | None:
        if not self.steps or not self.others:
            return None
        ranks = [
            Rank(
                rank=number, person=one.peer, is_me=False,
                samples=round(4e6 / number), averaged_bytes=round(3e9 / number),
                steps=self.steps, service_seconds=7200.0 / number, longest_seconds=3600.0,
                devices=1 + number % 2, witnesses=self.peers - 1,
                confirming=self.peers - 1 - (number % 5 == 3), name=one.said_name, peer=one.peer,
            )
            for number, one in enumerate(self.others, start=1)
        ]  # fmt: skip
        helper = msgspec.structs.replace(
            ranks[0], rank=1, samples=0, person=peer_id(0), peer=peer_id(0), name="backbone"
        )
        return Board(
            run="poem", steps=self.steps, people=tuple(ranks), helpers=(helper,),
            records=self.peers, seen_steps=self.steps, asked=0, unheard={}, keeps=True,
        )  # fmt: skip

    def source(self) -> PageSource:
        from node.run.costs import Costs, GpuBytes

        gpu = GpuBytes(0, 0)
        costs = Costs(
            parameters=124_000_000, state_bytes=1_500_000_000, fixed_bytes=2_400_000_000,
            with_gpu=gpu, offloaded=gpu, sample_bytes=30_000_000, disk_bytes=1_500_000_000,
            keeper_disk_bytes=6_000_000_000, results_bytes=268_435_456, round_bytes=248_000_000,
            samples_per_round=TARGET,
        )  # fmt: skip
        return PageSource(
            lambda: self.view,
            self.history,
            lambda: self.definition,
            lambda: costs,
            lambda: NOW + self.now,
            is_closed=self.closed,
            healthy=lambda: True,
            invite=lambda: "potluck-run:" + "k7Qz9" * 34,
            board=self.board,
            key=bytes(32),
        )


@asynccontextmanager
async def served(page: RunPage, port: int = 0) -> AsyncIterator[str]:
    """The page over HTTP, as a backbone serves it; gives its URL."""
    send, receive = trio.open_memory_channel[str](1)
    health = BackboneHealth(lambda: LISTENS, lambda: TrafficFacts(0, 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(page.run)
        nursery.start_soon(
            serve_backbone, ListenAddress("127.0.0.1", port), health, send.send_nowait, page
        )
        yield await receive.receive()
        nursery.cancel_scope.cancel()
