"""docs/protocols.md says of the directory what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocols.dht import messages
from protocols.dht.families import NOTE
from protocols.dht.quotas import SLOT_OVERHEAD_BYTES, StorageLimits
from protocols.dht.refusals import SlotRefusal
from protocols.dht.routing import K
from protocols.dht.settings import DhtSettings

PAGE = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text("utf-8")
SECTION = re.sub(r"\s+", " ", PAGE[PAGE.index(f"## {messages.PROTOCOL}") :])


def test_every_refusal_has_its_number_and_name() -> None:
    table = re.findall(r"^\| (\d+) \| ([a-z ]+)", PAGE, re.MULTILINE)
    said = {int(number): name.strip().split(":")[0] for number, name in table}
    for refusal in SlotRefusal:
        words = refusal.name.lower().replace("_", " ")
        assert said[refusal].startswith(words), refusal


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (messages.FIND, "`find`"),
        (messages.STORE, "`store`, `store-many`"),
        (messages.STORE_MANY, "`store`, `store-many`"),
        (messages.GREET, "`greet`"),
    ],
)
def test_the_limits_of_the_messages_are_those_of_the_methods(method: object, names: str) -> None:
    request = getattr(method, "request_limit_bytes")  # noqa: B009 - a Method of any two types
    response = getattr(method, "response_limit_bytes")  # noqa: B009
    assert f"| {names} | {request:,} -> {response:,} |" in SECTION


@pytest.mark.parametrize(
    "statement",
    [
        f"the k = {K} peers closest",
        f"[queries (1 to {messages.QUERIES_PER_REQUEST})",
        f"[slots (1 to {messages.SLOTS_STORED_AT_ONCE})",
        f"up to {messages.KNOWN_PER_QUERY} peers",
        f"up to {messages.HAVE_PER_QUERY} slots",
        f"({messages.SLOT_BYTES_PER_ANSWER >> 10} KiB in a response)",
        f"The first {messages.REASONS_PER_ANSWER} `reasons`",
        f"(up to {messages.NEWER_PER_ANSWER}, {messages.NEWER_BYTES_PER_ANSWER >> 10} KiB)",
        f"the named peers (up to {messages.CONTACTS_PER_STORED})",
        f"{StorageLimits().keys_per_publisher} at one node",
        f"{StorageLimits().total_bytes >> 20} MiB at one node",
        f"counted with {SLOT_OVERHEAD_BYTES:,} bytes",
        f"size ({NOTE.value_limit_bytes:,} bytes unless",
        f"publishers a key may have ({NOTE.slots_per_key})",
        f"A writer waits for {DhtSettings().enough_written} replicas",
        f"the first {DhtSettings().enough_replicas} replicas",
        f"{DhtSettings().alpha} at a time",
        f"They live for {StorageLimits().cached_seconds:.0f} seconds",
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_code(statement: str) -> None:
    assert statement in SECTION
