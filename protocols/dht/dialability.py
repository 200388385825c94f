"""Whether others can dial this node, by what they say.

A node behind a router that lets nothing in has addresses, and may not know that they lead
nowhere: nobody has it in a table, so nobody brings it slots, and what it holds is no replica's.
Those who tried its addresses say in their answers how that went, and it goes by them: once those
who tried in vain outnumber the others by more than two to one, it no longer counts itself among
the replicas of anything. It goes on saying its addresses: they may answer one day.

Easy to get wrong: what this costs has to be small either way, since a liar may say anything. A
node that wrongly counts itself out still keeps whatever others bring it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from protocols.identity import PeerId

PEERS_HEARD = 64  # the newest; as for the swarm's time
IN_VAIN_PER_SUCCESS = 2


class Dialled(enum.IntEnum):
    """What a peer found when it tried somebody's addresses. The numbers travel; append."""

    UNKNOWN = 0
    """It has not tried, or need not: it says nothing about it."""
    ANSWERED = 1
    IN_VAIN = 2


class Dialability:
    """Invariant: at most PEERS_HEARD verdicts, one a peer, and the counts are theirs."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[PeerId, bool] = OrderedDict()
        self._answered = 0

    @property
    def is_given(self) -> bool:
        """Whether we can be dialled, as far as we know; true until somebody says otherwise."""
        in_vain = len(self._verdicts) - self._answered
        return in_vain <= IN_VAIN_PER_SUCCESS * self._answered

    def says(self, peer: PeerId, dialled: int) -> bool:
        """A peer says how it went; whether that has changed what `is_given` says."""
        if dialled not in (Dialled.ANSWERED, Dialled.IN_VAIN):
            return False
        answered = dialled == Dialled.ANSWERED
        if self._verdicts.get(peer) is answered:
            return False
        before = self.is_given
        self._forget(peer)
        self._verdicts[peer] = answered
        self._answered += answered
        if len(self._verdicts) > PEERS_HEARD:
            self._forget(next(iter(self._verdicts)))
        return self.is_given is not before

    def __str__(self) -> str:
        return f"{self._answered} of {len(self._verdicts)} peers that tried could dial this node"

    def _forget(self, peer: PeerId) -> None:
        self._answered -= self._verdicts.pop(peer, False)
