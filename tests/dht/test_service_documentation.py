"""docs/protocols.md says of the directory what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocols.dht import (
    DhtSettings,
    acquaintances,
    contacts,
    dialability,
    families,
    handlers,
    lookup,
    messages,
    reader,
    routing,
    swarm_time,
    upkeep,
    walk,
)
from protocols.dht.families import NOTE
from protocols.dht.publisher import PublishingSettings
from protocols.dht.routing import K
from protocols.dht.slots import SlotRefusal
from protocols.dht.storage import SLOT_OVERHEAD_BYTES, StorageLimits

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
        f"up to {messages.WANTED_PER_QUERY:,} slots",
        f"up to {messages.CURSOR_BYTES} bytes that mean something",
        f"more names ({messages.NAMES_PER_ANSWER:,})",
        f"looks at for one ({handlers.SLOTS_LOOKED_AT:,} slots)",
        f"drawn at random, again every {reader.TURN_SECONDS:.0f} seconds",
        f"the closest {DhtSettings().enough_written} instead",
        f"Every {reader.SURVEY_SECONDS:.0f} seconds a read of all k",
        f"({messages.SLOT_BYTES_PER_ANSWER >> 10} KiB in a response)",
        f"has at most {messages.PACKED_BYTES_PER_ANSWER >> 10} KiB",
        f"contacts = {messages.CONTACTS_PER_ANSWER}, packs = false",
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
        f"up to {lookup.SLOW_AT_ONCE} such",
        f"or {lookup.QUESTIONS_PER_K} k questions",
        f"at least {lookup.FAILURES_TO_DISCREDIT} failed",
        f"each has room for k = {K}",
        f"fewer than {routing.PEERS_PER_NETWORK} peers in the bucket",
        f"the bucket's {1 << routing.RANGE_BITS} equal parts",
        f"(IPv4 /{contacts.IP4_NETWORK_BITS}, IPv6 /{contacts.IP6_NETWORK_BITS}",
        f"if that was over {routing.SURELY_THERE_SECONDS:.0f} seconds ago",
        f"After {routing.FAILURES_TO_FORGET} failures",
        f"after {routing.FIRST_RETRY_SECONDS:.0f} seconds, then ever more rarely, up to "
        f"{routing.LONGEST_RETRY_SECONDS / 60:.0f} minutes, "
        f"{routing.FORGOTTEN_AFTER_TRIES} times",
        f"says nothing for {routing.QUIET_SECONDS / 60:.0f} minutes",
        f"a lookup for the {routing.REFRESH_WIDTH} closest",
        f"used them for {acquaintances.IDLE_LINK_SECONDS / 60:.0f} minutes, or sooner when over "
        f"{acquaintances.IDLE_LINKS} of them",
        f"up to {dialability.ADDRESSES_TRIED} are tried",
        f"(within a factor of {walk.NEAR_ENOUGH})",
        f"older than {reader.WRITE_IN_PROGRESS_MS // 1000} seconds are sent it",
        f"the newest {swarm_time.PEERS_SAMPLED} peers and "
        f"{swarm_time.SAMPLE_LIFE_MS // 3_600_000} hours",
        f"differ by over {swarm_time.AGREE_WITHIN_MS // 1000} seconds",
        f"bringing more than {handlers.FORGED_SLOTS_ALLOWED} such slots",
        f"the {upkeep.HANDOVER_REPLICAS} closest of a key's other replicas",
        f"at least every {PublishingSettings().longest_interval_seconds / 60:.0f} minutes",
        "again after 1, 5, 30 and 300 seconds",
        f"{StorageLimits().bytes_per_publisher >> 20} MiB at one node, counted in the same way",
        f"{StorageLimits().bytes_per_sender >> 20} MiB at one node of what came",
        f"({NOTE.bytes_per_key >> 20} MiB, counted as under refusal 11; never above "
        f"{families.LARGEST_BYTES_PER_KEY >> 20} MiB)",
        f"They live for {StorageLimits().cached_seconds:.0f} seconds",
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_code(statement: str) -> None:
    assert statement in SECTION


def test_after_joining_a_node_looks_around_when_the_page_says() -> None:
    assert upkeep.SETTLING_SECONDS == (1.0, 5.0, 30.0, 300.0)
