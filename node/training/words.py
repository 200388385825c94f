"""Every event in words for a person (`--plain`) and as an object for a program (`--json`). Logs are
made from typed events, never the other way round.

Parts of the text come from peers. Code that prints it passes it through
`node.app.cli.output.printable`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from node.core.display_name import short
from node.core.duration import span
from node.core.training_view import TrainerPhase, TrainerView
from node.training.happenings import (
    Began,
    ExpertsBack,
    ExpertsLost,
    ExpertsMissing,
    ExpertsTaken,
    Failed,
    FirstSamplesAccepted,
    Happening,
    Leaving,
    Left,
    Measured,
    NetworkBack,
    NetworkLost,
    Notice,
    Paused,
    PeerCame,
    PeerWent,
    Preparing,
    RecordsSummed,
    Resumed,
    RunComplete,
    ServingBegan,
    WillUse,
)
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointMissed,
    CheckpointSaved,
    FellBehind,
    FetchingFailed,
    GradientsDropped,
    HeldBack,
    NoBatchFits,
    NoRunFound,
    ParametersAveraged,
    PlaceFree,
    PlacesTaken,
    RoundFailed,
    ScaleChanged,
    StepTaken,
    TooSlowToCatchUp,
)


def words_of(happening: Happening) -> str:
    """One line; empty if it is of no use to a person."""
    match happening:
        case Preparing(doing=doing):
            return doing
        case WillUse(lines=lines):
            return "\n".join(lines)
        case Measured():
            return (
                f"measured: {happening.samples_per_second:,.1f} samples/s on {happening.device}"
                f"{' (compiled)' if happening.compiled else ''}, "
                f"{happening.micro_batch:,} at once in {happening.batch_seconds:.2f} s"
            )
        case Began(run=run, epoch=epoch, keeps_only=keeps_only):
            return f"{'keeping' if keeps_only else 'training in'} {run}, from step {epoch:,} on"
        case FirstSamplesAccepted(samples=samples, seconds=seconds):
            return f"the others have accepted your first {samples:,} samples, after {seconds:.1f} s"
        case Paused(reasons=reasons):
            said = "; ".join(reasons)
            return said if said.startswith("paused") else f"paused: {said}"
        case Resumed(seconds=seconds):
            return f"continuing after {span(seconds)}"
        case NetworkLost(reason=reason):
            return f"network lost: {reason} potluck keeps trying."
        case NetworkBack(seconds=seconds):
            return f"the network is back after {span(seconds)}"
        case PeerCame(peer=peer, reach=reach):
            return f"{short(peer)} came ({reach})"
        case PeerWent(peer=peer):
            return f"{short(peer)} went"
        case Notice(words=words):
            return words
        case ExpertsMissing(reason=reason):
            return f"waiting for experts: {reason} potluck keeps trying."
        case ExpertsBack(seconds=seconds, dropped=dropped):
            batches = "1 batch was" if dropped == 1 else f"{dropped:,} batches were"
            return f"experts answer again after {span(seconds)}; {batches} dropped meanwhile"
        case RunComplete(epoch=epoch):
            return f"the run is complete: {epoch:,} steps"
        case ServingBegan(run=run, most=most):
            return f"serving up to {_experts(most)} of {run}"
        case ExpertsTaken(uids=uids, how=how):
            return f"serving {_some_of(uids)}: {_HOW.get(how, how)}"
        case ExpertsLost(uids=uids):
            return f"no longer serving {_some_of(uids)}: another server had them earlier"
        case RecordsSummed(steps=steps, samples=samples, people=people):
            who = "1 person has" if people == 1 else f"{people:,} people have"
            return f"by the records, {who} given {samples:,} samples to {steps:,} steps"
        case Failed(refused=refused):
            return f"{'refused' if refused else 'failed'}: {' '.join(said_of(happening))}"
        case Leaving(at_once=True):
            return "leaving now"
        case Leaving():
            return "leaving after this round; Ctrl-C again leaves at once"
        case Left():
            return f"left after {span(happening.seconds)}: {given_by(happening)}. Thank you!"
        case _:
            return _words_of_run(happening)


def _words_of_run(happening: Happening) -> str:
    """Words for the events of the run itself."""
    match happening:
        case StepTaken(members=members, own_samples=own):
            loss = "" if happening.loss is None else f", loss {happening.loss:.4f}"
            peers = happening.peers or len(members)
            if len(members) > 1 and not own:
                share = f"{happening.samples:,.0f} samples"
                return f"step {happening.epoch + 1:,} by {peers:,} peers{loss}: {share}"
            if len(members) > 1:
                share = f"{own:,} of {happening.samples:,.0f} samples are yours"
                return f"step {happening.epoch + 1:,} with {peers:,} peers{loss}: {share}"
            return f"step {happening.epoch + 1:,} alone{loss}: {own:,} samples, all yours"
        case HeldBack(samples=samples, reason=reason):
            return f"a batch of {samples:,} samples is held back and does not count: {reason}"
        case RoundFailed(epoch=epoch, reason=reason):
            return f"step {epoch + 1:,} has to be tried again: {reason}"
        case GradientsDropped(samples=samples, reason=reason):
            return f"{samples:,} samples are given up: {reason}"
        case FellBehind(at_least_epoch=epoch, reason=reason):
            return f"catching up with step {epoch:,}: {reason}"
        case CaughtUp():
            return _caught_up(happening)
        case TooSlowToCatchUp(epoch=epoch, reason=reason):
            return f"the run is faster than the download of its state (step {epoch:,}): {reason}"
        case NoBatchFits(steps=steps, batch=batch, batch_seconds=seconds):
            return (
                f"the last {steps} steps were made without this machine: a batch of {batch:,} "
                f"takes it {seconds:.1f} s, and the others finish earlier, or its link brings it "
                "each step too late. Give it more processors or memory or a faster link, or ask "
                "the organiser for a smaller samples_at_once or a larger batch"
            )
        case NoRunFound():
            return (
                "no peer of the run reports its progress, and this one waits for them: they may "
                "be away for a while, the run may be over, or they have another version of "
                "potluck (ask the organiser which one; `potluck version` tells yours)"
            )
        case PlacesTaken(places=places):
            return (
                f"all {places:,} places in the run's rounds are taken: this peer follows its "
                "steps, and computes as soon as a place is free"
            )
        case PlaceFree():
            return "a place in the run's rounds is free: this peer computes"
        case FetchingFailed(reason=reason):
            return f"the run's state could not be fetched yet, and potluck tries again: {reason}"
        case ParametersAveraged(members=members, drift=drift):
            return f"parameters averaged with {len(members)} peers; they had drifted by {drift:.1e}"
        case ScaleChanged(scale=scale):
            return f"the loss scale is {scale:g} now"
        case CheckpointSaved(epoch=epoch, path=path):
            return f"checkpoint of step {epoch:,}: {path}"
        case CheckpointMissed(epoch=epoch, reason=reason):
            return f"no checkpoint of step {epoch:,}: {reason}"
        case _:
            return ""


def object_of(happening: Happening) -> dict[str, Any]:
    """One object: `event` is its kind, in lower case with underscores."""
    fields: dict[str, Any] = msgspec.to_builtins(happening, builtin_types=(bytes,))
    kind = fields.pop("type")
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
    return {"event": words, **_in_hex(fields)}


def _in_hex(value: Any) -> Any:
    """The value with all bytes in hexadecimal, because JSON has none."""
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {name: _in_hex(one) for name, one in value.items()}
        case list() | tuple():
            return [_in_hex(one) for one in value]
        case _:
            return value


def role_words(role: str, *, keeps: bool) -> str:
    """The role of a peer in the run, in words."""
    does = {"trains": "trains", "auxiliary": "helps"}.get(role, role)
    return " and ".join(one for one in (does, "keeps" if keeps else "") if one)


def since_words(view: TrainerView) -> str:
    """The time in this phase: a round is part of training."""
    whole = TrainerPhase.KEEPING if view.keeps_only else TrainerPhase.TRAINING
    training = f"{whole} " if view.phase is TrainerPhase.AVERAGING else ""
    seconds = view.phase_seconds if math.isfinite(view.phase_seconds) else 0.0
    return f"{training}for {span(seconds)}"


def said_of(failed: Failed) -> tuple[str, ...]:
    """The error, and its cause if that is known."""
    return tuple(one for one in (failed.what, failed.why) if one)


def _caught_up(event: CaughtUp) -> str:
    peers = "1 peer" if len(event.sources) == 1 else f"{len(event.sources)} peers"
    size = f"{event.fetched_bytes / 1e6:,.1f} MB from {peers} in {event.seconds:.1f} s, verified"
    made = "1 step" if event.replayed == 1 else f"{event.replayed:,} steps"
    replayed = f"; with {made} made meanwhile" if event.replayed else ""
    return f"caught up with step {event.epoch:,}: {size}{replayed}"


def given_by(left: Left) -> str:
    """The session's contribution in words."""
    parts = []
    if left.samples or not (left.alone_samples or left.expert_rows):
        parts.append(f"{left.samples:,} samples of yours are in {_steps(left.steps)} of the run")
    if left.alone_samples:
        made = _steps(left.alone_steps)
        whose = "" if parts else " of yours"
        parts.append(f"{left.alone_samples:,} samples{whose} are in {made} that you made alone")
    if left.lost_samples:
        parts.append(f"{left.lost_samples:,} are in none")
    if left.expert_rows:
        parts.append(f"your experts have computed {left.expert_rows:,} rows")
    return "; ".join(parts)


_HOW = {
    "new": "new, from their first weights",
    "own copy": "from this machine's own copies",
    "taken over": "taken over, because their server is gone",
}
UIDS_NAMED = 4


def _some_of(uids: tuple[str, ...]) -> str:
    named = ", ".join(uids[:UIDS_NAMED])
    more = "" if len(uids) <= UIDS_NAMED else ", …"
    return f"{_experts(len(uids))} ({named}{more})"


def _experts(number: int) -> str:
    return "1 expert" if number == 1 else f"{number:,} experts"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"
