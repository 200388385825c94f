"""A whole run of real processes, for benches that watch it from outside, as its users do.

    async with open_closed_run(folder, definition) as run:      # auth server, organiser's peer
        ann = run.join("ann", await run.code_for("ann"))        # potluck join, in a home of its own
        await run.until(lambda: has(ann, "began"), "ann's start", ann)

All are the commands that people type, over real libp2p: `auth serve`, `backbone`, `join`. The
output of each is read as it comes, with the moment at which it came (`Heard`).

Promises: no process that was started here outlives the block. If a part ends although it should
not, the error names it, with its last output.

A machine of two cores plays all of the volunteers' machines at once, and the measured peer would
wait for the others' computing. With `one_is_alone` all the others share one core, if there are
several, and the peer that joins with `alone` has the rest.

`write_certificate` makes the auth server's own certificate as docs/moderators.md describes it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lab.bench.processes import BenchFailed
from node.app.demo import Child, Event, free_port

LIFE: Final = datetime.timedelta(days=30)  # with less, the server warns of its end


def write_certificate(home: Path, host: str) -> None:
    """certificate.pem, which signs itself, and key.pem, for `potluck auth serve`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "scripts/bench")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFE)
        .not_valid_after(now + LIFE)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_file = home / "key.pem"
    key_file.touch(mode=0o600)
    key_file.write_bytes(key.private_bytes(encoding, form, plain))


RUN: Final = "bench"
ORGANISER: Final = "organiser"
PART_SECONDS: Final = 180.0  # for one thing to happen: ten times what the longest takes

DEFINITION: Final = """
[run]
name = "bench"
[model]
name = "gpt"
size = "tiny"
context = {context}
width = {width}
layers = {layers}
heads = 4
[optimizer]
name = "adamw"
lr = 0.001
[training]
batch = {batch}
samples_at_once = 32
max_norm = 1.0
[averaging]
codec = "float16"
"""


@dataclass(frozen=True)
class Size:
    """Of the model, and of a step. By default a state (parameters and optimizer) of 25 MB."""

    width: int = 204
    layers: int = 4
    context: int = 64
    batch: int = 128

    def definition(self) -> str:
        return DEFINITION.format(
            context=self.context, width=self.width, layers=self.layers, batch=self.batch
        )


@dataclass(frozen=True)
class VolunteerPlace:
    """Where a process runs: `host` is the address that it listens at, `through` the command that
    starts it there (such as `nsenter --net=…`)."""

    host: str = "127.0.0.1"
    through: tuple[str, ...] = ()


HERE: Final = VolunteerPlace()


@dataclass
class Heard:
    """One process of the run, its output, and the time of each line."""

    child: Child
    began: float
    events: list[tuple[float, Event]] = field(default_factory=list)

    def all(self, kind: str, after: int = 0) -> list[tuple[float, Event]]:
        return [one for one in self.events[after:] if one[1].get("event") == kind]


def has(one: Heard, kind: str, after: int = 0) -> bool:
    """Whether it has reported such an event, after this many earlier ones."""
    return bool(one.all(kind, after))


def accepted(one: Heard, after: int = 0) -> tuple[float, Event] | None:
    """The first step that others have made with samples of this peer, and when it was told."""
    for at, event in one.all("step_taken", after):
        if event["own_samples"] and len(event["members"]) > 1:
            return at, event
    return None


class ClosedRun:
    """Made by `open_closed_run`."""

    def __init__(
        self, folder: Path, nursery: trio.Nursery, hub: VolunteerPlace, *, one_is_alone: bool
    ) -> None:
        self.invite = ""
        self._folder, self._nursery, self._hub = folder, nursery, hub
        self._one_is_alone = one_is_alone
        self._heard: list[Heard] = []
        self._starts: dict[str, Callable[[], Heard]] = {}  # the last command of each name
        self._changed = trio.Event()

    async def open(self, definition: str) -> None:
        plain = () if self._hub.through else ("--insecure-http",)  # it never leaves this machine
        url = f"http{'' if plain else 's'}://{self._hub.host}:{free_port()}"
        if not plain:
            write_certificate(self._folder / ORGANISER, self._hub.host)
        await self._do("auth", "init", "--run", RUN, "--public-url", url)
        server = self._start("auth", ("auth", "serve", *plain, "--json"))
        await self.until(lambda: has(server, "serving"), "the auth server's start", server)
        run = self._folder / "run"
        run.mkdir()
        (run / "run.toml").write_text(definition)
        organiser = self._start(ORGANISER, _backbone(run, self._hub))
        await self.until(lambda: has(organiser, "began"), "the organiser's start", organiser)
        self.invite = str(organiser.all("started")[0][1]["invite"])

    async def add_backbone(self, name: str, place: VolunteerPlace) -> Heard:
        """One more `potluck backbone`. Later invites lead to it as well."""
        first = _address_of(self.organiser)
        run, copy, home = self._folder / "run", self._folder / f"{name}-run", self._folder / name
        copy.mkdir()
        for kept in run.glob("run.*"):
            shutil.copy(kept, copy)
        code = await self.code_for(name, "--role", "backbone")
        invite = copy / "invite"
        invite.write_text(self.invite)
        variables = {"POTLUCK_LOGIN_CODE": code}
        await self._do("login", str(invite), home=home, through=place.through, variables=variables)
        words = (*_backbone(copy, place), "--bootstrap", first)
        one = self._start(name, words, home=home, through=place.through)
        await self.until(lambda: has(one, "began"), f"the start of {name}", one)
        ways_in = [word for at in (first, _address_of(one)) for word in ("--bootstrap", at)]
        self.invite = str((await self._do("run", "invite", str(run), *ways_in))["invite"])
        return one

    @property
    def organiser(self) -> Heard:
        return next(one for one in self._heard if one.child.name == ORGANISER)

    async def code_for(self, name: str, *words: str) -> str:
        """An enrolment code for this name."""
        return str((await self._do("auth", "codes", "new", "--name", name, *words))["code"])

    def join(
        self,
        name: str,
        code: str,
        *words: str,
        command: Sequence[str] = ("join",),
        place: VolunteerPlace = HERE,
        alone: bool = False,
    ) -> Heard:
        """`potluck join`, or another command for which one needs an invite, in a home that is named
        like this. `alone`: on a processor that the others leave to it."""
        variables = {"POTLUCK_INVITE": self.invite, "POTLUCK_LOGIN_CODE": code}
        listen = f"/ip4/{place.host}/tcp/0"
        return self._start(
            name,
            (*command, "--json", "--threads", "1", "--listen", listen, *words),
            home=self._folder / name,
            variables=variables,
            through=(*place.through, *self._processors(alone=alone)),
        )

    def start_again(self, one: Heard) -> Heard:
        """The same command in the same home and place, after its end."""
        return self._starts[one.child.name]()

    async def ask(self, name: str, *words: str, place: VolunteerPlace = HERE) -> Event:
        """Run a command in this home until it ends; its last line of output."""
        return await self._do(*words, home=self._folder / name, through=place.through)

    async def until(self, holds: Callable[[], bool], part: str, *needed: Heard) -> None:
        """Wait for a condition. BenchFailed after a timeout, or if a needed process ends."""
        with trio.move_on_after(PART_SECONDS) as patience:
            while not holds():
                for one in needed:
                    if one.child.exit_code is not None:
                        raise BenchFailed(
                            f"{one.child.name} ended before {part} was over.",
                            why=f"{one.child.ended_by()}. It said last: {one.child.last_lines()}",
                        )
                await self._changed.wait()
        if patience.cancelled_caught:
            said = "; ".join(f"{one.child.name}: {one.child.last_lines()}" for one in needed)
            raise BenchFailed(f"{part} took more than {PART_SECONDS:.0f} seconds.", why=said)

    async def end(self, one: Heard) -> None:
        """Have it leave, and wait until it has."""
        one.child.terminate()
        await self.until(lambda: one.child.exit_code is not None, f"the end of {one.child.name}")

    def kill_all(self) -> None:
        for one in self._heard:
            one.child.kill()

    def _start(
        self,
        name: str,
        words: Sequence[str],
        *,
        home: Path | None = None,
        variables: dict[str, str] | None = None,
        through: tuple[str, ...] | None = None,
    ) -> Heard:
        child = Child(
            name,
            words,
            home=home or self._folder / ORGANISER,
            folder=self._folder,
            variables={"OMP_NUM_THREADS": "1", **(variables or {})},
            through=(*self._hub.through, *self._processors()) if through is None else through,
        )
        one = Heard(child, time.monotonic())
        self._heard.append(one)
        self._starts[name] = partial(
            self._start, name, words, home=home, variables=variables, through=through
        )
        child.start()
        self._nursery.start_soon(self._follow, one)
        return one

    async def _follow(self, one: Heard) -> None:
        def take(_child: Child, event: Event) -> None:
            one.events.append((time.monotonic(), event))
            self._wake()

        await one.child.read(take)
        self._wake()

    async def _do(
        self,
        *words: str,
        home: Path | None = None,
        through: tuple[str, ...] | None = None,
        variables: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        name = " ".join(word for word in words[:2] if "/" not in word)
        words = (*words, "--json")
        one = self._start(name, words, home=home, variables=variables, through=through)
        await self.until(lambda: one.child.exit_code is not None, f"`potluck {' '.join(words)}`")
        if one.child.exit_code or not one.events:
            raise BenchFailed(f"`{one.child.command}` failed.", why=one.child.last_lines())
        return one.events[-1][1]

    def _processors(self, *, alone: bool = False) -> tuple[str, ...]:
        """The command that keeps a process on the first processor, or on the others, if it can."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if not self._one_is_alone or len(usable) < 2 or shutil.which("taskset") is None:
            return ()
        which = usable[1:] if alone else usable[:1]
        return ("taskset", "-c", ",".join(map(str, which)))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _backbone(run: Path, place: VolunteerPlace) -> tuple[str, ...]:
    listen = f"/ip4/{place.host}/tcp/0"
    return (
        *("backbone", str(run), "--threads", "1", "--json"),
        *("--listen", listen, "--http", "127.0.0.1:0"),
    )


def _address_of(one: Heard) -> str:
    return str(one.all("started")[0][1]["addresses"][0])


@asynccontextmanager
async def open_closed_run(
    folder: Path, definition: str, hub: VolunteerPlace = HERE, *, one_is_alone: bool = False
) -> AsyncIterator[ClosedRun]:
    """The run in a folder that is there and empty; its auth server and its organiser's peer run at
    `hub` until the block is left. `one_is_alone`: one joins `alone`, see there."""
    async with trio.open_nursery() as nursery:
        run = ClosedRun(folder, nursery, hub, one_is_alone=one_is_alone)
        try:
            await run.open(definition)
            yield run
        finally:
            run.kill_all()
        nursery.cancel_scope.cancel()
