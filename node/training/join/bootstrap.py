"""Reaching other peers, and getting the run's definition from them, for as long as it takes.

    await meet(node, session)
    signed = await definition_of(node, session, "poem", organiser)
    await refuse_if_in_use(node, session, run)       # early, and again just before entering the run

All known addresses are retried with growing pauses. The owner is told which ones, how each failed,
and whose fault that probably is. A member that they refuse waits for another token, unless none
would help, or the auth server refuses it, too. Then the peers that answered are asked for the
definition. That ends with the newest one that any of them has, or with an error: this potluck is
too old for it, or it has mistakes. If nobody has one, the node goes on asking with growing pauses,
and reports each reason once.

Each key belongs to one node. On one machine a lock ensures this (node/core/running_lock.py). A
copied home contains the key; on another machine only the run's directory shows it. If this key has
published progress since this node began, another node has done so. Two nodes with one key would
overwrite each other's slots, and the others would see one peer with two states.

A definition from an earlier session may be genuine and still outdated, because the organiser may
have signed another one since. It is used only if no other peer has a newer one. The first peer to
answer may be the only liar, while others are not reached yet. So a forgery ends the search only
after FORGED_SECONDS of nothing else.

After `kill -9` the slot of an earlier life of this node stays for a while. It is older than this
life. The node then waits for as long as a living node takes to publish again; if nothing is found,
or after a clean end, it does not wait. Two copies that start within seconds of each other have both
published nothing when they look. So each looks again after it has measured its machine. If two
still enter at the same moment, both say so in their logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from node.core.configuration import Configuration
from node.core.directory import join_or_be_refused
from node.core.disk_trouble import disk_trouble
from node.core.node import Node
from node.run.kept import remember, remembered
from node.run.signed import SignedDefinition, read_signed
from node.training.happenings import (
    ASKING,
    LOOKING,
    MAKING_SURE,
    NetworkBack,
    NetworkLost,
    Notice,
    Preparing,
)
from node.training.network_watch import blame_of
from node.training.phases import NETWORK
from node.training.session import TrainingSession
from protocols.accumulation.progress_slot import (
    SAY_AGAIN_SECONDS,
    cohorts_told,
    progress_key,
    sums_key,
)
from protocols.dht import Joined, SlotEntry
from protocols.errors import PotluckError, Refused
from protocols.identity import PeerId
from protocols.moshpit.cohorts import cohort_of
from protocols.network import Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc
from protocols.runs.fetching import fetch_definition
from protocols.runs.messages import NoDefinition, NotTheDefinition

QUIET_SECONDS: Final = 5.0  # after which the owner is told that nobody answers yet
TELL_SECONDS: Final = 2.0  # between two looks at how the addresses fare


async def meet(node: Node, session: TrainingSession) -> None:
    """Until a peer of the swarm has answered; NotAllowed if they refuse this node for good."""
    if node.dht.bootstrap_state().joined is Joined.ALONE:
        return
    refusal: NotAllowed | None = None
    session.happened(Preparing(LOOKING))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell_of_silence, node, session)
        try:
            await join_or_be_refused(node.dht, node.membership)
        except NotAllowed as error:
            refusal = error
        nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal if node.membership else _without_a_pass(session.run, refusal)


def _without_a_pass(run: str, refusal: NotAllowed) -> NotAllowed:
    """The same refusal, for an owner whose invite says that the run is open."""
    return NotAllowed(
        f"The peers at the addresses of this invite let nobody into {run} without a pass.",
        why=f"The run is closed, or the addresses belong to another run by now. {refusal.what}",
        advice="Ask the organiser for a new invite (`potluck run invite`); with one from the run's "
        "moderators, `potluck login INVITE` gets a pass.",
        reason=refusal.reason,
    )


async def _tell_of_silence(node: Node, session: TrainingSession) -> None:
    """While nobody answers, report it and how each address fares; until cancelled.

    Not before all have been tried once: a machine that is busy with starting (torch is loaded
    meanwhile) is slow at its first dial, which is harmless."""
    began, is_told = time.monotonic(), False
    await trio.sleep(QUIET_SECONDS)
    try:
        while True:
            state = node.dht.bootstrap_state()
            if is_told or state.rounds_failed:
                if not is_told:
                    session.happened(NetworkLost(blame_of(state)))
                    is_told = True
                session.gate.close(NETWORK, blame_of(state))
            await trio.sleep(TELL_SECONDS)
    finally:
        session.gate.open(NETWORK)
        if is_told and node.dht.bootstrap_state().joined is not Joined.TRYING:
            session.happened(NetworkBack(round(time.monotonic() - began, 3)))


async def definition_of(
    node: Node, session: TrainingSession, run: str, organiser: str
) -> SignedDefinition:
    """The newest definition of the run that any peer has, verified, and remembered."""
    places = node.configuration.places
    session.happened(Preparing(ASKING))
    signed = await find_definition(
        node.network,
        node.rpc,
        node.configuration,
        run,
        organiser,
        lambda words: session.happened(Notice(words)),
    )
    try:
        await trio.to_thread.run_sync(remember, places, signed)
    except OSError as error:
        why, advice = disk_trouble(error, places.runs_folder)
        raise PotluckError(
            "The run's definition cannot be kept on this machine.", why=why, advice=advice
        ) from None
    return signed


def _tell_nobody(_words: str) -> None:
    """Nobody wants to know of failures that do not last."""


async def find_definition(
    network: Network,
    rpc: Rpc,
    configuration: Configuration,
    run: str,
    organiser: str,
    tell: Callable[[str], None] = _tell_nobody,
) -> SignedDefinition:
    """The newest definition of the run that any peer has, verified."""
    known = await trio.to_thread.run_sync(remembered, configuration.places, run, organiser)
    accept = partial(
        read_signed,
        run=run,
        organiser=organiser,
        not_before_ms=0 if known is None else known.signed_ms,
    )
    asker = DefinitionAsker(network, rpc, configuration.bootstrap_addresses, tell)
    return await asker.until_known(run, accept, known)


FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 15.0  # between two questions for a definition that nobody had
FORGED_SECONDS: Final = 30.0

Accept = Callable[[bytes], SignedDefinition]


@dataclass(frozen=True)
class DefinitionAsker:
    """`named`: addresses of the invite, whose peers are asked first. `tell`: given failures."""

    network: Network
    rpc: Rpc
    named: Iterable[str]
    tell: Callable[[str], None]

    async def until_known(
        self, run: str, accept: Accept, known: SignedDefinition | None
    ) -> SignedDefinition:
        """UnusableDefinition; NotTheDefinition if for long nobody has had a genuine one."""
        seconds, told = FIRST_RETRY_SECONDS, frozenset[str]()
        give_up = trio.current_time() + FORGED_SECONDS
        while True:
            try:
                return await fetch_definition(self.rpc, self._peers(), run, accept, known=known)
            except (NoDefinition, NotTheDefinition) as error:
                if isinstance(error, NotTheDefinition) and trio.current_time() >= give_up:
                    raise
                # by the message and not by the peer: they are asked in another order each time
                reasons = error.reasons if isinstance(error, NoDefinition) else {str(error)}
                if not reasons <= told:
                    told |= reasons
                    self.tell(f"{error.what} {error.why} It is tried again.")
            await trio.sleep(seconds)
            seconds = min(2.0 * seconds, LONGEST_RETRY_SECONDS)

    def _peers(self) -> list[PeerId]:
        """The peers of the invite, then the others in random order: only some are asked, and
        anybody may have started many."""
        named = {at.rpartition("/p2p/")[2] for at in self.named}
        peers = [link.peer for link in self.network.links()]
        self.network.random.shuffle(peers)
        return sorted(peers, key=lambda peer: peer not in named)


SPEAKS_AGAIN_SECONDS: Final = SAY_AGAIN_SECONDS + 1.0  # and a second for the way
LOOK_SECONDS: Final = 0.5
ROUNDING_MS: Final = 2.0  # slots count whole ones; earlier lives published longer ago
ANSWER_SECONDS: Final = 3.0
"""For the directory's answer. Without an answer the node may train: if there is another one after
all, both say so in their logs later."""


class KeyInUse(Refused):
    """Another node takes part in the run with this node's key."""


async def refuse_if_in_use(
    node: Node,
    session: TrainingSession,
    run: str,
    *,
    patience_seconds: float = SPEAKS_AGAIN_SECONDS,
) -> None:
    """KeyInUse if another node publishes progress with this node's key."""
    is_told = False
    while True:
        said_ms = await _said_last(node, run)
        if said_ms is None:
            return
        now_ms = 1000.0 * node.network.wall_time() + node.dht.statistics().clock_offset_ms
        if said_ms > now_ms - 1000.0 * node.uptime_seconds - ROUNDING_MS:
            raise KeyInUse(
                "Another node takes part in this run with this node's key.",
                why=f"Both have the peer id {node.network.peer_id}: one of them has a copy of "
                f"{node.configuration.key_file}.",
                advice="Let the other one train, or give this one its own key: a new home "
                "(POTLUCK_HOME or --home) makes one. Copy invites between machines, never homes.",
            )
        if node.uptime_seconds > patience_seconds:
            return
        if not is_told:
            is_told = True
            session.happened(Preparing(MAKING_SURE))
        await trio.sleep(LOOK_SECONDS)


async def _said_last(node: Node, run: str) -> float | None:
    """When this key last published progress in the run, by the swarm's time."""
    me, said = node.network.peer_id, list[float]()

    async def slots_under(key: str) -> dict[PeerId, SlotEntry]:
        found = await node.dht.get(key)
        if me in found:
            said.append(float(found[me].sequence))
        return found

    with trio.move_on_after(ANSWER_SECONDS), suppress(PotluckError):
        await slots_under(progress_key(run))
        sums = await slots_under(sums_key(run))
        count = cohorts_told(one.value for one in sums.values())
        if count > 1:
            await slots_under(progress_key(run, count, cohort_of(run, me, count)))
    return max(said, default=None)
