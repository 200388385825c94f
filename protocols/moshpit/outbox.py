"""What a round has to say to its members: in order to each, and nobody waits for another.

A message is a unary call with an empty answer. The answer says that it arrived, so the next one
to the same member goes after it; a member that is slow or gone holds up nobody else.

Promise: there is a task for a member only while there is something to tell it, and it ends when
the member is silent for `CALL_SECONDS`. So a round that is over may still be telling its decision,
and leaves nothing behind when it has.

A leader may die while it hands out its list. A member that does not know the round is therefore
shown the list, once, by whoever wants to tell it something.

Easy to get wrong: a call that failed may have arrived all the same. What is sent must bear to be
received twice, and a failure is a reason to suspect a member and no proof of anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import trio

from protocols.errors import DeadlineExceeded, PotluckError
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.group import Group
from protocols.moshpit.round_messages import AGREE, SHOW, Agree, Show, UnknownRound
from protocols.rpc import Rpc

log = logging.getLogger("potluck.moshpit")

CALL_SECONDS = 4.0
"""How long a member has to acknowledge: as long as a stalled transfer is waited for, since both
mean that the member has stopped. Not so while bytes come from it (pulse.py): then our message
waits behind chunks that were queued before it, on one of the two home connections."""

MOST_WAITING = 64
"""Messages that wait for one member. A round has a few for each attempt; more means that it takes
nothing in, and it is treated as unreachable."""


class Outbox:
    """Messages of one round to its members, by their place in the roster."""

    def __init__(
        self,
        rpc: Rpc,
        nursery: trio.Nursery,
        group: Group,
        failed: Callable[[int, PotluckError], None],
        is_alive: Callable[[int], bool],
    ) -> None:
        """`failed` is told of every member that could not be told something. `is_alive` says
        whether bytes come from a member: while they do, its answer is waited for."""
        self._rpc = rpc
        self._nursery = nursery
        self._group = group
        self._peers = group.members
        self._shown: set[int] = set()
        self._failed = failed
        self._is_alive = is_alive
        self._waiting: dict[int, deque[AgreementMessage]] = {}

    def post(self, member: int, message: AgreementMessage) -> None:
        """Send it as soon as what was posted to this member before has arrived."""
        waiting = self._waiting.get(member)
        if waiting is None:
            self._waiting[member] = deque([message])
            self._nursery.start_soon(self._send_all, member)
        elif message not in waiting and len(waiting) < MOST_WAITING:
            waiting.append(message)
        # else: it is said by one that waits, or the member takes nothing in and will be given up

    async def _send_all(self, member: int) -> None:
        waiting = self._waiting[member]
        try:
            while waiting:
                await self._send(member, waiting[0])
                waiting.popleft()
        except PotluckError as error:
            log.debug("%s was not told of a round: %s", self._peers[member], error)
            del self._waiting[member]  # what waited behind it has no sense without it
            self._failed(member, error)
        finally:
            if self._waiting.get(member) is waiting:
                del self._waiting[member]

    async def _send(self, member: int, message: AgreementMessage) -> None:
        try:
            await self._tell(member, message)
        except UnknownRound:
            if member in self._shown:
                raise
            self._shown.add(member)
            show = Show(self._group.roster)
            await self._rpc.call(self._peers[member], SHOW, show, timeout=CALL_SECONDS)
            await self._tell(member, message)

    async def _tell(self, member: int, message: AgreementMessage) -> None:
        """Until it is acknowledged. Again, if that takes long: it bears to be received twice."""
        agree = Agree(self._group.round_id, message)
        while True:
            try:
                await self._rpc.call(self._peers[member], AGREE, agree, timeout=CALL_SECONDS)
            except DeadlineExceeded:
                if not self._is_alive(member):
                    raise
            else:
                return
