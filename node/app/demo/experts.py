"""`potluck demo --experts`: a run with a mixture of experts, in which servers are killed.

    summary = await ExpertsDemo(folder, tell).play()

In order: a definition; the organiser's peer; four servers of experts; three trainers; two servers
and a trainer are killed; others take their experts over from the copies; training continues. The
run is open, because the other demo shows the auth server.

Everybody types commands without further flags. A peer serves at most a quarter of the run's cells
by itself: four servers have all of them, and the trainers, who come later, have room to take over.

The killed ones die with `SIGKILL`. For half a minute their announcements still stand in the
directory, and calls to them fail; the mixture is that of the experts that answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from node.app.demo.driver import LISTEN, DemoFailed, DemoStage, Tell, has_told, told_event
from node.run.template import small_with_experts

if TYPE_CHECKING:
    from pathlib import Path

    from node.app.demo.processes import Child, Event

RUN: Final = "experts-demo"
SERVERS: Final = ("sam", "sue", "stan", "sara")
TRAINERS: Final = ("ann", "ben", "cleo")
KILLED: Final = ("sam", "sue", "cleo")
STEPS_BEFORE: Final = 8
STEPS_AFTER: Final = 8  # more, with the experts that were taken over
STEPS_BETWEEN_LOOKS: Final = 4
TAKE_OVER_SECONDS: Final = 75.0  # the promise is a minute, on a machine that does nothing else
COMPARED: Final = 3  # steps at either end, whose mean losses are compared
FALLS_BELOW: Final = 0.95  # of the first steps' loss

SIZES: Final = (3, 4)
DEFINITION: Final = small_with_experts(
    RUN,
    batch=48,
    sizes=SIZES,
    k=3,
    run='description = "a small GPT with a mixture of experts, to see potluck at work"',
    averaging="grace_seconds = 3.0",
    experts="grace_seconds = 1.0\ntimeout_seconds = 10.0\nin_flight = 2",
    checkpoints="every_seconds = 5.0",
)
CELLS: Final = 2 * prod(SIZES)


@dataclass
class ExpertsStory:
    """What the children have told."""

    losses: dict[int, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """Of each trainer, those with samples of its own."""
    taken: dict[str, Counter[str]] = field(default_factory=dict)
    """By each, how many experts it took, by how they came."""
    left: set[str] = field(default_factory=set)

    def take(self, name: str, event: Event) -> None:
        match event.get("event"):
            case "step_taken":
                if event.get("loss") is not None:
                    self.losses.setdefault(int(event["epoch"]), float(event["loss"]))
                if event.get("own_samples"):
                    self.steps[name] = self.steps.get(name, 0) + 1
            case "experts_taken":
                self.taken.setdefault(name, Counter())[event["how"]] += len(event["uids"])
            case "left":
                self.left.add(name)

    @property
    def epoch(self) -> int:
        """The number of steps with a loss."""
        return len(self.losses)

    def taken_how(self, how: str) -> int:
        return sum(counts[how] for counts in self.taken.values())

    def ends(self) -> tuple[float, float]:
        """The mean losses of the first and of the last steps."""
        losses = [self.losses[epoch] for epoch in sorted(self.losses)]
        return mean(losses[:COMPARED]), mean(losses[-COMPARED:])


class ExpertsDemo(DemoStage):
    """One demo of a run with experts."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        super().__init__(folder, tell)
        self._organiser = folder / "organiser"
        self._story = ExpertsStory()

    async def _play(self) -> dict[str, Any]:
        invite = await self._start_organiser()
        children = {name: self._serve(name, invite) for name in SERVERS}
        self._tell(
            "serving", f"{', '.join(SERVERS)} type `potluck experts serve`: processes of their own"
        )
        await self._until(
            lambda: all(has_told(child, "experts_taken") for child in children.values()),
            "the servers' experts",
        )
        for name in TRAINERS:
            children[name] = self._join(name, invite)
        self._tell("joining", f"{', '.join(TRAINERS)} type `potluck join`, to train")
        await self._until(
            lambda: (
                all(self._story.steps.get(name) for name in TRAINERS)
                and self._story.epoch >= STEPS_BEFORE
            ),
            "the first steps",
        )
        before = await self._census("the experts before")
        lost = self._kill(children, before)
        killed_at, began = self._story.epoch, self._seconds
        new = self._story.taken_how("new")
        live = await self._until_served_again(began)
        seconds = self._seconds - began
        copies, anew = self._story.taken_how("taken over"), self._story.taken_how("new") - new
        first_weights = f", {anew} from their first weights" if anew else ""
        self._tell(
            "taken_over",
            f"after {seconds:.0f} s {live} of {CELLS} experts are served: {copies} were taken over "
            f"from their copies{first_weights}",
            live=live,
            take_over_seconds=round(seconds, 1),
        )
        wanted = self._story.epoch + STEPS_AFTER
        await self._until(lambda: self._story.epoch >= wanted, "the steps after that")
        for child in self._children:
            child.terminate()
        await self._until(
            lambda: all(child.exit_code is not None for child in self._children), "their leaving"
        )
        return self._summary(len(lost), killed_at, live, seconds) | {
            "from_copies": copies,
            "anew": anew,
        }

    async def _start_organiser(self) -> str:
        folder = self._folder / "run"
        folder.mkdir()
        (folder / "run.toml").write_text(DEFINITION, "utf-8")
        command = ["run", "start", str(folder), "--keep-only", "--json", "--threads", "1"]
        child = self._start("organiser", [*command, "--listen", LISTEN], home=self._organiser)
        await self._until(lambda: has_told(child, "started"), "the organiser's peer")
        self._tell(
            "definition",
            f"a run whose model has two mixtures, with {CELLS} experts in all; its organiser has "
            "signed it, and keeps the rest of the model",
            cells=CELLS,
        )
        return str(told_event(child, "started")["invite"])

    def _serve(self, name: str, invite: str) -> Child:
        return self._volunteer(name, invite, "experts", "serve")

    def _join(self, name: str, invite: str) -> Child:
        return self._volunteer(name, invite, "join")

    def _volunteer(self, name: str, invite: str, *command: str) -> Child:
        words = [*command, "--json", "--threads", "1", "--listen", LISTEN]
        variables = {"POTLUCK_INVITE": invite}
        return self._start(name, words, home=self._folder / name, variables=variables)

    async def _until_served_again(self, began: float) -> int:
        """How many experts the survivors serve: all, or as many as they do after a minute."""
        killed = {_peer_of(self._folder / name) for name in KILLED}
        while True:
            next_look = self._story.epoch + STEPS_BETWEEN_LOOKS
            await self._until(
                lambda at=next_look: self._story.epoch >= at,  # type: ignore[misc]
                "the training after that",
            )
            live = len(served_by_others(await self._census("the experts"), killed))
            if live >= CELLS or self._seconds - began > TAKE_OVER_SECONDS:
                return live

    async def _census(self, part: str) -> Event:
        return await self._do_at(self._organiser, part, "experts", "list")

    def _kill(self, children: dict[str, Child], census: Event) -> set[str]:
        """Returns the experts of those that are killed."""
        killed = {_peer_of(self._folder / name) for name in KILLED}
        lost = served_by_others(census, set()) - served_by_others(census, killed)
        for name in KILLED:
            if not children[name].kill():
                raise DemoFailed(f"{name} had ended before it was killed.")
        words = f"{', '.join(KILLED)} are killed (SIGKILL), and with them {len(lost)} experts"
        self._tell("killed", f"{words}: the others continue", names=list(KILLED), experts=len(lost))
        return lost

    def _summary(self, lost: int, killed_at: int, live: int, seconds: float) -> dict[str, Any]:
        first, last = self._story.ends()
        survivors = [name for name in (*SERVERS, *TRAINERS) if name not in KILLED]
        stayed = [name for name in survivors if name not in self._story.left]
        failures = []
        if last > FALLS_BELOW * first:
            failures.append(f"the loss did not fall: {first:.3f} before, {last:.3f} after")
        if live < CELLS:
            failures.append(f"only {live} of {CELLS} experts were live in the end")
        if stayed:
            failures.append(f"{', '.join(stayed)} did not leave as told")
        return {
            "event": "summary",
            "servers": len(SERVERS),
            "trainers": len(TRAINERS),
            "killed": list(KILLED),
            "killed_at_step": killed_at,
            "experts": CELLS,
            "lost": lost,
            "take_over_seconds": round(seconds, 1),
            "live": live,
            "steps": self._story.epoch,
            "loss_first": round(first, 4),
            "loss_last": round(last, 4),
            "failures": failures,
            "seconds": round(self._seconds, 1),
        }

    def _take(self, child: Child, event: Event) -> None:
        if child.name in (*SERVERS, *TRAINERS):
            before = self._story.epoch
            self._story.take(child.name, event)
            epoch = self._story.epoch
            if epoch > before and epoch % 4 == 1:
                loss = self._story.losses[max(self._story.losses)]
                self._tell("step", f"step {epoch}: loss {loss:.2f}", epoch=epoch, loss=loss)
        self._wake()

    def _has_left(self, child: Child) -> bool:
        return child.name in self._story.left


def served_by_others(census: Event, peers: set[str]) -> set[str]:
    """The experts with a server that is none of these."""
    return {
        uid
        for server in census["servers"]
        if server["peer"] not in peers
        for uid in server["experts"]
    }


def _peer_of(home: Path) -> str:
    from node.core.configuration import read_configuration
    from node.core.key_file import load_identity

    configuration = read_configuration(environment={"POTLUCK_HOME": str(home)})
    identity = load_identity(configuration.key_file)
    return "" if identity is None else identity.peer_id


def experts_page_of(summary: dict[str, Any], *, keep: bool) -> str:
    """The summary for a person."""
    lines = [
        "",
        f"{summary['servers']} servers with {summary['experts']} experts and "
        f"{summary['trainers']} trainers; {', '.join(summary['killed'])} were killed at step "
        f"{summary['killed_at_step']}.",
        f"Their {summary['lost']} experts were taken over within {summary['take_over_seconds']:.0f}"
        f" s: {summary['live']} of {summary['experts']} are served.",
        f"loss {summary['loss_first']:.2f} -> {summary['loss_last']:.2f} in {summary['steps']} "
        f"steps; {summary['seconds']:.0f} s in all",
    ]
    lines += [f"FAILED: {words}" for words in summary["failures"]]
    if not keep:
        lines.append("Everything is removed; `potluck demo --experts --keep` keeps it.")
    return "\n".join(lines)
