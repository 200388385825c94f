"""Whom to keep away from, and for how long. Pure: the time is an argument.

A peer that breaks the protocol gets a *strike* and is avoided for a while: a second after the
first strike, twice as long after each further one, up to ten minutes. After an hour without a
strike it is forgotten: software gets upgraded, and a cosmic ray is no policy.

Promise: bounded memory. Of more than `LARGEST_COUNT` offenders the ones that struck longest ago
are forgotten first.

Easy to get wrong: an identity costs nothing to make, so this keeps a broken peer from wasting our
time again and again; it does not keep out somebody who makes a new key for each attempt. Limits
on connections do that, and tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocols.identity import PeerId

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 600.0
FORGIVEN_AFTER_SECONDS = 3600.0
LARGEST_COUNT = 4096  # peers; a strike is some 200 bytes, so under 1 MiB


@dataclass
class _Record:
    strikes: int
    last: float
    until: float


class Penalties:
    """The strikes of each peer that has any."""

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()  # the newest strike last

    def __len__(self) -> int:
        return len(self._records)

    def strike(self, peer: PeerId, now: float) -> int:
        """Note an offence; how many strikes the peer has now (1: it is news, say so once)."""
        record = self._records.pop(peer, None)
        if record is None or now - record.last >= FORGIVEN_AFTER_SECONDS:
            record = _Record(0, now, now)
        record.strikes += 1
        record.last = now
        # 2**20 seconds is beyond any cap; a float power would overflow after a thousand strikes
        delay = FIRST_DELAY_SECONDS * 2 ** min(record.strikes - 1, 20)
        record.until = now + min(delay, LONGEST_DELAY_SECONDS)
        self._records[peer] = record
        if len(self._records) > LARGEST_COUNT:
            self._records.popitem(last=False)
        return record.strikes

    def avoided_for(self, peer: PeerId, now: float) -> float:
        """Seconds for which this peer is still to be avoided; 0.0 when it is not."""
        if not self._records:
            return 0.0
        record = self._records.get(peer)
        if record is None:
            return 0.0
        if now - record.last >= FORGIVEN_AFTER_SECONDS:
            del self._records[peer]
            return 0.0
        return max(0.0, record.until - now)

    def avoided(self, now: float) -> dict[PeerId, float]:
        """Everybody who is avoided now, with the seconds that remain."""
        return {
            peer: record.until - now for peer, record in self._records.items() if record.until > now
        }
