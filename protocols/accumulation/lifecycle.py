"""One peer's way through the epochs: what it does next, whatever happens. Pure.

    lifecycle = Lifecycle(Mode(target_samples=4096), epoch=0, history=first)
    for effect in lifecycle.take(Contributed(samples=32)):
        match effect:
            case Average(weight=weight, expected=expected): ...
            case Step(): ...
            case Fetch(at_least_epoch=epoch): ...

    joining -> accumulating -> averaging -> stepping (-> averaging parameters) -> accumulating
    wherever the run goes on without this peer:  behind -> fetching -> accumulating

The caller tells what happened and does what comes back, in order; nothing else decides what is
applied, kept or dropped. The whole machine is one table, `TABLE`.

Promises: a sample is in at most one step (it is counted when its round commits with this peer in
it, and else kept or dropped, by name); no result of another epoch or history is applied; every
phase has a way out.

Easy to get wrong: a result that is too light (fewer than COMMIT_SHARE of the target's samples
stand behind it) is not applied although it was committed, by any of its members. An estimate that
was made for another epoch or history than the life's own decides nothing. And before `Averaged`
with ALONE the newest estimate has to be told: it says whether anybody else takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from protocols.accumulation.forks import Elsewhere
from protocols.accumulation.history import history_after_parameters, next_history
from protocols.accumulation.life import Life, Mode, Phase
from protocols.accumulation.lifecycle_events import (
    Announce,
    Average,
    Averaged,
    AverageParameters,
    Contributed,
    DropGradients,
    Effect,
    Ending,
    Estimated,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    HoldBack,
    KeepGradients,
    LookAgain,
    ParametersAveraged,
    Restored,
    Step,
    StepAlone,
    Stepped,
)
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId

COMMIT_SHARE: Final = 0.5
"""Of the target: fewer samples behind a result make no step. Stragglers who found each other after
the others had left would otherwise make a step of their own, and so would most parts of a round
that was torn apart."""

MOST_LOOKS_PAST: Final = 120
"""At the others, for a group that has begun without this peer and neither ends nor fails: a minute
(progress.READ_WHEN_DUE_SECONDS). Who says for ever that it averages holds nobody for ever."""


Turn = tuple[Life, tuple[Effect, ...]]


class Lifecycle:
    """Invariant: `life` is what the table made of the one before. Not for two threads at once."""

    def __init__(self, mode: Mode, *, epoch: int, history: bytes) -> None:
        self.mode = mode
        self.life = Life(Phase.JOINING, epoch, history)

    def take(self, event: Event) -> tuple[Effect, ...]:
        """What is to be done now that this happened.

        ProtocolMisuse, and nothing changes, for what cannot happen in this phase: a bug of ours.
        """
        self.life, effects = advance(self.mode, self.life, event)
        return effects


def advance(mode: Mode, life: Life, event: Event) -> Turn:
    """The next life, and what is to be done."""
    turn = TABLE.get((life.phase, type(event)))
    if turn is None:
        raise ProtocolMisuse(f"{type(event).__name__} cannot happen while {life.phase.value}.")
    return turn(mode, life, event)


# -- batches


def _count(mode: Mode, life: Life, event: Contributed) -> Turn:
    """Accumulate (DeDLOC, 3.1). What is not finite never counts (R9)."""
    if mode.auxiliary:
        raise ProtocolMisuse("An auxiliary peer has no samples.")
    if event.samples <= 0:
        raise ProtocolMisuse(f"A batch of {event.samples} samples cannot be counted.")
    if not event.finite:
        return life, (HoldBack("Its loss or a gradient is not finite.", event.samples),)
    return replace(life, samples=life.samples + event.samples), ()


def _count_beside(mode: Mode, life: Life, event: Contributed) -> Turn:
    """The next epoch's samples, while this one's round and step are under way (delayed)."""
    if not mode.delayed:
        raise ProtocolMisuse(
            f"A batch was computed while {life.phase.value}.",
            why="Without `delayed`, the parameters it was computed with are about to change.",
        )
    return _count(mode, life, event)


def _too_late(_mode: Mode, life: Life, event: Contributed) -> Turn:
    reason = f"They were computed with the parameters of epoch {life.epoch}, which are given up."
    return life, (DropGradients(reason, event.samples),)


# -- looks at the others


def _note(_mode: Mode, life: Life, event: Estimated) -> Turn:
    """Nothing is decided while something is under way; but who is there is remembered."""
    found = event.estimate
    life = replace(life, number=max(life.number, found.number))
    if (found.epoch, found.history) == (life.epoch, life.history):
        life = replace(
            life,
            company=found.company,
            holders=found.holders,
            me=found.me,
            ahead=found.ahead,
        )
    return life, ()


def _look(mode: Mode, life: Life, event: Estimated) -> Turn:
    """Go where the run is, or begin the round that is due."""
    found = event.estimate
    life, _ = _note(mode, life, event)
    is_ours = (found.epoch, found.history) == (life.epoch, life.history)
    if not is_ours or found.number <= life.looked_past:
        return life, ()
    elsewhere = found.behind or found.fork
    if elsewhere is not None:
        return _leave(life, elsewhere)
    if life.passed_by & found.ahead:
        return _fetch_from(life, tuple(sorted(life.passed_by & found.ahead)))
    life = replace(life, phase=Phase.ACCUMULATING)
    if not found.has_place:
        return life, ()  # it follows the run until a place in its rounds is free
    if 0 < mode.last_epoch <= life.epoch or not found.is_due_with(life.samples):
        return life, ()
    if not life.samples and not mode.auxiliary and not found.is_spared_with(0):
        return life, ()  # it has nothing to bring, and would only take somebody's place
    if life.begun_without & found.averaging and found.number < life.waits_to:
        return life, ()  # the others' round ends, and they are ahead, or it fails
    average = Average(life.epoch, life.history, life.samples, found.expected, found.awaited)
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


def _leave(life: Life, elsewhere: Elsewhere) -> Turn:
    fetch = Fetch(elsewhere.reason, elsewhere.epoch, elsewhere.history, elsewhere.peers)
    return _without_gradients(replace(life, phase=Phase.FETCHING), elsewhere.reason, fetch)


def _without_gradients(life: Life, reason: str, *then: Effect) -> Turn:
    """Nothing stale is carried into another state."""
    samples = life.samples + life.in_round
    drop = (DropGradients(reason, samples),) if samples else ()
    return replace(life, samples=0, in_round=0), (*drop, *then)


# -- rounds


def _round_ended(mode: Mode, life: Life, event: Averaged) -> Turn:
    return _ENDINGS[event.ending](mode, life, event)


def _committed(mode: Mode, life: Life, event: Averaged) -> Turn:
    """theta_{e+1} = step(theta_e, sum of g_i w_i / sum of w_i), if enough stands behind it (R3)."""
    if not event.digest:
        raise ProtocolMisuse("A committed result has a digest.")
    if event.weight < COMMIT_SHARE * mode.target_samples:
        return _kept(life, _too_light(mode, event.weight))
    lacking = _lacking(life, event)
    if lacking:  # which its other members may see otherwise, and then they are further
        return _kept(replace(life, passed_by=life.passed_by | {*event.members}), lacking)
    if life.passed_by & life.ahead:
        return _kept(life, "An earlier round of this epoch was committed without this peer.")
    return _next_epoch(replace(life, expected=max(1, len(event.members))), event.digest, Step)


def _lacking(life: Life, event: Averaged) -> str:
    """Who is missing, where this group is not the run but a part that was torn off: of those whose
    steps the state is made of, as far as they live, it has fewer than the rest; or as many, and the
    rest has made the step or has the smallest name. So of two groups that come about at once one
    makes a step at most.
    """
    if event.votes is not None:  # over a grid nobody knows who took part, but how many did
        have = round(event.votes)
        if 2 * have > len(life.holders):
            return ""
        return f"{have} of the {len(life.holders)} peers that have made the run's steps took part."
    group = {*event.members, *event.left_out, life.me}
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


def _alone(mode: Mode, life: Life, event: Averaged) -> Turn:
    """A step only where nobody else takes part, and with as much as any other step (R4)."""
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
        life = replace(life, passed_by=life.passed_by | {*event.members})
    if event.begun_without:
        others, until = frozenset(event.begun_without), life.number + MOST_LOOKS_PAST
        life = replace(life, begun_without=others, waits_to=until)
    return life, effects


def _left_out(mode: Mode, life: Life, event: Averaged) -> Turn:
    """The others have made the step; unless what they committed was too light for one."""
    if 0.0 < event.weight < COMMIT_SHARE * mode.target_samples:
        return _kept(life, _too_light(mode, event.weight))
    return _fetch_from(life, event.members)


def _fetch_from(life: Life, peers: tuple[PeerId, ...]) -> Turn:
    """These have made the step without this peer, which makes none of its own as long as one of
    them is there."""
    reason = f"The round of epoch {life.epoch} was committed without this peer."
    life = replace(life, phase=Phase.FETCHING, passed_by=life.passed_by | {*peers})
    return _without_gradients(life, reason, Fetch(reason, life.epoch + 1, None, peers))


_ENDINGS: Final[dict[Ending, Callable[[Mode, Life, Averaged], Turn]]] = {
    Ending.COMMITTED: _committed,
    Ending.DISCARDED: _discarded,
    Ending.LEFT_OUT: _left_out,
    Ending.ALONE: _alone,
}


def _next_epoch(life: Life, digest: bytes, step: type[Step | StepAlone]) -> Turn:
    """The round's samples are counted; in delayed mode those beside it are the next epoch's."""
    history = next_history(life.history, life.epoch, digest)
    ahead = replace(
        life,
        phase=Phase.STEPPING,
        epoch=life.epoch + 1,
        history=history,
        in_round=0,
        company=0,
        holders=frozenset(),
        ahead=frozenset(),
        passed_by=frozenset(),
        follows=False,
    )
    return ahead, (step(life.epoch, history), Announce())


def _kept(life: Life, reason: str) -> Turn:
    """Try again with the same samples, once it is known where the others are now. In delayed mode
    those that were computed meanwhile join them: they are one step less stale, not more."""
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


def _parameters_averaged(_mode: Mode, life: Life, event: ParametersAveraged) -> Turn:
    """What was committed makes another state, and so another history; else all is as it was."""
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
            fetch = Fetch(reason, life.epoch, after, event.members)
            return _without_gradients(replace(life, phase=Phase.FETCHING), reason, fetch)
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
        follows=isinstance(event, Fetched),
    )
    return life, (*effects, Announce(), LookAgain())


def _restored(mode: Mode, life: Life, event: Restored) -> Turn:
    """From the own disk; the others have to be looked at before anything else."""
    life, effects = _fetched(mode, life, event)
    return replace(life, phase=Phase.JOINING), effects


def _fetch_failed(_mode: Mode, life: Life, _event: FetchFailed) -> Turn:
    life = replace(life, phase=Phase.BEHIND, looked_past=life.number)
    return life, (LookAgain(),)


TABLE: Final[dict[tuple[Phase, type[Event]], Callable[[Mode, Life, Any], Turn]]] = {
    (Phase.JOINING, Contributed): _count,
    (Phase.JOINING, Estimated): _look,
    (Phase.JOINING, Restored): _restored,
    (Phase.ACCUMULATING, Contributed): _count,
    (Phase.ACCUMULATING, Estimated): _look,
    (Phase.ACCUMULATING, Restored): _restored,
    (Phase.AVERAGING, Contributed): _count_beside,
    (Phase.AVERAGING, Estimated): _note,
    (Phase.AVERAGING, Averaged): _round_ended,
    (Phase.STEPPING, Contributed): _count_beside,
    (Phase.STEPPING, Estimated): _note,
    (Phase.STEPPING, Stepped): _stepped,
    (Phase.AVERAGING_PARAMETERS, Contributed): _count_beside,
    (Phase.AVERAGING_PARAMETERS, Estimated): _note,
    (Phase.AVERAGING_PARAMETERS, ParametersAveraged): _parameters_averaged,
    (Phase.BEHIND, Contributed): _too_late,
    (Phase.BEHIND, Estimated): _look,
    (Phase.BEHIND, Restored): _restored,
    (Phase.FETCHING, Contributed): _too_late,
    (Phase.FETCHING, Estimated): _note,
    (Phase.FETCHING, Fetched): _fetched,
    (Phase.FETCHING, FetchFailed): _fetch_failed,
}
"""What follows from what. Everything that is not here cannot happen."""
