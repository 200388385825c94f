"""The two ends of a circuit: asking a relay for one, and taking one that a relay brings.

    stream = await ask_for_circuit(network, relay, peer)     # a network dials its addresses so
    network.serve(STOP, CircuitTaker(network, is_ours).answer)

A circuit is not yet a link: the two peers do their handshake over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import base58
import trio

from nat import messages
from nat.messages import Hop, HopType, Status, Stop, StopType
from nat.relaying import HOP, TALK_SECONDS
from protocols.errors import PotluckError, ProtocolNotServed, RemoteMisbehaviour, Unreachable
from protocols.identity import PeerId
from protocols.network import Network, Stream, TraversableNetwork

MOST_CIRCUITS: Final = 256  # relayed links that others may have to us at once, by all relays

_WHY: Final = {
    Status.NO_RESERVATION: "it has no reservation there now",
    Status.RESOURCE_LIMIT_EXCEEDED: "the relay carries as much as it may",
    Status.PERMISSION_DENIED: "the relay serves only members of its run",
    Status.CONNECTION_FAILED: "the peer did not answer the relay",
}


async def ask_for_circuit(network: Network, relay: PeerId, peer: PeerId) -> Stream:
    """A stream to `peer` through `relay`; Unreachable, with the relay's reason, if there is none.

    There is no timeout except that of the network: use `trio.fail_after`.
    """
    try:
        stream = await network.open(relay, HOP)
    except ProtocolNotServed:
        raise Unreachable(
            f"{relay} is no relay.",
            why="It may have been one, under another version or configuration.",
            advice="Try again later: the peer looks for other relays by itself.",
        ) from None
    try:
        ask = Hop(type=HopType.CONNECT)
        ask.peer.id = base58.b58decode(peer)
        await messages.send(stream, ask)
        said = await messages.read(stream, Hop)
        if (said.type, said.status) == (HopType.STATUS, Status.OK):
            return stream
        raise Unreachable(
            f"{peer} cannot be reached through the relay {relay}.",
            why=f"{_WHY.get(said.status, f'the relay answered {said.status}')}.",
            advice="Try again in a moment: the peer looks for other relays by itself.",
        )
    except (RemoteMisbehaviour, trio.BrokenResourceError) as error:
        stream.reset()
        raise Unreachable(
            f"The relay {relay} did not make a circuit to {peer}.",
            why=str(error) or "It ended the stream.",
            advice="Try again in a moment.",
        ) from None
    except BaseException:
        stream.reset()
        raise


class CircuitTaker:
    """Takes the circuits that relays bring. `is_ours` says whether we have a place at a relay.

    A relay may bring half of those that the others leave, so that none can shut the others out.
    """

    def __init__(self, network: TraversableNetwork, is_ours: Callable[[PeerId], bool]) -> None:
        self._network = network
        self._is_ours = is_ours
        self.open: Counter[PeerId] = Counter()

    async def answer(self, stream: Stream) -> None:
        """Handle one stream of the STOP protocol; returns when its link has ended."""
        with trio.fail_after(TALK_SECONDS):
            asked = await messages.read(stream, Stop)
            refusal = self._why_not(stream.remote_peer, asked.type)
            if refusal is not None:
                await messages.send(stream, Stop(type=StopType.STATUS, status=refusal))
                return
        relay = stream.remote_peer
        self.open[relay] += 1  # from the check on, or many that come at once would all pass it
        try:
            await self._take(stream, PeerId(base58.b58encode(asked.peer.id[:64]).decode()))
        finally:
            self.open -= Counter((relay,))

    async def _take(self, stream: Stream, peer: PeerId) -> None:
        with trio.fail_after(TALK_SECONDS):
            await messages.send(stream, Stop(type=StopType.STATUS, status=Status.OK))
        try:
            await self._network.carry_circuit(stream, peer)
        except PotluckError:
            stream.reset()  # the peer at the other end failed to prove itself

    def _why_not(self, relay: PeerId, kind: int) -> Status | None:
        if kind != StopType.CONNECT:
            return Status.UNEXPECTED_MESSAGE
        if not self._is_ours(relay):
            return Status.PERMISSION_DENIED
        left_by_others = MOST_CIRCUITS - self.open.total() + self.open[relay]
        return Status.RESOURCE_LIMIT_EXCEEDED if self.open[relay] >= left_by_others // 2 else None
