"""What the parts of one member's agreement share: who it is, its timers, and what it sends.

A message of a member to itself is put in `inbox` and taken like any other, so that a coordinator
treats itself as it treats everybody. Timers have names; to arm one again moves it.

Easy to get wrong: no decision may rest on what a timer's clock says, only on its having fired.
That is what lets the tests fire every timer at every moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.verdicts import Effect, Send


@dataclass(frozen=True)
class Timing:
    """What a round waits for, in seconds.

    - `round_seconds`: for the exchange, with all its attempts; then the round is discarded.
    - `closing_seconds`: for agreeing on that; then this member stops, if need be in doubt.
    - `answer_seconds`: for an answer that costs nothing: a few round trips of a bad home link.
    - `poll_seconds`: how often a member shows its coordinator that it is alive, and is shown it.
    - `silence_seconds`: after so much of it the other is taken for gone. At least twice a poll.
    - `stagger_seconds`: how long each successor waits for the one before it.
    """

    round_seconds: float
    closing_seconds: float = 8.0
    answer_seconds: float = 1.5
    poll_seconds: float = 1.0
    silence_seconds: float = 3.0
    stagger_seconds: float = 0.4


class Desk:
    """The surroundings of one member in one round. `now` is set by whoever was called last."""

    def __init__(
        self, me: int, size: int, coordinators: Sequence[int], timing: Timing, now: float
    ) -> None:
        self.me = me
        self.size = size
        self.coordinators = tuple(coordinators)
        self.timing = timing
        self.now = now
        self.timers: dict[str, float] = {}
        self.inbox: deque[AgreementMessage] = deque()
        self.effects: list[Effect] = []

    def send(self, to: int, message: AgreementMessage) -> None:
        if to == self.me:
            self.inbox.append(message)
        else:
            self.effects.append(Send(to, message))

    def send_to_others(self, message: AgreementMessage) -> None:
        for member in range(self.size):
            if member != self.me:
                self.send(member, message)

    def send_to_all(self, message: AgreementMessage) -> None:
        self.send_to_others(message)
        self.send(self.me, message)

    def arm(self, name: str, seconds: float) -> None:
        self.timers[name] = self.now + seconds

    def disarm(self, *names: str) -> None:
        for name in names:
            self.timers.pop(name, None)

    def due(self) -> str | None:
        """The timer that was due first, if one is due by now."""
        name = min(self.timers, key=lambda each: self.timers[each], default=None)
        return name if name is not None and self.timers[name] <= self.now else None

    @property
    def next_deadline(self) -> float:
        return min(self.timers.values(), default=math.inf)
