"""Recognizes repeated requests by the nonces of the last 2N seconds (DeDLOC I.5).

A request is accepted while its time differs from ours by at most N. One that is received now may be
N ahead, and stays acceptable for another 2N. Its nonce is remembered exactly that long, and after
that its time is too old for any copy. A nonce that is still acceptable is never forgotten, whatever
is sent: when there is no room, new requests are refused, and the old ones stay known.

Room is shared so that a flood hurts the flooder only. A sender has up to SHARE_NONCES; all of them
together POOL_NONCES, and beyond that everybody still has a few of their own (RESERVED_NONCES for
each of MOST_SENDERS). A sender above its share gets TOO_MANY_REQUESTS. Measured in
tests/auth/core/test_nonce_memory.py: completely full, it takes less than 64 MiB.

Forgetting is safe only while the clock runs forward. If it were set forward (everything is
forgotten) and back again, old requests would be acceptable again. The same would happen after a
restart, which begins with no nonces. So nothing timed before our start, or before the forgotten
nonces, is accepted (`_forgotten_until_ms`), and the refusal says so.

One case is left. If we restart at once, a sender whose clock is ahead has timed its requests after
our start, and such a request could be accepted a second time in the first N seconds. Only the
sender itself could do that, because the channel proves the sender. To exclude it, start the window
at N after the last moment of the previous one.
"""

from __future__ import annotations

from collections import deque

from auth.refusals import AccessRefused, Reason
from auth.tokens import CLOCK_TOLERANCE_MS, in_words

NONCE_BYTES = 16
MEMORY_MS = 2 * CLOCK_TOLERANCE_MS

SHARE_NONCES = 160_000  # 5,000 requests a second for half a minute, 2,600 a second forever
POOL_NONCES = 300_000  # more than one event loop can verify in 2N: 100 microseconds each
MOST_SENDERS = 1_024  # several times as many as a node has links
RESERVED_NONCES = 64  # a request a second, whatever all others do

FORGET_AT_ONCE = 64  # after a flood, forgetting must not hold the event loop for 100 ms
SMALL_SET = 256  # nonces; a set keeps the memory of its largest size, and large ones release it


class _Sender:
    """The live nonces of one sender."""

    __slots__ = ("key", "most", "seen")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.seen: set[bytes] = set()
        self.most = SMALL_SET  # about how many the set has memory for

    def add(self, nonce: bytes) -> None:
        self.seen.add(nonce)
        self.most = max(self.most, len(self.seen))

    def discard(self, nonce: bytes) -> None:
        self.seen.discard(nonce)
        if self.most > SMALL_SET and 4 * len(self.seen) < self.most:
            self.seen = set(self.seen)
            self.most = max(SMALL_SET, len(self.seen))


class NonceWindow:
    """The live nonces of all senders. `check` before verifying, `remember` after.

    Invariant: `_nonces` holds, in the order of arrival, exactly the nonces in the senders' sets;
    `_owners` and `_received` have the sender and the arrival time of each. A sender is known while
    it has one.

    `started_ms` may be changed when it turns out that the clock was wrong at the start: a node
    whose clock was an hour ahead would refuse everything for an hour.
    """

    def __init__(
        self,
        started_ms: int,
        *,
        share: int = SHARE_NONCES,
        pool: int = POOL_NONCES,
        most_senders: int = MOST_SENDERS,
        reserved: int = RESERVED_NONCES,
    ) -> None:
        self.started_ms = started_ms
        self._share = share
        self._pool = pool
        self._most_senders = most_senders
        self._reserved = reserved
        self._senders: dict[bytes, _Sender] = {}
        self._nonces: deque[bytes] = deque()
        self._owners: deque[_Sender] = deque()
        self._received: deque[int] = deque()
        self._last_ms = -1  # one int object for all nonces of a millisecond: memory
        self._forgotten_until_ms = -1

    def __len__(self) -> int:
        """How many nonces are kept now."""
        return len(self._received)

    def check(self, sender: bytes, nonce: bytes, time_ms: int, now_ms: int) -> None:
        """Refuse a request for its time, its nonce, or lack of room. Changes no answer.

        Call this before the costly verification of the signature, and `remember` after it.
        """
        off = time_ms - now_ms
        if off > CLOCK_TOLERANCE_MS or -off > CLOCK_TOLERANCE_MS:
            raise _wrong_time(off)
        self._forget(now_ms, at_most=FORGET_AT_ONCE)
        if time_ms < self.started_ms:
            raise AccessRefused(
                Reason.REPLAY,
                "The request was made before this node was started.",
                why="It may have been received already, before the restart, and is not done twice.",
                advice="Send a new request. If this goes on, the sender's clock is "
                f"{in_words(abs(off))} behind: set it.",
            )
        if time_ms <= self._forgotten_until_ms:
            raise AccessRefused(
                Reason.REPLAY,
                "The request is from a time that is over.",
                why="The clock of the node that refuses it was set back, and it may have received "
                "the request before that.",
                advice="Send a new request; that passes within a minute.",
            )
        known = self._senders.get(sender)
        if known is not None and nonce in known.seen:
            self._forget(now_ms)  # it may be due to be forgotten
            if nonce in known.seen:
                raise AccessRefused(Reason.REPLAY)
        if not self._has_room(known):
            self._forget(now_ms)
            if not self._has_room(self._senders.get(sender)):
                raise AccessRefused(Reason.TOO_MANY_REQUESTS)

    def remember(self, sender: bytes, nonce: bytes, now_ms: int) -> None:
        """Keep the nonce of a request that was checked and whose signature is genuine."""
        known = self._senders.get(sender)
        if known is None:
            known = self._senders[sender] = _Sender(sender)
        elif nonce in known.seen:
            return
        known.add(nonce)
        self._nonces.append(nonce)
        self._owners.append(known)
        if now_ms != self._last_ms:
            self._last_ms = now_ms
        self._received.append(self._last_ms)

    def _has_room(self, sender: _Sender | None) -> bool:
        if sender is None:
            return len(self._senders) < self._most_senders
        kept = len(sender.seen)
        return kept < self._reserved or (kept < self._share and len(self._received) < self._pool)

    def _forget(self, now_ms: int, *, at_most: int = -1) -> None:
        """Drop nonces received more than 2N ago, oldest first."""
        received = self._received
        oldest_kept_ms = now_ms - MEMORY_MS
        while received and received[0] < oldest_kept_ms and at_most:
            at_most -= 1
            received_ms = received.popleft()
            sender = self._owners.popleft()
            sender.discard(self._nonces.popleft())
            if not sender.seen:
                del self._senders[sender.key]
            # it was timed up to N after it was received
            self._forgotten_until_ms = max(
                self._forgotten_until_ms, received_ms + CLOCK_TOLERANCE_MS
            )


def _wrong_time(off_ms: int) -> AccessRefused:
    side = "ahead of" if off_ms > 0 else "behind"
    return AccessRefused(
        Reason.CLOCK,
        f"The request's time is {in_words(abs(off_ms))} {side} that of the node which refuses it; "
        f"{in_words(CLOCK_TOLERANCE_MS)} are allowed.",
    )
