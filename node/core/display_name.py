"""The name of a peer as a person sees it: on the screen, in the log, in tables.

    label(peer, verified="code:alice", said="Ada")      # code:alice “Ada” …PXsWW5pf

The end of the key is always shown, because only it proves anything. A name without quotes comes
from the run's auth server, which knows the person. A name in quotes is the peer's own choice
(`--name`), and two peers may choose the same.

The threats are names from strangers that control the terminal, reverse the direction of writing,
close their own quotes and continue as another peer's key, or imitate another name with letters of
another alphabet. So a name may only have letters, digits, spaces and a few signs, all of one
alphabet. Every other character is replaced by a question mark.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol

from node.core.wrong_use import WrongUse

LONGEST_NAME: Final = 24
"""Characters; the limit that other peers accept (protocols/accumulation/progress_slot.py)."""

SHORT_ID: Final = 8
"""The last characters of a peer id; the first ones are the same for all."""

MOST_CELLS: Final = 16
"""The width of a name beside its key, so that a list of peers fits a terminal of 80 columns."""

NAMES_REMEMBERED: Final = 2048
"""A thousand peers' names are asked for with every view, and each takes 15 µs."""

_SIGNS: Final = frozenset(" -_.'")
_ALIKE: Final = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "CHEROKEE", "COPTIC")
"""Alphabets with letters that look alike, as the beginning of Unicode's names of letters."""

_DOTS: Final = re.compile(r"\.\.+")  # the end of a key begins with such dots

_BASE58: Final = "[1-9A-HJ-NP-Za-km-z]"
_ID: Final = rf"\b12D3KooW{_BASE58}{{44}}\b"
_SHORT_ID: Final = rf"…{_BASE58}{{{SHORT_ID}}}\b"
_NAMED: Final = re.compile(rf"({_ID}|{_SHORT_ID})(?: \(([^()]*)\))?")


class WithNames(Protocol):
    """A peer with its names: `name` from the run's auth server, `said_name` from the peer."""

    @property
    def peer(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def said_name(self) -> str: ...


def short(peer: str) -> str:
    """A peer id as it is shown in little room."""
    return f"…{peer[-SHORT_ID:]}" if len(peer) > SHORT_ID else peer


def label(peer: str, verified: str = "", said: str = "", most_cells: int = MOST_CELLS) -> str:
    """A peer's label: its names, up to so many cells, and the end of its key."""
    verified = "".join(one if one.isprintable() else "?" for one in verified)
    said = cleaned(said)
    quoted = f"“{said}”" if said else ""
    name = " ".join(one for one in (verified, quoted) if one)
    if verified and _clipped(name, most_cells) != name:
        name = verified
    return f"{_clipped(name, most_cells)} {short(peer)}".strip()


def cleaned(said: str) -> str:
    """A peer's own name, with the characters that may be shown."""
    return _cleaned(said[:LONGEST_NAME])


@lru_cache(maxsize=NAMES_REMEMBERED)
def _cleaned(said: str) -> str:
    alphabet = ""
    kept = []
    for letter in unicodedata.normalize("NFKC", said):
        mine = next((one for one in _ALIKE if unicodedata.name(letter, "").startswith(one)), "")
        alphabet = alphabet or mine
        is_fine = letter in _SIGNS or unicodedata.category(letter)[0] in "LN"
        kept.append(letter if is_fine and mine in ("", alphabet) else "?")
    return " ".join(_DOTS.sub("?", "".join(kept)).split())[:LONGEST_NAME]


def as_written(text: str) -> str:
    """A name that its owner typed; WrongUse if others would see it differently."""
    name = " ".join(unicodedata.normalize("NFKC", text).split())
    if len(name) > LONGEST_NAME or cleaned(name) != name or "?" in name:
        raise WrongUse(
            f"A name has at most {LONGEST_NAME} letters, digits, spaces and -_.' of one alphabet.",
            why="Everybody else sees it in their terminal, beside the end of your key.",
        )
    return name


def with_names(words: str, peers: Iterable[WithNames]) -> str:
    """Replace each peer id in the words, whole or short, by its label.

    A person in brackets after it, whom the label already names, is left out.
    """
    return all_with_names([words], peers)[0]


def all_with_names(texts: Sequence[str], peers: Iterable[WithNames]) -> list[str]:
    """`with_names` for each of the texts. Most words name nobody, and then the peers are not
    looked at: a screen asks several times a second, and there may be a thousand."""
    asked = {found[1] for words in texts for found in _NAMED.finditer(words)}
    ends = tuple({one[-SHORT_ID:] for one in asked})
    by_id: dict[str, WithNames] = {}
    for one in peers if ends else ():
        if one.peer.endswith(ends):
            by_id[short(one.peer)] = by_id[one.peer] = one

    def said(peer: str, person: str | None) -> str:
        one = by_id.get(peer)
        behind = f" ({person})" if person is not None else ""
        if one is None:
            return f"{short(peer)}{behind}"
        name = label(one.peer, one.name, one.said_name)
        return name if person == one.name else f"{name}{behind}"

    return [with_peers(words, said) for words in texts]


def with_peers(words: str, said: Callable[[str, str | None], str]) -> str:
    """Replace each peer id in the words. `said` is given the id, whole or short, and what stands in
    brackets after it."""
    return _NAMED.sub(lambda found: said(found[1], found[2]), words)


def _clipped(name: str, most_cells: int) -> str:
    # Imported here: every command reads the settings, but few print names.
    from rich.cells import cell_len, set_cell_size

    if cell_len(name) <= most_cells:
        return name
    return set_cell_size(name, most_cells - 1).rstrip() + "…"
