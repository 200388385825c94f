"""The demo's story: its run, the events, and its claims, as one object and as a page. Pure.

The run's definition is the output of `potluck run init`, with a few values changed as a person
would, so that it fits into a minute. The story takes the events that the volunteers and the keeper
print (node/training/words.py, `object_of`): contributions, losses, digests of parameters. At the
end `failures` lists the claims that were not met, which decides the command's exit code.

The steps have to last longer than a late volunteer needs to start, on slow machines and on fast
ones, and the loss has to fall far enough in them. A sample counts when a round with it was
committed, as every member of that round reports. So the samples of a killed volunteer are known,
too, up to its last step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.core.caps.units import in_words
from protocols.accumulation.events import MOST_BATCHES

if TYPE_CHECKING:
    from node.app.demo.judging import Judged


RUN = "demo"
STEPS = 36
BATCH = 96  # the samples of a step, at least
STEP_SECONDS = 0.5
"""A step has as many samples as one volunteer computes in this time, if that is more."""
LATE_AT_STEP = 3  # when the late one is started; it takes some fifteen steps to be there
KILL_AT_STEP = STEPS // 3

# With 0.002 and more, one of a few runs makes a step in which the attention of the first layer tips
# over, with a gradient no larger than others: the loss jumps by one to three, and falls again.
LEARNING_RATE = "0.0015"

CHANGES: dict[tuple[str, str], str] = {
    ("run", "description"): '"a small GPT that learns Python, to see potluck at work"',
    ("optimizer", "lr"): LEARNING_RATE,
    ("schedule", "warmup"): "4",
    ("schedule", "steps"): str(STEPS),
    ("training", "steps"): str(STEPS),
    ("averaging", "grace_seconds"): "3.0",
    ("averaging", "round_seconds"): "60.0",
    ("checkpoints", "every_seconds"): "5.0",
}

_SECTION = re.compile(r"\[([a-z]+)\]\s*$")
_KEY = re.compile(r"#?([a-z_]+) = ")


def batch_for(samples_per_second: float) -> int:
    """The samples of a step on a machine that computes so many."""
    return max(BATCH, round(samples_per_second * STEP_SECONDS))


def demo_sized(text: str, batch: int = BATCH) -> str:
    """The text of a new run.toml with `CHANGES` and this batch in it. KeyError if one does not fit
    in."""
    left, section, lines = CHANGES | {("training", "batch"): str(batch)}, "", []
    for line in text.splitlines():
        header, key = _SECTION.match(line), _KEY.match(line)
        if header is not None:
            section = header[1]
        elif key is not None and (section, key[1]) in left:
            line = f"{key[1]} = {left.pop((section, key[1]))}"
        lines.append(line)
    if left:
        raise KeyError(f"run.toml has no place for {', '.join('.'.join(one) for one in left)}")
    return "\n".join([*lines, ""])


BARS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 48


@dataclass(frozen=True)
class ToldRound:
    """One member's report of a step's round: the state after it, and how many samples each peer
    brought. `own`: the number that the member counts as its own."""

    history: str
    brought: dict[str, int]
    own: int


@dataclass
class StoryVolunteer:
    """One person's part."""

    name: str
    samples: int = 0
    steps: int = 0
    peer: str = ""
    epoch: int = 0
    entered_at: int | None = None  # the epoch with which the loop began
    samples_per_second: float = 0.0
    caught_up: dict[str, Any] | None = None
    parameters: str = ""
    left: bool = False
    killed_at: int | None = None
    told: dict[int, ToldRound] = field(default_factory=dict)


@dataclass
class Story:
    """Invariant: `curve` has one loss for each epoch that any peer has reported."""

    batch: int = BATCH
    people: dict[str, StoryVolunteer] = field(default_factory=dict)
    kept: dict[int, ToldRound] = field(default_factory=dict)
    """The keeper's report of each step; it reports none that it was not in."""
    kept_epoch: int = 0
    _losses: dict[int, float] = field(default_factory=dict)

    def person(self, name: str) -> StoryVolunteer:
        return self.people.setdefault(name, StoryVolunteer(name))

    def take(self, name: str, event: dict[str, Any]) -> None:
        """Take one object that this volunteer printed; irrelevant ones are ignored."""
        one = self.person(name)
        match event.get("event"):
            case "measured":
                one.samples_per_second = float(event["samples_per_second"])
            case "began":
                one.entered_at = one.epoch = int(event["epoch"])
            case "step_taken":
                one.epoch = max(one.epoch, int(event["epoch"]) + 1)
                if event["own_samples"] and len(event["members"]) > 1:
                    one.samples += int(event["own_samples"])
                    one.steps += 1
                one.told[int(event["epoch"])] = _told(event)
                if event["loss"] is not None:
                    self._losses[int(event["epoch"]) + 1] = float(event["loss"])
            case "caught_up":
                one.epoch = max(one.epoch, int(event["epoch"]))
                if one.caught_up is None or event["fetched_bytes"] > one.caught_up["fetched_bytes"]:
                    one.caught_up = event
            case "run_complete":
                one.epoch, one.parameters = int(event["epoch"]), str(event["parameters"])
            case "left":
                one.left = True
            case _:
                pass

    def take_of_keeper(self, event: dict[str, Any]) -> None:
        """Take one object that the keeper printed."""
        match event.get("event"):
            case "step_taken":
                self.kept_epoch = int(event["epoch"]) + 1
                self.kept[int(event["epoch"])] = _told(event)
            case "caught_up":
                self.kept_epoch = int(event["epoch"])
                for seen in event["seen"]:
                    self.kept[int(seen["epoch"])] = _told(seen)
            case _:
                pass

    @property
    def epoch(self) -> int:
        """The furthest epoch of any peer."""
        return max((one.epoch for one in self.people.values()), default=0)

    def curve(self) -> list[tuple[int, float]]:
        """The run's loss in each step."""
        return sorted(self._losses.items())

    def contributions(self) -> list[dict[str, Any]]:
        """The contributions, the largest first."""
        whole = sum(one.samples for one in self.people.values())
        ordered = sorted(self.people.values(), key=lambda one: (-one.samples, one.name))
        return [
            {
                "name": one.name,
                "samples": one.samples,
                "share": round(one.samples / whole, 4) if whole else 0.0,
                "steps": one.steps,
                **self._witnessed(one),
                "killed": one.killed_at is not None,
            }
            for one in ordered
        ]

    def _witnessed(self, one: StoryVolunteer) -> dict[str, Any]:
        """Split its samples: those in steps of the keeper, by the keeper's signed lists; those in
        other steps; and the steps about which the two disagree."""
        seen = {
            epoch: self._credited(told.brought.get(one.peer, 0))
            for epoch, told in self.kept.items()
        }
        unseen: Counter[int] = Counter()
        for teller in self.people.values():
            for epoch in teller.told.keys() - self.kept.keys():
                brought = self._credited(teller.told[epoch].brought.get(one.peer, 0))
                unseen[epoch] = max(unseen[epoch], brought)
        differing = [
            epoch
            for epoch, told in sorted(one.told.items())
            if epoch in self.kept
            and told.history == self.kept[epoch].history
            and told.own != self.kept[epoch].brought.get(one.peer)
        ]
        return {
            "witnessed": sum(seen.values()),
            "unwitnessed": unseen.total(),
            "differing": differing,
        }

    def _credited(self, samples: int) -> int:
        return min(samples, MOST_BATCHES * self.batch)

    def survivors(self) -> list[StoryVolunteer]:
        return [one for one in self.people.values() if one.killed_at is None]


def _told(event: dict[str, Any]) -> ToldRound:
    brought = {str(one["peer"]): round(one["samples"]) for one in event["shares"]}
    return ToldRound(str(event["history"]), brought, int(event["own_samples"]))


def sparkline(values: list[float], columns: int = SPARK_COLUMNS) -> str:
    """A curve in one line: as many bars as there is room for, each the mean of its part."""
    if not values:
        return ""
    bars = min(columns, len(values))
    parts = [values[i * len(values) // bars : (i + 1) * len(values) // bars] for i in range(bars)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((one - low) / span * (len(BARS) - 1))] for one in means)


LARGEST_LOSS_RATIO = 0.6  # of the last loss to the first one


def summary_of(
    story: Story,
    judged: Judged,
    checkpoint: Path,
    health: dict[str, Any],
    board: dict[str, Any],
    *,
    late: str,
    seconds: float,
) -> dict[str, Any]:
    """All claims of the demo; `board` is `potluck leaderboard` at the backbone peer. `failures`
    lists the claims that were not met; empty is success."""
    digests = {one.name: one.parameters for one in story.survivors()}
    digests["checkpoint"] = judged.digest
    newcomer = story.person(late)
    found = newcomer.caught_up or {}
    killed = [one for one in story.people.values() if one.killed_at is not None]
    summary: dict[str, Any] = {
        "event": "summary",
        "seconds": round(seconds, 2),
        "steps": story.epoch,
        "parameters": judged.parameters,
        "loss_first": round(judged.loss_first, 4),
        "loss_last": round(judged.loss_last, 4),
        "loss_ratio": round(judged.loss_last / judged.loss_first, 4),
        "curve": [[epoch, round(loss, 4)] for epoch, loss in story.curve()],
        "contributions": story.contributions(),
        "credit": {kind: [_rank_of(one) for one in board[kind]] for kind in ("people", "helpers")},
        "killed": [{"name": one.name, "epoch": one.killed_at} for one in killed],
        "late": {
            "name": late,
            "entered_at": newcomer.entered_at,
            "caught_up_with": found.get("epoch"),
            "fetched_bytes": found.get("fetched_bytes", 0),
            "samples": newcomer.samples,
        },
        "digests": digests,
        "digests_equal": len(set(digests.values())) == 1 and all(digests.values()),
        "checkpoint": str(checkpoint),
        "checkpoint_epoch": judged.epoch,
        "health": health,
        "sample": judged.sample,
    }
    summary["failures"] = failures(summary)
    return summary


def failures(summary: dict[str, Any]) -> list[str]:
    """The claims that do not hold, in words."""
    wrong = []
    if not summary["loss_ratio"] < LARGEST_LOSS_RATIO:
        wrong.append(f"the loss fell only to {summary['loss_ratio']:.0%} of the first one")
    if not summary["digests_equal"]:
        wrong.append("the survivors do not hold the same parameters")
    wrong += _credit_failures(summary)
    if summary["checkpoint_epoch"] != summary["steps"]:
        wrong.append("the last checkpoint is not of the last step")
    if not summary["killed"]:
        wrong.append("nobody was killed")
    if not summary["late"]["samples"]:
        wrong.append("the latecomer's samples did not count")
    if summary["health"].get("status") != 200:
        wrong.append(f"the backbone peer was not healthy: {summary['health'].get('troubles')}")
    return wrong


def _rank_of(rank: dict[str, Any]) -> dict[str, Any]:
    """One person's rank by the records. A person who logged in with a code is `code:NAME`."""
    kept = ("samples", "steps", "averaged_bytes", "service_seconds", "devices")
    return {"name": rank["person"].removeprefix("code:"), **{key: rank[key] for key in kept}}


def _credit_failures(summary: dict[str, Any]) -> list[str]:
    """Compare the sums of the records with the keeper's signed lists, and with each volunteer's own
    report.

    Every sample in a step of the keeper has to be credited: the records are added up at the keeper,
    and its own record alone is enough. For a step without it (it was left out, or took the state of
    a later one), only the members' records show the samples. Such a record may not have reached the
    keeper, since it is signed every few seconds, and a peer that is killed, or has half a second
    left, may not hand it over. So those samples may be credited, and no others.
    """
    credited = {one["name"]: one["samples"] for one in summary["credit"]["people"]}
    wrong = []
    for one in summary["contributions"]:
        found, least = credited.get(one["name"], 0), one["witnessed"]
        if not least <= found <= least + one["unwitnessed"]:
            wrong.append(
                f"the records give {one['name']} {found:,} samples, but the keeper's rounds "
                f"{least:,} (others: {one['unwitnessed']:,})"
            )
        if one["differing"]:
            wrong.append(f"{one['name']} and the keeper differ on the steps {one['differing']}")
    return wrong


def page_of(summary: dict[str, Any], *, keep: bool) -> str:
    """The summary for people."""
    losses = [loss for _, loss in summary["curve"]]
    survivors = [name for name in summary["digests"] if name != "checkpoint"]
    digest = summary["digests"]["checkpoint"]
    equal = (
        f"{', '.join(survivors)} and the checkpoint hold the same parameters: {digest}"
        if summary["digests_equal"]
        else f"NOT the same parameters: {summary['digests']}"
    )
    kept = summary["checkpoint"] if keep else "written, and removed with the rest (--keep keeps it)"
    sample = "\n".join(f"              {line}" for line in summary["sample"].splitlines())
    return "\n".join(
        [
            "",
            f"  loss        {sparkline(losses)}",
            f"              {summary['loss_first']:.2f} at first, {summary['loss_last']:.2f} after "
            f"{summary['steps']} steps (nats per byte, of text that nobody trained on)",
            f"  who         {_shares(summary)}",
            f"  equal       {equal}",
            f"  checkpoint  {kept}",
            "  it writes   (after half a minute of training: the shape of code, not the sense)",
            sample,
            "",
            f"That took {summary['seconds']:.0f} s. Now try it yourself: `potluck run init DIR` "
            "defines a run, `potluck join INVITE` takes part in one.",
            *(f"FAILED: {one}" for one in summary["failures"]),
        ]
    )


def _shares(summary: dict[str, Any]) -> str:
    """By the records, not by the peers' own claims."""
    late, killed = summary["late"]["name"], {one["name"] for one in summary["killed"]}
    people, helpers = summary["credit"]["people"], summary["credit"]["helpers"]
    whole = sum(one["samples"] for one in people) or 1
    told = []
    for one in people:
        name, samples = one["name"], one["samples"]
        note = " (killed)" if name in killed else " (late)" if name == late else ""
        told.append(f"{name}{note} {samples:,} samples, {samples / whole:.0%}")
    told += [f"{one['name']} averaged {in_words(one['averaged_bytes'])}" for one in helpers]
    return f"\n{' ' * 14}".join(told)
