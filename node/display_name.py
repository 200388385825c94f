"""What a peer is called wherever a person reads of it: on the screen, in the log, in tables.

    label(peer, verified="code:alice", said="Ada")      # code:alice “Ada” …PXsWW5pf

The end of the key is always there, because that alone proves anything. A name without quotes comes
from the run's auth server, which knows the person. One in quotes is what the peer says of itself
(`--name`), and two peers may say the same.

Threat: a stranger's name that commands the terminal, turns the direction of writing, ends its own
quotes and goes on as another peer's key, or looks like another's with letters of another alphabet.
So a name has letters, figures, spaces and a few signs only, of one alphabet, and all others are
replaced by a question mark.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from node.wrong_use import WrongUse

LONGEST_NAME: Final = 24
"""Characters; as many as others take (protocols/accumulation/progress_slot.py)."""

SHORT_ID: Final = 8
"""Of a peer id's last characters: the first ones are the same for all."""

MOST_CELLS: Final = 16
"""Of a name beside its key, so that a list of peers fits a terminal of 80 columns."""

_SIGNS: Final = frozenset(" -_.'")
_ALIKE: Final = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "CHEROKEE", "COPTIC")
"""Alphabets with letters that look like those of another; as Unicode's names of letters begin."""

_DOTS: Final = re.compile(r"\.\.+")  # a key's end begins with such

_BASE58: Final = "[1-9A-HJ-NP-Za-km-z]"
_ID: Final = rf"\b12D3KooW{_BASE58}{{44}}\b"
_SHORT_ID: Final = rf"…{_BASE58}{{{SHORT_ID}}}\b"
_NAMED: Final = re.compile(rf"({_ID}|{_SHORT_ID})(?: \(([^()]*)\))?")


@dataclass(frozen=True)
class Named:
    """A peer with its names. `verified`: by the run's auth server. `said`: by the peer itself."""

    peer: str
    verified: str = ""
    said: str = ""

    @property
    def label(self) -> str:
        return label(self.peer, self.verified, self.said)


def short(peer: str) -> str:
    """A peer id as it is shown where there is little room."""
    return f"…{peer[-SHORT_ID:]}" if len(peer) > SHORT_ID else peer


def label(peer: str, verified: str = "", said: str = "", most_cells: int = MOST_CELLS) -> str:
    """What a peer is called: its names, of which so many cells are shown, and the key's end."""
    verified = "".join(one if one.isprintable() else "?" for one in verified)
    said = cleaned(said)
    quoted = f"“{said}”" if said else ""
    name = " ".join(one for one in (verified, quoted) if one)
    if verified and _clipped(name, most_cells) != name:
        name = verified
    return f"{_clipped(name, most_cells)} {short(peer)}".strip()


def cleaned(said: str) -> str:
    """What is shown of a name that somebody gave itself."""
    alphabet = ""
    kept = []
    for letter in unicodedata.normalize("NFKC", said[:LONGEST_NAME]):
        mine = next((one for one in _ALIKE if unicodedata.name(letter, "").startswith(one)), "")
        alphabet = alphabet or mine
        is_fine = letter in _SIGNS or unicodedata.category(letter)[0] in "LN"
        kept.append(letter if is_fine and mine in ("", alphabet) else "?")
    return " ".join(_DOTS.sub("?", "".join(kept)).split())[:LONGEST_NAME]


def as_written(text: str) -> str:
    """A name that its owner typed; WrongUse if others would not be shown it as it is."""
    name = " ".join(unicodedata.normalize("NFKC", text).split())
    if len(name) > LONGEST_NAME or cleaned(name) != name or "?" in name:
        raise WrongUse(
            f"A name has at most {LONGEST_NAME} letters, figures, spaces and -_.' of one alphabet.",
            why="It is shown in the terminals of all others, beside the end of your key.",
        )
    return name


def with_names(words: str, peers: Iterable[Named]) -> str:
    """The words with each peer id in them, whole or short, as its label; a person in brackets
    behind it, whom the label names, is left out."""
    named = list(peers)
    by_id: Mapping[str, Named] = {
        **{short(one.peer): one for one in named},
        **{one.peer: one for one in named},
    }

    def said(found: re.Match[str]) -> str:
        one = by_id.get(found[1])
        behind = f" ({found[2]})" if found[2] is not None else ""
        if one is None:
            return f"{short(found[1])}{behind}"
        return one.label if found[2] == one.verified else f"{one.label}{behind}"

    return _NAMED.sub(said, words)


def _clipped(name: str, most_cells: int) -> str:
    from rich.cells import cell_len, set_cell_size  # every command reads the settings, few show

    if cell_len(name) <= most_cells:
        return name
    return set_cell_size(name, most_cells - 1).rstrip() + "…"
