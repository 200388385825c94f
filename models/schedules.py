"""Learning rates over the epochs: a linear warm-up, then one of four kinds of decay.

A schedule is a torch `LRScheduler` whose whole state is one number, the epochs done, so that it
travels as `{"last_epoch": 12}`; a newcomer takes that number and sets its rates from its own
settings.

The first step has a rate above zero. With `warmup` w the steps 0 … w - 1 take 1/(w+1) … w/(w+1) of
the full rate, and step w is the first with all of it; the rate of the last step before `steps` is
just above the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from models.errors import WrongSettings

DIGITS = 12
"""Of a factor. Cosines and powers differ between machines in the last of their 16 digits, and all
peers should step with the same rate."""

Decay = Literal["constant", "linear", "cosine", "polynomial"]
DECAYS: tuple[Decay, ...] = get_args(Decay)
Steps = Annotated[int, Meta(ge=0, le=1 << 40)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class ScheduleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """- `warmup`: the number of epochs before the full rate.
    - `steps`: the epoch from which the floor is kept; without meaning for "constant".
    - `floor`: the rate at the end, as a fraction of the full one.
    - `power`: of the polynomial; 1 is linear, and 2 is the published one of LARS.
    """

    decay: Decay
    warmup: Steps = 0
    steps: Steps = 0
    floor: Fraction = 0.0
    power: Annotated[float, Meta(gt=0.0, le=16.0)] = 2.0

    def __post_init__(self) -> None:
        if self.decay != "constant" and self.steps <= self.warmup:
            raise WrongSettings(
                f"A {self.decay} schedule cannot end at step {self.steps} after a warm-up of "
                f"{self.warmup}.",
                advice="Set `steps` to the number of steps that the whole run will make.",
            )


def factor(settings: ScheduleSettings, epoch: int) -> float:
    """The fraction of the full rate for the step from this epoch to the next."""
    if epoch < settings.warmup:
        return round((epoch + 1) / (settings.warmup + 1), DIGITS)
    if settings.decay == "constant":
        return 1.0
    done = min((epoch - settings.warmup) / (settings.steps - settings.warmup), 1.0)
    match settings.decay:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case "polynomial":
            left = (1.0 - done) ** settings.power
    return round(settings.floor + (1.0 - settings.floor) * left, DIGITS)


class Schedule(LRScheduler):
    """Sets each group's rate to `factor` times the rate that the optimizer was made with."""

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings) -> None:
        self.settings = settings
        super().__init__(optimizer)

    @property
    def described(self) -> str:
        """Two schedules with the same words set the same rates (protocols/accumulation compares
        them)."""
        own = self.settings
        return (
            f"{own.decay}, warmup={own.warmup}, steps={own.steps}, floor={own.floor:.9g}, "
            f"power={own.power:.9g}"
        )

    def get_lr(self) -> list[Any]:
        return [rate * factor(self.settings, self.last_epoch) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the rates, too: from our settings, not from the state's sender."""
        epoch = state_dict.get("last_epoch")
        if type(epoch) is not int or not 0 <= epoch < 1 << 63 or len(state_dict) != 1:
            raise WrongSettings(
                "This is not the state of a schedule: it must be the epochs done, and only that.",
                why=f"It has the keys {sorted(map(str, state_dict))}.",
            )
        self.last_epoch = epoch
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
