"""A model of a whole run: lifecycles, the directory's slots, and rounds with every possible ending.

A peer's decisions are those of the product (`advance`, `estimate`); the test that explores chooses
what happens to it. A batch is one sample with a name; parameters are the list of the results that
were applied; a step is committed with the set of its samples. So the tests can check any state:

- no sample is in two steps of what any peer holds;
- peers at the same epoch and history hold the same parameters, and have had that many steps;
- every sample in a step was computed with the parameters of that epoch, or in delayed mode of the
  one before;
- every step has enough samples;
- a lifecycle counts the samples that it has.

Easy to get wrong: a round may be committed with the data of a peer that never learns it. Its
samples are then in one step of the others, and it still has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from blake3 import blake3

from protocols.accumulation.claims import Credit
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.known import Known, ProgressSettings, Seen
from protocols.accumulation.lifecycle import (
    COMMIT_SHARE,
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
    KeepGradients,
    Life,
    Mode,
    ParametersRoundEnded,
    Phase,
    StateFetchFailed,
    Step,
    StepAlone,
    Stepped,
    advance,
)
from protocols.accumulation.lineage import HISTORY_BYTES
from protocols.accumulation.progress import estimate
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.identity import PeerId

FIRST = b"\0" * HISTORY_BYTES
SIGNATURE = b"m" * 16


class Sample(NamedTuple):
    """One batch: its peer, its number, and how many steps had made its parameters."""

    peer: int
    number: int
    steps: int


class Result(NamedTuple):
    """An applied result: a step with these samples, or (without any) averaged parameters."""

    epoch: int
    samples: frozenset[Sample]
    digest: bytes


@dataclass(frozen=True)
class Peer:
    life: Life
    parameters: tuple[Result, ...] = ()
    taken: int = 0
    """How many steps the parameters had that its batches are computed with."""
    samples: frozenset[Sample] = frozenset()
    in_round: frozenset[Sample] = frozenset()
    fetch: Fetch | None = None
    made: int = 0
    alive: bool = True
    brings: object = None
    hands: object = None
    """By cohorts (cohort_model.py): what it has of the round under way, and of the last one."""
    step_peers: int = 0
    has_failed: bool = False
    """By cohorts: how many peers were in the step that made its state, and whether a round of this
    epoch has made none."""

    @property
    def slot(self) -> ProgressSlot:
        life = self.life
        return ProgressSlot(
            life.epoch,
            life.history,
            life.published_samples,
            0.0,
            SIGNATURE,
            averaging=life.phase is Phase.AVERAGING,
            follows=life.follows,
            step_peers=self.step_peers,
        )

    @property
    def key(self) -> tuple[Phase, int, bytes]:
        return (self.life.phase, self.life.epoch, self.life.history)

    @property
    def steps(self) -> int:
        return sum(1 for one in self.parameters if one.samples)


@dataclass(frozen=True)
class World:
    """All peers, and the directory's slot of each; None if it has none (any more)."""

    peers: tuple[Peer, ...]
    board: tuple[ProgressSlot | None, ...]


class Action(NamedTuple):
    """An event, the peers that it happens to, and the world after it."""

    name: str
    who: tuple[int, ...]
    world: World

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.who))} {self.name}"


@dataclass(frozen=True)
class Rules:
    """The rules of the explored world. `batches`: of one peer, in all its lives."""

    mode: Mode
    size: int
    batches: int
    deaths: int = 1
    stale_slots: bool = True
    """Slots are written some time after their content has become true."""
    doubts: bool = True
    """A round may be committed without one of its members learning it."""

    def beginning(self) -> World:
        peers = tuple(Peer(Life(Phase.JOINING, 0, FIRST)) for _ in range(self.size))
        return World(peers, tuple(one.slot for one in peers))

    def estimate(self, world: World, number: int) -> Estimate:
        """The estimate of this peer from the slots that it reads."""
        seen = {
            name_of(other): Seen(slot, 0.0)
            for other, slot in enumerate(world.board)
            if slot is not None and other != number
        }
        settings = ProgressSettings(self.mode.target_samples)
        known = Known(Credit(), me=name_of(number))
        return estimate(seen, world.peers[number].slot, settings, 0.0, known, number=1)

    def rounds(self, world: World) -> Iterator[Action]:
        """All ways in which a round that is under way may end."""
        waiting: dict[tuple[Phase, int, bytes], list[int]] = {}
        for number, peer in enumerate(world.peers):
            if peer.alive and peer.life.phase in (Phase.AVERAGING, Phase.AVERAGING_PARAMETERS):
                waiting.setdefault(peer.key, []).append(number)
        for (phase, epoch, _history), numbers in waiting.items():
            for group in subsets(numbers):
                if phase is Phase.AVERAGING:
                    yield from _endings(self, world, epoch, group)
                else:
                    yield from _endings_of_parameters(self, world, epoch, group)


def name_of(peer: int) -> PeerId:
    return PeerId(f"peer-{peer}")


def following(rules: Rules, world: World) -> Iterator[Action]:
    """Everything that may happen next."""
    for number, peer in enumerate(world.peers):
        yield from _of_one(rules, world, number, peer)
    yield from rules.rounds(world)


def subsets(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All but the empty one, the smallest first."""
    for size in range(1, len(numbers) + 1):
        yield from combinations(numbers, size)


def _of_one(rules: Rules, world: World, number: int, peer: Peer) -> Iterator[Action]:
    who = (number,)
    if not peer.alive:
        if world.board[number] is not None:
            yield Action("expires", who, _with_slot(world, number, None))
        born = replace(Peer(Life(Phase.JOINING, 0, FIRST)), made=peer.made)
        yield Action("starts again", who, _published(with_peer(world, number, born), number))
        return
    if rules.stale_slots and world.board[number] != peer.slot:
        yield Action("says how it is", who, _published(world, number))
    phase = peer.life.phase
    if computes(rules, phase) and peer.made < rules.batches:
        sample = Sample(number, peer.made, peer.taken)
        more = replace(peer, made=peer.made + 1, samples=peer.samples | {sample})
        yield Action("computes", who, told(rules, world, number, more, Contributed(samples=1)))
    if looks(phase):
        for settled in (True, False):
            looked = look(rules, world, number, settled=settled)
            if looked != world:
                yield Action("looks" if settled else "looks in no hurry", who, looked)
    if phase is Phase.STEPPING:
        yield Action("has stepped", who, told(rules, world, number, peer, Stepped()))
    if phase is Phase.FETCHING:
        yield from _fetches(rules, world, number, peer)
    if sum(1 for one in world.peers if not one.alive) < rules.deaths:
        yield Action("dies", who, with_peer(world, number, replace(peer, alive=False)))


def computes(rules: Rules, phase: Phase) -> bool:
    """Whether the training thread computes, and waits for nothing."""
    if rules.mode.delayed:
        return phase not in (Phase.BEHIND, Phase.FETCHING)
    return phase in (Phase.JOINING, Phase.ACCUMULATING)


def looks(phase: Phase) -> bool:
    """Whether an estimate may decide something."""
    return phase in (Phase.JOINING, Phase.ACCUMULATING, Phase.BEHIND)


def look(rules: Rules, world: World, number: int, *, settled: bool = True) -> World:
    """This peer reads the directory, and its lifecycle is told the estimate."""
    found = rules.estimate(world, number)
    if not settled:
        found = replace(found, fork=None)
    # Every reading is a new one; that its number grows is no part of the state.
    peer = world.peers[number]
    fresh = replace(peer, life=replace(peer.life, number=0, looked_past=0))
    return told(rules, world, number, fresh, Estimated(found))


def _fetches(rules: Rules, world: World, number: int, peer: Peer) -> Iterator[Action]:
    fetch = peer.fetch
    assert fetch is not None
    for other, source in enumerate(world.peers):
        serves = source.alive and source.life.phase not in (Phase.FETCHING, Phase.BEHIND)
        late_enough = source.life.epoch >= fetch.at_least_epoch
        fits = fetch.history is None or fetch.history == source.life.history
        if other != number and serves and late_enough and fits:
            got = replace(
                peer,
                parameters=source.parameters,
                taken=source.steps,
                fetch=None,
                step_peers=source.step_peers,
                has_failed=False,
            )
            event = Fetched(source.life.epoch, source.life.history)
            yield Action("has a state", (number, other), told(rules, world, number, got, event))
    failed = replace(peer, fetch=None)
    yield Action("gets no state", (number,), told(rules, world, number, failed, StateFetchFailed()))


def _endings(rules: Rules, world: World, epoch: int, group: tuple[int, ...]) -> Iterator[Action]:
    """All ways in which a round of this group may end."""
    if len(group) == 1:
        (one,) = group
        samples = world.peers[one].in_round
        digest = digest_of("alone", one, sorted(samples))
        ended = Averaged(Ending.ALONE, digest=digest)
        yield Action("is alone", group, told_end(rules, world, one, ended, epoch, samples))
        return
    discarded = world
    for one in group:
        discarded = told_end(rules, discarded, one, Averaged(Ending.DISCARDED), epoch, frozenset())
    yield Action("discard", group, discarded)
    for counted in subsets(group):
        samples = frozenset().union(*(world.peers[one].in_round for one in counted))
        for words, endings in commits(rules, group, counted, samples):
            after = world
            for one, ended in endings.items():
                after = told_end(rules, after, one, ended, epoch, samples)
            name = f"end with {counted}{words}" if words or counted != group else "commit"
            yield Action(name, group, after)


def commits(
    rules: Rules,
    group: tuple[int, ...],
    counted: tuple[int, ...],
    samples: frozenset[Sample],
    peers: int = 0,
) -> Iterator[tuple[str, dict[int, Averaged]]]:
    """What each of a group may hear of a round that is committed with these samples of `counted`;
    and in words, who does not hear of it."""
    if not samples:
        return
    digest, weight = digest_of(sorted(samples)), float(len(samples))
    members, roster = tuple(map(name_of, counted)), tuple(map(name_of, group))
    others = tuple(name_of(one) for one in group if one not in counted)
    committed = Averaged(Ending.COMMITTED, weight, digest, members, left_out=others, peers=peers)
    left_out = Averaged(Ending.LEFT_OUT, weight, digest, members, peers=peers)
    in_doubt = Averaged(Ending.DISCARDED, members=roster, in_doubt=True)
    endings = {one: committed if one in counted else left_out for one in group}
    yield "", endings
    for doubter in group if rules.doubts else ():
        if (doubter,) != counted:  # a member has committed
            yield f", and {doubter} does not know", {**endings, doubter: in_doubt}


def _endings_of_parameters(
    rules: Rules, world: World, epoch: int, group: tuple[int, ...]
) -> Iterator[Action]:
    if len(group) == 1:
        (one,) = group
        alone = ParametersRoundEnded(Ending.ALONE)
        yield Action("is alone", group, told(rules, world, one, world.peers[one], alone))
        return
    for size in (0, *range(2, len(group) + 1)):
        for counted in combinations(group, size):
            digest = digest_of("parameters", epoch, counted)
            result = Result(epoch, frozenset(), digest)
            after = world
            for one in group:
                peer = after.peers[one]
                if one in counted:
                    peer = replace(peer, parameters=(*peer.parameters, result))
                    event = ParametersRoundEnded(Ending.COMMITTED, digest)
                elif counted:
                    event = ParametersRoundEnded(Ending.LEFT_OUT, digest)
                else:
                    event = ParametersRoundEnded(Ending.DISCARDED)
                after = told(rules, after, one, peer, event)
            name = f"average the parameters of {counted}"
            yield Action(name if counted != group else "average parameters", group, after)


def told_end(
    rules: Rules,
    world: World,
    number: int,
    ended: Averaged,
    epoch: int,
    samples: frozenset[Sample],
) -> World:
    result = Result(epoch, samples, ended.digest)
    return told(rules, world, number, world.peers[number], ended, result)


def told(
    rules: Rules,
    world: World,
    number: int,
    peer: Peer,
    event: Event,
    result: Result | None = None,
) -> World:
    """One event at one peer, and its effects. It learns how a round ended only after a look."""
    life = peer.life
    if isinstance(event, Averaged):
        looked = Estimated(rules.estimate(world, number))
        life, _ = advance(rules.mode, life, looked)
        life = replace(life, number=0, looked_past=0)
    life, effects = advance(rules.mode, life, event)
    peer = replace(peer, life=life)
    for effect in effects:
        peer = _done(rules, peer, effect, result)
    if isinstance(event, Contributed) and life.phase in (Phase.BEHIND, Phase.FETCHING):
        peer = replace(peer, samples=frozenset())
    world = with_peer(world, number, peer)
    return world if rules.stale_slots else _published(world, number)


def _done(rules: Rules, peer: Peer, effect: Effect, result: Result | None) -> Peer:
    match effect:
        case Average():
            assert not peer.in_round
            return replace(peer, in_round=peer.samples, samples=frozenset(), taken=peer.steps)
        case Step() | StepAlone():
            assert result is not None
            assert result.epoch == effect.epoch
            stepped = replace(peer, parameters=(*peer.parameters, result), in_round=frozenset())
            return stepped if rules.mode.delayed else replace(stepped, taken=stepped.steps)
        case KeepGradients(samples=samples):
            assert samples == len(peer.in_round)
            return replace(peer, samples=peer.samples | peer.in_round, in_round=frozenset())
        case DropGradients(samples=samples):
            assert samples == len(peer.samples | peer.in_round)
            return replace(peer, samples=frozenset(), in_round=frozenset())
        case Fetch():
            return replace(peer, fetch=effect)
        case AverageParameters():
            assert effect.epoch == peer.steps
            return peer
        case _:
            return peer


def with_peer(world: World, number: int, peer: Peer) -> World:
    peers = (*world.peers[:number], peer, *world.peers[number + 1 :])
    return replace(world, peers=peers)


def _published(world: World, number: int) -> World:
    return _with_slot(world, number, world.peers[number].slot)


def _with_slot(world: World, number: int, slot: ProgressSlot | None) -> World:
    return replace(world, board=(*world.board[:number], slot, *world.board[number + 1 :]))


def digest_of(*content: object) -> bytes:
    return blake3(repr(content).encode()).digest(16)


def what_is_wrong(rules: Rules, world: World) -> str | None:
    """The first promise that this world breaks."""
    held: dict[tuple[int, bytes], tuple[Result, ...]] = {}
    for number, peer in enumerate(world.peers):
        life = peer.life
        if not peer.alive:
            continue
        if (life.samples, life.in_round) != (len(peer.samples), len(peer.in_round)):
            return f"{number} counts {life.samples} + {life.in_round} and has others"
        if peer.steps != life.epoch:
            return f"{number} is at epoch {life.epoch} after {peer.steps} steps"
        if held.setdefault((life.epoch, life.history), peer.parameters) != peer.parameters:
            return f"{number} has other parameters than a peer with the same history"
        wrong = _wrong_steps(rules, peer)
        if wrong is not None:
            return f"{number}: {wrong}"
    return None


def forked(world: World) -> str | None:
    """The living peers that have made other steps than another one."""
    made: dict[int, Result] = {}
    for number, peer in enumerate(world.peers):
        for result in peer.parameters:
            if peer.alive and result.samples and made.setdefault(result.epoch, result) != result:
                return f"{number} has made another step of epoch {result.epoch} than another peer"
    return None


def _wrong_steps(rules: Rules, peer: Peer) -> str | None:
    counted: set[Sample] = set()
    for result in peer.parameters:
        if counted & result.samples:
            return f"{counted & result.samples} count twice"
        counted |= result.samples
        if result.samples and len(result.samples) < COMMIT_SHARE * rules.mode.target_samples:
            return f"the step of epoch {result.epoch} has only {len(result.samples)} samples"
        oldest = result.epoch - 1 if rules.mode.delayed else result.epoch
        stale = [one for one in result.samples if not oldest <= one.steps <= result.epoch]
        if stale:
            return f"{stale} are in the step of epoch {result.epoch}"
    return None
