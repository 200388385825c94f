"""The peers that this node avoids, slows down or has shut out, and what is open with each.

- `Penalties`: a peer that broke the protocol is avoided for a while, longer each time.
- `ShutOut`: a peer that may not take part is not talked to until it shows a new token.
- `RefusalPace`: a peer that is refused again and again is read slowly.
- `OpenWork`: everything that is open with a peer, to end it at once.

The first three are pure: the time is an argument. Each remembers at most `MOST_PEERS`, well under a
megabyte, and forgets the oldest first.

An identity costs nothing to make. So this keeps a broken or refused peer from wasting our time, but
does not stop an attacker that makes a new key for each attempt. Limits on connections and tokens do
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from auth.bounded_map import BoundedMap
from protocols.errors import PotluckError
from protocols.identity import PeerId

MOST_PEERS = 4096

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 600.0
FORGIVEN_AFTER_SECONDS = 3600.0  # by then the peer may have upgraded; a bit flip is no offence

LET_IN_EVERY_SECONDS = 5.0  # the longest wait for a person who is allowed again
KNOCK_EVERY_SECONDS = 60.0  # each knock opens a link to a peer that should have none

REFUSED_AT_ONCE = 256  # twice the calls that a node has in flight on one stream
REFUSED_PER_SECOND = 20.0  # 100 microseconds each: a five-hundredth of a core for each stranger
LONGEST_PAUSE_SECONDS = 10.0  # the longest pause of a stream after one refusal


@dataclass
class _Offender:
    strikes: int
    last: float
    until: float


class Penalties:
    """The strikes of each peer that has any.

    A peer is avoided for a second after its first strike, and for twice as long after each further
    one, up to ten minutes. After an hour without a strike it is forgotten.
    """

    def __init__(self) -> None:
        self._offenders: BoundedMap[PeerId, _Offender] = BoundedMap(MOST_PEERS)

    def __len__(self) -> int:
        return len(self._offenders)

    def strike(self, peer: PeerId, now: float) -> int:
        """Record a violation; return the peer's number of strikes (1: the first, so warn)."""
        offender = self._offenders.get(peer)
        if offender is None or now - offender.last >= FORGIVEN_AFTER_SECONDS:
            offender = _Offender(0, now, now)
        offender.strikes += 1
        offender.last = now
        # 2**20 seconds is beyond any cap; a float power would overflow after a thousand strikes
        delay = FIRST_DELAY_SECONDS * 2 ** min(offender.strikes - 1, 20)
        offender.until = now + min(delay, LONGEST_DELAY_SECONDS)
        self._offenders[peer] = offender
        return offender.strikes

    def avoided_for(self, peer: PeerId, now: float) -> float:
        """Seconds for which this peer is still avoided; 0.0 if it is not."""
        offender = self._offenders.get(peer)
        if offender is None:
            return 0.0
        if now - offender.last >= FORGIVEN_AFTER_SECONDS:
            del self._offenders[peer]
            return 0.0
        return max(0.0, offender.until - now)

    def avoided(self, now: float) -> dict[PeerId, float]:
        """All peers that are avoided now, with the remaining seconds."""
        return {peer: one.until - now for peer, one in self._offenders.items() if one.until > now}


@dataclass
class _Outcast:
    error: PotluckError
    let_in_at: float
    knock_at: float


class ShutOut:
    """The peers that are shut out, and why.

    Calls to a revoked peer fail at once with the reason, and its streams are reset before anything
    on them is read. But the same key may be allowed again and come with a new token. So one stream
    every few seconds is let in, and an accepted token ends the shut-out (`readmit`). If this node
    wants to call such a peer, it first *knocks*, rarely: it sends an empty request, and the
    answer shows the peer's token. Without that, a node that only answers would stay shut out for
    ever.

    This checks no tokens; it only makes refusing cheap. Forgetting a peer is safe, because its
    token is still refused at every use.
    """

    def __init__(self) -> None:
        self._outcasts: BoundedMap[PeerId, _Outcast] = BoundedMap(MOST_PEERS)

    def __len__(self) -> int:
        return len(self._outcasts)

    def shut(self, peer: PeerId, error: PotluckError, now: float) -> None:
        self._outcasts[peer] = _Outcast(
            error, now + LET_IN_EVERY_SECONDS, now + KNOCK_EVERY_SECONDS
        )

    def readmit(self, peer: PeerId) -> None:
        self._outcasts.pop(peer, None)

    def reason(self, peer: PeerId) -> PotluckError | None:
        """Why this peer is shut out; None if it is not."""
        outcast = self._outcasts.get(peer)
        return None if outcast is None else outcast.error

    def lets_in(self, peer: PeerId, now: float) -> bool:
        """Whether to read a stream that this peer opens. A True uses up its turn."""
        outcast = self._outcasts.get(peer)
        if outcast is None:
            return True
        if now < outcast.let_in_at:
            return False
        outcast.let_in_at = now + LET_IN_EVERY_SECONDS
        return True

    def may_knock(self, peer: PeerId, now: float) -> bool:
        """Whether to knock at this peer now. A True uses up the turn."""
        outcast = self._outcasts.get(peer)
        if outcast is None or now < outcast.knock_at:
            return False
        outcast.knock_at = now + KNOCK_EVERY_SECONDS
        return True


class RefusalPace:
    """Slows down peers that are refused again and again (a leaky bucket).

    The bucket stores for each peer the time at which all its refusals would have been sent at the
    steady rate. A refusal costs this node a signature, because errors are signed like any answer,
    and usually a verification. So after `REFUSED_AT_ONCE` refusals a peer is read only as fast as
    `REFUSED_PER_SECOND` allows, on all its streams together; the rest waits in the peer's memory. A
    node whose token runs out during its calls has fewer in flight than the bucket allows at once.

    The error itself is sent at once. Only the reading of the next request is delayed, so that a
    refusal does not look like an outage.
    """

    def __init__(self) -> None:
        self._paid_until: BoundedMap[PeerId, float] = BoundedMap(MOST_PEERS)

    def __len__(self) -> int:
        return len(self._paid_until)

    def refused(self, peer: PeerId, now: float) -> float:
        """Record a refusal; return for how many seconds to stop reading from this peer."""
        each = 1.0 / REFUSED_PER_SECOND
        allowance = REFUSED_AT_ONCE * each
        paid_until = max(self._paid_until.get(peer, now), now) + each
        paid_until = min(paid_until, now + allowance + LONGEST_PAUSE_SECONDS)
        self._paid_until[peer] = paid_until
        return max(0.0, paid_until - now - allowance)


EndWith = Callable[[PotluckError], None]


class Endable:
    """Work that can be ended from outside. `error` is the reason."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.error: PotluckError | None = None

    def end_with(self, error: PotluckError) -> None:
        if self.error is None:
            self.error = error
            self.scope.cancel()

    @property
    def cut_short(self) -> PotluckError | None:
        """Why the work was ended; None if it was not, or had just finished by itself."""
        return self.error if self.scope.cancelled_caught else None


class OpenWork:
    """Everything that is open with any peer: calls, handlers, transfers.

    Work with a peer registers here with the function that ends it, and leaves when it has ended.
    `end_all_with` calls all those functions and does not wait: the work takes no further step after
    the next turn of the event loop. It may still be telling the peer why; `ended` waits for that.

    An ending function runs while other work registers and leaves. It must only start the end
    (cancel a scope, wake tasks). It must not wait or raise.
    """

    def __init__(self) -> None:
        self._of_peer: dict[PeerId, set[EndWith]] = {}
        self._left: dict[PeerId, trio.Event] = {}

    def enter(self, peer: PeerId, end_with: EndWith) -> None:
        self._of_peer.setdefault(peer, set()).add(end_with)

    def leave(self, peer: PeerId, end_with: EndWith) -> None:
        mine = self._of_peer[peer]
        mine.remove(end_with)
        if not mine:
            del self._of_peer[peer]
            if peer in self._left:
                self._left.pop(peer).set()

    @contextmanager
    def register(self, peer: PeerId) -> Iterator[Endable]:
        """Run the block so that it can be ended from outside. Check `cut_short` after it."""
        ending = Endable()
        self.enter(peer, ending.end_with)
        try:
            with ending.scope:
                yield ending
        finally:
            self.leave(peer, ending.end_with)

    def end_all_with(self, peer: PeerId, error: PotluckError) -> int:
        """End everything that is open with a peer; return how many things that was."""
        ends = list(self._of_peer.get(peer, ()))
        for end_with in ends:
            end_with(error)
        return len(ends)

    async def ended(self, peer: PeerId) -> None:
        """Wait until nothing is open with this peer."""
        while peer in self._of_peer:
            await self._left.setdefault(peer, trio.Event()).wait()
