"""The description of a run's data, as a table that a run's file can hold.

    [data]
    shuffle_examples = 10_000

    [[data.source]]
    kind = "jsonl"
    paths = ["https://data.example.org/wikipedia-{000..099}.jsonl.gz"]
    field = "text"
    probability = 0.23

    [[data.source]]
    kind = "text"
    paths = ["shards/oscar-*.txt.gz"]
    probability = 0.77

Without any source, the data is the source code of Python's standard library.

Easy to get wrong: a run's file comes from somebody else. Any file that it names on a volunteer's
disk would be read, trained on, and partly readable from the gradients. So settings that came over
the network are opened with `from_strangers=True`, which calls `refuse_this_machine`.
"""

from __future__ import annotations

import ipaddress
import os.path
import re
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from models.data.cutting import SMALLEST_PIECE_BYTES
from models.data.errors import DataSettingsError
from models.errors import nearest

MOST_SOURCES = 64
MOST_PATHS = 4_096  # as written; patterns and braces may name many more shards
LONGEST_PATH = 4_096  # characters; what systems and servers take
LARGEST_BUFFER = 1_000_000  # examples, of all sources; more is a data set, and not a buffer
MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
LARGEST_EXAMPLE_BYTES = 16 * MEBIBYTE  # the rest of one is kept in positions; no picture has more

LARGEST_TOKENIZED_BYTES = MEBIBYTE // 4  # the library takes some 220 times as much meanwhile
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z", re.ASCII)

Kind = Literal["standard-library", "text", "jsonl", "parquet", "datasets"]
Word = Annotated[str, msgspec.Meta(max_length=256)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_PATH)]


class SourceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source of a mixture."""

    kind: Kind
    """`text`, `jsonl` (each also as `.gz`), `parquet`: files, from `paths`. `datasets`: a data set
    of Hugging Face, with the extra of that name. `standard-library`: Python's own source code."""

    paths: Annotated[tuple[Path, ...], msgspec.Meta(max_length=MOST_PATHS)] = ()
    """Files, folders, patterns (`shards/*.gz`) or http(s) addresses; `{000..099}` counts."""

    probability: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.0
    """How often this source is drawn, in proportion to the others."""

    name: Word = ""
    """Its name in events. Without, its kind and its number."""

    field: Word = "text"
    """The field of a record with the text or picture (jsonl, Parquet, datasets)."""

    label_field: Word = ""
    """The field with the label, a whole number; none if empty."""

    documents: Literal["lines", "paragraphs", "files"] = "lines"
    """One document of a `text`: a line, the text between empty lines, or the whole file."""

    dataset: Word = ""
    """`datasets` only: the data set's name, as owner/name."""

    subset: Word = ""
    """`datasets` only: the data set's configuration, for example a language."""

    split: Word = "train"
    """`datasets` only: the part of the data set."""


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer whose ids the model reads (tokens.py)."""

    path: Path
    """The http(s) address of a tokenizer.json, or a model in the cache of Hugging Face
    (owner/name); in one's own loop also a file, or a folder with one."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    """Of the file. Without it, the error says which one is there."""


class DataSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a run's data."""

    source: Annotated[tuple[SourceSettings, ...], msgspec.Meta(max_length=MOST_SOURCES)] = (
        SourceSettings("standard-library"),
    )

    shuffle_examples: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_BUFFER)] = 10_000
    """S of the paper: how many examples of each source are shuffled among themselves."""

    shuffle_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=64 * GIBIBYTE)] = 256 * MEBIBYTE
    """The same in bytes, for all sources together; the first limit that is reached counts."""

    piece_bytes: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_EXAMPLE_BYTES)] | None = None
    """Documents are cut into examples of at most this many bytes; 0 leaves them whole (pictures).
    By default, the size of one sample of the model."""

    tokenizer: TokenizerSettings | None = None
    """None: the ids are the bytes of the text."""

    passes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """How often each source is read; 0 is forever."""

    patience_seconds: Annotated[float, msgspec.Meta(ge=0.05, le=600)] = 10.0
    """A server that sends nothing for this long counts as interrupted."""

    largest_document_bytes: Annotated[int, msgspec.Meta(ge=64, le=GIBIBYTE)] = 4 * MEBIBYTE
    """A longer line, record or picture is skipped."""

    largest_shard_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)] = 64 * GIBIBYTE
    """A shard is given up beyond this, as it is stored and unpacked."""


def data_settings(table: Mapping[str, Any]) -> DataSettings:
    """The settings in a table (TOML, JSON). DataSettingsError names every mistake in it."""
    _check_keys(table, DataSettings, "data")
    if isinstance(tokenizer := table.get("tokenizer"), Mapping):
        _check_keys(tokenizer, TokenizerSettings, "data.tokenizer")
    for number, source in enumerate(_sources_in(table), 1):
        _check_keys(source, SourceSettings, f"data.source number {number}")
    try:
        settings = msgspec.convert(dict(table), DataSettings)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(f"The settings of the data are not valid: {error}.") from None
    check(settings)
    return settings


def check(settings: DataSettings) -> None:
    """DataSettingsError for a wrong value (also in settings that were made in Python, which were
    not checked), or for keys that do not go together."""
    try:
        msgspec.convert(msgspec.to_builtins(settings), DataSettings)
    except (msgspec.ValidationError, TypeError) as error:
        raise _wrong(f"The settings of the data are not valid: {error}.") from None
    if settings.shuffle_examples * len(settings.source) > LARGEST_BUFFER:
        raise _wrong(
            f"{len(settings.source)} sources of {settings.shuffle_examples:,} `shuffle_examples` "
            f"are more than {LARGEST_BUFFER:,} together."
        )
    if settings.piece_bytes == 0 and settings.largest_document_bytes > LARGEST_EXAMPLE_BYTES:
        raise _wrong(
            "Where `piece_bytes` is 0, and documents are left whole, `largest_document_bytes` may "
            f"be {LARGEST_EXAMPLE_BYTES:,} at most."
        )
    if not settings.source:
        raise _wrong("The settings name no source of data.")
    if settings.tokenizer is not None and settings.piece_bytes == 0:
        raise _wrong("A tokenizer is for text, and `piece_bytes` = 0 is for pictures.")
    if settings.tokenizer is not None and (settings.piece_bytes or 0) > LARGEST_TOKENIZED_BYTES:
        raise _wrong(f"With a tokenizer `piece_bytes` must be {LARGEST_TOKENIZED_BYTES:,} at most.")
    if 0 < (settings.piece_bytes or 0) < SMALLEST_PIECE_BYTES:
        raise _wrong(f"`piece_bytes` must be 0, or at least {SMALLEST_PIECE_BYTES}.")
    for source, name in zip(settings.source, source_names(settings), strict=True):
        _check_source(source, name)


def source_names(settings: DataSettings) -> tuple[str, ...]:
    """The name of each source; no two alike."""
    names: list[str] = []
    for number, source in enumerate(settings.source, 1):
        name = source.name or source.dataset or source.kind
        while name in names:
            name = f"{name} ({number})"
        names.append(name)
    return tuple(names)


def refuse_this_machine(settings: DataSettings) -> None:
    """DataSettingsError if the settings name something on this machine or in its local network.

    It checks only the names; `web.Web` checks where a server's name leads.
    """
    if settings.tokenizer is not None:
        _refuse_tokenizer(settings.tokenizer.path)
    for source, name in zip(settings.source, source_names(settings), strict=True):
        for path in source.paths:
            if not is_address(path):
                raise DataSettingsError(
                    f"The data {name!r} would be read from this machine's disk, at {path[:200]!r}.",
                    why="The settings come from somebody else, and training data can partly be "
                    "read from the gradients that are sent.",
                    advice="The organiser has to name http(s) addresses instead.",
                )
            _refuse_own_network(path, f"data {name!r}")
        # without an owner, the library would read the folder of this name
        if source.dataset and ("/" not in source.dataset or os.path.exists(source.dataset)):
            raise DataSettingsError(
                f"The data set {source.dataset!r} would be read from this machine's disk.",
                why="The settings come from somebody else.",
                advice="It must be called owner/name, as on Hugging Face, and there must be no "
                "folder of that name where potluck runs.",
            )


def _refuse_tokenizer(path: str) -> None:
    if is_address(path):
        _refuse_own_network(path, "tokenizer")
    elif not HUB_NAME.match(path) or "/" not in path or os.path.exists(path):
        raise DataSettingsError(
            f"The tokenizer would be read from this machine's disk, at {path[:200]!r}.",
            why="The settings come from somebody else.",
            advice="It must be an http(s) address, or called owner/name, as on Hugging Face, with "
            "no folder of that name where potluck runs.",
        )


def _refuse_own_network(path: str, what: str) -> None:
    if is_private_host(_host_of(path)):
        raise DataSettingsError(
            f"The {what} would be fetched from {_host_of(path)!r}, which is this machine or its "
            "own network.",
            why="The settings come from somebody else.",
            advice="The organiser has to name an address in the internet instead.",
        )


def is_address(path: str) -> bool:
    """Whether this is fetched, and not on the disk."""
    return path.lower().startswith(("http://", "https://"))


def is_private_host(host: str) -> bool:
    """Whether this is the name of this machine, or an address of a private network."""
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _number_of(host)
    return address is not None and not address.is_global


TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # NAT64: the last 32 bits are IPv4


def _number_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in a host's name, if it is one; of an IPv6 address that wraps IPv4, the
    latter."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 0x7f.1 and 2130706433
        except (OSError, UnicodeError):
            return None
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour
        if address in TRANSLATED:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        return wrapped or address
    return address


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _check_source(source: SourceSettings, name: str) -> None:
    if source.kind in ("text", "jsonl", "parquet"):
        if not source.paths:
            raise _wrong(f"The data {name!r} of kind {source.kind!r} names no `paths`.")
    elif source.paths:
        raise _wrong(f"The data {name!r} of kind {source.kind!r} has no use for `paths`.")
    if (source.kind == "datasets") != bool(source.dataset):
        raise _wrong(
            f"The data {name!r}: `dataset` goes with the kind 'datasets', and with no other."
        )
    if source.dataset and not HUB_NAME.match(source.dataset):
        raise _wrong(f"The data {name!r}: {source.dataset!r} is no name like 'owner/name'.")
    if source.kind != "text" and source.documents != "lines":
        raise _wrong(f"The data {name!r}: `documents` goes with the kind 'text'.")
    if source.kind in ("text", "standard-library") and source.label_field:
        raise _wrong(f"The data {name!r} of kind {source.kind!r} has no labels.")
    if not source.field or source.field == source.label_field:
        raise _wrong(f"The data {name!r}: `field` and `label_field` must be two names.")
    for field in (source.field, source.label_field):
        if not field.isprintable() or '"' in field or "\\" in field:
            raise _wrong(f"The data {name!r}: {field!r} cannot be the name of a field.")
    for path in source.paths:
        is_no_address = not _host_of(path) if is_address(path) else "://" in path
        if "\0" in path or is_no_address:
            raise _wrong(f"The data {name!r}: {path[:200]!r} is no path and no http(s) address.")


def _sources_in(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sources = table.get("source", ())
    if not isinstance(sources, list | tuple):
        return []  # msgspec reports the right type
    return [source for source in sources[:MOST_SOURCES] if isinstance(source, Mapping)]


def _check_keys(table: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    known = kind.__struct_fields__
    for key in table:
        if key not in known:
            word = str(key)[:100]
            raise DataSettingsError(f"{where} has no key {word!r}.", advice=nearest(word, known))


def _wrong(what: str) -> DataSettingsError:
    return DataSettingsError(what, advice="docs/organisers.md, section Data, has an example.")
