"""Records for tests: persons with one device each, and what they say of steps."""

from __future__ import annotations

from collections.abc import Mapping

from node.training.credit.tally import CreditRecord, PersonStanding, tally
from protocols.credit.record import Line, Page, page_number
from protocols.identity import Identity, PeerId

RUN = "poem/organiser"
HISTORY = bytes(16)
IDENTITIES = {name: Identity.from_seed(name.encode().ljust(32)) for name in "ABCDEFGHIJST"}
KEYS = {name: one.public_key for name, one in IDENTITIES.items()}
PEERS: dict[str, PeerId] = {name: one.peer_id for name, one in IDENTITIES.items()}
PERSONS = {peer: name for name, peer in PEERS.items()}
Brought = Mapping[str, tuple[int, int]]  # samples, averaged bytes


def line_of(
    brought: Brought,
    epoch: int = 0,
    *,
    history: bytes = HISTORY,
    moment: int | None = None,
    over_a_grid: bool = False,
    of_samples: int | None = None,
    served: Mapping[str, int] | None = None,
) -> Line:
    """The line of a step; its members are the places of a page that has just them, and the servers
    after them."""
    servers = list(dict.fromkeys([*brought, *(served or {})]))
    whole = sum(samples for samples, _ in brought.values()) if of_samples is None else of_samples
    return Line(
        epoch,
        history,
        60 * epoch if moment is None else moment,
        whole,
        over_a_grid,
        tuple(range(len(brought))),
        tuple(samples for samples, _ in brought.values()),
        tuple(averaged for _, averaged in brought.values()),
        tuple(servers.index(name) for name in served or {}),
        tuple((served or {}).values()),
    )


def page_of(brought: Brought, line: Line, served: Mapping[str, int] | None = None) -> Page:
    members = tuple(KEYS[name] for name in dict.fromkeys([*brought, *(served or {})]))
    return Page(RUN, page_number(line.epoch), members, (line,))


def says(
    name: str,
    brought: Brought,
    epoch: int = 0,
    *,
    served: Mapping[str, int] | None = None,
    **details: object,
) -> CreditRecord:
    """The line of this person's only device about a step."""
    line = line_of(brought, epoch, served=served, **details)  # type: ignore[arg-type]
    return CreditRecord(PEERS[name], name, page_of(brought, line, served))


def everybody_says(brought: Brought, epoch: int = 0, **details: object) -> list[CreditRecord]:
    return [says(name, brought, epoch, **details) for name in brought]


def standings(
    records: list[CreditRecord], newest_epoch: int = 1 << 40
) -> dict[str, PersonStanding]:
    found = tally(records, PERSONS, newest_epoch=newest_epoch)
    return {one.person: one for one in found}
