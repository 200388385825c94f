"""What the run's page shows: plain data for everybody who can open it. Pure.

    source = PageSource(session.view, history, ...)
    sections_of(source)          # {"run": {...}, "people": [...], "events": [...], ...}

Each section is sent again when it has changed. Lists are bounded. Numbers that are unknown are
null, and none is infinite or not a number, which JSON has not.

The organiser decides what is public (`[page]` in run.toml). Until that is known, peers have
pseudonyms and there are no events. With pseudonyms nothing on the page
leads to a peer's key or its person's name: also in the words of events each peer is replaced.
Members of a closed run, who came by a login link (login.py), see names and events in any case.
Nothing here names a folder or an address of the machine that serves the page.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from node.core.caps.units import in_words
from node.core.display_name import label, short, with_peers
from node.core.training_view import RunPeerView, TrainerView

if TYPE_CHECKING:
    from node.run.costs import Costs
    from node.run.definition import RunDefinition
    from node.training.credit import Board, Rank
    from node.training.history import RunHistory, Stay

MOST_PEOPLE: Final = 500
MOST_RANKS: Final = 100  # of each kind on the leaderboard
NAME_CELLS: Final = 32

Section = Any  # JSON: what msgspec encodes


def _nobody() -> Board | None:
    return None


@dataclass(frozen=True)
class PageSource:
    """Where the figures come from. `is_closed`: the run has an auth server. `healthy`: whether a
    volunteer who came now would be served; None if the peer does not say. `invite`: how others
    join; empty if that is not this peer's to tell. `board`: the newest leaderboard."""

    view: Callable[[], TrainerView]
    history: RunHistory
    definition: Callable[[], RunDefinition | None]
    costs: Callable[[], Costs | None]
    wall_time: Callable[[], float]
    is_closed: bool = False
    healthy: Callable[[], bool | None] = lambda: None
    invite: Callable[[], str] = lambda: ""
    board: Callable[[], Board | None] = _nobody
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """For pseudonyms: nobody without it finds the peer behind one."""


def sections_of(source: PageSource, *, for_members: bool = False) -> dict[str, Section]:
    """All sections but the points of the curve."""
    view, definition = source.view(), source.definition()
    names = Naming(source, view, definition, for_members=for_members)
    shows_events = for_members or (definition is not None and definition.page.events)
    return {
        "run": run_section(source, view, definition),
        "people": people_section(source, view, names),
        "round": round_section(source, names),
        "board": board_section(source.board(), names),
        "checkpoints": [[one.step, round(one.at), one.bytes] for one in source.history.checkpoints],
        "events": [
            [round(one.at), names.in_words(one.words)] for one in reversed(source.history.events)
        ]
        if shows_events
        else None,
        "definition": definition_section(definition, source.costs()),
        "join": join_section(source),
    }


class Naming:
    """How peers are called on this page."""

    def __init__(
        self,
        source: PageSource,
        view: TrainerView,
        definition: RunDefinition | None,
        *,
        for_members: bool,
    ) -> None:
        if for_members:
            self.is_pseudonymous = False
        elif definition is None or definition.page.names == "auto":
            self.is_pseudonymous = source.is_closed or definition is None
        else:
            self.is_pseudonymous = definition.page.names == "pseudonyms"
        self._key = source.key
        self._said: dict[str, tuple[str, str]] = {
            one.peer: (one.name, one.said_name) for one in source.history.stays.values()
        }
        self._said |= {one.peer: (one.name, one.said_name) for one in view.peers}
        self._said[view.peer] = view.person, view.name
        self._by_end = {short(peer): peer for peer in self._said}

    def of(self, peer: str, verified: str = "", said: str = "") -> str:
        """The name of a peer; the given names are used if it was not seen lately."""
        if self.is_pseudonymous:
            return self._pseudonym(peer)
        known = self._said.get(peer, ("", ""))
        return label(peer, known[0] or verified, known[1] or said, NAME_CELLS)

    def of_person(self, rank: Rank) -> str:
        """A person on the leaderboard."""
        if self.is_pseudonymous:
            return self._pseudonym(rank.peer or rank.person)
        person = rank.person if ":" in rank.person else ""
        return self.of(rank.peer or rank.person, person, rank.name)

    def in_words(self, words: str) -> str:
        def said(peer: str, person: str | None) -> str:
            whole = self._by_end.get(peer, peer)
            if self.is_pseudonymous:
                return self._pseudonym(whole) if whole in self._said else "a peer"
            if whole in self._said:
                return self.of(whole)
            return short(peer) + (f" ({person})" if person is not None else "")

        return with_peers(words, said)

    def _pseudonym(self, peer: str) -> str:
        return f"peer {blake3(peer.encode(), key=self._key).hexdigest(length=3)}"


def run_section(source: PageSource, view: TrainerView, definition: RunDefinition | None) -> Section:
    batch, pace = view.batch, source.history.pace
    last = source.history.curve.last
    return {
        "name": view.run,
        "description": "" if definition is None else definition.run.description,
        "at": round(source.wall_time(), 1),
        "seconds": round(source.history.seconds, 1),
        "phase": view.phase.value,
        "healthy": source.healthy(),
        "step": view.epoch or (0 if last is None else last.step),
        "steps": view.steps or (0 if definition is None else definition.training.steps),
        "seconds_left": _number(view.seconds_left),
        "loss": _number(view.loss if last is None or view.loss is not None else last.loss),
        "loss_step": view.loss_step or (0 if last is None else last.step),
        "samples": round(last.total) if last is not None else 0,
        "batch": round(_number(batch.samples) or 0.0),
        "target": batch.target or (0 if definition is None else definition.training.batch),
        "rate": _number(batch.samples_per_second, 1),
        "seconds_to_step": _number(batch.seconds_to_step),
        "accumulating": None if pace is None else _number(pace[0]),
        "averaging": None if pace is None else _number(pace[1]),
    }


def people_section(source: PageSource, view: TrainerView, names: Naming) -> Section:
    """This peer first, then the others by their samples of the last hour."""
    history = source.history
    hour, stays, now = history.last_hour(), history.stays, history.seconds
    everybody = sum(hour.values())

    def share(peer: str) -> float | None:
        return round(hour.get(peer, 0.0) / everybody, 4) if everybody else None

    own = {
        "who": names.of(view.peer, view.person, view.name),
        "own": True,
        "role": "keeps" if view.keeps_only else "trains",
        "reach": "this peer",
        "device": "" if view.keeps_only else view.device,
        "here": round(view.session_seconds),
        "rate": _number(view.contribution.samples_per_second, 1),
        "hour": share(view.peer),
        "trip": None,
        "part": None,
        "ignored": False,
    }
    others = sorted(view.peers, key=lambda one: (-hour.get(one.peer, 0.0), one.peer))
    rows = [
        _person(one, names.of(one.peer, one.name, one.said_name), share(one.peer), stays, now)
        for one in others[: MOST_PEOPLE - 1]
    ]
    return {"rows": [own, *rows], "more": max(0, len(others) - len(rows))}


def _person(
    one: RunPeerView, who: str, hour: float | None, stays: Mapping[str, Stay], now: float
) -> Section:
    stay = stays.get(one.peer)
    return {
        "who": who,
        "role": "keeps" if one.keeps else one.role,
        "reach": one.reach,
        "device": one.device,
        "here": None if stay is None else round(now - stay.since),
        "rate": _number(one.samples_per_second, 1),
        "hour": hour,
        "trip": _number(one.round_trip_ms),
        "part": _number(one.reduces, 4),
        "ignored": bool(one.ignored),
    }


def round_section(source: PageSource, names: Naming) -> Section:
    """The members of the newest round: what each brought, and the part that it averaged."""
    found = source.history.last_round
    if found is None:
        return None
    members = [
        [names.of(one.peer), round(one.samples), _number(one.part, 4)] for one in found.members
    ]
    return {"step": found.step, "members": members, "of_many": found.of_many}


def board_section(board: Board | None, names: Naming) -> Section:
    if board is None:
        return None
    return {
        "steps": board.steps,
        "seen": board.seen_steps,
        "records": board.records,
        "keeps": board.keeps,
        "people": _ranks(board.people, names),
        "helpers": _ranks(board.helpers, names),
    }


def _ranks(ranks: Iterable[Rank], names: Naming) -> Section:
    return [
        [
            one.rank,
            names.of_person(one),
            one.samples,
            one.alone_samples,
            one.steps,
            one.averaged_bytes,
            round(one.service_seconds),
            one.devices,
            one.confirming,
            one.witnesses,
        ]
        for one in list(ranks)[:MOST_RANKS]
    ]


def definition_section(definition: RunDefinition | None, costs: Costs | None) -> Section:
    """The definition, and what it costs a volunteer: names and values, both in words."""
    if definition is None:
        return None
    training, averaging = definition.training, definition.averaging
    codec = averaging.codec
    facts = [
        ("Model", str(definition.model.get("name", "its own module"))[:60]),
        ("Data", str(definition.data.get("name", definition.data.get("kind", "")))[:60]),
        ("Optimizer", str(definition.optimizer.get("name", ""))[:60]),
        ("Samples of a step", f"{training.step_samples:,}"),
        ("Steps", f"{training.steps:,}" if training.steps else "until it is stopped"),
        ("Precision", training.precision),
        ("Codec", codec if isinstance(codec, str) else "one for each parameter"),
        *([("PowerSGD", f"rank {averaging.powersgd_rank}")] if averaging.powersgd_rank else []),
        ("Most peers of a round", f"{averaging.group_size:,}"),
    ]
    asked = []
    if costs is not None:
        asked = [
            ("Parameters", f"{costs.parameters:,}"),
            ("Memory, at least", in_words(costs.memory_bytes(1))),
            ("Download at first", in_words(costs.state_bytes)),
            ("Each step, each way", f"up to {in_words(costs.round_bytes)}"),
            ("Disk", in_words(costs.disk_bytes)),
        ]
    return {
        "facts": [list(one) for one in facts if one[1]],
        "costs": [list(one) for one in asked],
        "version": definition.limits.least_version,
    }


def join_section(source: PageSource) -> Section:
    """The invite as text, and the rows of its QR code (none if it is too long for one); null if
    that is not this peer's to tell."""
    invite = source.invite()
    if not invite:
        return None
    from node.app.views.qr import qr_rows

    return {
        "invite": invite,
        "closed": source.is_closed,
        "qr": ["".join("01"[dark] for dark in row) for row in qr_rows(invite)],
    }


def _number(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)
