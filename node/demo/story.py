"""What the demo has seen: who brought what, the loss, who has which parameters. Pure.

Fed with the events that the volunteers and the keeper print (node/trainer/words.py, `object_of`).

Easy to get wrong: a sample counts when a round with it was committed, as every member of that round
tells. So what a volunteer brought who was killed is known, too: up to its last step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from node.demo.definition import BATCH
from protocols.accumulation.share import MOST_BATCHES

BARS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 48


@dataclass(frozen=True)
class Told:
    """What somebody who was in a step's round tells of it: the state that it made, and how many
    samples each peer brought. `own`: what the one who tells counts as its own."""

    history: str
    brought: dict[str, int]
    own: int


@dataclass
class Volunteer:
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
    told: dict[int, Told] = field(default_factory=dict)


@dataclass
class Story:
    """Invariant: `curve` has one loss for each epoch that anybody has told of."""

    people: dict[str, Volunteer] = field(default_factory=dict)
    kept: dict[int, Told] = field(default_factory=dict)
    """What the keeper tells of each step; it tells of none that it was not in."""
    kept_epoch: int = 0
    _losses: dict[int, float] = field(default_factory=dict)

    def person(self, name: str) -> Volunteer:
        return self.people.setdefault(name, Volunteer(name))

    def take(self, name: str, event: dict[str, Any]) -> None:
        """One object that this volunteer printed; what says nothing here is passed over."""
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
        """One object that the keeper printed."""
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
        """The furthest that anybody is."""
        return max((one.epoch for one in self.people.values()), default=0)

    def curve(self) -> list[tuple[int, float]]:
        """The run's loss in each step."""
        return sorted(self._losses.items())

    def loss_at(self, epoch: int) -> float | None:
        return self._losses.get(epoch)

    def contributions(self) -> list[dict[str, Any]]:
        """Who brought what, the most first."""
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

    def _witnessed(self, one: Volunteer) -> dict[str, Any]:
        """Of its samples those in steps that the keeper was in, by its signed lists; those in
        others; and the steps of which the two tell otherwise."""
        seen = {
            epoch: _credited(told.brought.get(one.peer, 0)) for epoch, told in self.kept.items()
        }
        unseen: Counter[int] = Counter()
        for teller in self.people.values():
            for epoch in teller.told.keys() - self.kept.keys():
                brought = _credited(teller.told[epoch].brought.get(one.peer, 0))
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

    def survivors(self) -> list[Volunteer]:
        return [one for one in self.people.values() if one.killed_at is None]


def _told(event: dict[str, Any]) -> Told:
    brought = {str(one["peer"]): round(one["samples"]) for one in event["shares"]}
    return Told(str(event["history"]), brought, int(event["own_samples"]))


def _credited(samples: int) -> int:
    return min(samples, MOST_BATCHES * BATCH)


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
