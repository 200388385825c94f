"""The views for moderators: no text of others can move the cursor or look like our own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from node.app.cli.output import Output
from node.app.views.auth_view import show

HOSTILE = "\x1b[2J\r\nAll is well.[red]\u202e" + "x" * 500


def account(**changed: Any) -> dict[str, Any]:
    return {
        "name": "github:alice",
        "roles": ["volunteer"],
        "state": "allowed",
        "bound": True,
        "added_by": "local:m",
        "added_ms": 0,
        "changed_by": "local:m",
        "changed_ms": 0,
        "last_seen_ms": None,
        "keys": 0,
        "live_tokens": 0,
        "note": "",
        **changed,
    }


def token(**changed: Any) -> dict[str, Any]:
    return {
        "serial": 7,
        "name": "github:alice",
        "peer": "12D3KooW",
        "issued_ms": 0,
        "expires_ms": 1,
        "revoked": False,
        **changed,
    }


def row(**changed: Any) -> dict[str, Any]:
    return {
        "at_ms": 0,
        "act": "refused",
        "name": None,
        "peer": None,
        "actor": "peer",
        "reason": "",
        "detail": "",
        **changed,
    }


def ended(**changed: Any) -> dict[str, Any]:
    return {
        "kind": "name",
        "value": "github:alice",
        "change": "revoked",
        "live_tokens": 2,
        "list_number": 9,
        "forget_ms": 5,
        "spread": {"way": "server"},
        **changed,
    }


@pytest.mark.parametrize(
    ("act", "answer"),
    [
        ("list", {"accounts": [account(name=HOSTILE)], "total": 1}),
        ("list", {"account": account(note=HOSTILE), "tokens": [token(peer=HOSTILE)], "total": 1}),
        ("audit", {"rows": [row(reason=HOSTILE, name=HOSTILE)], "more": False}),
        ("revoke", ended(spread={"way": "nobody", "why": HOSTILE})),
    ],
)
def test_text_of_others_is_shown_harmless_and_short(
    act: str, answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show(act, answer, Output())
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\r" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("All is well")]


def test_for_a_program_the_answer_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ended(value=HOSTILE)
    show("revoke", answer, Output(json=True))
    assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize(
    ("spread", "said"),
    [
        ({"way": "server"}, "Spread: the nodes get the list from the running server"),
        ({"way": "directory", "replicas": 1}, "at 1 node;"),
        ({"way": "node", "number": 9}, "Spread: the list was given to the node"),
        ({"way": "nobody", "why": "Nobody answered."}, "NOT SPREAD: no node knows the list yet."),
        ({"way": "none"}, "There is nothing to spread"),
    ],
)
def test_it_is_said_whether_the_nodes_have_heard(
    spread: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show("revoke", ended(spread=spread), Output())
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("name", "Logins and renewals are refused."),
        ("peer", "That key gets no more tokens"),
        ("serial", "Only that token is refused"),
    ],
)
def test_it_is_said_what_a_revocation_does_not_do(
    kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show("revoke", ended(kind=kind), Output())
    assert said in capsys.readouterr().out


def test_a_name_under_which_nobody_can_log_in_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "kind": "name",
        "value": "githbu:alice",
        "account": {**account(name="githbu:alice"), "provider": "githbu"},
        "change": "new",
        "list_number": 3,
        "provider_is_known": False,
    }
    show("allow", answer, Output())
    assert "no provider githbu in auth.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", ["new", "roles", "rebound", "unchanged", "was denied", "was revoked", "of tomorrow"]
)
def test_allowing_says_what_changed(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "kind": "name",
        "value": "github:alice",
        "account": account(),
        "change": change,
        "list_number": 3,
    }
    show("allow", answer, Output())
    assert "github:alice" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "is_said"), [("was denied", True), ("roles", False)])
def test_a_person_who_came_with_a_code_comes_back_with_it(
    change: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = account(name="code:alice")
    answer = {"kind": "name", "value": "code:alice", "account": alice, "change": change}
    show("allow", {**answer, "list_number": 3}, Output())
    said = capsys.readouterr().out
    assert ("with their code again" in said) is is_said


def test_a_log_that_was_changed_cannot_be_overlooked(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = {"sound": False, "rows": 16, "what": "Row 17 is missing.", "head": "16:ab"}
    show("audit-verify", verdict, Output())
    shown = capsys.readouterr().out
    assert shown.startswith("THE AUDIT LOG WAS CHANGED")
    assert "Row 17" in shown
