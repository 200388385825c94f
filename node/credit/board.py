"""The leaderboard as it is shown and printed as JSON: those with samples, and those who help.

Who brings no samples (a machine without a GPU that averages for others, keeps checkpoints, relays)
has a place in a table of its own, by what it averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from node.credit.checking import Check
from node.credit.tally import Standing
from protocols.identity import PeerId

MOST_SHOWN: Final = 500  # of each kind
MOST_UNHEARD_SHOWN: Final = 100


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    person: str
    is_me: bool
    samples: int
    averaged_bytes: int
    steps: int
    service_seconds: float
    longest_seconds: float
    devices: int
    alone_samples: int = 0  # in steps that this person made alone, by its own word
    alone_steps: int = 0
    name: str = ""  # that it gives itself, as far as it is here now, cleaned
    peer: str = ""  # a device of its


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: that the run has made, and `seen_steps` those that this peer was in. `records`: how
    many peers' were added up. `asked`, `unheard`: the peers that were there to be asked, and those
    of them who did not answer, with why. `keeps`: whether this peer keeps everybody's records
    itself. `checks`: of the sums of others who do, where that was asked for."""

    run: str
    steps: int
    people: tuple[Rank, ...]
    helpers: tuple[Rank, ...]
    records: int
    seen_steps: int
    asked: int
    unheard: dict[str, str]
    keeps: bool = False
    checks: tuple[Check, ...] = ()


def board_of(
    run: str,
    steps: int,
    standings: Iterable[Standing],
    *,
    mine: str,
    records: int,
    seen_steps: int,
    asked: int,
    unheard: Mapping[str, str],
    keeps: bool = False,
    checks: tuple[Check, ...] = (),
    names: Mapping[PeerId, str] | None = None,
) -> Board:
    found = list(standings)
    helpers = [one for one in found if one.helps]
    helpers.sort(key=lambda one: (-one.averaged_bytes, -one.service_seconds, one.person))
    return Board(
        run=run,
        steps=steps,
        people=_ranked([one for one in found if not one.helps], mine, names or {}),
        helpers=_ranked(helpers, mine, names or {}),
        records=records,
        seen_steps=seen_steps,
        asked=asked,
        keeps=keeps,
        checks=checks,
        unheard=dict(sorted(unheard.items())[:MOST_UNHEARD_SHOWN]),
    )


def _ranked(standings: list[Standing], mine: str, names: Mapping[PeerId, str]) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            rank=rank,
            person=one.person,
            is_me=one.person == mine,
            samples=one.samples,
            averaged_bytes=one.averaged_bytes,
            steps=one.steps,
            service_seconds=round(one.service_seconds, 3),
            longest_seconds=round(one.longest_seconds, 3),
            devices=len(one.devices),
            alone_samples=one.alone_samples,
            alone_steps=one.alone_steps,
            name=next((names[peer] for peer in one.devices if names.get(peer)), ""),
            peer=one.devices[0] if one.devices else "",
        )
        for rank, one in enumerate(standings[:MOST_SHOWN], start=1)
    )
