"""What a round has to say to its members: in order to each, and nobody waits for another.

A message is a unary call with an empty answer. The answer says that it arrived, so the next one
to the same member goes after it; a member that is slow or gone holds up nobody else.

Promise: there is a task for a member only while there is something to tell it, and each call ends
by its deadline. So a round that is over may still be telling its decision, and leaves nothing
behind when it has.

Easy to get wrong: a call that failed may have arrived all the same. What is sent must bear to be
received twice, and a failure is a reason to suspect a member and no proof of anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.round_messages import AGREE, Agree
from protocols.rpc import Rpc

log = logging.getLogger("potluck.moshpit")

CALL_SECONDS = 4.0
"""How long a member has to acknowledge: as long as a stalled transfer is waited for, since both
mean that the member has stopped. A full buffer of a slow uplink drains in less."""

MOST_WAITING = 64
"""Messages that wait for one member. A round has a few for each attempt; more means that it takes
nothing in, and it is treated as unreachable."""


class Outbox:
    """Messages of one round to its members, by their place in the roster."""

    def __init__(
        self,
        rpc: Rpc,
        nursery: trio.Nursery,
        round_id: bytes,
        peers: tuple[PeerId, ...],
        failed: Callable[[int, PotluckError], None],
    ) -> None:
        self._rpc = rpc
        self._nursery = nursery
        self._round_id = round_id
        self._peers = peers
        self._failed = failed
        self._waiting: dict[int, deque[AgreementMessage]] = {}

    def post(self, member: int, message: AgreementMessage) -> None:
        """Send it as soon as what was posted to this member before has arrived."""
        waiting = self._waiting.get(member)
        if waiting is None:
            self._waiting[member] = deque([message])
            self._nursery.start_soon(self._send_all, member)
        elif len(waiting) < MOST_WAITING:
            waiting.append(message)
        # else: the call in flight will time out, and that is reported

    async def _send_all(self, member: int) -> None:
        peer, waiting = self._peers[member], self._waiting[member]
        try:
            while waiting:
                request = Agree(self._round_id, waiting[0])
                await self._rpc.call(peer, AGREE, request, timeout=CALL_SECONDS)
                waiting.popleft()
        except PotluckError as error:
            log.debug("%s was not told of a round: %s", peer, error)
            del self._waiting[member]  # what waited behind it has no sense without it
            self._failed(member, error)
        finally:
            if self._waiting.get(member) is waiting:
                del self._waiting[member]
