"""How a round ends as one: the pure state machine of one member, without I/O and clock.

agreement = Agreement(me, size, coordinators, timing, now, plan, verify)
agreement.begin(now)                       # at the leader only: coordinators[0]
for effect in agreement.effects(): ...     # after each call below
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.verdicts import Effect

Plan = Callable[[tuple[int, ...]], tuple[int, ...]]
"""From the members of an attempt to its cuts."""

CheckCuts = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""From members and cuts of a coordinator's Start to what is wrong with them; "" if nothing is."""

Verify = Callable[[Ballot, Statement], bool]
"""Whether a statement was signed by the reducer whose part it is about, in this ballot."""


@dataclass(frozen=True)
class Timing:
    """What a round waits for, in seconds; `round_seconds` is for the whole of it."""

    round_seconds: float
    answer_seconds: float = 1.5
    poll_seconds: float = 1.0
    silence_seconds: float = 3.0
    stagger_seconds: float = 0.4


class Agreement:
    """One member's side of one round. Every method may add effects; drain them after each call."""

    def __init__(
        self,
        me: int,
        size: int,
        coordinators: Sequence[int],
        timing: Timing,
        now: float,
        *,
        plan: Plan,
        verify: Verify,
        check_cuts: CheckCuts | None = None,
    ) -> None:
        self.verdict = None
        raise NotImplementedError

    def begin(self, now: float) -> None:
        """Start ballot 0; at `coordinators[0]` only."""

    def receive(self, sender: int, message: AgreementMessage, now: float) -> None:
        """Take a message; RemoteMisbehaviour, with nothing changed, if an honest member of this
        round would not have sent it."""

    def unreachable(self, member: int, now: float) -> None:
        """A message to this member was not acknowledged, or its link is lost."""

    def exchange_done(
        self, ballot: Ballot, digest: bytes, statements: tuple[Statement, ...], now: float
    ) -> None:
        """The exchange of this ballot has brought the whole result; digest as digest_of_result."""

    def exchange_failed(
        self, ballot: Ballot, suspicions: tuple[Suspicion, ...], now: float
    ) -> None:
        """The exchange of this ballot has failed because of these."""

    def tick(self, now: float) -> None:
        """Do what is due; to be called at `next_deadline`, and harmless at any other time."""

    @property
    def next_deadline(self) -> float:
        """When `tick` is due; inf after the verdict, when nothing is left to do."""
        raise NotImplementedError

    def effects(self) -> list[Effect]:
        """What is to be done now, in order; drained."""
        raise NotImplementedError
