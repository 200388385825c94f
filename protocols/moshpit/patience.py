"""When a peer that does not answer counts as gone, while a group forms.

A leader that waits for others is silent for seconds and must be told from a dead one. So whoever
waits for it asks it something else twice a second, `still-there`, which any living process answers
at once; and what is believed of its silence depends on the round trip that was measured.

Easy to get wrong: a machine that is overloaded is slow to answer and not gone. As long as anything
at all comes from it, it is asked again, a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from protocols.errors import DeadlineExceeded, PotluckError, ProtocolNotServed, Unreachable
from protocols.identity import PeerId
from protocols.messages import Empty
from protocols.moshpit.known_peers import Absence
from protocols.moshpit.matchmaking_messages import STILL_THERE

if TYPE_CHECKING:
    from protocols.network import Network
    from protocols.rpc import Rpc

SHORTEST_SILENCE_SECONDS = 1.0  # busy machines are silent for some tenths of a second
SILENT_ROUND_TRIPS = 5.0  # more than that without an answer is no jitter
NEW_LINK_SECONDS = 3.0  # a dial, a handshake and a stream: eight round trips of 0.35 s
STILL_THERE_SECONDS = 0.5  # between two looks at a leader that holds our join
MOST_OVERDUE = 3  # answers of a leader from which other bytes come


class Patience:
    """How long to wait for whom, by what the links say."""

    def __init__(self, network: Network, rpc: Rpc) -> None:
        self._network, self._rpc = network, rpc

    def seconds_with(self, peer: PeerId) -> float:
        """How long an answer of this peer may take before it counts as gone."""
        link = self._network.link(peer)
        if link is None:
            return NEW_LINK_SECONDS
        return max(SHORTEST_SILENCE_SECONDS, SILENT_ROUND_TRIPS * (link.round_trip_seconds or 0.0))

    def round_trip(self, peer: PeerId, start: float) -> float:
        """What an answer to a call of `start` says of the round trip, without the dialling."""
        link = self._network.link(peer)
        if link is None or link.round_trip_seconds is None:
            return 0.0
        return min(link.round_trip_seconds, trio.current_time() - start)

    async def probe(self, peer: PeerId) -> None:
        """Returns when a peer has answered; an error if it has not in time."""
        await self._rpc.call(peer, STILL_THERE, Empty(), timeout=self.seconds_with(peer))

    async def silence_of(
        self, leader: PeerId, answered: Callable[[PeerId, float], None]
    ) -> PotluckError:
        """Returns, with the last error, when a leader does not answer any more. Until then
        `answered` is told of every answer and its round trip."""
        overdue = 0
        while True:
            start, heard = trio.current_time(), self._bytes_from(leader)
            try:
                await self.probe(leader)
            except DeadlineExceeded as error:
                overdue += 1
                if overdue >= MOST_OVERDUE or self._bytes_from(leader) <= heard:
                    return error
            except PotluckError as error:
                return error
            else:
                overdue = 0
                answered(leader, self.round_trip(leader, start))
                await trio.sleep(STILL_THERE_SECONDS)

    def _bytes_from(self, peer: PeerId) -> int:
        link = self._network.link(peer)
        return 0 if link is None else link.bytes_received


def absence_of(error: PotluckError) -> Absence:
    """What an error of a call says about the peer that was called."""
    if isinstance(error, Unreachable | DeadlineExceeded):
        return Absence.UNREACHABLE
    if isinstance(error, ProtocolNotServed):
        return Absence.ELSEWHERE
    return Absence.AT_ODDS
