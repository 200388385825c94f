"""`potluck auth serve` as it is run: signals, kill -9, a second server, moderators at a socket."""

from __future__ import annotations

import re
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from auth.server.moderation import Moderation
from auth.server.store import StoreReader, create_store, open_store
from node.app.auth_places import AuthPlaces, find_auth_places, hold_auth_lock
from node.core.control_client import ControlFailure, ask_once
from node.core.running_lock import AlreadyRunning
from tests.auth.web.authority import Authority
from tests.auth.web.http_client import connect
from tests.auth.web.running import ACTOR, RUN, Volunteer
from tests.commands.console import RunningCommand, objects, potluck, running
from tests.leaving import LEAVE_SECONDS
from tests.waiting import PATIENCE_SECONDS, until


class Home:
    """A home in which `auth serve` can be started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: AuthPlaces = find_auth_places({"POTLUCK_HOME": str(folder)})
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.issue()
        made = create_store(self.places.folder, RUN, actor=ACTOR)
        self.fingerprint = made.fingerprint
        self.write_settings()

    def write_settings(self, more: str = "") -> None:
        self.places.settings_file.write_text(
            f'run = "{RUN}"\npublic_url = "https://127.0.0.1:8443"\n'
            f'[server]\nlisten = ["127.0.0.1:0"]\n'
            f'certificate = "{self.certificate.name}"\ncertificate_key = "{self.key.name}"\n'
            f"[limits]\nrequests_per_minute_per_address = 1000000\n{more}"
        )

    @contextmanager
    def serving(self, *words: str) -> Iterator[tuple[RunningCommand, Served]]:
        with running("auth", "serve", "--json", *words, home=self.folder) as command:
            yield command, Served(self, command.next_object())

    def act(self, act: str, **arguments: Any) -> Any:
        asked = {"act": act, "arguments": arguments, "actor": ACTOR}
        return ask_once(self.places.socket, "auth", asked)


class Served:
    """A server that has said that it serves. Volunteers can be told to ask it."""

    def __init__(self, home: Home, said: dict[str, Any]) -> None:
        self.said = said
        self.port = int(said["listening"][0].rsplit(":", 1)[1])
        self.invited_fingerprint = home.fingerprint
        self.tls: ssl.SSLContext | None = home.authority.trust()

    async def post(self, path: str, value: object) -> Any:
        async with connect(self.port, self.tls) as client:
            return await client.post(path, value)

    async def get(self, path: str) -> Any:
        async with connect(self.port, self.tls) as client:
            return await client.ask("GET", path)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.slow
def test_it_says_where_it_is_once_it_serves_and_ends_by_itself_on_signals(home: Home) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        with home.serving() as (command, served):
            assert served.said["event"] == "serving"
            assert served.said["run"] == RUN
            assert served.said["fingerprint"] == home.fingerprint
            assert served.said["socket"] == str(home.places.socket)
            assert trio.run(served.get, "/readyz").status == 200
            ended, seconds, errors = command.stop(number)
            assert (ended, errors) == (code, "")
            assert seconds < LEAVE_SECONDS
            assert not home.places.socket.exists()
            assert not home.places.lock_file.exists()


@pytest.mark.slow
def test_a_second_server_of_one_home_is_refused(home: Home) -> None:
    with home.serving() as (command, _):
        second = potluck("auth", "serve", "--json", home=home.folder)
        assert second.returncode == 3
        [said] = objects(second.stdout)
        assert str(command.pid) in said["error"]["what"]
        with pytest.raises(AlreadyRunning), hold_auth_lock(home.places):
            pass


@pytest.mark.slow
def test_moderators_act_on_the_running_server_through_its_socket(home: Home) -> None:
    with home.serving() as (_, served):
        code = home.act("codes-new", uses=1, name="bob")["code"]
        volunteer = Volunteer(served)  # type: ignore[arg-type]  # all that it asks of a server

        async def join_and_be_thrown_out() -> None:
            assert (await volunteer.join(code)).status == 200
            before = int((await served.get("/v1/revocations")).headers["etag"].strip('"'))
            home.act("revoke", target="code:bob", reason="a test")
            assert (await volunteer.renew()).status == 403
            after = await served.get(f"/v1/revocations?after={before}")
            assert after.status == 200, "the new list is there at once"

        trio.run(join_and_be_thrown_out)
        status = ask_once(home.places.socket, "auth-status")
        assert status["live_tokens"] == 1
        assert status["pid"] == served.said["pid"]
        for asked, word in (
            ({"act": "fly", "arguments": {}, "actor": ACTOR}, "does not understand"),
            ({"act": 5}, "no moderator's act"),
            ({"act": "revoke", "arguments": {"target": "code:nobody"}, "actor": ACTOR}, "nobody"),
        ):
            with pytest.raises(ControlFailure, match=word):
                ask_once(home.places.socket, "auth", asked)


@pytest.mark.slow
def test_a_renewed_certificate_is_taken_without_a_restart(home: Home) -> None:
    with home.serving() as (_, served):

        async def serial() -> str:
            async with connect(served.port, served.tls) as client:
                await client.ask("GET", "/healthz")
                number: str = client.stream.getpeercert()["serialNumber"]  # type: ignore[attr-defined]
                return number

        def has_changed_from(first: str) -> Callable[[], Awaitable[bool]]:
            async def has_changed() -> bool:
                return await serial() != first

            return has_changed

        async def watch_it_change() -> None:
            first = await serial()
            home.authority.issue()
            await until(has_changed_from(first), PATIENCE_SECONDS)

        trio.run(watch_it_change)


@pytest.mark.slow
@pytest.mark.parametrize("after_passes", [1, 100])
def test_after_kill_9_every_pass_that_was_handed_out_is_in_the_log(
    home: Home, after_passes: int
) -> None:
    received: set[int] = set()
    with home.serving() as (command, served):
        code = home.act("codes-new", uses=16)["code"]

        async def renew_until_it_dies() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(16):
                    nursery.start_soon(one_volunteer)

        async def one_volunteer() -> None:
            volunteer = Volunteer(served)  # type: ignore[arg-type]
            try:
                await volunteer.join(code)
                while True:
                    assert volunteer.opened is not None
                    received.add(volunteer.opened.token.serial)
                    if len(received) >= after_passes:
                        command.process.kill()
                    assert (await volunteer.renew()).status == 200
            except (OSError, EOFError, trio.BrokenResourceError):
                return

        trio.run(renew_until_it_dies)
        command.process.wait()
    reader = StoreReader(home.places.folder)
    with reader.reading() as connection:
        kept = {serial for (serial,) in connection.execute("SELECT serial FROM tokens")}
    assert received <= kept
    with open_store(home.places.folder) as store:
        assert Moderation(store).verify().sound
    with home.serving() as (command, served):
        assert trio.run(served.get, "/readyz").status == 200
        code = home.act("codes-new", uses=1)["code"]
        volunteer = Volunteer(served)  # type: ignore[arg-type]
        trio.run(volunteer.join, code)
        assert volunteer.opened is not None
        assert volunteer.opened.token.serial > max(received), "no serial is given twice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "settings", "word", "code"),
    [
        (["--insecure-http"], '[server]\nlisten = ["0.0.0.0:0"]', "Plain HTTP is not served", 2),
        (["--listen", "nonsense"], "", "--listen nonsense", 2),
        ([], "[server]\nlisen = []", "no setting `server.lisen`", 2),
        ([], '[server]\ncertificate = "nowhere.pem"\ncertificate_key = "x"', "cannot be read", 1),
        ([], "", "no certificate", 2),
    ],
)
def test_a_server_that_cannot_start_explains_it_in_three_sentences(
    home: Home, words: list[str], settings: str, word: str, code: int
) -> None:
    least = f'run = "{RUN}"\npublic_url = "https://auth.example"\n'
    home.places.settings_file.write_text(least + settings)
    done = potluck("auth", "serve", "--json", *words, home=home.folder)
    assert done.returncode == code, done
    [said] = objects(done.stdout)
    assert word in said["error"]["what"]
    assert said["error"]["advice"] or said["error"]["why"]


@pytest.mark.slow
def test_without_a_home_that_was_made_it_says_how_to_make_one(tmp_path: Path) -> None:
    done = potluck("auth", "serve", home=tmp_path)
    assert done.returncode == 2
    assert "auth init" in done.stderr


@pytest.mark.slow
def test_plain_http_on_loopback_is_served_where_it_listens(home: Home) -> None:
    with home.serving("--insecure-http", "--listen", "127.0.0.1:0") as (_, served):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.said["url"])
        assert served.said["certificate_until_ms"] is None
        served.tls = None
        assert trio.run(served.get, "/v1/about").json()["run"] == RUN


@pytest.mark.slow
def test_its_output_for_people_says_where_and_what_next(home: Home) -> None:
    with running("auth", "serve", home=home.folder) as command:
        assert RUN in command.next_line()
        assert "https://" in command.next_line()
        _, _, errors = command.stop()
        assert "auth invite" in errors
