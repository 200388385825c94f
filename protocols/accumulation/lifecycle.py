"""The state machine of one peer in a run: which phase it is in, and what it does next. Pure.

    lifecycle = Lifecycle(Mode(target_samples=4096), epoch=0, history=first)
    for effect in lifecycle.take(Contributed(samples=32)):
        match effect:
            case Average(weight=weight, expected=expected): ...
            case Step(): ...
            case Fetch(at_least_epoch=epoch): ...

    joining -> accumulating -> averaging -> stepping (-> averaging parameters) -> accumulating
    when the run has gone on without this peer:  behind -> fetching -> accumulating

The caller reports events and carries out the effects in order. Only this module decides which
samples and results are applied, kept or dropped.

In this file, from top to bottom: the state (`Phase`, `Mode`, `Life`), the events, the effects, the
machine (`Lifecycle`, `advance`), one function for each transition, and `TABLE`, which says which
function handles which event in which phase.

Promises:

- A sample is in at most one step. It is counted when its round commits with this peer in it.
  Otherwise an effect keeps or drops it.
- A result of another epoch or history is never applied.
- There is a way out of every phase.

Easy to get wrong:

- A committed result with fewer than COMMIT_SHARE of the target's samples is too light: no member
  applies it.
- An estimate that was made for another epoch or history than that of the `Life` decides nothing.
- Report the newest estimate before `Averaged`: it says who else takes part.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from protocols.accumulation.estimate import Estimate
from protocols.accumulation.known import NOBODY
from protocols.accumulation.lineage import history_after_parameters, next_history
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.cohorts import Cohort

# ---- the state of the machine


class Phase(enum.Enum):
    JOINING = "joining"
    """This peer has not read the others' progress yet."""
    ACCUMULATING = "accumulating"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    AVERAGING_PARAMETERS = "averaging parameters"
    BEHIND = "behind"
    """This peer's state is not the run's. The next estimate says from which peers to fetch it."""
    FETCHING = "fetching"


@dataclass(frozen=True)
class Mode:
    """How this peer takes part. It never changes.

    - `target_samples`: samples of one round, as in ProgressSettings.
    - `delayed`: compute the next epoch's samples while a round is averaged and its step is made.
    - `auxiliary`: take part in rounds without samples.
    - `parameters_every`: average the parameters, too, after every so many steps; 0: never.
    - `last_epoch`: the run is complete at this epoch, and no further round begins; 0: never.
    """

    target_samples: int
    delayed: bool = False
    auxiliary: bool = False
    parameters_every: int = 0
    last_epoch: int = 0

    def is_complete_at(self, epoch: int) -> bool:
        return 0 < self.last_epoch <= epoch


@dataclass(frozen=True)
class Life:
    """The state of one peer.

    - `samples`: accumulated and in no round. In delayed mode, while a round is under way, they
      belong to the next epoch.
    - `in_round`: samples in the round that is under way.
    - `number`: of the newest estimate.
    - `looked_past`: only estimates with a higher number decide anything.
    - `company`: how many others take part, by the newest estimate of this epoch and history.
    - `holders`, `needs`, `me`: as in the same Estimate. No step is made without most of the
      holders.
    - `ahead`, `just_ahead`, `may_be_ahead`: the peers that are further, that are so by one epoch,
      and that say so, by the same estimate. `made`: the histories of those one epoch further.
    - `passed_by`: the members of a round of this epoch that was or may have been committed without
      this peer, or whose result this peer did not apply. While one of them is further, this peer
      makes no other step of this epoch.
    - `asks_any`: how many more times this peer tries to fetch the step from any that are one epoch
      further. In a large run the heads of that round may have handed it down to some, and died.
    - `follows`: the state was fetched from others, and this peer has made no step since. The state
      from which a run begins is nobody's step: who fetches it does not follow.
    - `expected`: how many peers were expected in the round, or were in it.
    - `begun_without`: the members of a group of this epoch that has begun without this peer. It
      waits while they are seen to average, up to the estimate with the number `waits_to`, unless
      it is asked into another.
    """

    phase: Phase
    epoch: int
    history: bytes
    samples: int = 0
    in_round: int = 0
    number: int = 0
    looked_past: int = 0
    company: int = 0
    holders: frozenset[PeerId] = frozenset()
    needs: int = 0
    me: PeerId = NOBODY
    ahead: frozenset[PeerId] = frozenset()
    just_ahead: frozenset[PeerId] = frozenset()
    may_be_ahead: frozenset[PeerId] = frozenset()
    made: frozenset[tuple[PeerId, bytes]] = frozenset()
    passed_by: frozenset[PeerId] = frozenset()
    asks_any: int = 0
    follows: bool = False
    expected: int = 1
    begun_without: frozenset[PeerId] = frozenset()
    waits_to: int = 0

    @property
    def published_samples(self) -> int:
        """For the progress slot: how many samples this peer brings to the round that ends its
        epoch."""
        return self.in_round if self.phase is Phase.AVERAGING else self.samples

    @property
    def counts_batches(self) -> bool:
        """Whether a batch that ends now counts: it does not if the parameters are given up."""
        return self.phase not in (Phase.BEHIND, Phase.FETCHING)

    def may_be_passed_by(self, members: Iterable[PeerId]) -> Life:
        """After a round of which these members may have made the step without this peer."""
        asks_any = MOST_ASKED if self.needs else self.asks_any
        return replace(self, passed_by=self.passed_by | {*members}, asks_any=asks_any)


# ---- events and effects


class Ending(enum.Enum):
    """How a round ended for this peer (moshpit/outcome.py)."""

    COMMITTED = "committed"
    DISCARDED = "discarded"
    LEFT_OUT = "left out"
    ALONE = "alone"


# -- events


@dataclass(frozen=True)
class Contributed:
    """A batch was computed with this peer's current parameters."""

    samples: int
    finite: bool = True


@dataclass(frozen=True)
class FoundNotFinite:
    """A batch that was counted turned out not to be finite. `in_round`: it was counted into the
    round that begins."""

    samples: int
    in_round: bool = False


@dataclass(frozen=True)
class Estimated:
    estimate: Estimate


@dataclass(frozen=True)
class Averaged:
    """The round that `Average` asked for has ended.

    - `weight`, `digest`, `members`, `peers`: of the committed result, with this peer or (LEFT_OUT)
      without it. A weight of 0 is unknown. For ALONE, `digest` is at least 16 random bytes, because
      a step that is made alone begins a history of its own.
    - `left_out`: other peers of the group that know that their data is not in the result.
    - `votes`: over a grid, how many of the peers in the result have had a part in the run's steps
      (`members` are then only those of the last group).
    - `begun_without`: DISCARDED, because a group of these peers has begun without this peer.
    - `in_doubt`: DISCARDED, but `members` may have made the step.
    - `peers`: of how many peers the data is in the result. By cohorts these are more than
      `members`, which are then their heads.
    - `handed_down`: the head of this peer's cohort has applied the result, and has asked already
      whether most of the holders were in it.
    """

    ending: Ending
    weight: float = 0.0
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()
    left_out: tuple[PeerId, ...] = ()
    votes: float | None = None
    reason: str = ""
    begun_without: tuple[PeerId, ...] = ()
    in_doubt: bool = False
    peers: int = 0
    handed_down: bool = False


@dataclass(frozen=True)
class Stepped:
    """The step that `Step` or `StepAlone` asked for was made."""


@dataclass(frozen=True)
class ParametersRoundEnded:
    """The averaging that `AverageParameters` asked for has ended. A committed result is in the
    parameters already."""

    ending: Ending
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """The state that `Fetch` asked for has replaced this peer's."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class StateFetchFailed:
    """The state that `Fetch` asked for could not be fetched."""


@dataclass(frozen=True)
class Restored:
    """A state was loaded from this peer's own disk."""

    epoch: int
    history: bytes


Event = (
    Contributed
    | FoundNotFinite
    | Estimated
    | Averaged
    | Stepped
    | ParametersRoundEnded
    | Fetched
    | StateFetchFailed
    | Restored
)


# -- effects


@dataclass(frozen=True)
class Average:
    """Begin the round that ends this epoch, with everything accumulated: `weight` samples. In
    delayed mode, first let the model take over the last step's parameters, if it has not yet."""

    epoch: int
    history: bytes
    weight: int
    expected: int
    awaited: frozenset[PeerId] = frozenset()
    coming: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    cohort: Cohort | None = None
    needs: int = 0
    is_again: bool = False


@dataclass(frozen=True)
class Step:
    """Apply the committed result to the parameters of `epoch`, then report `Stepped`. The `Life`
    is already at the next epoch, with `history`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class StepAlone:
    """Nobody else is in the run: make the step of `epoch` with the gradients that this peer gave
    to the round, then report `Stepped`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class AverageParameters:
    """Average the parameters with the peers at the same epoch and history, all with equal weight,
    then report `ParametersRoundEnded`. `expected`: how many peers were in the step before."""

    epoch: int
    history: bytes
    expected: int


@dataclass(frozen=True)
class Fetch:
    """Fetch the state of one of `peers`, which claim to be at this epoch or later. If `history` is
    given, the state must be of that history. Give up after so many `seconds`. Then report
    `Fetched` or `StateFetchFailed`."""

    reason: str
    at_least_epoch: int
    history: bytes | None
    peers: tuple[PeerId, ...]
    seconds: float = math.inf


@dataclass(frozen=True)
class DropGradients:
    """Drop everything accumulated (in delayed mode, also the samples in the round)."""

    reason: str
    samples: int


@dataclass(frozen=True)
class KeepGradients:
    """The round made no step: keep its samples for the next attempt. In delayed mode, add the
    samples accumulated meanwhile."""

    reason: str
    samples: int


@dataclass(frozen=True)
class HoldBack:
    """A batch is not finite, and is left out."""


@dataclass(frozen=True)
class Announce:
    """Publish this peer's progress at once."""


@dataclass(frozen=True)
class LookAgain:
    """Read the others' progress at once: the next decision needs an estimate with a higher number
    than the last one."""


Effect = (
    Average
    | Step
    | StepAlone
    | AverageParameters
    | Fetch
    | DropGradients
    | KeepGradients
    | HoldBack
    | Announce
    | LookAgain
)


COMMIT_SHARE: Final = 0.5
"""A result with a smaller share of the target's samples makes no step. Otherwise stragglers that
meet after the others' round would make a step of their own, and so would most parts of a round that
was split."""

MOST_ASKED: Final = 2
LONGEST_ASKED_SECONDS: Final = 120.0  # as long as a large run waits for most of its peers

MOST_LOOKS_PAST: Final = 120
"""How many estimates this peer waits for a group that has begun without it: a minute
(progress.READ_WHEN_DUE_SECONDS). Peers that claim for ever to be averaging cannot hold it up for
longer."""


Turn = tuple[Life, tuple[Effect, ...]]


class Lifecycle:
    """Invariant: `life` changes only through `TABLE`. Not thread-safe."""

    def __init__(self, mode: Mode, *, epoch: int, history: bytes) -> None:
        self.mode = mode
        self.life = Life(Phase.JOINING, epoch, history)

    def take(self, event: Event) -> tuple[Effect, ...]:
        """Apply the event and return the effects to carry out.

        Raises ProtocolMisuse, and changes nothing, for an event that cannot happen in this phase:
        that is a bug of ours.
        """
        self.life, effects = advance(self.mode, self.life, event)
        return effects


def advance(mode: Mode, life: Life, event: Event) -> Turn:
    """The next `Life`, and the effects."""
    turn = TABLE.get((life.phase, type(event)))
    if turn is None:
        raise ProtocolMisuse(f"{type(event).__name__} cannot happen while {life.phase.value}.")
    return turn(mode, life, event)


# -- batches


def _count(mode: Mode, life: Life, event: Contributed) -> Turn:
    """Accumulate (DeDLOC, 3.1). A batch that is not finite never counts."""
    if mode.auxiliary:
        raise ProtocolMisuse("An auxiliary peer has no samples.")
    if event.samples <= 0:
        raise ProtocolMisuse(f"A batch of {event.samples} samples cannot be counted.")
    if not event.finite:
        return life, (HoldBack(),)
    return replace(life, samples=life.samples + event.samples), ()


def _uncount(_mode: Mode, life: Life, event: FoundNotFinite) -> Turn:
    if event.in_round:
        return replace(life, in_round=life.in_round - event.samples), ()
    return replace(life, samples=life.samples - event.samples), ()


def _count_beside(mode: Mode, life: Life, event: Contributed) -> Turn:
    """Count samples of the next epoch, while this epoch's round or step is under way (delayed)."""
    if not mode.delayed:
        raise ProtocolMisuse(
            f"A batch was computed while {life.phase.value}.",
            why="Without `delayed`, the parameters it was computed with are about to change.",
        )
    return _count(mode, life, event)


def _too_late(_mode: Mode, life: Life, event: Contributed) -> Turn:
    reason = f"They were computed with the parameters of epoch {life.epoch}, which are given up."
    return life, (DropGradients(reason, event.samples),)


# -- estimates


def _note(_mode: Mode, life: Life, event: Estimated) -> Turn:
    """Remember who is there. Nothing is decided while a round, step or fetch is under way."""
    found = event.estimate
    life = replace(life, number=max(life.number, found.number))
    if (found.epoch, found.history) == (life.epoch, life.history):
        life = replace(
            life,
            company=found.company,
            holders=found.holders,
            needs=found.needs,
            me=found.me,
            ahead=found.ahead,
            just_ahead=found.just_ahead,
            may_be_ahead=found.may_be_ahead,
            made=found.made,
        )
    return life, ()


def _look(mode: Mode, life: Life, event: Estimated) -> Turn:
    """Fetch the run's state if it is elsewhere, or begin the round that is due."""
    found = event.estimate
    life, _ = _note(mode, life, event)
    is_ours = (found.epoch, found.history) == (life.epoch, life.history)
    if not is_ours or found.number <= life.looked_past:
        return life, ()
    elsewhere = found.behind or found.fork
    if elsewhere is not None:
        fetch = Fetch(elsewhere.reason, elsewhere.epoch, elsewhere.history, elsewhere.peers)
        return _fetch(life, fetch)
    if life.passed_by & found.ahead:
        return _fetch_from(life, tuple(sorted(life.passed_by & found.ahead)))
    if life.asks_any and found.just_ahead:
        return _fetch_from_any(life, tuple(sorted(found.just_ahead)))
    if found.may_be_ahead if life.asks_any else life.passed_by & found.may_be_ahead:
        return life, ()  # they are asked to show the step that they say they have made
    life = replace(life, phase=Phase.ACCUMULATING)
    if not found.has_place:
        return life, ()  # follow the run until a place in its rounds is free
    if mode.is_complete_at(life.epoch) or not found.is_due_with(life.samples):
        return life, ()
    if not life.samples and not mode.auxiliary and not found.is_spared:
        return life, ()  # without samples it would only take another peer's place
    if _waits_for_others(life, found):
        return life, ()
    average = Average(
        life.epoch,
        life.history,
        life.samples,
        found.expected,
        found.awaited,
        found.coming,
        found.lost,
        found.cohort,
        found.needs,
        found.is_again,
    )
    life = replace(
        life,
        phase=Phase.AVERAGING,
        samples=0,
        in_round=life.samples,
        expected=found.expected,
        begun_without=frozenset(),
        waits_to=0,
    )
    return life, (average, Announce())


def _waits_for_others(life: Life, found: Estimate) -> bool:
    """Whether others still average without this peer. Their round succeeds, and they are ahead; or
    it fails. Then they may begin the next one before they are seen to average no more, but they ask
    this peer into it."""
    if found.is_asked or found.number >= life.waits_to:
        return False
    return bool(life.begun_without & found.averaging)


def _fetch(life: Life, fetch: Fetch) -> Turn:
    """Meanwhile this peer's slot says that it has no samples, and averages nothing."""
    return _without_gradients(replace(life, phase=Phase.FETCHING), fetch.reason, Announce(), fetch)


def _without_gradients(life: Life, reason: str, *then: Effect) -> Turn:
    """Drop all samples: they are stale in another state."""
    samples = life.samples + life.in_round
    drop = (DropGradients(reason, samples),) if samples else ()
    return replace(life, samples=0, in_round=0), (*drop, *then)


# -- rounds


def _round_ended(mode: Mode, life: Life, event: Averaged) -> Turn:
    return _ENDINGS[event.ending](mode, life, event)


def _committed(mode: Mode, life: Life, event: Averaged) -> Turn:
    """theta_{e+1} = step(theta_e, sum of g_i w_i / sum of w_i), if enough stands behind it."""
    if not event.digest:
        raise ProtocolMisuse("A committed result has a digest.")
    if event.weight < COMMIT_SHARE * mode.target_samples:
        return _kept(life, _too_light(mode, event.weight))
    # the head has asked already whether enough holders were there; it may lie about the others
    lacking = "" if event.handed_down and not life.needs else _lacking(life, event)
    if lacking:  # the other members may see this differently, and then they are further
        return _kept(life.may_be_passed_by(event.members), lacking)
    made = next_history(life.history, life.epoch, event.digest)
    # over a grid, the results of several groups make the same history
    same = {peer for peer, history in life.made if history == made and event.votes is None}
    further = (life.ahead | life.may_be_ahead) - same
    others = (life.just_ahead | life.may_be_ahead) - same
    if life.passed_by & further or (life.asks_any and others and not event.handed_down):
        return _kept(life, "An earlier round of this epoch was committed without this peer.")
    came = event.peers or max(1, len(event.members))
    return _next_epoch(replace(life, expected=came), event.digest, Step)


def _lacking(life: Life, event: Averaged) -> str:
    """Why this group may not make a step, or "": it may be a part that was split off from the run.

    A group makes a step if it has most of the living holders (the peers that made the run's steps).
    With exactly half of them it makes one only if none of the missing ones is already ahead and the
    smallest name of all holders is in the group. So of two groups that form at the same time, at
    most one makes a step. In a large run it needs most of the peers that were in the last step
    instead: those that seem to be gone may be cut off, and where heads of cohorts have died, others
    came in their place.
    """
    if event.votes is not None:  # over a grid only the number of those who took part is known
        have = round(event.votes)
        if 2 * have > len(life.holders):
            return ""
        return f"{have} of the {len(life.holders)} peers that have made the run's steps took part."
    group = {*event.members, *event.left_out, life.me}
    if life.needs:
        came = event.peers or len(group)
        return _too_few(came, life) if came < life.needs else ""
    present, missing = life.holders & group, life.holders - group
    if len(missing) < len(present):
        return ""
    are_equal = len(missing) == len(present) and not missing & life.ahead
    if are_equal and (not missing or min(present) < min(missing)):
        return ""
    return (
        f"{len(missing)} of the {len(life.holders)} peers that have made the run's steps were not "
        "in the round, and are alive."
    )


def _too_few(came: int, life: Life) -> str:
    return (
        f"{came} came, and {life.needs} are most of the peers in the last step. The others may be "
        "cut off and go on, so this side waits for them for some minutes."
    )


def _alone(mode: Mode, life: Life, event: Averaged) -> Turn:
    """Make a step alone only if nobody else takes part, and with enough samples."""
    if life.needs > 1:
        return _kept(life, _too_few(1, life))
    if life.company:
        return _kept(life, f"{life.company} others take part, and none of them came.")
    if life.in_round < COMMIT_SHARE * mode.target_samples:
        return _kept(life, _too_light(mode, life.in_round))
    if not event.digest:
        raise ProtocolMisuse("A step that is made alone needs bytes that nobody else has.")
    return _next_epoch(replace(life, expected=1), event.digest, StepAlone)


def _discarded(_mode: Mode, life: Life, event: Averaged) -> Turn:
    life, effects = _kept(life, event.reason or "The round was discarded.")
    if event.in_doubt:
        life = life.may_be_passed_by(event.members)
    if event.begun_without:
        others, until = frozenset(event.begun_without), life.number + MOST_LOOKS_PAST
        life = replace(life, begun_without=others, waits_to=until)
    return life, effects


def _left_out(mode: Mode, life: Life, event: Averaged) -> Turn:
    """The others have made the step, unless too little was behind their result. The one that says
    how much may lie."""
    life = life.may_be_passed_by(event.members)
    if 0.0 < event.weight < COMMIT_SHARE * mode.target_samples:
        return _kept(life, _too_light(mode, event.weight))
    if 0 < event.peers < life.needs:
        return _kept(life, _too_few(event.peers, life))
    return _fetch_from(life, event.members)


def _fetch_from_any(life: Life, peers: tuple[PeerId, ...]) -> Turn:
    """Fetch from these peers, which are one epoch further and may have the result of a round of
    which this peer does not know how it ended. Any of them may lie, so this is tried a few times
    only, and not for long."""
    reason = f"A round of epoch {life.epoch} may have been committed without this peer."
    return _fetch(life, Fetch(reason, life.epoch + 1, None, peers, LONGEST_ASKED_SECONDS))


def _fetch_from(life: Life, peers: tuple[PeerId, ...]) -> Turn:
    """Fetch from these peers, which have made the step without this one."""
    reason = f"The round of epoch {life.epoch} was committed without this peer."
    return _fetch(life, Fetch(reason, life.epoch + 1, None, peers))


_ENDINGS: Final[dict[Ending, Callable[[Mode, Life, Averaged], Turn]]] = {
    Ending.COMMITTED: _committed,
    Ending.DISCARDED: _discarded,
    Ending.LEFT_OUT: _left_out,
    Ending.ALONE: _alone,
}


def _next_epoch(life: Life, digest: bytes, step: type[Step | StepAlone]) -> Turn:
    """Make the step: the round's samples count. Those computed beside it (delayed) belong to the
    next epoch."""
    history = next_history(life.history, life.epoch, digest)
    ahead = replace(
        life,
        phase=Phase.STEPPING,
        epoch=life.epoch + 1,
        history=history,
        in_round=0,
        company=0,
        holders=frozenset(),
        needs=0,
        ahead=frozenset(),
        just_ahead=frozenset(),
        may_be_ahead=frozenset(),
        made=frozenset(),
        passed_by=frozenset(),
        asks_any=0,
        follows=False,
    )
    return ahead, (step(life.epoch, history), Announce())


def _kept(life: Life, reason: str) -> Turn:
    """Try again with the same samples, after a fresh look at the others. Samples that were computed
    meanwhile (delayed) join them: they are now one step less stale than planned."""
    keep = KeepGradients(reason, life.in_round)
    life = replace(
        life,
        phase=Phase.ACCUMULATING,
        samples=life.samples + life.in_round,
        in_round=0,
        looked_past=life.number,
    )
    return life, (keep, Announce(), LookAgain())


def _too_light(mode: Mode, weight: float) -> str:
    return f"Only {weight:,.0f} samples stand behind the round, of {mode.target_samples:,}."


# -- steps and parameters


def _stepped(mode: Mode, life: Life, _event: Stepped) -> Turn:
    every = mode.parameters_every
    if every and life.epoch % every == 0 and life.expected > 1:
        life = replace(life, phase=Phase.AVERAGING_PARAMETERS)
        return life, (AverageParameters(life.epoch, life.history, life.expected),)
    return replace(life, phase=Phase.ACCUMULATING), ()


def _parameters_averaged(_mode: Mode, life: Life, event: ParametersRoundEnded) -> Turn:
    """A committed average of parameters is a new state and so begins a new history. Any other
    ending but LEFT_OUT changes nothing."""
    after = history_after_parameters(life.history, life.epoch, event.digest)
    match event.ending:
        case Ending.COMMITTED:
            if not event.digest:
                raise ProtocolMisuse("A committed result has a digest.")
            life = replace(
                life, phase=Phase.ACCUMULATING, history=after, company=0, holders=frozenset()
            )
            return life, (Announce(),)
        case Ending.LEFT_OUT:
            reason = f"The parameters of epoch {life.epoch} were averaged without this peer."
            return _fetch(life, Fetch(reason, life.epoch, after, event.members))
        case _:
            return replace(life, phase=Phase.ACCUMULATING), ()


# -- other states


def _fetched(_mode: Mode, life: Life, event: Fetched | Restored) -> Turn:
    life, effects = _without_gradients(life, "Another state was taken over.")
    life = Life(
        Phase.ACCUMULATING,
        event.epoch,
        event.history,
        number=life.number,
        looked_past=life.number,
        follows=isinstance(event, Fetched) and event.epoch > 0,
    )
    return life, (*effects, Announce(), LookAgain())


def _restored(mode: Mode, life: Life, event: Restored) -> Turn:
    """A state from this peer's disk: read the others' progress before anything else."""
    life, effects = _fetched(mode, life, event)
    return replace(life, phase=Phase.JOINING), effects


def _fetch_failed(_mode: Mode, life: Life, _event: StateFetchFailed) -> Turn:
    asks_any = max(0, life.asks_any - 1)
    life = replace(life, phase=Phase.BEHIND, looked_past=life.number, asks_any=asks_any)
    return life, (LookAgain(),)


TABLE: Final[dict[tuple[Phase, type[Event]], Callable[[Mode, Life, Any], Turn]]] = {
    (Phase.JOINING, Contributed): _count,
    (Phase.JOINING, FoundNotFinite): _uncount,
    (Phase.JOINING, Estimated): _look,
    (Phase.JOINING, Restored): _restored,
    (Phase.ACCUMULATING, Contributed): _count,
    (Phase.ACCUMULATING, FoundNotFinite): _uncount,
    (Phase.ACCUMULATING, Estimated): _look,
    (Phase.ACCUMULATING, Restored): _restored,
    (Phase.AVERAGING, Contributed): _count_beside,
    (Phase.AVERAGING, FoundNotFinite): _uncount,
    (Phase.AVERAGING, Estimated): _note,
    (Phase.AVERAGING, Averaged): _round_ended,
    (Phase.STEPPING, Contributed): _count_beside,
    (Phase.STEPPING, FoundNotFinite): _uncount,
    (Phase.STEPPING, Estimated): _note,
    (Phase.STEPPING, Stepped): _stepped,
    (Phase.AVERAGING_PARAMETERS, Contributed): _count_beside,
    (Phase.AVERAGING_PARAMETERS, FoundNotFinite): _uncount,
    (Phase.AVERAGING_PARAMETERS, Estimated): _note,
    (Phase.AVERAGING_PARAMETERS, ParametersRoundEnded): _parameters_averaged,
    (Phase.BEHIND, Contributed): _too_late,
    (Phase.BEHIND, Estimated): _look,
    (Phase.BEHIND, Restored): _restored,
    (Phase.FETCHING, Contributed): _too_late,
    (Phase.FETCHING, Estimated): _note,
    (Phase.FETCHING, Fetched): _fetched,
    (Phase.FETCHING, StateFetchFailed): _fetch_failed,
}
"""The function for each event in each phase. A pair that is missing here cannot happen."""
