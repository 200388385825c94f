"""Asking a peer what it trains, and how, to say by name what differs; and answering that.

    serve_description(rpc, run, mine)
    theirs = await described_by(rpc, peer, run)

Easy to get wrong: what a peer answers need not be what it trains. Compare its digest with the
signature in the peer's slot.
"""

from __future__ import annotations

import logging

from protocols.accumulation.state_messages import DESCRIPTION, DescriptionRequest, StateGone
from protocols.accumulation.training_description import TrainingDescription
from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc import Rpc

log = logging.getLogger("potluck.state")

ASK_SECONDS = 10.0  # for what only makes a refusal clearer


def serve_description(rpc: Rpc, run: str, mine: TrainingDescription) -> None:
    """Answer from now on. One for each rpc."""

    async def answer(_caller: Caller, request: DescriptionRequest) -> TrainingDescription:
        if request.run != run:
            raise StateGone("This peer takes part in another run.")
        return mine

    rpc.serve(DESCRIPTION, answer)


async def described_by(rpc: Rpc, peer: PeerId, run: str) -> TrainingDescription | None:
    """What a peer says that it trains; None if it does not say."""
    try:
        return await rpc.call(peer, DESCRIPTION, DescriptionRequest(run), timeout=ASK_SECONDS)
    except PotluckError as error:
        log.debug("%s does not say what it trains: %s", peer, error)
        return None
