"""The file of `potluck plan`: the peers and the speed of their links.

    values = 25_600_000      # of the vector that is averaged
    bytes_per_value = 4
    batch = 32_768           # samples per step
    group_size = 64          # as in the run's definition; may be left out. A run with as many peers
                             # or more averages by cohorts

    [[peer]]
    name = "alice"
    samples_per_s = 40       # 0: has no GPU
    up_mbps = 200            # Mb/s, millions of bits per second
    down_mbps = 200
    computes = true          # true, false or "auto"
    dial_out_only = false    # true: nobody can dial it, so it reduces nothing; may be left out

    [[link]]                 # optional: what goes from one peer to another is limited
    from = "alice"
    to = "bob"
    mbps = 10
    relayed = true           # may be left out: the two only meet through a relay, both ways. The
                             # plan keeps parts off it; without mbps it carries what a relay's
                             # circuit does (nat/relay_limits.py)

A file that is nearly right is dangerous, because its plan looks right. So nothing is guessed:
anything unknown, missing, repeated, out of bounds or not a number is an error with its place
(WrongUse, exit code 2).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nat.relay_limits import RelayLimits
from node.core.wrong_use import WrongUse, nearest
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.plan_strategy import Computes, PlannedPeer, PlannedPeers, dealt
from protocols.moshpit.settings import GROUP_SIZE

STDIN = "-"
LARGEST_FILE_BYTES = 1 << 20  # a thousand peers take a seventh of it
MOST_PEERS = 1_000  # planned in half a second
MOST_LINKS = 10_000  # each is a row of the programme
LONGEST_NAME = 64  # characters: a peer id has 52
BYTES_PER_MEGABIT = 125_000.0
NAMES_DEAL = "plan"
"""In place of a run's name when peers are dealt into cohorts. A run deals them by their ids, which
the file does not have, so a plan shows cohorts as uneven as a run's, but with other peers in them.
"""


class _Number(NamedTuple):
    """The bounds of a number, and its name."""

    least: float
    most: float
    what: str
    whole: bool = False


_TOP: dict[str, _Number] = {
    "values": _Number(1, 1e13, "how many values the vector has", whole=True),
    "bytes_per_value": _Number(1e-3, 16, "bytes that a value takes on the wire"),
    "batch": _Number(1e-3, 1e12, "samples per step"),
}
_GROUP_SIZE = _Number(2, LARGEST_GROUP, "the most peers that average in one group", whole=True)
_MBPS = "Mb/s, millions of bits per second"
_PEER: dict[str, _Number] = {
    "samples_per_s": _Number(0, 1e9, "samples per second, 0 for a peer without a GPU"),
    "up_mbps": _Number(1e-3, 1e8, _MBPS),
    "down_mbps": _Number(1e-3, 1e8, _MBPS),
}
_LINK: dict[str, _Number] = {"mbps": _Number(1e-3, 1e8, _MBPS)}
_COMPUTES = {True: Computes.ALWAYS, False: Computes.NEVER, "auto": Computes.AUTO}

_EXAMPLE = "`potluck plan --help` shows a whole file."


def read_plan_file(path: str) -> PlannedPeers:
    """The peers and links in the file, or on stdin if it is `-`. WrongUse if anything is wrong."""
    name = "stdin" if path == STDIN else path
    return parse_plan(_document(_content(path, name), name), name)


def parse_plan(document: Mapping[str, Any], name: str) -> PlannedPeers:
    """The collaboration in a parsed document; `name` appears in the messages of mistakes."""
    known = {*_TOP, "group_size", "peer", "link"}
    _check_keys(document, known, name, optional={"group_size", "link"})
    group_size = _number(document.get("group_size", GROUP_SIZE), "group_size", _GROUP_SIZE, name)
    numbers = {key: _number(document[key], key, bounds, name) for key, bounds in _TOP.items()}
    tables = _tables(document["peer"], "peer", MOST_PEERS, name)
    if not tables:
        raise WrongUse(f"There is no peer in {name}.", why="A plan needs peers.", advice=_EXAMPLE)
    peers = [_peer(table, f"peer {number} of {name}") for number, table in enumerate(tables, 1)]
    places: dict[str, int] = {}
    for place, peer in enumerate(peers):
        if peer.name in places:
            raise WrongUse(
                f"Two peers of {name} have the name {peer.name!r}.",
                why="Links and results go by the peers' names.",
                advice="Give each [[peer]] a name of its own.",
            )
        places[peer.name] = place
    limits: dict[tuple[int, int], float] = {}
    relayed: set[tuple[int, int]] = set()
    links = _tables(document.get("link", []), "link", MOST_LINKS, name)
    for number, table in enumerate(links, 1):
        ends, limit, by_relay = _link(table, places, f"link {number} of {name}")
        if ends in limits:
            raise WrongUse(
                f"The link {number} of {name} has the same from and to as an earlier one.",
                why="There can be only one limit for one direction between two peers.",
                advice="Remove one of the two, or exchange from and to for the other direction.",
            )
        limits[ends] = limit
        if by_relay:
            relayed.add((min(ends), max(ends)))
    for first, second in relayed:
        for way in ((first, second), (second, first)):
            limits.setdefault(way, float(RelayLimits().circuit_bytes_per_second))
    cohorts = dealt([peer.name for peer in peers], int(group_size), NAMES_DEAL)
    largest = max(map(len, cohorts)) if cohorts else len(peers)
    if largest > group_size:
        together = f"{len(cohorts)} cohorts, of up to {largest} peers" if cohorts else "one group"
        raise WrongUse(
            f"The {len(peers):,} peers of {name} are too many for groups of {group_size:g}.",
            why=f"They would be {together}. In a run, those beyond a group only follow it.",
            advice=f"Take a larger group_size, up to {LARGEST_GROUP}, or fewer peers.",
        )
    return PlannedPeers(
        vector_bytes=numbers["values"] * numbers["bytes_per_value"],
        batch=numbers["batch"],
        peers=peers,
        limits=limits,
        relayed=frozenset(relayed),
        cohorts=cohorts,
    )


def _content(path: str, name: str) -> bytes:
    try:
        if path == STDIN:
            content = _read(sys.stdin.buffer)
        else:
            with Path(path).open("rb") as file:
                content = _read(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WrongUse(
            f"{name} cannot be read: {reason}.",
            why="Give a file with peers, or - for stdin.",
            advice="Check its name and permissions (ls -l).",
        ) from None
    if len(content) > LARGEST_FILE_BYTES:
        raise WrongUse(
            f"{name} is larger than a megabyte.",
            why=f"A plan has at most {MOST_PEERS:,} peers, which need far less.",
            advice="Check that this is the right file.",
        )
    return content


def _read(file: BinaryIO) -> bytes:
    return file.read(LARGEST_FILE_BYTES + 1)


def _document(content: bytes, name: str) -> Mapping[str, Any]:
    import tomllib

    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError
        raise WrongUse(
            f"{name} is not valid TOML: {error}.",
            why="Peers are tables that begin with [[peer]]; each key has a line `key = value`.",
            advice=_EXAMPLE,
        ) from None


def _tables(value: Any, key: str, most: int, name: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise WrongUse(
            f"`{key}` in {name} is not a list of tables.",
            why=f"Each of them begins with [[{key}]], in two brackets.",
            advice=_EXAMPLE,
        )
    if len(value) > most:
        raise WrongUse(
            f"{name} has {len(value):,} tables [[{key}]].",
            why=f"A plan has at most {most:,}.",
            advice="Leave some out: a plan of fewer shows how a larger run averages, too.",
        )
    return value


def _peer(table: Mapping[str, Any], where: str) -> PlannedPeer:
    known = {"name", *_PEER, "computes", "dial_out_only"}
    _check_keys(table, known, where, optional={"dial_out_only"})
    name = table["name"]
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise WrongUse(
            f"The name of {where} is {_shown(name)}.",
            why=f"A name is a text of 1 to {LONGEST_NAME} printable characters.",
            advice='Write for example name = "alice".',
        )
    where = f"{where}, {name!r}"
    computes = table["computes"]
    if not isinstance(computes, bool) and computes != "auto":
        raise WrongUse(
            f"`computes` of {where} is {_shown(computes)}.",
            why='It is true or false, without quotes, or "auto" for the plan to decide.',
            advice='Write computes = "auto" if you do not know.',
        )
    dial_out_only = table.get("dial_out_only", False)
    if not isinstance(dial_out_only, bool):
        raise WrongUse(
            f"`dial_out_only` of {where} is {_shown(dial_out_only)}.",
            why="It is true or false, without quotes.",
            advice="Write dial_out_only = true if nobody can dial this peer.",
        )
    numbers = {key: _number(table[key], key, bounds, where) for key, bounds in _PEER.items()}
    return PlannedPeer(
        name=name,
        samples_per_s=numbers["samples_per_s"],
        up=numbers["up_mbps"] * BYTES_PER_MEGABIT,
        down=numbers["down_mbps"] * BYTES_PER_MEGABIT,
        computes=_COMPUTES[computes],
        dial_out_only=dial_out_only,
    )


def _link(
    table: Mapping[str, Any], places: Mapping[str, int], where: str
) -> tuple[tuple[int, int], float, bool]:
    """The ends, what the link carries, and whether it leads through a relay."""
    relayed = table.get("relayed", False)
    if not isinstance(relayed, bool):
        raise WrongUse(
            f"`relayed` of {where} is {_shown(relayed)}.",
            why="It is true or false, without quotes.",
            advice="Write relayed = true if the two only meet through a relay.",
        )
    optional = {"relayed", *_LINK} if relayed else {"relayed"}
    _check_keys(table, {"from", "to", "relayed", *_LINK}, where, optional=optional)
    ends = []
    for key in ("from", "to"):
        peer = table[key]
        if not isinstance(peer, str) or peer not in places:
            meant = nearest(peer, places) if isinstance(peer, str) else None
            raise WrongUse(
                f"`{key}` of {where} is {_shown(peer)}.",
                why="There is no [[peer]] with that name.",
                advice=f"Did you mean {meant!r}?" if meant else "Name one of the peers.",
            )
        ends.append(places[peer])
    if ends[0] == ends[1]:
        raise WrongUse(
            f"The {where} leads from {table['from']!r} to itself.",
            why="A peer sends itself nothing over a link.",
            advice="Name two different peers.",
        )
    if "mbps" in table:
        limit = _number(table["mbps"], "mbps", _LINK["mbps"], where) * BYTES_PER_MEGABIT
    else:
        limit = float(RelayLimits().circuit_bytes_per_second)
    return (ends[0], ends[1]), limit, relayed


def _check_keys(
    table: Mapping[str, Any], known: Set[str], where: str, *, optional: Set[str] = frozenset()
) -> None:
    for key in table:
        if key not in known:
            meant = nearest(key, known)
            raise WrongUse(
                f"There is no `{_short(key)}` in {where}.",
                why=f"It has {', '.join(sorted(known))}.",
                advice=f"Did you mean `{meant}`?" if meant else "Remove it.",
            )
    for key in sorted(known - optional):
        if key not in table:
            raise WrongUse(
                f"`{key}` is missing in {where}.",
                why="potluck guesses no value, because a plan for other peers than yours would "
                "look right.",
                advice=_EXAMPLE,
            )


def _number(value: Any, key: str, bounds: _Number, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and bounds.least <= value <= bounds.most) or (  # false for NaN
        bounds.whole and value != int(value)
    ):
        kind = "a whole number" if bounds.whole else "a number"
        raise WrongUse(
            f"`{key}` of {where} is {_shown(value)}.",
            why=f"It is {kind} from {bounds.least:g} to {bounds.most:g}: {bounds.what}.",
            advice="Correct it in the file: the plan is only as good as its figures.",
        )
    return float(value)


def _shown(value: Any) -> str:
    """As TOML has it, more or less."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > 10**18:
        return "too large a number"  # of thousands of digits, maybe, which repr refuses
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"
