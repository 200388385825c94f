"""Text as ids of a tokenizer: the file tokenizer.json of Hugging Face's library, and nothing else.

    tokenizer = load_tokenizer(settings.tokenizer, web, folder)
    tokenizer.encoded(b"some text")            # int32 each, and the id that ends a document

A tokenizer.json is data: a vocabulary, and the rules by which text is taken apart. No code comes
with it. It comes from a web server or from this machine's cache of Hugging Face, and its SHA-256
stands in the settings, so that all peers of a run have the same ids.

The threat: a text may contain the written form of a special token. It is taken for text. And the
rules of a stranger's file may replace each letter by a thousand, again and again, until there is no
memory left: such a file is refused before it sees a text. All rules that add letters count, those
of the normalizer and those that take a text apart.

Easy to get wrong: the file may ask for truncation and padding. A document is neither.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.data.errors import Interrupted, ShardBroken, TokenizerAway, WrongTokenizer
from models.data.events import log
from models.data.examples import Pause
from models.data.retrying import Attempts
from models.data.settings import MEBIBYTE, TokenizerSettings, is_address
from models.data.web import Web
from models.data.web_reader import WebReader
from models.errors import WrongSettings
from models.extras import install
from models.hub_cache import cached_file, read_limited

FILE: Final = "tokenizer.json"
LARGEST_FILE_BYTES: Final = 32 * MEBIBYTE  # the largest published ones have some 20
ID_BYTES: Final = 4
BYTES_PER_ID: Final = 4  # of English text, about; a document is cut by it
LARGEST_ID: Final = 1_000_000
MOST_GROWTH: Final = 128  # times as many letters; of published ones, that of ALBERT may reach 72
LARGEST_GROWTH: Final = 10**12  # that is told

ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
"""The first of these that a tokenizer has ends a document; if it has none, nothing does."""

_kept: dict[str, Tokenizer] = {}
_loading = threading.Lock()


class Tokenizer:
    """`ids`: how many there are, from 0 on."""

    def __init__(self, library: Any, where: str) -> None:
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # in a text they are text
        numbers = library.get_vocab(with_added_tokens=True)
        self.ids = 1 + max(numbers.values(), default=0)
        self._end: int | None = next((numbers[one] for one in ENDS if one in numbers), None)
        self._library, self._where = library, where

    def encoded(self, content: bytes) -> bytes:
        """The ids of a document, int32 each in this machine's order of bytes."""
        text = content.decode("utf-8", "replace")
        with _explained(f"The tokenizer of {self._where} cannot read a text of the data"):
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if self._end is not None:
            ids.append(self._end)
        return np.asarray(ids, dtype=np.int32).tobytes()


def load_tokenizer(settings: TokenizerSettings, web: Web, folder: Path) -> Tokenizer:
    """WrongTokenizer if it is not here, or not the one that the settings mean. The last one is
    kept: a run opens its data anew with each size of a batch."""
    with _loading:
        known = _kept.get(settings.sha256)
        if known is None:
            known = _loaded(settings, web, folder)
            _kept.clear()
            _kept[settings.sha256] = known
        return known


def _loaded(settings: TokenizerSettings, web: Web, folder: Path) -> Tokenizer:
    where = settings.path
    content = _fetched(where, web) if is_address(where) else _here(where, folder)
    found = hashlib.sha256(content).hexdigest()
    if found != settings.sha256:
        said = f"says {settings.sha256}" if settings.sha256 else "does not say which one it means"
        raise WrongTokenizer(
            f"The tokenizer of {where} has the SHA-256 {found}, and [data.tokenizer] {said}.",
            why="All peers of a run must have the same one.",
            advice=f'If this is the right one: sha256 = "{found}".',
        )
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError:
        raise WrongTokenizer(
            "A tokenizer needs the library tokenizers, which is not installed here.",
            advice=install("transformers"),
        ) from None
    with _explained(f"The tokenizer of {where} cannot be used"):
        library = LibraryTokenizer.from_str(content.decode())
        rules = [one for one in (library.normalizer, library.pre_tokenizer) if one is not None]
        growth = _growth_of_all(json.loads(one.__getstate__()) for one in rules)
        tokenizer = Tokenizer(library, where)
    if growth > MOST_GROWTH:
        raise WrongTokenizer(
            f"The tokenizer of {where} could make a text {growth:,} times as long.",
            why="Its rules replace letters by longer texts, which takes memory without limit.",
            advice=f"Use one that makes it at most {MOST_GROWTH} times as long.",
        )
    if tokenizer.ids > LARGEST_ID:
        raise WrongTokenizer(
            f"The tokenizer of {where} has {tokenizer.ids:,} ids.",
            advice=f"Use one with at most {LARGEST_ID:,}.",
        )
    return tokenizer


def _growth_of_all(rules: Iterable[Mapping[str, Any]]) -> int:
    """Of rules that are applied one after the other."""
    growth = 1
    for one in rules:
        growth = min(growth * _growth(one), LARGEST_GROWTH)
    return growth


def _growth(rule: Mapping[str, Any]) -> int:
    """How many times as long a rule can make a text. Unicode's own tables make up to 18 letters of
    one, once; that is not counted.

    Easy to get wrong: a letter that a rule writes may be taken apart by these tables, too, and what
    they make of it be replaced again. So each counts as all that they make of it.
    """
    match rule:
        case {"type": "Sequence"}:
            return _growth_of_all(rule.get("normalizers") or rule.get("pretokenizers") or ())
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
            pattern
        ):
            return max(1, _letters(content))
        case {"type": "Replace", "content": str(content)}:
            return 1 + _letters(content)  # an expression may find a place between two letters
        case {"type": "Prepend", "prepend": str(content)}:
            return max(1, _letters(content))
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_replacement(base64.b64decode(table))
        case {"type": "BertNormalizer"}:
            return 3  # a space on both sides of each Chinese letter
        case {"type": "ByteLevel", "add_prefix_space": bool()}:
            return 5  # a letter for each of up to four bytes, and one before each piece
        case {"type": "ByteLevel"}:
            return 12  # as a normalizer: of such a letter, Unicode's tables make up to three
        case {"type": "Metaspace"}:
            return 2  # a letter before each piece
        case _:
            return 1


def _letters(written: str) -> int:
    """How many letters Unicode's tables make of these, at most."""
    return len(unicodedata.normalize("NFKD", written))


def _longest_replacement(table: bytes) -> int:
    """Of SentencePiece's table of letters: the size of an index, the index, and the replacements,
    each with a zero behind it."""
    size = int.from_bytes(table[:4], "little")
    replacements = table[4 + size :].split(b"\0")
    return max(1, *(_letters(one.decode("utf-8", "replace")) for one in replacements))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """The library's errors in our words. It is written in Rust, whose panics are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WrongTokenizer(
            f"{what}: {str(error)[:200]}.",
            advice="Use another tokenizer.json, or ask those who made this one.",
        ) from None


def _fetched(address: str, web: Web) -> bytes:
    reader, content = WebReader(web, address, 0, LARGEST_FILE_BYTES), bytearray()
    attempts = Attempts(web.clock, partial(log.warning, "the tokenizer: %s; attempt %d in %.0f s"))
    try:
        while True:
            try:
                if not (data := reader.read()):
                    return bytes(content)
                content += data
            except Interrupted as error:
                web.clock.wait_until(_next_attempt(attempts, error, reader.byte).until)
    except ShardBroken as error:
        raise WrongTokenizer(
            f"The tokenizer of {address} cannot be fetched: {error}",
            advice="Check the address below [data.tokenizer].",
        ) from None
    finally:
        reader.close()


def _next_attempt(attempts: Attempts, error: Interrupted, byte: int) -> Pause:
    try:
        return attempts.interrupted(error, byte)
    except ShardBroken as last:
        raise TokenizerAway(
            f"The tokenizer cannot be fetched: {last}",
            advice="Check the address below [data.tokenizer], and this machine's connection. Its "
            "server may be back later.",
        ) from None


def _here(where: str, folder: Path) -> bytes:
    """The file itself, that of a folder, or that of a model in the cache."""
    beside = folder / where
    try:
        if beside.exists():
            file = beside / FILE if beside.is_dir() else beside
            return read_limited(file, f"The tokenizer of {where}", LARGEST_FILE_BYTES)
        return cached_file(where, FILE, largest=LARGEST_FILE_BYTES)
    except WrongSettings as error:
        raise WrongTokenizer(error.what, why=error.why, advice=error.advice) from None
