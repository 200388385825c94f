"""The demo itself: the commands that people type, played on one machine, from start to end.

    summary = await Demo(folder, tell, keep=False).play()

In order: an auth server with a fresh key; a definition; a backbone peer; codes for four people;
three volunteers; a fourth who comes late; one of the three is killed; the run completes by itself;
contributions are added up from everybody's records; the final models are compared.

Promises: whatever happens, no process that was started here is left when `play` ends (`kill_all`
also does it from a signal's handler). A failed part ends the demo, with its name and its last
output.

Nothing here is timed. Every step waits for an event of the one before, so a slow machine plays the
same demo slowly.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from node.app.demo.processes import Child, Event, free_port
from node.app.demo.story import (
    KILL_AT_STEP,
    LATE_AT_STEP,
    RUN,
    STEPS,
    Story,
    batch_for,
    demo_sized,
    summary_of,
)
from node.core.configuration import read_configuration
from node.core.key_file import load_identity
from protocols.errors import PotluckError

EARLY = ("ann", "ben", "cleo")
KILLED = "cleo"
LATE = "dora"
KEEPER = "backbone"

PART_SECONDS = 240.0
"""The timeout of one part: on a free machine the longest, the training, takes half a minute; a busy
one gets eight times that."""

LISTEN = "/ip4/127.0.0.1/tcp/0"  # any free port, for this machine alone
STEPS_TOLD = 6  # a line each

Tell = Callable[[dict[str, Any], str], None]


class DemoFailed(PotluckError):
    """A part of the demo failed."""


class DemoStage:
    """The processes of a demo, in a folder that exists and is empty. `tell` is given each event and
    its words. A demo has `_play`, which returns the summary, and `_take` for the events.

    Invariant: no process that was started here outlives `play`.
    """

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell_out = folder, tell
        self._began = time.monotonic()
        self._children: list[Child] = []
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    def kill_all(self) -> None:
        """End every process that was started here. For a signal's handler, too."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)  # to all, before anything waits for one
        for child in self._children:
            child.kill()

    async def play(self) -> dict[str, Any]:
        """Returns the summary. DemoFailed, which names the part that failed."""
        try:
            async with trio.open_nursery() as self._nursery:
                summary = await self._play()
                self._nursery.cancel_scope.cancel()
        finally:
            self.kill_all()
        return summary

    async def _play(self) -> dict[str, Any]:
        raise NotImplementedError

    def _take(self, child: Child, event: Event) -> None:
        """A child has printed this."""
        raise NotImplementedError

    def _has_left(self, child: Child) -> bool:
        """Whether a child that ended by itself, without an error, was at its end."""
        raise NotImplementedError

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        home: Path,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        assert self._nursery is not None
        child = Child(
            name,
            arguments,
            home=home,
            folder=self._folder,
            variables=variables,
        )
        self._children.append(child)
        child.start()
        self._nursery.start_soon(self._follow, child)
        return child

    async def _follow(self, child: Child) -> None:
        await child.read(self._take)
        self._wake()

    async def _do_at(self, home: Path, part: str, *arguments: str) -> Event:
        """Run a command that ends by itself; returns its output."""
        child = self._start(part, [*arguments, "--json"], home=home)
        child.may_end = True
        await self._until(lambda: child.exit_code is not None, part)
        if child.exit_code or not child.events:
            raise self._failed(child)
        return child.events[-1]

    async def _until(self, holds: Callable[[], bool], part: str) -> None:
        """Wait for a condition; DemoFailed after a timeout, or if a process ends that must not."""
        with trio.move_on_after(PART_SECONDS) as patience:
            while not holds():
                for child in self._children:
                    if child.exit_code is not None and not self._ended_well(child):
                        raise self._failed(child)
                await self._changed.wait()
        if patience.cancelled_caught:
            said = "\n".join(f"{one.name}: {one.last_lines()}" for one in self._children)
            raise DemoFailed(
                f"The demo gave up waiting for {part}.",
                why=f"It took more than {PART_SECONDS:.0f} seconds. The last output of its parts:\n"
                + said,
                advice="Try again when the machine is less busy; --keep keeps all files.",
            )

    def _ended_well(self, child: Child) -> bool:
        if child.may_end:
            return True
        return child.exit_code == 0 and self._has_left(child)

    def _failed(self, child: Child, why: str = "") -> DemoFailed:
        said = child.last_lines()
        return DemoFailed(
            f"A part of the demo failed: {child.name} (`{child.command}`).",
            why=" ".join(
                one for one in (why, f"{child.ended_by()}. Its last output: {said}") if one
            ),
            advice="`potluck demo --keep` keeps all files for a closer look. If it fails again, "
            "please report it.",
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, event: str, words: str, **fields: Any) -> None:
        seconds = round(self._seconds, 2)
        self._tell_out({"event": event, "seconds": seconds, **fields}, f"{seconds:5.1f} s  {words}")


class Demo(DemoStage):
    """One demo of a run that everybody trains whole."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        super().__init__(folder, tell)
        self._run_folder = folder / "run"
        self._organiser = folder / "organiser"
        self._story = Story()
        self._steps_told = 0

    async def _play(self) -> dict[str, Any]:
        auth = await self._start_auth_server()
        codes = {name: await self._code_for(name) for name in (*EARLY, LATE)}
        self._tell("enrolled", f"{', '.join(codes)} may take part, each with a code for one use")
        await self._define()
        backbone, invite, http_url = await self._start_backbone()
        volunteers, health = await self._train(invite, codes, http_url)
        await self._until(lambda: self._story.kept_epoch >= STEPS, "the keeper's last step")
        board = await self._do("leaderboard", "leaderboard")
        self._tell(
            "credit",
            "the backbone peer has added up everybody's contribution, from the signed records of "
            f"{board['records']} peers",
            records=board["records"],
        )
        checkpoint = await self._last_checkpoint(backbone)
        auth.terminate()
        for name in volunteers:
            self._story.person(name).peer = self._peer_of(name)
        from node.app.demo.judging import judge

        found = await trio.to_thread.run_sync(
            judge,
            (self._run_folder / "run.toml").read_bytes(),
            checkpoint,
            abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
        )
        return summary_of(
            self._story, found, checkpoint, health, board, late=LATE, seconds=self._seconds
        )

    async def _train(
        self, invite: str, codes: Mapping[str, str], http_url: str
    ) -> tuple[dict[str, Child], dict[str, Any]]:
        """Train until the run has made its steps and all volunteers that were not killed have left.
        Returns all volunteers, and the backbone peer's health. On a fast machine the run may be
        over before the late one is in a step, or before there is anybody to kill: then a message
        and the summary say that it was not shown."""
        volunteers = {name: self._join(name, invite, codes[name]) for name in EARLY}

        def all_have_left() -> bool:
            return all(one.exit_code == 0 for one in volunteers.values() if not one.may_end)

        await self._until(
            lambda: (
                all(self._story.person(name).entered_at is not None for name in EARLY)
                or all_have_left()
            ),
            "the volunteers' start",
        )
        self._tell_start()
        await self._until(lambda: self._story.epoch >= LATE_AT_STEP, "the first steps")
        volunteers[LATE] = self._join(LATE, invite, codes[LATE])
        meanwhile = "the run is over" if self._is_complete else "she starts while the others train"
        self._tell("late", f"{LATE} comes late: {meanwhile}")
        await self._until(lambda: self._story.epoch >= KILL_AT_STEP, "the training")
        self._kill(volunteers[KILLED])
        health = await self._look_at(http_url)
        late = self._story.person(LATE)
        await self._until(lambda: late.steps > 0 or all_have_left(), f"{LATE}'s catching up")
        if late.steps:
            self._tell_caught_up()
        else:
            self._tell(
                "too_late",
                f"the run had made its {STEPS} steps before {LATE} was in one: this machine is too "
                "fast for her",
            )
        await self._until(all_have_left, "the last steps")
        self._tell("complete", f"the run has made its {STEPS} steps, and the volunteers have left")
        return volunteers, health

    @property
    def _is_complete(self) -> bool:
        return self._story.epoch >= STEPS

    # -- the parts, in order

    async def _start_auth_server(self) -> Child:
        url = f"http://127.0.0.1:{free_port()}"
        made = await self._do("auth init", "auth", "init", "--run", RUN, "--public-url", url)
        command = ["auth", "serve", "--insecure-http", "--json"]
        child = self._start("auth server", command, home=self._organiser)
        await self._until(lambda: has_told(child, "serving"), "the auth server")
        self._tell(
            "auth_server",
            f"an auth server at {url}, with a fresh key: it decides who may take part",
            url=url,
            fingerprint=made["fingerprint"],
        )
        return child

    async def _code_for(self, name: str) -> str:
        made = await self._do(f"code for {name}", "auth", "codes", "new", "--name", name)
        return str(made["code"])

    async def _define(self) -> None:
        made = await self._do("run init", "run", "init", str(self._run_folder), "--name", RUN)
        checked = await self._do("run check", "run", "check", str(self._run_folder))
        self._story.batch = batch_for(float(checked["samples_per_second"]))
        file = self._run_folder / "run.toml"
        file.write_text(demo_sized(file.read_text("utf-8"), self._story.batch), "utf-8")
        self._tell(
            "definition",
            f"a run, defined in run.toml: {STEPS} steps of {self._story.batch:,} samples, by "
            "everybody together; its organiser will sign it",
            organiser=made["organiser"],
            steps=STEPS,
            batch=self._story.batch,
        )

    async def _start_backbone(self) -> tuple[Child, str, str]:
        places = ("--listen", LISTEN, "--http", "127.0.0.1:0")
        child = self._start(
            KEEPER,
            ["backbone", str(self._run_folder), "--json", "--threads", "1", *places],
            home=self._organiser,
        )
        await self._until(
            lambda: has_told(child, "started") and has_told(child, "serving_http"),
            "the backbone peer",
        )
        started, http = told_event(child, "started"), told_event(child, "serving_http")
        self._tell(
            "backbone",
            "a backbone peer: others join through it, and it keeps checkpoints; "
            f"{http['url']}/metrics",
            addresses=started["addresses"],
            url=http["url"],
        )
        return child, str(started["invite"]), str(http["url"])

    def _join(self, name: str, invite: str, code: str) -> Child:
        variables = {"POTLUCK_INVITE": invite, "POTLUCK_LOGIN_CODE": code}
        arguments = ["join", "--json", "--threads", "1", "--listen", LISTEN]
        if name == EARLY[0]:
            self._tell(
                "joining",
                f"{', '.join(EARLY)} type `potluck join`: processes with homes of their own, over "
                "encrypted libp2p",
            )
        return self._start(name, arguments, home=self._folder / name, variables=variables)

    def _kill(self, child: Child) -> None:
        person = self._story.person(child.name)
        if self._is_complete or not child.kill():
            self._tell("spared", f"nobody is killed: the run had already made its {STEPS} steps")
            return
        person.killed_at = self._story.epoch
        self._tell(
            "killed",
            f"{child.name} is killed (SIGKILL) after step {person.killed_at}, without a goodbye: "
            "the others continue",
            name=child.name,
            epoch=person.killed_at,
        )

    async def _look_at(self, url: str) -> dict[str, Any]:
        """The backbone peer's /healthz and /metrics during the training."""
        try:
            status, body = await trio.to_thread.run_sync(_get, f"{url}/healthz")
            _, metrics = await trio.to_thread.run_sync(_get, f"{url}/metrics")
        except OSError as error:
            raise DemoFailed(
                f"The backbone peer does not answer at {url}.", why=f"{error}."
            ) from error
        health = {
            "url": url,
            "status": status,
            **json.loads(body),
            "metrics": sum(1 for line in metrics.splitlines() if not line.startswith(b"#")),
        }
        self._tell(
            "health",
            f"the backbone peer's /healthz says {status}, /metrics has {health['metrics']} figures",
            **health,
        )
        return health

    def _peer_of(self, name: str) -> str:
        """The volunteer's peer id, from the key in its home."""
        places = read_configuration(environment={"POTLUCK_HOME": str(self._folder / name)})
        identity = load_identity(places.key_file)
        return "" if identity is None else identity.peer_id

    async def _last_checkpoint(self, backbone: Child) -> Path:
        backbone.terminate()
        await self._until(lambda: backbone.exit_code is not None, "the last checkpoint")
        # Read from the disk: while it leaves, it prints nothing any more.
        written = sorted(self._run_folder.glob(f"checkpoints/epoch-{STEPS:010d}-*"))
        if not written:
            raise self._failed(backbone, f"It wrote no checkpoint of step {STEPS}.")
        return written[-1]

    # -- the events

    def _take(self, child: Child, event: Event) -> None:
        if child.name in (*EARLY, LATE):
            self._story.take(child.name, event)
            self._tell_step()
        elif child.name == KEEPER:
            self._story.take_of_keeper(event)
        self._wake()

    def _tell_step(self) -> None:
        """Print a line every few steps, when there is a report of the loss."""
        due = 1 if not self._steps_told else self._steps_told * STEPS // STEPS_TOLD
        curve = [one for one in self._story.curve() if one[0] >= max(due, 1)]
        if curve and self._steps_told <= STEPS_TOLD:
            epoch, loss = curve[0]
            self._steps_told += 1
            self._tell("step", f"step {epoch}: loss {loss:.2f}", epoch=epoch, loss=round(loss, 4))

    def _tell_start(self) -> None:
        rates = {name: self._story.person(name).samples_per_second for name in EARLY}
        words = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        self._tell(
            "training",
            f"all three have logged in, verified the definition and measured themselves: {words} "
            "samples/s",
            samples_per_second=rates,
        )

    def _tell_caught_up(self) -> None:
        late = self._story.person(LATE)
        found = late.caught_up or {}
        size = found.get("fetched_bytes", 0) / 1e6
        sources = len(found.get("sources", ()))
        peers = "1 peer" if sources == 1 else f"{sources} peers"
        self._tell(
            "caught_up",
            f"{LATE} has caught up: {size:.1f} MB from {peers}, verified; her samples "
            f"count since step {late.epoch}",
            name=LATE,
            epoch=late.epoch,
            fetched_bytes=found.get("fetched_bytes", 0),
            sources=sources,
        )

    def _has_left(self, child: Child) -> bool:
        return self._story.person(child.name).left

    async def _do(self, part: str, *arguments: str) -> Event:
        return await self._do_at(self._organiser, part, *arguments)


def has_told(child: Child, kind: str) -> bool:
    return any(event.get("event") == kind for event in child.events)


def told_event(child: Child, kind: str) -> Event:
    return next(event for event in child.events if event.get("event") == kind)


def _get(url: str) -> tuple[int, bytes]:
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10.0) as answer:
            return answer.status, answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        return error.code, error.read(1 << 20)
