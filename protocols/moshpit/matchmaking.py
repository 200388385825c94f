"""Peers with the same key find each other and settle on one signed list of members.

    matchmaker = Matchmaker(network, rpc, dht)              # one for each node
    key = group_key(run, epoch, 0, "all", topic)
    group = await matchmaker.find_group(Search(key, epoch, layout_digest, Offer(weight=32)))

Every peer puts a slot under the key and reads the others'. A peer that is first in the hash order
of those it sees invites them. Every other peer asks the first one that it knows to list it. So both
sides look for each other at once, and each tells the other what it knows. The first peer closes the
list when all have come, and signs it. The signed list is everybody's answer (gathering.py decides,
group_search.py carries it out).

`find_group` returns a `Group`, or raises `NobodyElse` (this peer is alone), `Late` (a group has
started without it), or another `NoGroup`.

A peer knows the members of the last epoch's group for the same run, round and name already. The
first of them leads at once, the others ask it at once, and only leaders need a slot.

Promises: all members of a group hold the same list, to the bit, in which each finds its own entry
as it signed it. A search ends `FOLLOWER_GRACE_SECONDS` after its deadline, or with the fetch of a
list that has begun by then (handing_on.py). A dead leader costs one short timeout. The work grows
with the peers under one key, not with the swarm, and the bytes that a peer sends do not grow with
their square.

Easy to get wrong: the list says who was there when it was closed. A member may be gone a moment
later. A member whose leader fell silent may be in another list by then: it takes part only in the
round that it was given, and refuses messages of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from auth.bounded_map import BoundedMap
from protocols.errors import ProtocolMisuse
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate, Reply
from protocols.moshpit.group import (
    Group,
    Late,
    NobodyElse,
    NoGroup,
    Search,
    group_key,
    is_first_round,
    place_of,
    run_of,
)
from protocols.moshpit.group_search import GroupSearch
from protocols.moshpit.handing_on import HandingOn
from protocols.moshpit.matchmaking_messages import (
    GROUP,
    INVITE,
    INVITED_FOR_NOTHING,
    JOIN,
    NOT_HERE,
    PROTOCOL,
    STILL_THERE,
    Invitation,
    InvitationAnswer,
    JoinAnswer,
    JoinReply,
    JoinRequest,
)
from protocols.moshpit.roster import Entry, Offer, Roster, StaleEpoch, Terms
from protocols.rpc import Empty

if TYPE_CHECKING:
    from protocols.dht import Dht
    from protocols.network import Network
    from protocols.rpc import Rpc

__all__ = [
    "GROUP",
    "PROTOCOL",
    "Entry",
    "Group",
    "Late",
    "Matchmaker",
    "NoGroup",
    "NobodyElse",
    "Offer",
    "Roster",
    "Search",
    "group_key",
]

PLACES_REMEMBERED = 32  # and who was there: a round of each of so many groups

GROUPS_REMEMBERED = 4
"""A peer looks at a place for those that were in its last groups there. With only the last one,
peers that were divided into two groups, perhaps by a network that was cut, would go on so."""

LISTS_REMEMBERED = 32  # of the last searches, to be shown to stragglers; 44 KB for 256 members


class Matchmaker:
    """Answers joins and invitations on this node, and searches. One for each rpc."""

    def __init__(self, network: Network, rpc: Rpc, dht: Dht) -> None:
        self._network, self._rpc, self._dht = network, rpc, dht
        self._lists = HandingOn(rpc)
        self._searches: dict[str, GroupSearch] = {}
        self._started = BoundedMap[str, Roster](LISTS_REMEMBERED)
        self._met = BoundedMap[str, tuple[frozenset[Candidate], ...]](PLACES_REMEMBERED)
        """The last groups at each place, the newest first, without this peer."""
        self.when_asked: Callable[[str, int, bool], None] | None = None
        """Told the run and the epoch of a group that others look for and this node does not, and
        whether peers come to that group first. Anybody may ask, and as often as he likes."""
        rpc.serve(JOIN, self._join)
        rpc.serve(INVITE, self._invite)
        rpc.serve(STILL_THERE, _still_there)

    async def find_group(self, search: Search) -> Group:
        """A group for this search, by its deadline and one short timeout at the latest.

        Cancelling leaves nothing behind but a slot that expires. Peers that wait for this one are
        sent away, and a peer that finds the slot is told that this one looks for no group.
        """
        if search.key in self._searches:
            raise ProtocolMisuse(f"A group is being looked for under {search.key} already.")
        self._started.pop(search.key, None)
        place = place_of(search.key)
        groups = self._met.get(place, ())
        newest = {one.peer: one for group in reversed(groups) for one in group}
        met_before = [newest[peer] for peer in sorted(newest.keys() - search.unled)]
        running = GroupSearch(
            *(self._network, self._rpc, self._dht, self._lists),
            *(search, met_before, self._remember),
        )
        self._searches[search.key] = running
        try:
            group = await running.run()
        finally:
            del self._searches[search.key]
        members = (Candidate(one.peer, one.reduces) for one in group.roster.entries)
        last = frozenset(one for one in members if one.peer != self._network.peer_id)
        self._met[place] = (last, *groups)[:GROUPS_REMEMBERED]
        return group

    def awaits_list_of(self, peer: PeerId) -> bool:
        """Whether a round that this peer speaks of may be that of a list on its way here: other
        members hand one on to us, or this peer leads us."""
        searches = self._searches.values()
        return self._lists.fetches or any(one.awaits_list_of(peer) for one in searches)

    async def take_roster(self, roster: Roster) -> bool:
        """A member shows a list that its leader could not bring us any more: whether we are a
        member by it. We are if we look for that group, asked that leader in this search, and find
        our entry as we signed it; the search then ends with this group. RosterRefused, by name,
        for a list that is not well signed.
        """
        search = self._searches.get(roster.key)
        return search is not None and await search.take(roster)

    def overtaken(self, run: str, epoch: int) -> None:
        """This run has ended this epoch: end the searches of it."""
        for search in self._searches.values():
            if run_of(search.terms.key) == run and search.terms.epoch == epoch:
                search.overtaken()

    def forget(self, peers: Collection[PeerId]) -> None:
        """Do not look for these where they were the last time: they are gone, or as good as."""
        for place, groups in list(self._met.items()):
            self._met[place] = tuple(
                frozenset(one for one in group if one.peer not in peers) for group in groups
            )

    def forget_list(self, key: str) -> None:
        """Show the list of the last group under this key to nobody any more."""
        self._started.pop(key, None)

    def _remember(self, roster: Roster) -> None:
        self._started[roster.key] = roster

    async def _join(self, caller: Caller, request: JoinRequest) -> JoinAnswer:
        terms = request.terms
        self._was_asked(terms)
        started = self._started.get(terms.key)
        if started is not None:
            return JoinAnswer(JoinReply.STARTED, started)
        search = self._searches.get(terms.key)
        if search is None:
            self._check_epoch(terms)
            return NOT_HERE
        return await search.join(caller.peer, request)

    def _invite(self, caller: Caller, invitation: Invitation) -> InvitationAnswer:
        terms = invitation.terms
        self._was_asked(terms)
        started = self._started.get(terms.key)
        if started is not None:
            return InvitationAnswer(Reply.STARTED, roster=started)
        search = self._searches.get(terms.key)
        if search is None:
            self._check_epoch(terms)
            return INVITED_FOR_NOTHING
        return search.invite(caller.peer, invitation)

    def _was_asked(self, terms: Terms) -> None:
        """Another peer looks for this group. If we do not, our run is told: we may not know yet
        that the round has begun, or that one of this epoch that has failed begins again."""
        if self.when_asked is not None and terms.key not in self._searches:
            self.when_asked(run_of(terms.key), terms.epoch, is_first_round(terms.key))

    def _check_epoch(self, terms: Terms) -> None:
        """StaleEpoch if this node looks for a group of another epoch of the same run."""
        run = run_of(terms.key)
        for search in self._searches.values():
            ours = search.terms
            if run_of(ours.key) == run and ours.epoch != terms.epoch:
                raise StaleEpoch(
                    f"It is for epoch {terms.epoch} of {run}; this peer is at {ours.epoch}.",
                    why="One of the two is behind.",
                    advice="The peer that is behind fetches the state of the run, and then joins.",
                )


def _still_there(_caller: Caller, _request: Empty) -> Empty:
    return Empty()
