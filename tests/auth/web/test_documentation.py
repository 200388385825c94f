"""docs/auth-server.md says what the server does: its addresses, codes, limits and counters."""

from __future__ import annotations

import re
from pathlib import Path

from auth.server import api, boundary, certificates, rate_limits, serving
from auth.server.join_refused import JoinReason
from auth.server.metrics import Metrics
from auth.server.providers.errors import LoginReason
from auth.server.settings import BY_NAME

TEXT = (Path(__file__).parents[3] / "docs" / "auth-server.md").read_text(encoding="utf-8")


def test_every_address_is_in_it() -> None:
    source = (Path(api.__file__).parent / "auth_server.py").read_text(encoding="utf-8")
    addresses = re.findall(r'\("(GET|POST)", "(/v1/[^"]*|/[a-z]+)", ', source)
    assert len(addresses) == 11
    for method, path in addresses:
        assert f"`{method} {path}" in TEXT


def test_every_code_of_a_refusal_is_in_it() -> None:
    codes = [reason.value for reason in JoinReason if reason is not JoinReason.LOGIN]
    codes += [f"login-{reason.value.replace('_', '-')}" for reason in LoginReason]
    assert [code for code in codes if f"`{code}`" not in TEXT] == []


def test_every_counter_is_in_it() -> None:
    registered = Metrics().registry.collect()
    names = [f"{each.name}_total" if each.type == "counter" else each.name for each in registered]
    assert [name for name in names if f"`{name}" not in TEXT] == []


def test_the_limits_are_those_of_the_code() -> None:
    said = dict(re.findall(r"^\| ([a-z -]+) \| (.*?) \|$", TEXT, re.MULTILINE))
    kib = f"{boundary.LARGEST_BODY_BYTES // 1024} KiB"
    assert said["body"].startswith(f"{kib}, ")
    assert f"; {boundary.BODY_SECONDS:g} s" in said["body"]
    assert said["request head"].startswith(f"{serving.LARGEST_HEAD_BYTES // 1024} KiB")
    assert f"; {serving.IDLE_SECONDS:g} s" in said["request head"]
    assert said["handshake"] == f"{serving.HANDSHAKE_SECONDS:g} s"
    assert said["whole request"].startswith(f"{boundary.REQUEST_SECONDS:g} s")
    assert said["answer that the client does not read"] == f"{serving.WRITE_SECONDS:g} s"
    assert f"{rate_limits.MOST_BUCKETS:,}" in said["addresses remembered"]
    for row, key in (
        ("connections", "server.connections"),
        ("connections", "server.connections_per_address"),
        ("handshakes from one address", "limits.connections_per_minute_per_address"),
        ("requests from one address", "limits.requests_per_minute_per_address"),
        ("logins from one address", "limits.logins_per_hour_per_address"),
        ("renewals of one account", "limits.renewals_per_hour_per_account"),
    ):
        assert f"{BY_NAME[key].default:,}" in said[row]


def test_the_pace_of_polls_and_of_certificates_is_that_of_the_code() -> None:
    shortest, longest = api.SHORTEST_POLL_SECONDS, api.LONGEST_POLL_SECONDS
    most = f"{api.POLLS_PER_SECOND * shortest:,}"
    assert f"{shortest} s for up to {most} live tokens" in TEXT
    assert f"{api.POLLS_PER_SECOND} times a second, up to {longest} s" in TEXT
    assert f"certificate files every {certificates.LOOK_SECONDS:g} seconds" in TEXT
    assert f"{certificates.WARN_BEFORE_SECONDS // 86_400} days before the certificate" in TEXT
