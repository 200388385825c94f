"""docs/protocols.md says of the exchange what the code does, number for number."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from protocols.identity import Identity, verify
from protocols.moshpit.attempt import LONGEST_OPENING_SECONDS, OPEN_SECONDS
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.butterfly import MOST_WAITING, MOST_WAITING_OF_PEER
from protocols.moshpit.exchange import ExchangePlan, Participant
from protocols.moshpit.handing_down import DECISION, HANDED, SHOWN
from protocols.moshpit.layout import (
    LARGEST_AVERAGED,
    LARGEST_CHUNK_BYTES,
    LONGEST_SEGMENT_NAME,
    SMALLEST_CHUNK_BYTES,
    Layout,
    Segment,
)
from protocols.moshpit.part_messages import (
    ALLREDUCE_PROTOCOL,
    PART,
    STALL_SECONDS,
    PartOpening,
    make_statement,
    plan_digest,
)
from protocols.moshpit.round import CHUNK_SECONDS, SMALLEST_TIMED_BYTES
from protocols.moshpit.switchboard import AGREE, SHOW

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text()
SECTION = DOCUMENT.split("## The exchange of a round\n")[1].split("\n## ")[0]
WORDS = " ".join(SECTION.split())

LAYOUT = Layout((Segment("weight", 10, "float16"), Segment("bias", 3)))


@pytest.mark.parametrize(
    "words",
    [
        f"the bulk method `{PART.name}` of `{ALLREDUCE_PROTOCOL}`",
        f"name (1 to {LONGEST_SEGMENT_NAME} characters)",
        f"from {SMALLEST_CHUNK_BYTES:,} bytes to {LARGEST_CHUNK_BYTES >> 20} MiB",
        f"the longest part has in {CHUNK_SECONDS:g} s",
        f"but at least {SMALLEST_TIMED_BYTES >> 10} KiB",
        f"The stall time is {STALL_SECONDS:g} s",
        f"Within {OPEN_SECONDS:g} s of the attempt's beginning",
        f"it has until {STALL_SECONDS:g} s after the last of them",
        f"after {LONGEST_OPENING_SECONDS:g} s in any case",
        f"for at most {LONGEST_OPENING_SECONDS:g} s; {MOST_WAITING_OF_PEER} of a peer",
        f"and {MOST_WAITING} in all, may wait",
        f"beyond {LARGEST_AVERAGED:.2e}".replace("e+", "e"),
    ],
)
def test_numbers_are_those_of_the_code(words: str) -> None:
    assert words in WORDS


def test_the_protocols_methods_are_listed_under_its_name() -> None:
    section = DOCUMENT.split(f"## {ALLREDUCE_PROTOCOL}\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+)` \((call|transfer)\)", section)
    calls, transfers = (AGREE, SHOW, DECISION, SHOWN), (PART, HANDED)
    assert all(each.protocol == ALLREDUCE_PROTOCOL for each in (*calls, *transfers))
    expected = {(each.name, "call") for each in calls} | {(e.name, "transfer") for e in transfers}
    assert set(listed) == expected


def test_every_refusal_is_named() -> None:
    assert all(f"`{code}`" in SECTION for code in PART.errors)


def test_every_suspicion_is_explained() -> None:
    source = (Path(__file__).parents[2] / "protocols" / "moshpit").glob("*.py")
    raised = set()
    for file in source:
        text = file.read_text()
        raised |= set(re.findall(r'suspect\(\s*[^,"]+,\s*"(\w+)"', text))
        if file.name == "attempt.py":
            raised |= set(re.findall(r'return "(\w+)"', text))
    assert raised
    assert all(f"`{code}`" in SECTION for code in raised), raised


def test_the_fields_of_the_opening_are_in_order() -> None:
    described = re.search(r"\| PartOpening \| (.*) \|", SECTION)
    assert described is not None
    assert len(described[1].split(", ")) == len(PartOpening.__struct_fields__)


def test_digests_are_made_as_described() -> None:
    layout = msgspec.msgpack.encode([[["weight", 10, "float16"], ["bias", 3, "none"]]])
    assert LAYOUT.digest == blake3(b"potluck moshpit layout 1\0" + layout).digest()
    in_chunks = blake3(b"potluck moshpit chunks 1\0" + LAYOUT.digest + bytes([0, 0, 16, 0]))
    assert LAYOUT.digest_in_chunks(4_096) == in_chunks.digest()
    me = Identity.from_seed(bytes(32)).peer_id
    plan = ExchangePlan(
        bytes(32), Ballot(0, 0), 0, (Participant(0, me, 2.0),), (0, 13), LAYOUT, 4_096
    )
    attempt = msgspec.msgpack.encode([[[0, me, 2.0]], [0, 13], 4_096])
    assert plan_digest(plan) == blake3(b"potluck moshpit attempt 1\0" + attempt).digest()


def test_a_statement_is_signed_as_described() -> None:
    identity = Identity.from_seed(bytes(32))
    round_id, digest = bytes(range(32)), bytes(reversed(range(32)))
    statement = make_statement(identity, round_id, Ballot(3, 1), 2, digest)
    message = round_id + bytes([0, 3, 0, 1, 0, 2]) + digest
    assert verify(b"potluck moshpit part 1", identity.peer_id, statement.signature, message)
