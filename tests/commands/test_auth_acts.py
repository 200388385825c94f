"""Moderators' commands: equal answers from a running server and from a stopped one's database.

Everything here is real processes: `potluck auth serve`, and the commands beside it.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.app.auth_places import find_auth_places, hold_auth_lock
from tests.commands.console import potluck
from tests.commands.moderated import answer, auth, done, made, serving
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

# An hour of two moderators, with what they get wrong.
HOUR = (
    "allow github:alice",
    "allow github:bob --role backbone --role volunteer --json",
    "allow two:words:here",
    "codes new --name dana",
    "codes list",
    "codes cancel c1",
    "list",
    "revoke github:bob",
    "revoke github:bob",
    "revoke 12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8",
    "list --revocations",
    "audit --verify",
)
# And a whole morning.
MORNING = (
    *HOUR,
    "allow github:alice",
    "allow carol",
    "allow GitHub:dave",
    "allow github:",
    "codes new --uses 3 --life 12h --note workshop --json",
    "codes cancel c1",
    "codes cancel c99",
    "list --role backbone --json",
    "list github:bob",
    "list github:nobody",
    "deny github:alice --reason left",
    "deny github:alice",
    "allow github:alice",
    "allow github:bob",
    "revoke github:bob --json",
    "revoke nobody",
    "revoke 17",
    "revoke 12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8",
    "allow 12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8",
    "revoke 12D3KooWKnDd",
    "list --tokens",
    "keys list",
    "keys rotate",
    "keys rotate",
    "keys withdraw 0123456789abcdef",
    "audit --name github:bob",
    "audit --act joined --json",
    "audit --act jioned",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return made(tmp_path / "home")


@pytest.fixture(params=["stopped", "running"])
def either(request: pytest.FixtureRequest, home: Path) -> Iterator[Path]:
    """A home whose server is stopped, and one whose server runs."""
    if request.param == "stopped":
        yield home
        return
    with serving(home):
        yield home


def plain(text: str) -> str:
    """Without what is different each time: moments, keys, hashes."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "MOMENT", text)
    text = re.sub(r"\b1\d{12}\b", "NUMBER", text)
    text = re.sub(r"\b[0-9A-Z]{5}(-[0-9A-Z]{5}){3}\b", "CODE", text)
    text = re.sub(r"\b[0-9a-f]{16,64}\b|\b[a-z2-7]{26}\b", "KEY", text)
    text = re.sub(r"\d+ (d|h|min|s)( \d+ (h|min|s))? (left|ago)", "SPAN", text)
    # a server that was started has said so in the log
    return re.sub(r"\b\d+ rows|\b\d+:KEY", "ROWS", text)


@pytest.mark.parametrize(
    "lines", [HOUR, pytest.param(MORNING, marks=pytest.mark.soak)], ids=["hour", "morning"]
)
def test_a_running_server_and_a_stopped_one_answer_the_same(
    lines: tuple[str, ...], tmp_path: Path
) -> None:
    stopped, beside = made(tmp_path / "one"), made(tmp_path / "two")
    with serving(beside), ThreadPoolExecutor(2) as hands:
        for line in lines:
            words = line.split()
            one, two = hands.map(lambda home, words=words: auth(home, *words), (stopped, beside))
            assert plain(one.stdout) == plain(two.stdout), line
            assert plain(one.stderr) == plain(two.stderr), line
            assert one.returncode == two.returncode, line
            assert "Traceback" not in one.stderr + two.stderr, line
            if one.returncode:
                assert "why:" in one.stderr or "next:" in one.stderr, line


def test_an_act_that_fails_changes_nothing_and_one_that_is_repeated_says_so(home: Path) -> None:
    done(home, "allow", "github:alice")
    rows = len(answer(home, "audit")["rows"])
    for words, code, said in (
        (("allow", "github:alice"), 0, "already"),
        (("allow", "git hub:x"), 2, "id of an identity provider"),
        (("revoke", "github:nobody"), 1, "Nobody is called"),
        (("codes", "new", "--name", "github:x"), 1, "code:x"),
        (("keys", "withdraw", "nonsense"), 1, "keys list"),
        (("audit", "--verify", "--head", "nonsense"), 1, "NUMBER:HASH"),
    ):
        completed = auth(home, *words)
        assert completed.returncode == code, words
        assert said in completed.stdout + completed.stderr, words
    assert len(answer(home, "audit")["rows"]) == rows


def test_the_log_has_the_moderator_and_the_reason_of_each_act(home: Path) -> None:
    done(home, "allow", "github:alice", "--reason", "asked in the forum")
    newest = answer(home, "audit", "--limit", "1")["rows"][0]
    assert newest["act"] == "allowed"
    assert newest["name"] == "github:alice"
    assert newest["reason"] == "asked in the forum"
    assert newest["actor"].startswith("local:")


def test_a_code_that_works_on_is_named_when_somebody_with_it_is_denied(home: Path) -> None:
    done(home, "codes", "new", "--uses", "30")
    assert "potluck auth codes cancel c1" in auth(home, "deny", "code:c1-1").stdout
    assert "codes cancel" not in auth(home, "deny", "code:dana").stdout


def test_acts_on_a_stopped_server_are_there_when_it_runs_and_the_other_way_round(
    home: Path,
) -> None:
    done(home, "allow", "github:alice")
    with serving(home):
        assert answer(home, "list")["total"] == 1
        done(home, "allow", "github:bob")
    assert [one["name"] for one in answer(home, "list")["accounts"]] == [
        "github:alice",
        "github:bob",
    ]


def test_a_server_that_was_killed_leaves_nothing_in_the_way(home: Path) -> None:
    with serving(home) as (server, started):
        server.process.kill()
        server.process.wait()
        assert Path(started["socket"]).exists()
        done(home, "allow", "github:alice")


def test_a_server_that_dies_in_the_middle_leaves_it_open_whether_it_acted(home: Path) -> None:
    with serving(home) as (server, _), ThreadPoolExecutor(1) as hands:
        server.process.send_signal(signal.SIGSTOP)
        asking = hands.submit(auth, home, "allow", "github:alice")
        _wait_until_it_is_asked(home)
        server.process.kill()
        completed = asking.result()
    assert completed.returncode == 4
    assert "may or may not have been carried out" in completed.stderr
    assert auth(home, "allow", "github:alice").returncode == 0, "asking again does no harm"


def _wait_until_it_is_asked(home: Path) -> None:
    """Until a client is connected: its socket has a line of its own, with the server's path."""
    path, deadline = str(home / "run" / "auth.sock"), time.monotonic() + PATIENCE_SECONDS
    while Path("/proc/net/unix").read_text().count(path) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_cannot_be_asked_is_not_written_behind_its_back(home: Path) -> None:
    places = find_auth_places({"POTLUCK_HOME": str(home)})
    with hold_auth_lock(places):
        completed = auth(home, "allow", "github:alice")
    assert completed.returncode == 4
    assert "nothing was done" in completed.stderr
    assert "pid" in completed.stderr
    assert answer(home, "list")["total"] == 0


def test_the_running_server_says_how_it_is_and_a_stopped_one_that_it_is(home: Path) -> None:
    stopped = auth(home, "status")
    assert stopped.returncode == 4
    assert "potluck auth serve" in stopped.stderr
    with serving(home) as (_, started):
        status = answer(home, "status")
        assert status["fingerprint"] == started["fingerprint"]
        shown = done(home, "status")
    assert started["fingerprint"] in shown
    assert f"pid {started['pid']}" in shown


def test_moderators_who_type_at_the_same_time_take_turns(either: Path) -> None:
    names = [f"github:m{number}" for number in range(5)]
    with ThreadPoolExecutor(len(names)) as hands:
        for completed in hands.map(lambda name: auth(either, "allow", name), names):
            assert completed.returncode == 0, completed.stderr
    assert [one["name"] for one in answer(either, "list")["accounts"]] == names


def test_where_nothing_was_made_every_command_says_how_to(tmp_path: Path) -> None:
    for words in (("allow", "x:y"), ("status",), ("invite",), ("spread",), ("revoke", "x:y")):
        completed = auth(tmp_path, *words)
        assert completed.returncode == 2, words
        assert "potluck auth init" in completed.stderr, words
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_bounded_and_says_what_it_leaves_out(home: Path) -> None:
    with serving(home):
        for number in range(4):
            done(home, "allow", f"github:m{number}")
        shown = done(home, "list", "--limit", "3")
    assert "m2" in shown
    assert "m3" not in shown
    assert "1 more account" in shown


def test_filters_of_accounts_do_not_go_with_other_lists(home: Path) -> None:
    completed = auth(home, "list", "--tokens", "--role", "volunteer")
    assert completed.returncode == 2
    assert "--role" in completed.stderr


def test_an_edited_log_is_found(home: Path) -> None:
    done(home, "allow", "github:alice", "--reason", "a good reason")
    head = answer(home, "audit", "--verify")["head"]
    done(home, "audit", "--verify", "--head", head)
    with sqlite3.connect(home / "auth" / "auth.sqlite") as connection:
        name = "audit_is_not_changed"
        find = "SELECT sql FROM sqlite_master WHERE name = ?"
        (trigger,) = connection.execute(find, (name,)).fetchone()
        connection.execute(f"DROP TRIGGER {name}")
        connection.execute("UPDATE audit SET reason = 'none' WHERE name = 'github:alice'")
        connection.execute(trigger)
    connection.close()
    for words in (("audit", "--verify"), ("audit", "--verify", "--json")):
        completed = auth(home, *words)
        assert completed.returncode == 1
        assert "Row 3" in completed.stdout


def test_a_backup_put_in_the_place_of_the_folder_is_the_server_again(either: Path) -> None:
    done(either, "allow", "github:alice")
    backup = answer(either, "backup", str(either / "copy"))
    assert Path(backup["path"]) == either / "copy"
    assert auth(either, "backup", str(either / "copy")).returncode == 1, "never over anything"
    again = either / "again"
    again.mkdir(mode=0o700)
    (either / "copy").rename(again / "auth")
    assert answer(again, "list")["accounts"][0]["name"] == "github:alice"
    assert answer(again, "audit", "--verify")["sound"]
    done(again, "allow", "github:bob")


def test_keys_rotate_and_the_one_in_use_can_be_withdrawn(home: Path) -> None:
    (first,) = answer(home, "keys", "list")["keys"]
    rotated = answer(home, "keys", "rotate", "--overlap", "5min")
    assert rotated["new"]["endorsed_by"] == first["key_id"]
    assert auth(home, "keys", "rotate").returncode == 1, "one is on its way already"
    withdrawn = auth(home, "keys", "withdraw", first["key_id"], "--json")
    states = [key["state"] for key in answer(home, "keys", "list")["keys"]]
    assert states[0] == "withdrawn"
    assert states[-1] == "signs now"
    assert withdrawn.returncode in (0, 4), "4: no server runs, and no node could be told"


def test_a_key_that_came_after_the_backup_is_put_back_by_its_file(tmp_path: Path) -> None:
    home = made(tmp_path / "home")
    folder = find_auth_places({}, home=str(home)).folder
    done(home, "backup", str(tmp_path / "backup"))
    new = answer(home, "keys", "rotate")["new"]
    folder.rename(tmp_path / "broken")
    (tmp_path / "backup").rename(folder)
    completed = potluck("auth", "keys", "list", home=home)
    assert "keys rotate --key FILE" in completed.stderr
    file = tmp_path / "broken" / "keys" / f"{new['key_id']}.key"
    told = done(home, "keys", "rotate", "--key", str(file))
    assert f"Key {new['key_id']} is here again, and signs from now on" in told
    assert answer(home, "keys", "list")["keys"][-1]["state"] == "signs now"
    assert auth(home, "keys", "rotate", "--key", str(file)).returncode == 1


def test_after_a_restore_every_step_of_withdrawing_a_key_again_names_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = made(tmp_path / "home")
    folder = find_auth_places({}, home=str(home)).folder
    (first,) = answer(home, "keys", "list")["keys"]
    done(home, "backup", str(tmp_path / "backup"))
    new = answer(home, "keys", "rotate")["new"]
    folder.rename(tmp_path / "broken")
    (tmp_path / "backup").rename(folder)
    completed = auth(home, "keys", "withdraw", new["key_id"])
    assert completed.returncode == 1
    assert "it counts again: withdraw it" in caplog.text
    for part in ("keys rotate --key FILE", "while the key was in use"):
        assert part in completed.stderr
    too_early = auth(home, "keys", "withdraw", first["key_id"]).stdout
    assert "nodes ignore this list" in too_early
    assert "`potluck auth keys rotate --key FILE`" in too_early
    file = tmp_path / "broken" / "keys" / f"{new['key_id']}.key"
    told = done(home, "keys", "rotate", "--key", str(file))
    assert "`potluck auth keys withdraw KEY`" in told
    states = {key["key_id"]: key["state"] for key in answer(home, "keys", "list")["keys"]}
    assert states[first["key_id"]] == "withdrawn"
    assert states[new["key_id"]] == "signs now"
