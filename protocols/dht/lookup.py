"""Finding the live peers closest to a target: Kademlia's iterative lookup, without the I/O.

The caller asks the peers that `next_queries` returns and reports each result: `answered`, `failed`,
or `slow`, which leaves the request open and lets others be asked meanwhile. The lookup is done when
the k closest of those that may be alive have all answered; `closest_answered` has them.

A peer that others name is hearsay until it has answered itself. So only peers that answered are
results, and one answer counts for at most k contacts. A source is *discredited* if most of the
peers that it names turn out not to exist. The other peers that only such sources named are asked
last, and the lookup does not wait for them. So a liar costs a lookup a few requests, and cannot
fill it with inventions.
Nor can it hide a real peer by naming it first with a wrong address: addresses that others give are
tried as well.

`failed` is about one request of this lookup. A late answer is still accepted, also after `failed`
or `slow`. An answer without a request is not.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from protocols.dht.contacts import Contact
from protocols.dht.routing import K

ALPHA = 3  # Kademlia's: requests in flight

# Up to this many slow peers do not count as in flight. More do, or a lookup on a bad link would ask
# the whole swarm.
SLOW_AT_ONCE = 20

# A lookup among 10,000 nodes asks about 30, or about 45 if a third of them are dead. It reaches ten
# times k only if almost everybody lies.
QUESTIONS_PER_K = 10

# Four failures that outweigh the successes two to one, so that invented contacts count. If 30 % of
# all nodes have just died, that discredits three of a hundred honest sources, and then only delays
# what nobody else named.
FAILURES_TO_DISCREDIT = 4
FAILURES_PER_SUCCESS = 2

RETRIES_WITH_NEW_ADDRESSES = 2
SOURCES_REMEMBERED = 8  # of one contact; the first that named it


class _State(enum.Enum):
    HEARD = "heard of"
    ASKED = "asked"
    SLOW = "slow"
    ANSWERED = "answered"
    FAILED = "failed"


class _Candidate:
    __slots__ = ("contact", "depth", "failures", "named_failed", "named_well", "sources", "state")

    def __init__(self, contact: Contact, source: _Candidate | None) -> None:
        self.contact = contact
        self.state = _State.HEARD
        self.depth: int = 1 if source is None else source.depth + 1
        self.failures = 0
        # None: from our own table, so we have spoken with it before
        self.sources = None if source is None else [source]
        self.named_well = 0
        self.named_failed = 0

    @property
    def is_discredited(self) -> bool:
        return (
            self.named_failed >= FAILURES_TO_DISCREDIT
            and self.named_failed > FAILURES_PER_SUCCESS * self.named_well
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether all sources that named it are discredited."""
        return self.sources is not None and all(one.is_discredited for one in self.sources)


class Lookup:
    """One lookup. `seeds` are contacts of our own table, which we have spoken with before.

    `alpha` may be changed while it runs: a caller in a hurry can ask all k at once.

    Invariant: `_distances` and `_by_distance` are parallel, in order of distance to the target, and
    hold each candidate once. `_unasked`, `_in_flight` and `_slow` count the states HEARD, ASKED and
    SLOW.
    """

    def __init__(
        self,
        target: int,
        own_id: int,
        seeds: Iterable[Contact],
        k: int = K,
        alpha: int = ALPHA,
    ) -> None:
        self.target = target
        self.k = k
        self.alpha = alpha
        self.asked_count = 0
        self.failed_count = 0
        self._own_id = own_id
        self._candidates: dict[int, _Candidate] = {}
        self._distances: list[int] = []
        self._by_distance: list[_Candidate] = []
        self._unasked = 0
        self._in_flight = 0
        self._slow = 0
        self._answered = 0
        self._somebody_lies = False
        self._add_candidates(seeds, None)

    def next_queries(self) -> list[Contact]:
        """The peers to ask now, closest first. They count as asked from now on."""
        if not self._unasked:
            return []
        excess_slow = max(0, self._slow - SLOW_AT_ONCE)
        room = min(
            self.alpha - self._in_flight - excess_slow,
            QUESTIONS_PER_K * self.k - self.asked_count,
        )
        if room <= 0:
            return []
        chosen = [one for one in self._closest_hopeful() if one.state is _State.HEARD][:room]
        if not chosen and not self._in_flight and self._answered < self.k:
            doubtful = (one for one in self._by_distance if one.state is _State.HEARD)
            chosen = list(islice(doubtful, room))
        for candidate in chosen:
            candidate.state = _State.ASKED
        self._unasked -= len(chosen)
        self._in_flight += len(chosen)
        self.asked_count += len(chosen)
        return [candidate.contact for candidate in chosen]

    def answered(self, contact: Contact, closer: Iterable[Contact]) -> None:
        """This peer answered, and named these. All after the first k are ignored."""
        candidate = self._candidates.get(contact.node_id)
        if candidate is None or candidate.state is _State.ANSWERED:
            return
        if candidate.state is _State.HEARD and not candidate.failures:
            return
        self.failed_count -= candidate.state is _State.FAILED
        late = candidate.state in (_State.FAILED, _State.SLOW)
        self._leave(candidate, _State.ANSWERED)
        self._answered += 1
        self._credit(candidate, successes=+1, failures=-1 if late else 0)
        self._add_candidates(islice(closer, self.k), candidate)

    def failed(self, contact: Contact) -> None:
        """This peer could not be dialled, did not answer in time, or answered nonsense."""
        candidate = self._candidates.get(contact.node_id)
        if candidate is None or candidate.state not in (_State.ASKED, _State.SLOW):
            return
        candidate.failures += 1
        self.failed_count += 1
        if candidate.state is _State.ASKED:
            self._credit(candidate, failures=+1)
        self._leave(candidate, _State.FAILED)
        if candidate.contact.addresses != contact.addresses:
            self._try_again(candidate)

    def slow(self, contact: Contact) -> None:
        """This peer has not answered for longer than usual.

        Its answer is still accepted. Until it comes, the sources that named the peer are rated
        worse.
        """
        candidate = self._candidates.get(contact.node_id)
        if candidate is not None and candidate.state is _State.ASKED:
            self._credit(candidate, failures=+1)
            self._leave(candidate, _State.SLOW)
            self._slow += 1

    @property
    def is_done(self) -> bool:
        """Nothing that may still come is worth waiting for."""
        if self.asked_count >= QUESTIONS_PER_K * self.k:
            return not self._in_flight
        for one in self._closest_hopeful():
            if one.state is not _State.ANSWERED:
                return False
        if self._answered >= self.k:
            return True
        return not self._slow and not self._unasked

    @property
    def waits_for_slow_only(self) -> bool:
        """Some peer has answered, and all others that were asked are slow.

        A caller without time may stop then.
        """
        if not self._slow or not self._answered or self._in_flight:
            return False
        return not any(one.state is _State.HEARD for one in self._closest_hopeful())

    def closest_answered(self, count: int | None = None) -> list[Contact]:
        """Those that answered, closest first: k of them, or `count`."""
        answered = (one.contact for one in self._by_distance if one.state is _State.ANSWERED)
        return list(islice(answered, self.k if count is None else count))

    def hops_to(self, contact: Contact) -> int:
        """How many peers had to be asked one after the other to reach this one, including it.

        1 if it was in our own table, 2 if a peer from there named it.
        """
        return self._candidates[contact.node_id].depth

    def _closest_hopeful(self) -> Iterator[_Candidate]:
        """The k closest that have answered or may soon do so."""
        hopeful = 0
        for candidate in self._by_distance:
            state = candidate.state
            if state is _State.FAILED or state is _State.SLOW:
                continue
            if self._somebody_lies and state is _State.HEARD and candidate.is_doubtful:
                continue
            yield candidate
            hopeful += 1
            if hopeful == self.k:
                return

    def _add_candidates(self, contacts: Iterable[Contact], source: _Candidate | None) -> None:
        for contact in contacts:
            node_id = contact.node_id
            known = self._candidates.get(node_id)
            if known is not None:
                self._add_source(known, contact, source)
            elif node_id != self._own_id:
                candidate = self._candidates[node_id] = _Candidate(contact, source)
                self._unasked += 1
                distance = node_id ^ self.target
                place = bisect_left(self._distances, distance)
                self._distances.insert(place, distance)
                self._by_distance.insert(place, candidate)

    def _add_source(self, known: _Candidate, contact: Contact, source: _Candidate | None) -> None:
        if known.state is _State.ANSWERED:
            return
        if (
            source is not None
            and known.sources is not None
            and known.state is not _State.FAILED
            and len(known.sources) < SOURCES_REMEMBERED
            and source not in known.sources
        ):
            known.sources.append(source)
        if contact.addresses == known.contact.addresses:
            return
        before = set(known.contact.addresses)
        if known.sources is None:
            # the addresses that we know ourselves stay first, however many others are named
            known.contact = contact.with_more_addresses(known.contact.addresses)
        else:
            known.contact = known.contact.with_more_addresses(contact.addresses)
        if known.state is _State.FAILED and not before.issuperset(known.contact.addresses):
            if known.sources is not None and source is not None:
                known.sources = [source]  # the earlier ones have been blamed already
            self._try_again(known)

    def _try_again(self, candidate: _Candidate) -> None:
        """Ask a failed peer again: it has addresses that were not tried yet."""
        if candidate.failures <= RETRIES_WITH_NEW_ADDRESSES:
            self.failed_count -= 1
            self._leave(candidate, _State.HEARD)
            self._unasked += 1

    def _leave(self, candidate: _Candidate, state: _State) -> None:
        self._unasked -= candidate.state is _State.HEARD
        self._in_flight -= candidate.state is _State.ASKED
        self._slow -= candidate.state is _State.SLOW
        candidate.state = state

    def _credit(self, candidate: _Candidate, successes: int = 0, failures: int = 0) -> None:
        for source in candidate.sources or ():
            source.named_well += successes
            source.named_failed += failures
            self._somebody_lies = self._somebody_lies or source.is_discredited
