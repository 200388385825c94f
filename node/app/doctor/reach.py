"""Check how others reach this node: its addresses, its router, its relays, and what they carry.

A node that runs is asked. Otherwise a node of this home is started for the length of the check,
without its directory: it connects to the peers that it would join at, lets them dial it back, and
takes a place at a relay if it needs one, as a node does at its start (nat/connectivity.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import trio

from nat.connectivity import Connectivity, ReachMode
from nat.reachability import DialVerdict
from node.app.doctor.finding import Finding, FindingLevel
from node.app.doctor.network import accepts
from node.app.doctor.surroundings import Surroundings
from node.core.caps.units import in_words
from node.core.node import open_real_network
from node.core.peer_address import PeerAddress
from node.core.status import ConnectivityStatus, connectivity_status
from protocols.errors import PotluckError
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.rpc import Rpc, open_rpc, ping

TOPIC: Final = "reach"
REACH_SECONDS: Final = 24.0  # stating the mode takes 5 s if peers answer, and then the rates
STATE_SECONDS: Final = 16.0
CONNECT_SECONDS: Final = 6.0
PEERS_ASKED: Final = 3
RATE_SECONDS: Final = 2.0
PAYLOAD: Final = bytes(4096)  # the most that a ping may carry
IN_FLIGHT: Final = 256  # calls: a megabyte under way, enough for 80 Mb/s at 100 ms
CALL_SECONDS: Final = 5.0

FORWARD: Final = (
    "Nothing has to be done. To be dialled directly, switch on UPnP or PCP at the router, or "
    "forward a TCP port to this machine and name it with --listen."
)
NEEDS_RELAY: Final = "Ask the organiser to run `potluck backbone`, which relays, or forward a port."

_SAYS: Final = {
    ReachMode.DIRECT: (FindingLevel.OK, "Others can connect to this node directly.", ""),
    ReachMode.MAPPED: (
        FindingLevel.OK,
        "Others can connect through a port that the router forwards.",
        "",
    ),
    ReachMode.PUNCHED: (
        FindingLevel.OK,
        "Others meet this node at a relay and then connect directly, through a hole.",
        FORWARD,
    ),
    ReachMode.RELAYED: (
        FindingLevel.NOTE,
        "Others with such a router as this one reach this node only through a relay.",
        FORWARD,
    ),
    ReachMode.DIAL_OUT_ONLY: (
        FindingLevel.WARNING,
        "Nobody can connect to this node. It takes part through the connections that it makes.",
        NEEDS_RELAY,
    ),
    ReachMode.UNKNOWN: (
        FindingLevel.NOTE,
        "How others reach this node is not known: no peer was there to try.",
        "",
    ),
}


async def check_reach(surroundings: Surroundings) -> Sequence[Finding]:
    if surroundings.node is not None:
        return [*_of_status(surroundings.node.connectivity), *_of_links(surroundings)]
    if not surroundings.peers:
        return [
            Finding(TOPIC, FindingLevel.NOTE, "No peer is known that could try to connect to us.")
        ]
    return await _examined(surroundings)


def _of_status(status: ConnectivityStatus) -> Iterator[Finding]:
    """The mode with its advice, the router, and each address."""
    mode = next((one for one in ReachMode if one.value == status.mode), ReachMode.UNKNOWN)
    level, says, advice = _SAYS[mode]
    if mode is ReachMode.DIAL_OUT_ONLY and status.trouble:
        says = f"{says} No relay: {status.trouble}."
    yield Finding(TOPIC, level, f"{mode.value}: {says}", advice)
    if status.outside:
        seen = f"The internet sees this machine at {status.outside}"
        yield Finding("router", FindingLevel.OK, f"{seen}. Its router: {status.router}.")
    for one in status.addresses:
        words = {
            DialVerdict.PUBLIC.value: "others can dial it",
            DialVerdict.PRIVATE.value: "nobody could dial it",
        }.get(one.verdict, "not tried")
        mapped = ", forwarded by the router" if one.mapped else ""
        yield Finding(TOPIC, FindingLevel.OK, f"{one.address}: {words}{mapped}.")


def _of_links(surroundings: Surroundings) -> Iterator[Finding]:
    """What a running node has measured of its relays and its fastest link."""
    assert surroundings.node is not None
    links = {link.peer: link for link in surroundings.node.links}
    for relay in surroundings.node.connectivity.relays:
        link = links.get(relay)
        trip = None if link is None else link.round_trip_ms
        yield _relay(relay, None if trip is None else trip / 1000)
    sent = max((link.send_bytes_per_second or 0 for link in links.values()), default=0)
    received = max((link.receive_bytes_per_second or 0 for link in links.values()), default=0)
    if sent or received:
        rates = f"{in_words(sent)}/s up and {in_words(received)}/s down"
        yield Finding("rates", FindingLevel.OK, f"The busiest links carried {rates} lately.")


def _relay(relay: str, round_trip_seconds: float | None) -> Finding:
    trip = "" if round_trip_seconds is None else f", {round_trip_seconds * 1000:.0f} ms away"
    return Finding("relays", FindingLevel.OK, f"Reachable through {relay}{trip}.")


async def _examined(surroundings: Surroundings) -> list[Finding]:
    accepting = await _accepting(surroundings.peers[:PEERS_ASKED])
    if not accepting:  # a node would not get further, and its start takes the processor a second
        return [_nobody("accepts connections")]
    identity = surroundings.identity or Identity.generate()
    member = surroundings.membership
    findings: list[Finding] = []
    async with (
        open_real_network(identity, surroundings.configuration) as network,
        open_rpc(network, None if member is None else member.guard(network)) as rpc,
        trio.open_nursery() as nursery,
    ):
        met = await _meet(accepting, network)
        if not met:
            return [_nobody("answers")]
        connectivity = Connectivity(network, lambda: met)
        await nursery.start(connectivity.run)
        with trio.move_on_after(STATE_SECONDS):
            await connectivity.stated.wait()
        findings += _of_status(connectivity_status(connectivity))
        for held in connectivity.reservations.held:
            findings.append(_relay(held.relay, await _round_trip(network, held.relay)))
        findings += await _rates(rpc, met)
        nursery.cancel_scope.cancel()
    return findings


def _nobody(does: str) -> Finding:
    says = f"How others reach this node is not known: no peer {does}."
    return Finding(TOPIC, FindingLevel.NOTE, says)


async def _accepting(peers: Sequence[PeerAddress]) -> list[PeerAddress]:
    accepting: list[PeerAddress] = []

    async def knock(one: PeerAddress) -> None:
        if await accepts(one):
            accepting.append(one)

    async with trio.open_nursery() as nursery:
        for one in peers:
            nursery.start_soon(knock, one)
    return accepting


async def _meet(peers: Sequence[PeerAddress], network: Network) -> list[PeerId]:
    met: list[PeerId] = []

    async def connect(peer: PeerId, address: str) -> None:
        network.learn_addresses(peer, [address])
        with trio.move_on_after(CONNECT_SECONDS), suppress(PotluckError):
            await network.connect(peer)
            met.append(peer)

    async with trio.open_nursery() as nursery:
        for one in peers:
            nursery.start_soon(connect, one.peer, one.text)
    return list(dict.fromkeys(met))


async def _round_trip(network: Network, peer: PeerId) -> float | None:
    with trio.move_on_after(CALL_SECONDS), suppress(PotluckError):
        return await network.ping(peer)
    return None


async def _rates(rpc: Rpc, peers: Sequence[PeerId]) -> list[Finding]:
    """What goes to the first peer that answers and comes back from it, both at once."""
    for peer in peers:
        echoed = 0
        failed = False

        async def call(peer: PeerId = peer) -> None:
            nonlocal echoed, failed
            while not failed:
                try:
                    await ping(rpc, peer, PAYLOAD, timeout=CALL_SECONDS)
                except PotluckError:
                    failed = True
                else:
                    echoed += len(PAYLOAD)

        with trio.move_on_after(RATE_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(IN_FLIGHT):
                    nursery.start_soon(call)
        if echoed:
            rate = in_words(echoed / RATE_SECONDS)
            says = f"{rate}/s go to {peer} and come back from it, both at once."
            return [Finding("rates", FindingLevel.OK, says)]
    return [Finding("rates", FindingLevel.NOTE, "No peer answered calls, so no rate was measured.")]
