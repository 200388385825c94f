"""Which of its two states a gathering is in, and what it does in them. Pure.

Everybody who can be dialled may lead; the first in the hash order of those who are there does.
gathering.py notes what is heard of and from others, and then has this reconsidered:

    leading     nobody earlier is known: invite whom we see, hold their joins, and close the list
                when that time has come; too many for one group become several, or (`splits` is
                False) the list has room for some and the rest is told that it has begun
    following   ask the first to be listed; once it has answered, send on to it whoever waits
                here; while it is silent, probe the next; after our patience is at an end, end

Easy to get wrong: a peer that can only dial out never leads. It waits in the state of a leader,
for somebody to follow, and closes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import (
    Candidate,
    Effect,
    End,
    Ending,
    Follow,
    Invite,
    Lead,
    Nobody,
    NotTogether,
    Probe,
    Regroup,
    SendOn,
    StartedWithoutUs,
)
from protocols.moshpit.gathering_parts import GatheringParts
from protocols.moshpit.known_peers import Absence, KnownPeer
from protocols.moshpit.splitting import split_around

PROBE_AFTER_SECONDS = 0.25
"""When the one we follow has not answered by then, the next in the order are probed meanwhile: a
group that lost its first half costs one timeout, and not one for each."""

STOPPED_SECONDS = 0.5
"""A tick that comes this late says that this process or machine did not run."""


class LeadOrFollow:
    """Invariant: while `ended` is False this peer follows exactly `following`, or leads (None)."""

    def __init__(self, parts: GatheringParts, *, reduces: bool, now: float) -> None:
        self.ended = False
        self.following: PeerId | None = None
        self.has_answered = False  # the one we follow
        self.started_by: PeerId | None = None  # who showed a list without us
        self._me, self._order, self._group_size = parts.me, parts.order, parts.group_size
        self._splits = parts.splits
        self._known, self._joins = parts.known, parts.joins
        self._awaited, self._closing = parts.awaited, parts.closing
        self._reduces = reduces
        self._ticked = now
        self._probe_at = math.inf
        self._effects: list[Effect] = []

    def effects(self) -> list[Effect]:
        """What is to be done now; drained."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    @property
    def has_probed(self) -> bool:
        """Whether the one we follow was silent for so long that others were probed."""
        return self._probe_at == math.inf

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.ended:
            return
        if now - self._ticked > STOPPED_SECONDS and now - self.next_moment > STOPPED_SECONDS:
            self._closing.was_stopped(now)
        self._ticked = now
        self.reconsider(now)

    @property
    def next_moment(self) -> float:
        """When to tick at the latest."""
        if self.ended:
            return math.inf
        since = self._ticked
        if self.following is not None:
            waits_for = self._joins.named_again_at if self.has_answered else self._probe_at
            return min(self._closing.gives_up_at, waits_for)
        moments = [self._closing.deadline, self._known.next_moment(since, self._joins)]
        if self._closing.quiet_at > since:
            moments.append(self._closing.quiet_at)
        return min(moments)

    def let_go_of(self, leader: PeerId, now: float) -> bool:
        """Follow this one no more; whether we did. If we lead now, then anew: what came, or did
        not, while we followed says nothing of when all are here."""
        if leader != self.following or self.ended:
            return False
        self.following, self.has_answered = None, False
        self._closing.begin_anew(now)
        return True

    def reconsider(self, now: float) -> None:
        """Do what is due by what is known now; to be called after each change of that."""
        if self.ended:
            return
        if self.following is None:
            first = self._known.first_before(self._me if self._reduces else None)
            if first is not None:
                self._follow(first, now)
            elif self._reduces:
                self._lead(now)
            elif now >= self._closing.deadline or self.started_by is not None:
                self.end(self._why_nothing())
        else:
            self._wait_for(self.following, now)

    def end(self, ending: Ending) -> None:
        self.ended = True
        self.add(End(ending))

    # -- following

    def _follow(self, leader: KnownPeer, now: float) -> None:
        self.following, self.has_answered = leader.peer, False
        self._probe_at = now + PROBE_AFTER_SECONDS
        self.add(Follow(leader.peer, self._known.passed_over()))

    def _wait_for(self, leader: PeerId, now: float) -> None:
        if self.has_answered:
            self._send_on(leader, now)
        elif now >= self._probe_at:
            self._probe_at = math.inf
            self._effects.extend(Probe(peer) for peer in self._known.to_probe(leader))
        if now >= self._closing.gives_up_at:
            self.let_go_of(leader, now)
            self._known.pass_over(leader, Absence.AT_ODDS, "it did not close its list in time")
            self.end(self._why_nothing())

    def _send_on(self, leader: PeerId, now: float) -> None:
        """To our leader; somebody who has passed it over, after a while: it is there for us."""
        for peer, ticket in self._joins.release_to(leader, now).items():
            self.add(SendOn(ticket, leader))
            known = self._known.get(peer)
            if known is not None:
                known.ask_again(now)  # should we lead again

    # -- leading

    def _lead(self, now: float) -> None:
        for peer in self._known.to_invite(now, self._joins):
            self.add(Invite(peer, self._known.reduces(peer)))
        if self._joins or now >= self._closing.quiet_at:  # those who died leave us alone
            self._effects.extend(
                Probe(peer) for peer in self._awaited.to_ask(self._joins, self._known)
            )
        if self._closing.has_come(now):
            self._close(now)
        elif now >= self._closing.deadline or self._is_surely_alone(now):
            self.end(self._why_nothing())

    def _is_surely_alone(self, now: float) -> bool:
        if self._joins or self._known.waited_for(now, self._joins):
            return False
        return self.started_by is not None or self._closing.nobody_comes(now)

    def _close(self, now: float) -> None:
        """Lead those who wait, or as many as a group may have, with the rest in groups of its own
        or in none."""
        ordered = sorted((self._me, *self._joins), key=self._order)
        if len(ordered) > self._group_size and not self._splits:
            ordered = self._first_of(ordered)
        if len(ordered) > self._group_size:
            reducers = [one for one in ordered if one == self._me or self._known.reduces(one)]
            clients = [one for one in ordered if one not in set(reducers)]
            own, *others = split_around(reducers, clients, self._group_size, self._awaited)
            for group in others:
                self._send_group(group)
            self._known.restrict(self._candidates(own), now)
            ordered = sorted(own, key=self._order)
        if len(ordered) > 1:
            self.ended = True
            self.add(Lead({one: self._joins.release(one) for one in ordered if one != self._me}))

    def _first_of(self, ordered: list[PeerId]) -> list[PeerId]:
        """As many as fit into the group: this peer, those who are awaited, then the others."""
        others = [one for one in ordered if one != self._me]
        others.sort(key=lambda one: one not in self._awaited)  # else as they were
        return sorted((self._me, *others[: self._group_size - 1]), key=self._order)

    def _send_group(self, group: list[PeerId]) -> None:
        candidates = self._candidates(group)
        for peer in group:
            self.add(Regroup(self._joins.release(peer), candidates))

    def _candidates(self, group: Iterable[PeerId]) -> tuple[Candidate, ...]:
        return tuple(Candidate(one, one == self._me or self._known.reduces(one)) for one in group)

    # -- the end

    def _why_nothing(self) -> Ending:
        if self.started_by is not None:
            return StartedWithoutUs(self.started_by)
        reasons = self._known.reasons()
        if reasons:
            return NotTogether(reasons)
        return Nobody(self._known.unreachable())
