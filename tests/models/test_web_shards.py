"""Shards on web servers: slow, broken, moved, changed. The servers are real; the waits are not."""

from __future__ import annotations

import gzip
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.data import web
from models.data.errors import NoDataLeft
from models.data.events import Retrying, ShardSkipped, SourceEvent, SourceRests
from models.data.opening import open_data
from models.data.retrying import WAITS_SECONDS
from tests.access.https_servers import make_certificate
from tests.models.openers import contents, everything, one_source, opened, sentences
from tests.models.virtual_clock import ImpatientClock, VirtualClock
from tests.models.web_server import Site, serving, status, web_server, without_ranges

LINES = [b"line %d of a shard on the web" % number for number in range(5_000)]
TEXT = b"\n".join(LINES)
EXPECTED = sorted(LINES)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with web_server(tmp_path) as made:
        yield made


def test_a_shard_is_read_from_a_server(site: Site) -> None:
    site.answers["/a.txt"] = serving(TEXT)
    events: list[SourceEvent] = []
    assert everything(one_source("text", f"{site.url}/a.txt"), events) == EXPECTED
    assert site.asked == [("/a.txt", "")]


def test_packed_shards_are_known_by_their_bytes_and_not_by_their_name(site: Site) -> None:
    site.answers["/a.txt"] = serving(gzip.compress(TEXT))
    site.answers["/b.txt.gz"] = serving(b"not packed at all")
    settings = one_source("text", f"{site.url}/a.txt", f"{site.url}/b.txt.gz")
    assert everything(settings) == sorted([*LINES, b"not packed at all"])


@pytest.mark.parametrize("packed", [False, True])
def test_an_interrupted_shard_goes_on_with_the_next_byte(site: Site, packed: bool) -> None:
    content = gzip.compress(TEXT, 1) if packed else TEXT
    half = len(content) // 2
    site.answers["/a"] = serving(content)
    site.once["/a"] = [serving(content, up_to=half), serving(content, up_to=half + 1_000)]
    events: list[SourceEvent] = []
    assert everything(one_source("text", f"{site.url}/a"), events) == EXPECTED
    ranges = [asked for _, asked in site.asked]
    assert ranges == ["", f"bytes={half}-", f"bytes={half + 1_000}-"]
    assert [event.wait_seconds for event in events if isinstance(event, Retrying)] == [1.0, 2.0]


def test_a_server_without_ranges_is_asked_again_from_the_beginning(site: Site) -> None:
    site.once["/a"] = [serving(TEXT, up_to=100_000)]
    site.answers["/a"] = without_ranges(TEXT)
    assert everything(one_source("text", f"{site.url}/a")) == EXPECTED


@pytest.mark.parametrize("how", ["another tag", "another length"])
def test_a_shard_that_changed_meanwhile_is_skipped_from_there(site: Site, how: str) -> None:
    site.once["/a"] = [serving(TEXT, up_to=100_000)]
    changed = serving(TEXT, '"b"') if how == "another tag" else serving(TEXT + b"\nmore")
    site.answers["/a"] = changed
    events: list[SourceEvent] = []
    with opened(one_source("text", f"{site.url}/a"), events) as data:
        found = contents(data)
    assert 0 < len(found) < len(LINES)
    assert set(found) < set(LINES)
    assert "it has changed on its server since byte 100,000 was read" in sentences(events)


def test_a_missing_shard_is_skipped_without_retries(site: Site) -> None:
    site.answers["/b"] = serving(TEXT)
    events: list[SourceEvent] = []
    settings = one_source("text", f"{site.url}/a", f"{site.url}/b")
    assert everything(settings, events) == EXPECTED
    skipped = [event for event in events if isinstance(event, ShardSkipped)]
    assert [event.reason for event in skipped] == ["its server answers 404 Not Found."]
    assert not any(isinstance(event, Retrying) for event in events)


def test_a_busy_server_is_asked_again_when_it_says(site: Site) -> None:
    site.once["/a"] = [status(503), status(429, retry_after="7"), status(500)]
    site.answers["/a"] = serving(TEXT)
    events: list[SourceEvent] = []
    assert everything(one_source("text", f"{site.url}/a"), events) == EXPECTED
    waits = [event.wait_seconds for event in events if isinstance(event, Retrying)]
    assert waits == [1.0, 7.0, 4.0]


def test_a_server_that_stays_broken_is_given_up_and_rests(site: Site) -> None:
    site.answers["/a"] = status(503)
    events: list[SourceEvent] = []
    clock = VirtualClock()
    with opened(one_source("text", f"{site.url}/a"), events, clock=clock) as data:
        with pytest.raises(NoDataLeft, match=r"no data left.* answers 503 Service Unavailable"):
            next(data)
        assert clock.waits == list(WAITS_SECONDS)
        assert isinstance(events[-1], SourceRests)
        site.answers["/a"] = serving(TEXT)
        clock.time += 301
        assert contents(data) == EXPECTED, "it is tried again after its rest"
    assert "gives examples again" in sentences(events)


@pytest.mark.slow
def test_a_server_that_falls_silent_is_interrupted(site: Site) -> None:
    head = b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\netag: "a"\r\n\r\n' % len(TEXT)
    site.once["/a"] = [site.silent(), site.silent(head + TEXT[:100_000])]
    site.answers["/a"] = serving(TEXT)
    events: list[SourceEvent] = []
    assert everything(one_source("text", f"{site.url}/a"), events) == EXPECTED
    reasons = [event.reason for event in events if isinstance(event, Retrying)]
    assert reasons == ["its server sends nothing"] * 2


@pytest.mark.slow
def test_bytes_that_trickle_are_interrupted_in_the_head_and_in_the_body(site: Site) -> None:
    head = b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\netag: "a"\r\n' % len(TEXT)
    site.once["/a"] = [
        site.trickling(b"HTTP/1.1 200 OK\r\nx-long: ", 0.02),
        site.trickling(head + b"\r\n", 0.02),
    ]
    site.answers["/a"] = serving(TEXT)
    events: list[SourceEvent] = []
    settings = one_source("text", f"{site.url}/a", patience_seconds=0.1)
    with open_data(settings, seed=1, on_event=events.append, clock=ImpatientClock()) as data:
        next(data)
    reasons = [event.reason for event in events if isinstance(event, Retrying)]
    assert reasons[0] == "its server sends nothing"
    assert "bytes a second" in reasons[1]


def test_an_answer_that_ends_early_is_not_taken_for_the_whole(site: Site) -> None:
    def short(handler: object) -> None:
        handler.wfile.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-9/%d\r\n" % len(TEXT)
            + b"content-length: 10\r\n\r\n"
            + TEXT[:10]
        )

    site.once["/a"] = [short]
    site.answers["/a"] = serving(TEXT)
    assert everything(one_source("text", f"{site.url}/a")) == EXPECTED


@pytest.mark.slow
def test_truncated_gzip_is_skipped_by_name_and_its_beginning_is_used(site: Site) -> None:
    site.answers["/a.gz"] = serving(gzip.compress(TEXT)[:9_000])
    site.answers["/b.gz"] = serving(gzip.compress(b"the next shard"))
    events: list[SourceEvent] = []
    found = everything(one_source("text", f"{site.url}/a.gz", f"{site.url}/b.gz"), events)
    assert b"the next shard" in found
    assert 500 < len(found) < len(LINES)
    (skipped,) = [event for event in events if isinstance(event, ShardSkipped)]
    assert skipped.shard == f"{site.url}/a.gz"
    assert skipped.documents == len(found) - 1
    assert "its gzip is truncated: the file ends at byte 9,000" in skipped.sentence


def test_redirects_are_followed_a_few_times(site: Site) -> None:
    for number in range(3):
        site.answers[f"/{number}"] = status(302, location=f"/{number + 1}")
    site.answers["/3"] = serving(TEXT)
    site.answers["/loop"] = status(301, location="/loop")
    events: list[SourceEvent] = []
    settings = one_source("text", f"{site.url}/0", f"{site.url}/loop")
    assert everything(settings, events) == EXPECTED
    assert "redirects more than 5 times" in sentences(events)


BAD_TARGETS = [
    "gopher://localhost/etc/passwd",
    *(pytest.param(target, marks=pytest.mark.slow) for target in ("", "http://[", "ftp://x/y")),
]


@pytest.mark.parametrize("target", BAD_TARGETS)
def test_redirects_to_invalid_addresses_are_not_followed(site: Site, target: str) -> None:
    site.answers["/a"] = status(302, location=target)
    site.answers["/b"] = serving(TEXT)
    events: list[SourceEvent] = []
    settings = one_source("text", f"{site.url}/a", f"{site.url}/b")
    assert everything(settings, events) == EXPECTED
    assert "redirects to what is no address" in sentences(events)


def test_a_strangers_shard_is_not_fetched_from_this_machine_by_whatever_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(site.url.rpartition(":")[2])
    looked_up = socket.getaddrinfo

    def rebound(host: str, *arguments: object, **more: object) -> object:
        here = "127.0.0.1" if host == "data.example.org" else host
        return looked_up(here, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    site.answers["/a"] = serving(TEXT)
    settings = one_source("text", f"http://data.example.org:{port}/a")
    events: list[SourceEvent] = []
    with opened(settings, events, from_strangers=True) as data, pytest.raises(NoDataLeft):
        next(data)
    assert "own network, to data.example.org, which is 127.0.0.1" in sentences(events)
    assert not site.asked, "nothing is sent there"
    assert everything(settings) == EXPECTED, "one's own settings may name it"


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine on Linux only")
def test_a_server_in_the_internet_does_not_redirect_into_our_own_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "is_private_host", lambda host: host == "127.0.0.2")
    with web_server(tmp_path) as outside, web_server(tmp_path, address="127.0.0.2") as inside:
        port = inside.url.rpartition(":")[2]
        inside.answers["/a"] = serving(TEXT)
        outside.answers["/by-name"] = status(302, location=f"http://127.2:{port}/a")
        outside.answers["/b"] = serving(b"the next shard")
        events: list[SourceEvent] = []
        shards = [f"{outside.url}/by-name", f"{outside.url}/b"]
        found = everything(one_source("text", *shards), events)
        assert found == [b"the next shard"]
        assert not inside.asked
        assert "own network, to 127.2, which is 127.0.0.2" in sentences(events)
        assert everything(one_source("text", f"{inside.url}/a")) == EXPECTED, "named by its owner"


def test_shards_above_the_limit_are_refused_before_they_are_read(site: Site) -> None:
    site.answers["/a"] = serving(TEXT)
    site.answers["/b"] = serving(b"small")
    events: list[SourceEvent] = []
    settings = one_source(
        "text", f"{site.url}/a", f"{site.url}/b", largest_shard_bytes=len(TEXT) - 1
    )
    assert everything(settings, events) == [b"small"]
    assert "`largest_shard_bytes`" in sentences(events)


def test_a_shard_that_unpacks_beyond_the_limit_is_given_up(site: Site) -> None:
    site.answers["/a"] = serving(gzip.compress(TEXT))
    site.answers["/b"] = serving(b"small")
    events: list[SourceEvent] = []
    settings = one_source("text", f"{site.url}/a", f"{site.url}/b", largest_shard_bytes=90_000)
    assert b"small" in everything(settings, events)
    assert "it unpacks to more than the 90,000 bytes" in sentences(events)


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate()
    events: list[SourceEvent] = []
    with web_server(tmp_path, certificate) as site:
        site.answers["/a"] = serving(TEXT)
        settings = one_source("text", f"{site.url}/a")
        with opened(settings, events) as data, pytest.raises(NoDataLeft):
            next(data)
        assert "CERTIFICATE_VERIFY_FAILED" in sentences(events)
        path, _ = certificate.written_to(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert everything(settings) == EXPECTED
