"""Every order in which a few gatherings can hear of each other, and every moment of one death.

A `Model` is a handful of real `Gathering` machines and the messages between them. It lists all
possible next events as named steps. `explore` takes each of them in a copy of the model, and so on
to the end, without going twice through the same state. Time passes only when nothing is under way,
as under trio's autojump clock: a message may overtake every other, but no timeout overtakes a
message, unless its receiver is dead.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from protocols.identity import PeerId
from protocols.moshpit.closing_time import Arrivals, ClosingTime
from protocols.moshpit.gathering import Gathering, LeadersWord, LeadOrFollow
from protocols.moshpit.gathering_effects import (
    Candidate,
    End,
    Follow,
    Lead,
    Probe,
    Regroup,
    Reply,
    SendAway,
    SendInvite,
    SendOn,
    StartedWithoutUs,
)
from protocols.moshpit.group import Search
from protocols.moshpit.known_peers import Absence, Awaited, KnownPeers, WaitingJoins
from protocols.moshpit.roster import Offer

POLL_SECONDS = 0.1
ANSWERS_TO_JOINS = ("list", "on", "away", "regroup", "shown")
PARTS = {
    Gathering,
    LeadOrFollow,
    LeadersWord,
    ClosingTime,
    WaitingJoins,
    Arrivals,
    Awaited,
    KnownPeers,
}
"""The parts of a machine. They may hold dicts, lists and sets, but these hold no parts."""
SETS = ("_came", "_there", "_lost", "_asked")
LATEST = 20.0  # all must have ended before this


def by_name(peer: PeerId) -> bytes:
    """The order of the model: a before b before c."""
    return peer.encode()


@dataclass
class Letter:
    """Something on its way. `kind` names what the receiver does with it."""

    kind: str
    sender: PeerId
    receiver: PeerId
    ticket: int = 0
    peers: tuple[PeerId, ...] = ()
    leader: PeerId | None = None
    reply: Reply | None = None


@dataclass
class Model:
    machines: dict[PeerId, Gathering]
    clients: frozenset[PeerId]
    now: float = 0.0
    letters: list[Letter] = field(default_factory=list)
    published: set[PeerId] = field(default_factory=set)
    dead: set[PeerId] = field(default_factory=set)
    may_die: tuple[PeerId, ...] = ()
    tickets: int = 0
    waiting: dict[int, tuple[PeerId, PeerId]] = field(default_factory=dict)  # follower, leader
    lists: dict[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)  # by leader
    accepted: dict[PeerId, PeerId] = field(default_factory=dict)  # member: leader
    endings: dict[PeerId, object] = field(default_factory=dict)

    @property
    def alive(self) -> list[PeerId]:
        return [peer for peer in self.machines if peer not in self.dead]

    @property
    def is_over(self) -> bool:
        return all(self.machines[peer].ended for peer in self.alive) and not self.letters

    def clone(self) -> Model:
        """An independent copy of this world."""
        other = copy.copy(self)
        other.machines = {peer: _clone_of(one) for peer, one in self.machines.items()}
        other.letters = [copy.copy(letter) for letter in self.letters]
        other.published, other.dead = set(self.published), set(self.dead)
        other.waiting, other.lists = dict(self.waiting), dict(self.lists)
        other.accepted, other.endings = dict(self.accepted), dict(self.endings)
        return other

    def fingerprint(self) -> bytes:
        """Equal for worlds that are equal."""
        state = dict(vars(self))
        machines = [_fingerprint_of(one) for one in state.pop("machines").values()]
        sets = [sorted(state.pop(name)) for name in ("published", "dead")]
        return f"{machines} {sets} {state}".encode()

    # -- what can happen

    def steps(self) -> list[str]:
        """The names of the possible next steps; time passes only if nothing else can happen."""
        steps = [f"publish {peer}" for peer in self.alive if peer not in self.published]
        first: set[tuple[bool, PeerId, PeerId]] = set()
        for number, letter in enumerate(self.letters):
            way = (letter.kind == "join", letter.sender, letter.receiver)
            if way not in first:  # messages on one way stay in order
                first.add(way)
                steps.append(f"deliver {number}")
        if not steps:
            steps.append("wait")
        if not self.dead:
            for peer in self.may_die if not self.is_over else ():
                steps += [f"kill {peer}", f"cut {peer}"]
        return steps

    def take(self, step: str) -> None:
        what, _, which = step.partition(" ")
        if what == "publish":
            self.published.add(PeerId(which))
            self._read(PeerId(which))
        elif what == "kill":
            self._kill(PeerId(which))
        elif what == "cut":
            self._lose_letters_of(PeerId(which))
            self._kill(PeerId(which))
        elif what == "deliver":
            letter = self.letters.pop(int(which))
            if letter.receiver in self.dead:
                self._post(letter)
            else:
                self._deliver(letter)
        else:
            self._wait()

    def _wait(self) -> None:
        moments = [self.machines[peer].next_deadline for peer in self.alive]
        self.now = max(self.now + 1e-6, min(self.now + POLL_SECONDS, *moments))
        for peer in self.alive:
            self.machines[peer].tick(self.now)
            self._read(peer)
            self._carry_out(peer)

    def _read(self, peer: PeerId) -> None:
        machine = self.machines[peer]
        if machine.looks_for_slots:
            for other in sorted(self.published - {peer}):
                machine.saw_slot(Candidate(other, other not in self.clients), 1, self.now)
            machine.slots_were_read(self.now)
        self._carry_out(peer)

    def _kill(self, peer: PeerId) -> None:
        """A process is killed: its machine closes the connections, which all others notice."""
        self.dead.add(peer)
        for ticket, (follower, leader) in list(self.waiting.items()):
            if leader == peer:
                self._post(Letter("lost", peer, follower))
            elif follower == peer:
                self._post(Letter("gone", peer, leader, ticket))

    def _lose_letters_of(self, peer: PeerId) -> None:
        """Its messages that have not arrived are lost; peers that wait for it notice."""
        lost = [letter for letter in self.letters if letter.sender == peer]
        self.letters = [letter for letter in self.letters if letter.sender != peer]
        for letter in lost:
            if letter.kind in ANSWERS_TO_JOINS:
                self._post(Letter("lost", peer, letter.receiver))
            if letter.kind in ("reply", "shown"):
                self._post(Letter("not met", peer, letter.receiver))

    # -- messages

    def _post(self, letter: Letter) -> None:
        if letter.receiver not in self.dead:
            self.letters.append(letter)
        elif letter.kind in ("invite", "probe"):
            self.letters.append(Letter("not met", letter.receiver, letter.sender))
        elif letter.kind == "join":
            self.letters.append(Letter("lost", letter.receiver, letter.sender))

    def _deliver(self, letter: Letter) -> None:
        me, other, now = letter.receiver, letter.sender, self.now
        machine = self.machines[me]
        if letter.kind == "join":
            self._take_join(machine, letter)
        elif letter.kind == "gone":
            self.waiting.pop(letter.ticket, None)
            machine.join_gone(other, letter.ticket, now)
        elif letter.kind == "answered":
            machine.leader.answers(other, 0.0, now)
        elif letter.kind == "lost":
            machine.leader.is_gone(other, Absence.UNREACHABLE, "it is gone", now)
        elif letter.kind == "away":
            machine.leader.is_gone(other, Absence.ELSEWHERE, "it looks for no group", now)
        elif letter.kind == "on":
            assert letter.leader is not None
            machine.leader.sends_us_on(other, Candidate(letter.leader), now)
        elif letter.kind == "regroup":
            machine.leader.makes_a_group(other, self._candidates(letter.peers), now)
        elif letter.kind == "list":
            if machine.leader.lists_us(other):
                self.accepted[me] = other
        elif letter.kind == "shown":
            if me not in letter.peers:
                machine.shown(other, letter.peers, now)
            elif machine.adopted():
                self.accepted[me] = self._leader_of(letter.peers)
                self._show_the_rest(me, letter.peers)
        elif letter.kind == "invite":
            self._answer_invitation(machine, other)
        elif letter.kind == "reply":
            leader = None if letter.leader is None else Candidate(letter.leader)
            assert letter.reply is not None
            machine.invitation_answered(other, letter.reply, leader, 0.0, now)
        elif letter.kind == "not met":
            machine.not_met(other, Absence.UNREACHABLE, "it is gone", now)
        self._carry_out(me)

    def _take_join(self, machine: Gathering, letter: Letter) -> None:
        me, follower = letter.receiver, letter.sender
        started = self._started_of(me)
        if started:
            self._post(Letter("shown", me, follower, peers=started))
        elif machine.ended or me not in self.published:
            self._post(Letter("away", me, follower))
        else:
            self.tickets += 1
            self.waiting[self.tickets] = (follower, me)
            self._post(Letter("answered", me, follower))
            candidate = Candidate(follower, follower not in self.clients)
            machine.join_came(candidate, self.tickets, letter.peers, 10.0, self.now)

    def _answer_invitation(self, machine: Gathering, by: PeerId) -> None:
        started = self._started_of(machine.me)
        if started:
            self._post(Letter("shown", machine.me, by, peers=started))
            return
        if machine.ended or machine.me not in self.published:
            reply, leader = Reply.NOT_HERE, None
        else:
            reply, leader = machine.invited(by, self.now)
        self._post(Letter("reply", machine.me, by, leader=leader, reply=reply))

    def _leader_of(self, members: tuple[PeerId, ...]) -> PeerId:
        return min(member for member in members if member not in self.clients)

    def _started_of(self, peer: PeerId) -> tuple[PeerId, ...]:
        leader = self.accepted.get(peer)
        return self.lists.get(peer) or (self.lists[leader] if leader else ())

    # -- effects

    def _carry_out(self, me: PeerId) -> None:
        if me in self.dead:
            return
        for effect in self.machines[me].effects():
            if isinstance(effect, Follow):
                self._post(Letter("join", me, effect.leader, peers=effect.passed_over))
            elif isinstance(effect, SendInvite):
                self._post(Letter("invite", me, effect.peer))
            elif isinstance(effect, Probe):
                self._post(Letter("probe", me, effect.peer))
            elif isinstance(effect, SendOn):
                self._reply(effect.ticket, Letter("on", me, me, leader=effect.leader))
            elif isinstance(effect, SendAway):
                self._reply(effect.ticket, Letter("away", me, me))
            elif isinstance(effect, Regroup):
                peers = tuple(one.peer for one in effect.group)
                self._reply(effect.ticket, Letter("regroup", me, me, peers=peers))
            elif isinstance(effect, Lead):
                self.lists[me] = tuple(sorted((me, *effect.tickets)))
                self.accepted[me] = me
                for ticket in effect.tickets.values():
                    self._reply(ticket, Letter("list", me, me))
                self._show_the_rest(me, self.lists[me])
            elif isinstance(effect, End):
                self.endings[me] = effect.ending
                if isinstance(effect.ending, StartedWithoutUs):
                    self._show_the_rest(me, self._started_of(effect.ending.by))

    def _reply(self, ticket: int, letter: Letter) -> None:
        follower, _leader = self.waiting.pop(ticket)
        letter.receiver = follower
        self._post(letter)

    def _show_the_rest(self, me: PeerId, members: tuple[PeerId, ...]) -> None:
        for ticket, (_follower, leader) in list(self.waiting.items()):
            if leader == me:
                self._reply(ticket, Letter("shown", me, me, peers=members))

    def _candidates(self, peers: tuple[PeerId, ...]) -> tuple[Candidate, ...]:
        return tuple(Candidate(one, one not in self.clients) for one in peers)


def model(
    names: str,
    *,
    clients: str = "",
    expected: int | None = None,
    group_size: int = 64,
    may_die: str = "",
) -> Model:
    """Peers of these names, in their order; those of `clients` can only dial out."""
    machines = {}
    for name in names:
        offer = Offer(1.0, reduces=name not in clients)
        search = Search("key", 0, bytes(32), offer, group_size, expected, 10.0)
        machines[PeerId(name)] = Gathering(PeerId(name), by_name, search, 0.0)
    victims = tuple(PeerId(name) for name in may_die)
    hidden = frozenset(PeerId(name) for name in clients)
    return Model(machines, hidden, may_die=victims)


def explore(start: Model, check: Callable[[Model], None], most: int = 1_000_000) -> int:
    """Visit every state once, and check each end. Returns the number of states."""
    seen: set[bytes] = set()
    ends = 0
    waiting = [start]
    while waiting:
        before = waiting.pop()
        for step in before.steps():
            after = before.clone()
            after.take(step)
            digest = hashlib.blake2b(after.fingerprint(), digest_size=16).digest()
            if digest in seen:
                continue
            seen.add(digest)
            assert after.now < LATEST, "it never ends"
            assert len(seen) < most, "too many states"
            if after.is_over:
                check(after)
                ends += 1
            else:
                waiting.append(after)
    assert ends
    return len(seen)


def _clone_of(machine: Gathering) -> Gathering:
    """An independent copy of a gathering."""
    clone = _copy(machine, {})
    assert isinstance(clone, Gathering)
    return clone


def _copy(part: object, done: dict[object, object]) -> object:
    """A copy of this part and all parts that it holds; shared parts stay shared."""
    clone = done.get(part)
    if clone is None:
        clone = done[part] = copy.copy(part)
        state = vars(clone)
        for name, value in state.items():
            kind = type(value)
            if kind in PARTS:
                state[name] = _copy(value, done)
            elif kind is dict:
                state[name] = {key: copy.copy(one) for key, one in value.items()}
            elif kind is list or kind is set:
                state[name] = value.copy()  # of what never changes
    return clone


def _fingerprint_of(machine: Gathering) -> str:
    """A value of everything in it that may change; shared parts are included once."""
    told: list[str] = []
    done: set[object] = set()
    parts: list[object] = [machine]
    while parts:
        part = parts.pop()
        if part in done:
            continue
        done.add(part)
        for name, value in vars(part).items():
            if type(value) in PARTS:
                parts.append(value)
            elif name in SETS:
                told.append(f"{name} {sorted(value)}")
            else:
                told.append(f"{name} {value}")
    return " ".join(told)
