"""Whom this node no longer talks with, because they may not take part. Pure: time is an argument.

A peer that was revoked is *shut out*: calls to it fail at once with the reason, and the streams
that it opens are reset before anything on them is read. One stream every few seconds is let in
all the same, for the same key may be allowed again and come with a new token: a token that is
accepted lifts it (`readmit`). And when this node itself wants something of such a peer, it *knocks*
first, rarely: it asks for nothing, and the answer shows the token. Else a person who was let in
again, and whose node only ever answers, would stay shut out for ever.

Promise: bounded memory. Of more than `LARGEST_COUNT` peers the longest shut out is forgotten,
which costs no safety: its token is still refused at every use, only less cheaply.

Easy to get wrong: this is no check of anything, it only makes refusing cheap.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocols.errors import PotluckError
from protocols.identity import PeerId

LET_IN_EVERY_SECONDS = 5.0  # a person who is let in again waits no longer than this at any peer
KNOCK_EVERY_SECONDS = 60.0  # it opens a link to somebody who was meant to have none
LARGEST_COUNT = 4096  # peers: as many as one avoids; well under 1 MiB


@dataclass
class _Record:
    error: PotluckError
    let_in_at: float
    knock_at: float


class ShutOut:
    """The peers that are shut out, and why."""

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def shut(self, peer: PeerId, error: PotluckError, now: float) -> None:
        self._records.pop(peer, None)
        self._records[peer] = _Record(error, now + LET_IN_EVERY_SECONDS, now + KNOCK_EVERY_SECONDS)
        if len(self._records) > LARGEST_COUNT:
            self._records.popitem(last=False)

    def readmit(self, peer: PeerId) -> None:
        self._records.pop(peer, None)

    def reason(self, peer: PeerId) -> PotluckError | None:
        """Why nothing is asked of this peer; None if it is not shut out."""
        record = self._records.get(peer)
        return None if record is None else record.error

    def lets_in(self, peer: PeerId, now: float) -> bool:
        """Whether a stream that this peer opens is looked at. Asking uses up its turn."""
        record = self._records.get(peer)
        if record is None:
            return True
        if now < record.let_in_at:
            return False
        record.let_in_at = now + LET_IN_EVERY_SECONDS
        return True

    def may_knock(self, peer: PeerId, now: float) -> bool:
        """Whether it may be looked whether this peer was let in again. Asking uses up the turn."""
        record = self._records.get(peer)
        if record is None or now < record.knock_at:
            return False
        record.knock_at = now + KNOCK_EVERY_SECONDS
        return True
