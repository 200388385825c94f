"""A real `potluck auth serve` for tests: its own home, its own certificate, a real database.

It is a process of its own, so that it can be killed. Moderators' acts go through its local socket,
as `potluck auth …` sends them; while it is stopped they are done on the database.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from auth.invites import Invite, write_invite
from auth.server.store import create_store, open_store
from node.app.auth_places import AuthPlaces, find_auth_places
from node.app.moderation import perform
from node.core.control_client import ask_once
from tests.access.https_servers import Certificate, make_certificate
from tests.commands.console import environment
from tests.ports import held_port
from tests.processes.children import die_with_parent
from tests.waiting import PATIENCE_SECONDS

RUN = "albert"
ACTOR = "local:test"


class AuthServerProcess:
    """One auth server, running or not. `life_seconds` is that of tokens; ten is the least.

    It keeps its port over its restarts: the caller holds it."""

    def __init__(
        self,
        home: Path,
        port: int,
        *,
        life_seconds: int = 3600,
        grace_seconds: int = 600,
        endpoints: tuple[str, ...] = (),
    ) -> None:
        self.home = home
        self.places: AuthPlaces = find_auth_places({}, home=str(home))
        self.certificate: Certificate = make_certificate()
        self.port = port
        self.url = f"https://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = (life_seconds, grace_seconds, endpoints)
        home.mkdir(parents=True, exist_ok=True)
        made = create_store(self.places.folder, RUN, actor=ACTOR)
        self.fingerprint = made.fingerprint
        self.write_settings()

    def write_settings(self, *, endpoints: tuple[str, ...] | None = None) -> None:
        """auth.toml and the certificate's files."""
        life, grace, usual = self._settings
        certificate, key = self.certificate.written_to(self.home)
        listed = json.dumps(list(usual if endpoints is None else endpoints))
        self.places.settings_file.write_text(
            f'run = "{RUN}"\npublic_url = "{self.url}"\nendpoints = {listed}\n'
            f'[server]\nlisten = ["127.0.0.1:{self.port}"]\n'
            f'certificate = "{certificate}"\ncertificate_key = "{key}"\n'
            f"[tokens]\nlife_seconds = {life}\ngrace_seconds = {grace}\n"
            "[limits]\nrequests_per_minute_per_address = 100000\n"
            "logins_per_hour_per_address = 100000\n"
            '[[provider]]\nid = "code"\nkind = "code"\n'
        )

    def start(self) -> None:
        """Start it, and return when it serves."""
        with (self.home / "errors").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "node", "auth", "serve", "--json"],
                env=environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=die_with_parent,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError((self.home / "errors").read_text())
        assert json.loads(line)["event"] == "serving"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by this signal, if it runs."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=PATIENCE_SECONDS)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def act(self, act: str, **arguments: Any) -> dict[str, Any]:
        """A moderator's act."""
        if self.process is None:
            with open_store(self.places.folder) as store:
                return perform(store.moderation(), act, arguments, ACTOR)
        asked = {"act": act, "arguments": arguments, "actor": ACTOR}
        answer: dict[str, Any] = ask_once(self.places.socket, "auth", asked, silence_seconds=30)
        return answer

    def new_code(self, name: str = "alice", uses: int = 1) -> str:
        """An enrolment code; whoever uses it is known by this name."""
        code: str = self.act("codes-new", name=name, uses=uses)["code"]
        return code

    def invite(self, code: str = "", *, pin: bytes | None = None, fingerprint: str = "") -> str:
        return write_invite(
            Invite(
                RUN,
                (),
                self.url,
                fingerprint or self.fingerprint,
                code,
                self.certificate.sha256 if pin is None else pin,
            )
        )


@contextmanager
def running_auth_server(home: Path, **settings: Any) -> Iterator[AuthServerProcess]:
    with held_port() as port:
        server = AuthServerProcess(home, port, **settings)
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGKILL)
