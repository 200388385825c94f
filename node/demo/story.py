"""What the demo has seen: who brought what, the loss, who has which parameters. Pure.

Fed with the events that the volunteers print (node/trainer/words.py, `object_of`).

Easy to get wrong: a sample counts when a round with it was committed, as every member of that round
tells. So what a volunteer brought who was killed is known, too: up to its last step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 48


@dataclass
class Volunteer:
    """One person's part."""

    name: str
    samples: int = 0
    steps: int = 0
    given_up: int = 0  # samples that it counts as in no step
    epoch: int = 0
    entered_at: int | None = None  # the epoch with which the loop began
    samples_per_second: float = 0.0
    caught_up: dict[str, Any] | None = None
    parameters: str = ""
    left: bool = False
    killed_at: int | None = None


@dataclass
class Story:
    """Invariant: `curve` has one loss for each epoch that anybody has told of."""

    people: dict[str, Volunteer] = field(default_factory=dict)
    _losses: dict[int, dict[str, tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

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
            case "gradients_dropped":
                one.given_up += int(event["samples"])
            case "caught_up":
                one.epoch = max(one.epoch, int(event["epoch"]))
                if one.caught_up is None or event["fetched_bytes"] > one.caught_up["fetched_bytes"]:
                    one.caught_up = event
            case "loss_seen":
                told = float(event["loss"]), int(event["samples"])
                self._losses[int(event["epoch"])][name] = told
            case "run_complete":
                one.epoch, one.parameters = int(event["epoch"]), str(event["parameters"])
            case "left":
                one.left = True
            case _:
                pass

    @property
    def epoch(self) -> int:
        """The furthest that anybody is."""
        return max((one.epoch for one in self.people.values()), default=0)

    def curve(self) -> list[tuple[int, float]]:
        """The loss of each step's samples, over all who told theirs."""
        return [
            (epoch, sum(loss * count for loss, count in told.values()) / samples)
            for epoch, told in sorted(self._losses.items())
            if (samples := sum(count for _, count in told.values()))
        ]

    def loss_at(self, epoch: int) -> float | None:
        return dict(self.curve()).get(epoch)

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
                "given_up": one.given_up,
                "killed": one.killed_at is not None,
            }
            for one in ordered
        ]

    def survivors(self) -> list[Volunteer]:
        return [one for one in self.people.values() if one.killed_at is None]


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
