"""Every order in which a small round can happen, and what must hold in each of its states.

A *world* is the local state of each member, who is alive, and what is under way. From a world,
anything that can happen next is a *step*: any message under way arrives (in any order), an
exchange ends well or badly, a call to a dead member fails, a member dies. Steps that could go on
for ever have a budget: deaths, timers that fire early, messages that are lost with their sender
told, links that break, messages that arrive twice. When nothing is under way, every timer fires
for free, except those of the round's end.

Messages of a dead member may still arrive or not: they stay under way, and a world in which only
these are left counts as ended.

Checked in every world (`Broken` says which failed, and by which steps one gets there):

- no two members have decided different results, dead ones included;
- who commits has in its buffer, complete, the result with that digest;
- nobody has written over a result that is decided;
- no member is certain of a discard while a result is decided (a quorum has accepted it in one
  ballot), whether or not anybody knows.

`search` can then say from which worlds nobody gets to a verdict any more: there must be none.

Local states are interned: each is computed once, however many worlds it is part of, so the search
itself handles tuples of numbers. Easy to get wrong: two local states are the same only if all
that they will ever do is. The clock and when timers are due are left out, and nothing else.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec

from protocols.moshpit.agreement import Agreement, Timing
from protocols.moshpit.agreement_messages import Result
from protocols.moshpit.ballots import Ballot, Suspicion, digest_of_result
from protocols.moshpit.verdicts import (
    Commit,
    Conclude,
    Discard,
    MemberLeftOut,
    OwnVerdict,
    Send,
    StartExchange,
    StopExchange,
)
from tests.moshpit.agreement_group import plan, statements, verify

Step = tuple[Any, ...]
AgreementType = type[Agreement]

END_TIMERS = ("round", "end")
ALL_TIMERS = ("poll", "suspect", "idle", "takeover", "answers", "watch", "reports", *END_TIMERS)

TIMING = Timing(round_seconds=60.0)

Spent = tuple[int, ...]  # what is left of each budget
DEATHS, TIMERS, FAILURES, LOSSES, DOUBLES, ENDS, DENIALS = range(7)


# who is told too little, or stops waiting too early, may have to end in doubt
_MAY_END_IN_DOUBT = ((TIMERS, "timers"), (LOSSES, "losses"), (ENDS, "ends"))


def _less(budgets: Spent, which: int) -> Spent:
    return (*budgets[:which], budgets[which] - 1, *budgets[which + 1 :])


class Broken(AssertionError):
    """An invariant does not hold; these steps lead to that state."""

    def __init__(self, what: str, path: list[Step]) -> None:
        super().__init__("\n".join([what, *map(str, path)]))


@dataclass
class Local:
    """One member, and the real state around it."""

    agreement: Agreement
    begun: bool = False
    running: StartExchange | None = None
    joined: frozenset[Ballot] = frozenset()
    buffer: tuple[Ballot, bytes] | None = None
    ever_held: frozenset[tuple[Ballot, bytes]] = frozenset()
    verdict: OwnVerdict | None = None
    ever_accepted: frozenset[tuple[Ballot, Result | None]] = frozenset()
    wrong: str = ""

    def clone(self) -> Local:
        return Local(
            clone(self.agreement, {}),
            self.begun,
            self.running,
            self.joined,
            self.buffer,
            self.ever_held,
            self.verdict,
            self.ever_accepted,
        )


def clone(value: Any, done: dict[int, Any]) -> Any:
    """A copy that shares immutable parts."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, dict):
        return {key: clone(each, done) for key, each in value.items()}
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list):
        return list(value)
    if isinstance(value, deque):
        return deque(value)
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, enum.Enum | Timing):
        return value
    made = object.__new__(type(value))
    done[id(value)] = made
    for name, each in vars(value).items():
        made.__dict__[name] = clone(each, done)
    return made


# the agreement's own
SHARED = ("_owner", "_desk", "_ending", "_blame", "_acceptor", "_exchange", "_succession")


def freeze(value: Any) -> Hashable:
    """A key that is equal for two local states with the same future."""
    if isinstance(value, msgspec.Struct | enum.Enum):
        return value
    if isinstance(value, dict):
        return frozenset((key, freeze(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, list | deque | tuple):
        return tuple(freeze(each) for each in value)
    if callable(value) or not hasattr(value, "__dict__"):
        return value if not callable(value) else None
    state = []
    for name, each in sorted(vars(value).items()):
        if name in ("now", "timing") or (name in SHARED and not isinstance(value, Agreement)):
            continue
        state.append(frozenset(each) if name == "timers" else freeze(each))
    return (type(value).__name__, *state)


@dataclass(frozen=True)
class Budgets:
    """How often events may happen that could otherwise happen for ever."""

    deaths: int = 0
    timers: int = 0  # that fire while something is under way
    failures: int = 0  # exchanges that fail although all their members live
    losses: int = 0  # messages that are lost, their sender being told
    doubles: int = 0  # messages that arrive and stay under way
    ends: int = 0  # firings of the timers of the round's end
    denials: int = 0  # exchanges at whose end another member says that it has another result


World = tuple[tuple[int, ...], int, frozenset[int], Spent]


@dataclass
class Interleavings:
    """The worlds of a round of `size` members."""

    size: int
    budgets: Budgets
    agreement_type: AgreementType = Agreement
    locals: list[Local] = field(default_factory=list)
    _ids: dict[Hashable, int] = field(default_factory=dict)
    _items: list[tuple[Any, ...]] = field(default_factory=list)
    _item_ids: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _after: dict[tuple[int, Step], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _checked: dict[tuple[int, ...], str] = field(default_factory=dict)

    # local states

    def _intern(self, local: Local) -> int:
        key = (
            freeze(local.agreement),
            local.begun,
            local.running,
            local.joined,
            local.buffer,
            local.ever_held,
            local.verdict,
            local.ever_accepted,
            local.wrong,
        )
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.locals)
            self.locals.append(local)
        return found

    def _item(self, item: tuple[Any, ...]) -> int:
        found = self._item_ids.get(item)
        if found is None:
            found = self._item_ids[item] = len(self._items)
            self._items.append(item)
        return found

    def _local_step(self, me: int, before: int, step: Step) -> tuple[int, tuple[int, ...]]:
        """The effect of this on a member, and the messages that it sends."""
        known = self._after.get((before, step))
        if known is not None:
            return known
        local = self.locals[before].clone()
        agreement = local.agreement
        match step:
            case ("begin",):
                local.begun = True
                agreement.begin(0.0)
            case ("message", sender, message):
                agreement.receive(sender, message, 0.0)
            case ("unreachable", member):
                agreement.unreachable(member, 0.0)
            case ("timer", name):
                agreement.fire(name)
            case ("done",):
                self._finish(local)
            case ("denied", member):
                self._finish(local, member)
            case ("failed", suspicion):
                assert local.running is not None
                ballot, local.running = local.running.ballot, None
                agreement.exchange_failed(ballot, (suspicion,), 0.0)
        sent = tuple(self._carry_out(me, local))
        accepted = agreement._acceptor.accepted
        if accepted is not None:
            local.ever_accepted |= {(accepted.ballot, accepted.result)}
        after = self._after[before, step] = (self._intern(local), sent)
        return after

    def _finish(self, local: Local, *contradicted: int) -> None:
        start = local.running
        assert start is not None
        shown = statements(start.ballot, start.members)
        digest = digest_of_result(shown)
        local.running, local.buffer = None, (start.ballot, digest)
        if not contradicted:  # else it is complete, and may all the same not be committed
            local.ever_held |= {local.buffer}
        local.agreement.exchange_done(start.ballot, digest, shown, 0.0, contradicted)

    def _carry_out(self, me: int, local: Local) -> Iterator[int]:
        for effect in local.agreement.effects():
            match effect:
                case Send(to, message):
                    yield self._item(("message", me, to, message))
                case StartExchange(ballot):
                    assert local.running is None, "two exchanges at once"
                    local.running, local.buffer = effect, None
                    local.joined |= {ballot}
                case StopExchange(ballot):
                    assert local.running is not None, "nothing to stop"
                    assert local.running.ballot == ballot, "another exchange is stopped"
                    local.running = None
                case Conclude(verdict):
                    assert local.verdict is None, "decided twice"
                    local.verdict = verdict
                    if isinstance(verdict, Commit) and local.buffer != (
                        verdict.attempt,
                        verdict.digest,
                    ):
                        local.wrong = f"member {me} commits {verdict} and holds {local.buffer}"

    # worlds

    def first(self) -> World:
        """The world before any event. A member that dies here has received nothing."""
        ids = tuple(
            self._intern(
                Local(
                    self.agreement_type(
                        me, self.size, range(self.size), TIMING, 0.0, plan=plan, verify=verify
                    )
                )
            )
            for me in range(self.size)
        )
        return ids, (1 << self.size) - 1, frozenset(), astuple(self.budgets)

    def steps(self, world: World) -> list[tuple[Step, World]]:
        """All possible next events, and the worlds after them."""
        ids, alive, under_way, budgets = world
        found: list[tuple[Step, World]] = []
        busy = False

        def add(step: Step, me: int, local: Step, left: frozenset[int], spent: Spent) -> None:
            after, sent = self._local_step(me, ids[me], local)
            went = (*ids[:me], after, *ids[me + 1 :])
            left = self._reaching(left, sent, alive)
            found.append((step, (went, alive, left, spent)))
            if spent[DEATHS]:  # it dies of it, or rather: before it does anything else
                dead = alive & ~(1 << me)
                spent = _less(spent, DEATHS)
                found.append((("then dies", *step), (went, dead, self._to_dead(left, me), spent)))

        for item in sorted(under_way):  # about in the order in which they were sent
            what, sender, to, message = self._items[item]
            left = under_way - {item}
            busy = busy or bool(alive >> sender & 1)
            if what == "gone":
                add(("gone", sender, to), sender, ("unreachable", to), left, budgets)
                continue
            add((what, sender, to, message), to, ("message", sender, message), left, budgets)
            if budgets[LOSSES] and alive >> sender & 1:
                spent = _less(budgets, LOSSES)
                add(("lost", sender, to, message), sender, ("unreachable", to), left, spent)
            if budgets[DOUBLES]:
                spent = _less(budgets, DOUBLES)
                step = ("message", sender, message)
                add(("twice", sender, to, message), to, step, under_way, spent)
        living = [me for me in range(self.size) if alive >> me & 1]
        before = 0 in living and not self.locals[ids[0]].begun
        if before:
            busy = True
            add(("begin",), 0, ("begin",), under_way, budgets)
        for me in living:
            start = self.locals[ids[me]].running
            if start is None:
                continue
            if all(start.ballot in self.locals[ids[each]].joined for each in start.members):
                busy = True
                add(("done", me), me, ("done",), under_way, budgets)
                for other in start.members if budgets[DENIALS] else ():
                    if other != me:
                        spent = _less(budgets, DENIALS)
                        add(("denied", me, other), me, ("denied", other), under_way, spent)
            for other in start.members:
                dead = not alive >> other & 1
                if other == me or not (dead or budgets[FAILURES]):
                    continue
                busy = busy or dead
                spent = budgets if dead else _less(budgets, FAILURES)
                why = Suspicion(other, "cut" if dead else "stalled")
                add(("failed", me, other), me, ("failed", why), under_way, spent)
        for me in living:
            armed = self.locals[ids[me]].agreement._desk.timers
            for name in ALL_TIMERS:
                if name not in armed:
                    continue
                costs = ENDS if name in END_TIMERS else TIMERS if busy else None
                if costs is None or budgets[costs]:
                    spent = budgets if costs is None else _less(budgets, costs)
                    add(("timer", me, name), me, ("timer", name), under_way, spent)
        if (before or not busy) and budgets[DEATHS]:
            for me in living:
                left = self._to_dead(under_way, me)
                spent = _less(budgets, DEATHS)
                found.append((("dies", me), (ids, alive & ~(1 << me), left, spent)))
        return found

    def _reaching(self, left: frozenset[int], sent: tuple[int, ...], alive: int) -> frozenset[int]:
        """The messages under way, with these. All calls to dead members fail at once."""
        if not sent:
            return left
        now = set(left)
        for item in sent:
            _, sender, to, _ = self._items[item]
            now.add(item if alive >> to & 1 else self._item(("gone", sender, to, None)))
        return frozenset(now)

    def _to_dead(self, under_way: frozenset[int], dead: int) -> frozenset[int]:
        now = set()
        for item in under_way:
            what, sender, to, _ = self._items[item]
            if to != dead:
                if not (what == "gone" and sender == dead):
                    now.add(item)
            elif sender != dead:
                now.add(self._item(("gone", sender, dead, None)))
        return frozenset(now)

    def what_is_wrong(self, world: World) -> str:
        """The invariant that does not hold in this world; "" if all do."""
        ids = world[0]
        wrong = self._checked.get(ids)
        if wrong is None:
            wrong = self._checked[ids] = self._what_is_wrong([self.locals[i] for i in ids])
        if not wrong and self.has_ended(world):
            wrong = self._what_is_wrong_at_the_end(world)
        return wrong

    def _what_is_wrong_at_the_end(self, world: World) -> str:
        """Survivors agree, and if they are a quorum, none is in doubt."""
        ids, alive, _, left = world
        verdicts = [self.locals[ids[me]].verdict for me in range(self.size) if alive >> me & 1]
        discards = [each for each in verdicts if isinstance(each, Discard)]
        if any(left[each] < getattr(self.budgets, name) for each, name in _MAY_END_IN_DOUBT):
            return ""
        if 0 < len(discards) < len(verdicts):
            return f"survivors end differently: {verdicts}"
        if len(verdicts) > self.size // 2 and any(each.in_doubt for each in discards):
            return f"a quorum lives and is in doubt: {verdicts}"
        return ""

    def _what_is_wrong(self, members: list[Local]) -> str:
        for each in members:
            verdict = each.verdict
            if each.wrong:
                return each.wrong
            if (
                isinstance(verdict, MemberLeftOut)
                and (verdict.attempt, verdict.digest) in each.ever_held
            ):
                return f"somebody has written over what is decided: {verdict}"
        verdicts = [each.verdict for each in members]
        results = {
            (verdict.attempt, verdict.members, verdict.digest)
            for verdict in verdicts
            if isinstance(verdict, Commit | MemberLeftOut)
        }
        ballots: dict[tuple[Ballot, Result | None], int] = {}
        for each in members:
            for accepted in each.ever_accepted:
                ballots[accepted] = ballots.get(accepted, 0) + 1
        decided = {result for (_, result), count in ballots.items() if count > self.size // 2}
        certain = any(isinstance(each, Discard) and not each.in_doubt for each in verdicts)
        if len(results) > 1 or len(decided) > 1:
            return f"different results are decided: {results or decided}"
        if certain and (results or decided - {None}):
            return f"a discard is certain, beside {results or decided}"
        return ""

    def has_ended(self, world: World) -> bool:
        """Whether all living members have a verdict."""
        ids, alive = world[0], world[1]
        return all(
            self.locals[ids[me]].verdict is not None for me in range(self.size) if alive >> me & 1
        )


@dataclass(frozen=True)
class Found:
    """The statistics of a search."""

    worlds: int
    ended: int
    complete: bool


def search(
    space: Interleavings,
    most: int | None = None,
    *,
    detours: int | None = None,
    progress: bool = True,
) -> Found:
    """Visit all worlds that can be reached (or `most` of them), depth first.

    With `detours`, only those on ways on which, that many times at most, something else happens
    next than what has been under way for longest; deaths are no detours and come everywhere.

    Broken, with the way to it, if an invariant fails in a world; or, if `progress` and all were
    seen, if from one of them the living never come to a verdict, whatever happens.

    Of a world that was seen only a digest is kept, or millions of them would not fit: two worlds
    with the same 64 bits are taken for one, which among ten million has a chance of 3 in a million.
    """
    first = space.first()
    allowed = 0 if detours is None else detours
    seen = _Seen(space)
    seen.add(first, 0)
    left = array("b", [allowed])
    edges_from, edges_to, ended = array("I"), array("I"), array("I")
    follow_edges = progress and detours is None
    to_visit = [(first, 0, allowed)]
    while to_visit and (most is None or len(left) < most):
        world, number, turns = to_visit.pop()
        if turns < left[number]:
            continue  # it was reached again with more to spend
        if space.has_ended(world):  # verdicts are final
            ended.append(number)
            continue
        for place, (step, after) in enumerate(space.steps(world)):
            costs = 0 if detours is None or place == 0 or "dies" in step[0] else 1
            if turns < costs:
                continue
            reached = seen.number_of(after)
            is_new = reached is None
            if reached is None:
                reached = seen.add(after, number)
                left.append(-1)
            if follow_edges:
                edges_from.append(number)
                edges_to.append(reached)
            if left[reached] >= turns - costs:
                continue
            left[reached] = turns - costs
            if is_new:
                wrong = space.what_is_wrong(after)
                if wrong:
                    raise Broken(wrong, seen.way_to(reached))
            to_visit.append((after, reached, turns - costs))
    if follow_edges and not to_visit:
        stuck = _without_an_end(len(left), edges_from, edges_to, ended)
        if stuck is not None:
            raise Broken("nobody gets to a verdict from here", seen.way_to(stuck))
    return Found(len(left), len(set(ended)), not to_visit)


class _Seen:
    """The worlds that a search has seen, numbered, and from which each was reached first."""

    def __init__(self, space: Interleavings) -> None:
        self._space = space
        self._numbers: dict[int, int] = {}
        self._came_from = array("I")

    def number_of(self, world: World) -> int | None:
        return self._numbers.get(_digest_of(world))

    def add(self, world: World, came_from: int) -> int:
        number = len(self._came_from)
        self._numbers[_digest_of(world)] = number
        self._came_from.append(came_from)
        return number

    def way_to(self, number: int) -> list[Step]:
        """Repeats the way from the first world, because only digests are kept."""
        numbers = []
        while number:
            numbers.append(number)
            number = self._came_from[number]
        world, way = self._space.first(), []
        for wanted in reversed(numbers):
            step, world = next(
                each for each in self._space.steps(world) if self.number_of(each[1]) == wanted
            )
            way.append(step)
        return way


def _digest_of(world: World) -> int:
    ids, alive, under_way, spent = world
    words = (*ids, alive, *spent, *sorted(under_way))
    return int.from_bytes(blake2b(array("I", words).tobytes(), digest_size=8).digest(), "big")


def _without_an_end(
    worlds: int, edges_from: array[int], edges_to: array[int], ended: array[int]
) -> int | None:
    """A world from which no end can be reached (all living members have a verdict), if any."""
    can_end = bytearray(worlds)
    for number in ended:
        can_end[number] = True
    grows = True
    while grows:  # worlds were numbered as they were reached: backwards, few turns are needed
        grows = False
        for place in range(len(edges_from) - 1, -1, -1):
            if can_end[edges_to[place]] and not can_end[edges_from[place]]:
                can_end[edges_from[place]] = grows = True
    stuck = can_end.find(0)
    return None if stuck < 0 else stuck


def walk(space: Interleavings, random: Random, most: int = 1000) -> World:
    """One random way through the worlds, step by step, to an end (or `most` steps)."""
    world, way = space.first(), list[Step]()
    for _ in range(most):
        if space.has_ended(world):
            break
        step, world = random.choice(space.steps(world))
        way.append(step)
        wrong = space.what_is_wrong(world)
        if wrong:
            raise Broken(wrong, way)
    return world
