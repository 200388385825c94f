"""Noticing that the network is gone, and that it is back.

Without any link a volunteer stops computing: after a while it would believe to be alone in the run,
and make steps that nobody else has. The gate is closed, with words that say who is probably to
blame; the directory goes on trying every known address by itself, and the first link opens it.

The organiser's first peer (`begins`) is never stopped by this: for it to be alone is how a run
begins.

Easy to get wrong: one link that changes over to another is no loss. Only a silence of
`LOST_SECONDS` is one, in which the places to join at were tried in vain. Until it is told, a
volunteer computes on; that it makes no step alone meanwhile is the tracker's affair
(`TrackerSettings.counts_silence`).
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Final

import trio

from node.trainer.blame import blame_of
from node.trainer.happenings import NetworkBack, NetworkLost, PeerCame, PeerWent
from node.trainer.phases import NETWORK
from node.trainer.session import Session
from protocols.dht.service import Dht
from protocols.network import LinkEvent, Network, Reach

LOST_SECONDS: Final = 2.0
FIRST_TRY_SECONDS: Final = 8.0
"""A loaded machine is slow to dial, and a first dial that is under way is no loss."""


async def watch_network(network: Network, dht: Dht, session: Session, *, begins: bool) -> None:
    """Close and open the gate under the name `network`, until the network itself ends."""
    with suppress(trio.EndOfChannel), network.link_events() as events:
        while True:
            await _until_lost(network, dht, session, events)
            if not begins:
                await _lost(network, dht, session, events)


async def _until_lost(
    network: Network, dht: Dht, session: Session, events: trio.MemoryReceiveChannel[LinkEvent]
) -> None:
    """Until there has been no link for a while, and the places to join at were tried in vain. Tells
    who comes and goes."""
    alone_since = math.inf
    while True:
        if network.links():
            alone_since = math.inf
            _tell(session, await events.receive())
            continue
        now = trio.current_time()
        alone_since = min(alone_since, now)
        if now - alone_since >= LOST_SECONDS and (
            dht.bootstrap_state().rounds_failed or now - alone_since >= FIRST_TRY_SECONDS
        ):
            return
        with trio.move_on_after(LOST_SECONDS):
            _tell(session, await events.receive())


async def _lost(
    network: Network,
    dht: Dht,
    session: Session,
    events: trio.MemoryReceiveChannel[LinkEvent],
) -> None:
    began = trio.current_time()
    words = blame_of(dht.bootstrap_state())
    session.happened(NetworkLost(words))
    try:
        while not network.links():
            session.gate.close(NETWORK, blame_of(dht.bootstrap_state()))
            with trio.move_on_after(LOST_SECONDS):
                _tell(session, await events.receive())
    finally:
        session.gate.open(NETWORK)
    session.happened(NetworkBack(round(trio.current_time() - began, 3)))


def _tell(session: Session, event: LinkEvent) -> None:
    if event.was is Reach.NONE:
        session.happened(PeerCame(event.peer, event.reach.value))
    elif event.reach is Reach.NONE:
        session.happened(PeerWent(event.peer))
