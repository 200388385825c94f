"""The trainer's phase, and what its owner can do: one phase, two sentences. Pure.

The order of the checks matters. An ended session stays ended; a peer that leaves is leaving,
whatever else is true; a lost network matters more than a pause; a round is shown only if nothing
stands in its way.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath

from node.core.training_view import TrainerPhase
from node.training.gate import Closed
from node.training.happenings import Failed, Left
from node.training.words import given_by, said_of

NETWORK = "network"
"""The name under which the gate is closed while no peer can be reached."""


@dataclass(frozen=True)
class Facts:
    """The facts of one moment."""

    leaving: bool = False
    leaving_at_once: bool = False
    failed: Failed | None = None
    left: Left | None = None
    closed: tuple[Closed, ...] = ()
    preparing: str = ""  # the preparation before the loop begins; empty when it has begun
    behind: bool = False
    places_taken: int = 0  # all places that there are, while this peer has none
    averaging: bool = False
    lacks_experts: bool = False
    alone: bool = False
    complete: bool = False
    begins: bool = False
    keeps_only: bool = False
    serves_only: bool = False
    again: str = "potluck join"  # the command that goes on with the run
    checkpoint: str = ""  # the newest checkpoint that this peer keeps, if any


@dataclass(frozen=True)
class PhaseWords:
    phase: TrainerPhase
    doing: str
    advice: str = ""


def told_of(facts: Facts) -> PhaseWords:
    """The phase to show."""
    network = next((one for one in facts.closed if one.name == NETWORK), None)
    if facts.failed is not None:
        phase = TrainerPhase.REFUSED if facts.failed.refused else TrainerPhase.FAILED
        return PhaseWords(phase, " ".join(said_of(facts.failed)), facts.failed.advice)
    if facts.left is not None:
        return _left(facts.left, facts)
    if facts.leaving:
        return _leaving(facts)
    if network is not None:
        return PhaseWords(
            TrainerPhase.NETWORK_LOST,
            network.words,
            "You need not do anything: potluck keeps trying all known addresses, and training "
            "continues by itself. Ctrl-C leaves.",
        )
    if facts.closed:
        return _paused(facts.closed)
    if facts.places_taken:  # also while it catches up, as it does after every step
        return PhaseWords(
            TrainerPhase.FOLLOWING,
            f"following the run: all {facts.places_taken:,} places in its rounds are taken",
            "You need not do anything: this peer computes as soon as a place is free.",
        )
    if facts.behind:
        return PhaseWords(
            TrainerPhase.CATCHING_UP, "fetching the run's newest state from other peers"
        )
    if facts.preparing:
        return PhaseWords(TrainerPhase.PREPARING, facts.preparing)
    if facts.averaging:
        return PhaseWords(TrainerPhase.AVERAGING, "averaging with the others")
    if facts.complete:
        return _complete(facts)
    if facts.serves_only:
        return PhaseWords(
            TrainerPhase.SERVING, "computing the experts' part of the others' batches"
        )
    if facts.keeps_only:
        return _keeping(facts)
    if facts.lacks_experts:
        return PhaseWords(
            TrainerPhase.TRAINING,
            "waiting for experts: too few of them answer",
            "Training continues by itself when volunteers serve them again, as `potluck experts "
            "serve` does.",
        )
    if facts.alone:
        others = "volunteers" if facts.begins else "the others"
        return PhaseWords(
            TrainerPhase.TRAINING,
            f"computing; no other peer trains at the moment, waiting for {others}",
            "`potluck run invite` makes an invite for them." if facts.begins else "",
        )
    return PhaseWords(TrainerPhase.TRAINING, "computing samples for the next step")


def _keeping(facts: Facts) -> PhaseWords:
    if facts.alone:
        return PhaseWords(
            TrainerPhase.KEEPING,
            "no volunteer trains at the moment; others can join here",
            "`potluck run invite` makes an invite for them.",
        )
    return PhaseWords(
        TrainerPhase.KEEPING, "helping with the volunteers' steps, and keeping checkpoints"
    )


def _left(left: Left, facts: Facts) -> PhaseWords:
    said = ["the run has made all its steps"] if facts.complete else []
    if (
        left.steps or left.alone_steps or left.lost_samples or left.expert_rows
    ):  # a peer that only keeps brings none
        said.append(given_by(left))
    gave = f"{'; '.join(said)}. Thank you!" if said else "Thank you!"
    if facts.complete:
        return PhaseWords(TrainerPhase.LEFT, gave, _export(facts))
    return PhaseWords(TrainerPhase.LEFT, gave, f"`{facts.again}` takes part again.")


def _complete(facts: Facts) -> PhaseWords:
    if not facts.begins:  # a volunteer has nothing more to do, and leaves by itself
        return PhaseWords(TrainerPhase.COMPLETE, "the run has made all its steps", "Ctrl-C leaves.")
    return PhaseWords(
        TrainerPhase.COMPLETE,
        "the run has made all its steps; its state is served to every peer that asks",
        f"{_export(facts)} Ctrl-C ends it.".lstrip(),
    )


def _export(facts: Facts) -> str:
    if not facts.checkpoint:
        return ""
    folder = shlex.quote(str(PurePath(facts.checkpoint).parent))
    return f"`potluck export {folder}` writes the trained model into a file."


def _leaving(facts: Facts) -> PhaseWords:
    if facts.leaving_at_once:
        return PhaseWords(TrainerPhase.LEAVING, "leaving now")
    if facts.serves_only:
        return PhaseWords(
            TrainerPhase.LEAVING,
            "giving the newest copies of the experts to others, within five seconds",
            "Ctrl-C again leaves at once.",
        )
    return PhaseWords(
        TrainerPhase.LEAVING,
        "leaving after the current round, within five seconds",
        "Ctrl-C again leaves at once.",
    )


def _paused(closed: tuple[Closed, ...]) -> PhaseWords:
    yours = [one for one in closed if one.name == "pause"]
    advice = "It continues by itself."
    if len(yours) < len(closed) and yours:
        advice = "`potluck resume` ends your pause; the rest ends by itself."
    elif yours:
        advice = f"`potluck resume` continues{'' if yours[0].until is None else ' earlier'}."
    return PhaseWords(TrainerPhase.PAUSED, "; ".join(one.words for one in closed), advice)
