"""`perform` checks the types of requests from the socket, and shows secrets in no other answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from auth.errors import AuthError
from auth.server.moderation import Moderation
from auth.server.store import create_store, open_store
from node.app.moderation import ACTS, LARGEST_LIMIT, perform
from protocols.errors import PotluckError

ME = "local:me"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_store(tmp_path / "auth", "ours", actor=ME)
    return tmp_path / "auth"


@pytest.fixture
def moderation(folder: Path) -> Iterator[Moderation]:
    with open_store(folder) as store:
        yield Moderation(store)


def acts(moderation: Moderation, folder: Path) -> dict[str, dict[str, Any]]:
    """Every act once, in an order in which each makes sense; and its answers."""
    asked: dict[str, dict[str, Any]] = {
        "allow": {"target": "github:alice"},
        "deny": {"name": "github:alice"},
        "revoke": {"target": "github:alice"},
        "courier": {"peer": "11" * 32},
        "list": {},
        "codes-new": {"name": "bob"},
        "codes-list": {},
        "codes-cancel": {"code": "c1"},
        "keys-list": {},
        "keys-rotate": {},
        "audit": {},
        "audit-verify": {},
        "backup": {"folder": str(folder.with_name("copy"))},
    }
    answers = {act: perform(moderation, act, given, ME) for act, given in asked.items()}
    key = answers["keys-list"]["keys"][0]["key_id"]
    answers["keys-withdraw"] = perform(moderation, "keys-withdraw", {"key": key}, ME)
    assert answers.keys() == ACTS.keys()
    return answers


def test_every_act_answers_with_plain_data(moderation: Moderation, folder: Path) -> None:
    for act, answer in acts(moderation, folder).items():
        assert json.loads(json.dumps(answer)) == answer, act


def test_a_code_is_shown_once_and_a_private_key_never(moderation: Moderation, folder: Path) -> None:
    seeds = {file.read_text().splitlines()[1] for file in (folder / "keys").glob("*.key")}
    answers = acts(moderation, folder)
    seeds |= {file.read_text().splitlines()[1] for file in (folder / "keys").glob("*.key")}
    code = answers["codes-new"]["code"]
    for act, answer in answers.items():
        said = json.dumps(answer)
        assert (code in said) == (act == "codes-new"), act
        assert not [seed for seed in seeds if seed in said], act


def test_an_act_of_another_version_is_named_as_such(moderation: Moderation) -> None:
    for act, arguments in (
        ("promote", {}),
        ("", {}),
        ("allow", {}),
        ("allow", {"target": 7}),
        ("allow", {"target": "github:alice", "role": "backbone"}),
        ("allow", {"target": "github:alice", "until": "tomorrow"}),
        ("list", {"limit": "all"}),
        ("courier", {"peer": None}),
    ):
        with pytest.raises(PotluckError, match="Restart the server"):
            perform(moderation, act, arguments, ME)
    assert perform(moderation, "list", {}, ME)["total"] == 0


def test_an_act_that_makes_no_sense_is_refused_with_an_explanation(moderation: Moderation) -> None:
    for act, arguments in (
        ("courier", {"peer": "xyz"}),
        ("audit", {"of_act": "x" * 10_000}),
        ("allow", {"target": "x" * 100_000}),
        ("allow", {"target": "github:alice", "role": ["king"]}),
        ("codes-new", {"uses": 0}),
        ("codes-new", {"life": -5}),
        ("codes-cancel", {"code": "9" * 5_000}),
        ("revoke", {"target": "9" * 18}),
        ("revoke", {"target": "12D3KooW" + "1" * 1_000}),
        ("keys-withdraw", {"key": "\x00" * 100}),
        ("audit-verify", {"head": "1:" + "z" * 64}),
        ("backup", {"folder": "/proc/nowhere/at/all"}),
    ):
        with pytest.raises((PotluckError, AuthError)) as caught:
            perform(moderation, act, arguments, ME)
        assert caught.value.what, act
        assert len(str(caught.value)) < 1_000, act


def test_a_limit_is_bounded_whatever_is_asked(moderation: Moderation) -> None:
    for limit in (10**9, 0, -1):
        perform(moderation, "allow", {"target": "github:alice"}, ME)
        assert len(perform(moderation, "list", {"limit": limit}, ME)["accounts"]) == 1
    assert LARGEST_LIMIT * 1_500 < 4_194_304, "an answer fits through the socket"
