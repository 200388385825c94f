"""Come among the others and learn from them what the run is: as long as it takes.

    await meet(node, session)
    signed = await definition_of(node, session, "poem", organiser)

Promises: all known addresses are tried again and again, ever more rarely; the owner is told which
ones, how each failed, and whose fault that probably is. Only a signed refusal ends it.

Easy to get wrong: a definition that was seen before is not enough to begin with, even if it is
genuine: the organiser may have signed another one since. It is what counts where none of the
others has a newer one.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import trio

from node.disk_trouble import disk_trouble
from node.joining.asking import DefinitionAsker
from node.node import Node
from node.run.remembered import remember, remembered, runs_folder
from node.run.signed import SignedDefinition, read_signed
from node.trainer.blame import blame_of
from node.trainer.happenings import NetworkBack, NetworkLost, Notice, Preparing
from node.trainer.phases import NETWORK
from node.trainer.session import Session
from node.trainer.stages import ASKING, LOOKING
from protocols.dht.bootstrap import Joined
from protocols.errors import PotluckError
from protocols.not_allowed import NotAllowed

QUIET_SECONDS: Final = 5.0  # after which the owner is told that nobody answers yet
TELL_SECONDS: Final = 2.0  # between two looks at how the addresses fare


async def meet(node: Node, session: Session) -> None:
    """Until somebody of the swarm has answered; NotAllowed if they say that this node may not."""
    if node.dht.bootstrap_state().joined is Joined.ALONE:
        return
    refusals: list[NotAllowed] = []

    async def listen_for_a_refusal() -> None:
        refusals.append(await node.dht.turned_away())
        nursery.cancel_scope.cancel()

    session.happened(Preparing(LOOKING))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen_for_a_refusal)
        nursery.start_soon(_tell_of_silence, node, session)
        await node.dht.joined()
        nursery.cancel_scope.cancel()
    if refusals:
        raise refusals[0] if node.membership else _without_a_pass(session.run, refusals[0])


def _without_a_pass(run: str, refusal: NotAllowed) -> NotAllowed:
    """The same, for somebody whose invite says that the run is open."""
    return NotAllowed(
        f"Those at the addresses of this invite let nobody into {run} without a pass.",
        why=f"The run is closed, or the addresses are another run's by now. {refusal.what}",
        advice="Ask the organiser for a new invite (`potluck run invite`); with one from the run's "
        "moderators, `potluck login INVITE` gets a pass.",
        reason=refusal.reason,
    )


async def _tell_of_silence(node: Node, session: Session) -> None:
    """Nobody answers: say so, and keep saying how it goes; until cancelled.

    Not before all have been tried once: a machine that is busy with starting (torch is loaded
    meanwhile) takes its time for a first dial, and that is no loss."""
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


async def definition_of(node: Node, session: Session, run: str, organiser: str) -> SignedDefinition:
    """The newest definition of the run that anybody has, verified, and remembered."""
    places = node.configuration.places
    known = await trio.to_thread.run_sync(remembered, places, run, organiser)
    accept = partial(
        read_signed,
        run=run,
        organiser=organiser,
        not_before_ms=0 if known is None else known.signed_ms,
    )
    session.happened(Preparing(ASKING))
    bootstrap = node.configuration.bootstrap_addresses
    asker = DefinitionAsker(
        node.network, node.rpc, bootstrap, lambda words: session.happened(Notice(words))
    )
    signed = await asker.until_known(run, accept, known)
    try:
        await trio.to_thread.run_sync(remember, places, signed)
    except OSError as error:
        why, advice = disk_trouble(error, runs_folder(places))
        raise PotluckError(
            "The run's definition cannot be kept on this machine.", why=why, advice=advice
        ) from None
    return signed
