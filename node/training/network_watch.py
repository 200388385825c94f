"""Notices that the network is gone or back, and says whose fault it probably is.

Without a link a volunteer stops computing: after a while it would think that it is alone in the
run, and make steps that nobody else has. The gate is closed with words about the probable cause.
The directory keeps trying every known address, and the first link opens the gate. The organiser's
first peer (`begins`) is never stopped: a run begins with one peer.

`blame_of` (pure) looks at the failed attempts. A refused connection comes from a machine that is
up, so its node is not running. Errors about routes and names come from this machine's own
connection. If none lets this node in, its token is too old or too new for them. Silence has no
clear cause: the other machine may be off, or a firewall may drop the packets. One answer from any
of the addresses shows that this machine is online.

Replacing one link with another is no loss. The network counts as lost only after `LOST_SECONDS` of
silence, in which dialling the peers to join at has failed. Until then a volunteer computes on; the
tracker keeps it from making a step alone (`open_tracker` without `counts_silence`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import trio

from node.training.happenings import NetworkBack, NetworkLost, PeerCame, PeerWent
from node.training.phases import NETWORK
from node.training.session import TrainingSession
from protocols.dht import BootstrapState, Dht
from protocols.identity import PeerId
from protocols.network import LinkEvent, Network, Reach

ELSEWHERE: Final = ("another node answers", "no potluck node")
THEIRS: Final = (*ELSEWHERE, "connection refused", "listens there", "not allowed")
OURS: Final = ("no route", "does not resolve", "network is unreachable")
REFUSED: Final = (
    "This node asks again, with the next token from the auth server. If it lasts, tell the run's "
    "moderators."
)
MOST_SHOWN: Final = 3
LONGEST_CHARACTERS: Final = 160  # of one address and its failure


def blame_of(state: BootstrapState) -> str:
    """The probable cause, in one or two sentences."""
    failures = [(one.address, one.failure) for one in state.addresses if one.failure]
    tried = len(state.addresses)
    is_refused = bool(tried) and all(one.refused for one in state.addresses)
    what = f"none of {tried} known addresses {'lets this node in' if is_refused else 'answers'}"
    if tried == 1:
        does = "let this node in" if is_refused else "answer"
        what = f"the only known address does not {does}"
    if not tried:
        what = "no peer can be reached"
    if state.cached_peers:
        what += f", nor any of {_count(state.cached_peers, 'peer', 'peers')} known from before"
    shown = "; ".join(_shown(*one) for one in failures[:MOST_SHOWN])
    whose = REFUSED if is_refused else _whose(failure for _, failure in failures)
    return f"{what}{f' ({shown})' if shown else ''}. {whose}"


def _whose(failures: Iterable[str]) -> str:
    said = [one.lower() for one in failures]
    if not said:
        return "This machine may be offline, or the others are."
    if all(any(sign in one for sign in ELSEWHERE) for one in said):
        return (
            "This machine is online: the fault is at the other end, where another program uses "
            "that address now. You may need a new invite."
        )
    if any(sign in one for one in said for sign in THEIRS):
        return (
            "This machine is online: the fault is at the other end, where no node is running. The "
            "run may be over, or its peers may be away for a while."
        )
    if all(any(sign in one for sign in OURS) for one in said):
        return "The fault is this machine's connection: it has no way out."
    return "They may be off, or a firewall in between may block the traffic."


def _shown(address: str, failure: str) -> str:
    """The address without its peer's long id, and the first sentence of its failure."""
    place, _, peer = address.partition("/p2p/")
    failure = " ".join(failure.split())
    of_place = failure.partition(f"{place}: ")[2].partition(";")[0]
    detail = (of_place or failure).partition(". ")[0].rstrip(".").replace(peer, "it")
    return f"{place}: {detail}"[:LONGEST_CHARACTERS]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


LOST_SECONDS: Final = 2.0
FIRST_TRY_SECONDS: Final = 8.0
"""A loaded machine is slow to dial, so a first dial that is under way is no loss."""


STAYS_SECONDS: Final = 2.0
"""A link that ends before that is not told of. To see whether this node can be reached, peers dial
it back, under a name of their own each time, and hang up."""


async def watch_network(
    network: Network, dht: Dht, session: TrainingSession, *, begins: bool
) -> None:
    """Close and open the gate under the name `network`, and tell which peers come and go, until the
    network itself ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell_of_peers, network, session)
        with suppress(trio.EndOfChannel), network.link_events() as events:
            while True:
                await _until_lost(network, dht, events)
                if not begins:
                    await _lost(network, dht, session, events)
        nursery.cancel_scope.cancel()


async def _until_lost(
    network: Network, dht: Dht, events: trio.MemoryReceiveChannel[LinkEvent]
) -> None:
    """Until there has been no link for a while, and dialling the peers to join at has failed."""
    alone_since = math.inf
    while True:
        if network.links():
            alone_since = math.inf
            await events.receive()
            continue
        now = trio.current_time()
        alone_since = min(alone_since, now)
        if now - alone_since >= LOST_SECONDS and (
            dht.bootstrap_state().rounds_failed or now - alone_since >= FIRST_TRY_SECONDS
        ):
            return
        with trio.move_on_after(LOST_SECONDS):
            await events.receive()


async def _lost(
    network: Network,
    dht: Dht,
    session: TrainingSession,
    events: trio.MemoryReceiveChannel[LinkEvent],
) -> None:
    began = trio.current_time()
    words = blame_of(dht.bootstrap_state())
    session.happened(NetworkLost(words))
    try:
        while not network.links():
            session.gate.close(NETWORK, blame_of(dht.bootstrap_state()))
            with trio.move_on_after(LOST_SECONDS):
                await events.receive()
    finally:
        session.gate.open(NETWORK)
    session.happened(NetworkBack(round(trio.current_time() - began, 3)))


async def _tell_of_peers(network: Network, session: TrainingSession) -> None:
    new: dict[PeerId, tuple[float, Reach]] = {}  # when to tell of it, and how it is reached
    with suppress(trio.EndOfChannel), network.link_events() as events:
        while True:
            with trio.move_on_at(min((at for at, _ in new.values()), default=math.inf)):
                event = await events.receive()
                if event.was is Reach.NONE:
                    new[event.peer] = trio.current_time() + STAYS_SECONDS, event.reach
                elif event.reach is Reach.NONE:
                    if new.pop(event.peer, None) is None:
                        session.happened(PeerWent(event.peer))
                elif event.peer in new:
                    new[event.peer] = new[event.peer][0], event.reach
            for peer, (at, reach) in list(new.items()):
                if at <= trio.current_time():
                    del new[peer]
                    session.happened(PeerCame(peer, reach.value))
