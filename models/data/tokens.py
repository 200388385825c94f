"""Text as ids of a tokenizer: the file tokenizer.json of Hugging Face's library, and nothing else.

    tokenizer = load_tokenizer(settings.tokenizer, web, folder)
    tokenizer.encoded(b"some text")            # int32 each, and the id that ends a document

A tokenizer.json is data: a vocabulary, and the rules by which text is taken apart. No code comes
with it. It comes from a web server or from this machine's cache of Hugging Face, and its SHA-256
stands in the settings, so that all peers of a run have the same ids.

The threat: a text may contain the written form of a special token. It is taken for text.

Easy to get wrong: the file may ask for truncation and padding. A document is neither.
"""

from __future__ import annotations

import hashlib
import threading
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
from models.hub_cache import cached_file, read_limited

FILE: Final = "tokenizer.json"
LARGEST_FILE_BYTES: Final = 32 * MEBIBYTE  # the largest published ones have some 20
ID_BYTES: Final = 4
BYTES_PER_ID: Final = 4  # of English text, about; a document is cut by it
LARGEST_ID: Final = 1_000_000

ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
"""The first of these that a tokenizer has ends a document; if it has none, nothing does."""

_kept: dict[str, Tokenizer] = {}
_loading = threading.Lock()


class Tokenizer:
    """`ids`: how many there are, from 0 on."""

    def __init__(self, library: Any) -> None:
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # in a text they are text
        numbers = library.get_vocab(with_added_tokens=True)
        self.ids = 1 + max(numbers.values(), default=0)
        self._end: int | None = next((numbers[one] for one in ENDS if one in numbers), None)
        self._library = library

    def encoded(self, content: bytes) -> bytes:
        """The ids of a document, int32 each in this machine's order of bytes."""
        text = content.decode("utf-8", "replace")
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
            advice="Install potluck with the extra `transformers`: "
            "pip install 'potluck[transformers]'.",
        ) from None
    try:
        tokenizer = Tokenizer(LibraryTokenizer.from_str(content.decode()))
    except BaseException as error:
        # the library is written in Rust, whose panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WrongTokenizer(
            f"The tokenizer of {where} cannot be used: {str(error)[:200]}."
        ) from None
    if tokenizer.ids > LARGEST_ID:
        raise WrongTokenizer(f"The tokenizer of {where} has {tokenizer.ids:,} ids.")
    return tokenizer


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
