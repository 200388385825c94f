"""Whether others can dial this node, by their own reports.

A node behind a router that lets nothing in has addresses, and may not know that they do not work.
Nobody has it in a table, so no slots are sent to it, and it is no useful replica. Peers that tried
its addresses report the result in their answers. If those that failed outnumber the others by more
than two to one, this node no longer counts itself among the replicas of any key. It goes on
announcing its addresses, which may work one day.

A liar may report anything, so a wrong result must cost little. A node that wrongly believes that it
cannot be dialled still keeps the slots that others send.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence

from protocols.dht.contacts import network_of
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach

PEERS_HEARD = 64  # the newest, as for swarm time
FAILURES_PER_SUCCESS = 2


class Dialled(enum.IntEnum):
    """The result of dialling a peer's addresses. The numbers are on the wire: only append."""

    UNKNOWN = 0
    """It has not tried, or need not: this is no report."""
    ANSWERED = 1
    FAILED = 2


class Dialability:
    """Invariant: at most PEERS_HEARD reports, one for each peer; the counts are theirs."""

    def __init__(self) -> None:
        self._reports: OrderedDict[PeerId, bool] = OrderedDict()
        self._answered = 0

    @property
    def is_dialable(self) -> bool:
        """Whether we can be dialled, as far as we know; True until reports say otherwise."""
        failed = len(self._reports) - self._answered
        return failed <= FAILURES_PER_SUCCESS * self._answered

    def report(self, peer: PeerId, dialled: int) -> bool:
        """Take a peer's report; return whether it changed `is_dialable`."""
        if dialled not in (Dialled.ANSWERED, Dialled.FAILED):
            return False
        answered = dialled == Dialled.ANSWERED
        if self._reports.get(peer) is answered:
            return False
        before = self.is_dialable
        self._forget(peer)
        self._reports[peer] = answered
        self._answered += answered
        if len(self._reports) > PEERS_HEARD:
            self._forget(next(iter(self._reports)))
        return self.is_dialable is not before

    def __str__(self) -> str:
        return f"{self._answered} of {len(self._reports)} peers that tried could dial this node"

    def _forget(self, peer: PeerId) -> None:
        self._answered -= self._reports.pop(peer, False)


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
