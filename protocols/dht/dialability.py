"""Whether others can dial this node, by their own reports.

A node behind a router that lets nothing in has addresses, and may not know that they do not work.
Nobody has it in a table, so nobody brings it slots, and it is no useful replica. Peers that tried
its addresses report the result in their answers. If those that failed outnumber the others by more
than two to one, this node no longer counts itself among the replicas of any key. It goes on
announcing its addresses, which may work one day.

A liar may report anything, so a wrong result must cost little. A node that wrongly counts itself
out still keeps the slots that others bring.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence

from protocols.dht.contacts import network_of
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach

PEERS_HEARD = 64  # the newest, as for swarm time
IN_VAIN_PER_SUCCESS = 2


class Dialled(enum.IntEnum):
    """The result of dialling a peer's addresses. The numbers are on the wire: only append."""

    UNKNOWN = 0
    """It has not tried, or need not: this is no report."""
    ANSWERED = 1
    IN_VAIN = 2


class Dialability:
    """Invariant: at most PEERS_HEARD reports, one for each peer; the counts are theirs."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[PeerId, bool] = OrderedDict()
        self._answered = 0

    @property
    def is_given(self) -> bool:
        """Whether we can be dialled, as far as we know; True until reports say otherwise."""
        in_vain = len(self._verdicts) - self._answered
        return in_vain <= IN_VAIN_PER_SUCCESS * self._answered

    def says(self, peer: PeerId, dialled: int) -> bool:
        """Take a peer's report; return whether it changed `is_given`."""
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


# Choosing which of a stranger's addresses to dial, to check whether it can be dialled.
#
# A stranger could make us dial any address: third parties, who would take us for the attacker, or
# machines in our own network that it could not reach itself. So addresses at the place that its
# connection comes from come first. Of other addresses on the public internet one is tried, for
# peers that are reached by another way than they go out (a name, IPv4 beside IPv6). A peer that
# connects from the public internet has no private address that we could use.
#
# In a private network (at home, in tests) nothing is public; there all addresses are tried in
# order.
# tried, as they come.


ADDRESSES_TRIED = 3
TRIED_ELSEWHERE = 1


def addresses_to_try(claimed: Sequence[str], link: LinkFacts | None) -> list[str]:
    """The few addresses worth a dial, likeliest first, for a peer with this link."""
    if link is None or link.reach is not Reach.DIRECT:
        return list(claimed[:TRIED_ELSEWHERE])
    home = network_of(link.remote_address)
    if home is None:
        remote = _host_of(link.remote_address)
        return sorted(claimed, key=lambda one: _host_of(one) != remote)[:ADDRESSES_TRIED]
    there = [one for one in claimed if network_of(one) == home]
    elsewhere = [one for one in claimed if network_of(one) not in (home, None)]
    return [*there, *elsewhere[:TRIED_ELSEWHERE]][:ADDRESSES_TRIED]


def _host_of(address: str) -> str:
    return "/".join(address.split("/", 3)[1:3])
