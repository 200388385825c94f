"""Brings each message to its round: the `agree` method of `/potluck/allreduce/1.0.0`.

Peers of one group do not all begin at the same moment: the leader's first message may arrive while
the roster is still on its way to us. Such a call is held, with its answer, until the round begins
here or `HOLD_SECONDS` are over (longer while the roster is known to be on its way). Its sender
waits meanwhile, and sends us nothing more. A round that is over is remembered for a while and still
answers, so that a peer that was stopped and continues learns what was decided.

Promises: a message reaches a round only from a member of its roster. A message for an unknown round
is refused by name (`UnknownRound`), and so is one from another peer (`NotInThisRound`). A peer that
sends what no honest member would send is named in the log and avoided. Held calls and remembered
rounds are bounded.

Easy to get wrong: a held call holds up none of *our* messages. The bound is on others' calls, in
total and for each peer, so a stranger that names rounds that do not exist only holds up itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import trio
from msgspec import Meta

from auth.bounded_map import BoundedMap
from protocols.errors import Busy, PotluckError, RemoteMisbehaviour
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.part_messages import ALLREDUCE_PROTOCOL, ROUND_ID_BYTES
from protocols.moshpit.roster import CODES, Roster
from protocols.rpc import Empty, Message, Method, Rpc

HOLD_SECONDS = 0.5  # while the roster is under way; later, its sender shows it
HOLD_FOR_A_LIST_SECONDS = 3.0
"""While the roster comes from our leader, or other members hand it on to us (handing_on.py): a
message of the round is shorter and may overtake it. Short of the time that a call may take
(`round.CALL_SECONDS`), so that its sender can still show us the roster."""
MOST_HELD = 2 * LARGEST_GROUP  # calls that wait for a round to begin here: one of each member
MOST_HELD_OF_A_PEER = 4  # an honest peer has one: it waits for the answer before it sends more
ROUNDS_REMEMBERED = 16  # a peer that was away for longer has to fetch the state anyway

Receiver = Callable[[PeerId, AgreementMessage], None]
"""Takes a message of a round; raises NotInThisRound."""


class Switchboard:
    """The rounds of one averager: running ones, ended ones, and awaited ones."""

    def __init__(
        self, rpc: Rpc, awaits_list_of: Callable[[PeerId], bool] = lambda _peer: False
    ) -> None:
        """`awaits_list_of`: whether a call of this peer may be for the round of a list that is on
        its way here."""
        self._rpc = rpc
        self._awaits_list_of = awaits_list_of
        self._running: dict[bytes, Receiver] = {}
        self._over = BoundedMap[bytes, Receiver](ROUNDS_REMEMBERED)
        self._awaited: dict[bytes, trio.Event] = {}
        self._held: Counter[PeerId] = Counter()
        rpc.serve(AGREE, self._take)

    def knows(self, round_id: bytes) -> bool:
        """Whether this round runs here, or has run."""
        return round_id in self._running or round_id in self._over

    def close(self) -> None:
        """The averager ends: from now on no round is known here."""
        self._running.clear()
        self._over.clear()

    @contextmanager
    def running(self, round_id: bytes, receiver: Receiver) -> Iterator[None]:
        """Bring this round's messages to `receiver` until the block ends and, if it ends without an
        error, for as long as the round is remembered."""
        self._running[round_id] = receiver
        began = self._awaited.pop(round_id, None)
        if began is not None:
            began.set()
        try:
            yield
            self._over[round_id] = receiver
        finally:
            self._running.pop(round_id, None)

    async def _take(self, caller: Caller, request: Agree) -> Empty:
        receiver = await self._receiver_of(caller.peer, request.round_id)
        try:
            receiver(caller.peer, request.message)
        except RemoteMisbehaviour as error:
            self._rpc.blame(caller.peer, ALLREDUCE_PROTOCOL, error)
            raise
        return Empty()

    async def _receiver_of(self, peer: PeerId, round_id: bytes) -> Receiver:
        receiver = self._running.get(round_id) or self._over.get(round_id)
        if receiver is not None:
            return receiver
        await self._wait_for(peer, round_id)
        receiver = self._running.get(round_id) or self._over.get(round_id)
        if receiver is None:
            raise UnknownRound(
                f"Round {round_id.hex()[:16]} is not known here.",
                why="This peer is not in it, has restarted since, or it was long ago.",
                advice="Find a group for the next round.",
            )
        return receiver

    async def _wait_for(self, peer: PeerId, round_id: bytes) -> None:
        """Wait until the round begins here, but not for long."""
        if self._held.total() >= MOST_HELD or self._held[peer] >= MOST_HELD_OF_A_PEER:
            raise Busy("Too many messages wait here for rounds that have not begun.")
        began = self._awaited.setdefault(round_id, trio.Event())
        self._held[peer] += 1
        try:
            with trio.move_on_after(HOLD_SECONDS):
                await began.wait()
            if not began.is_set() and self._awaits_list_of(peer):
                with trio.move_on_after(HOLD_FOR_A_LIST_SECONDS - HOLD_SECONDS):
                    await began.wait()
        finally:
            self._held[peer] -= 1
            if self._held[peer] == 0:
                del self._held[peer]
            if not began.is_set() and began.statistics().tasks_waiting == 0:
                self._awaited.pop(round_id, None)


# The messages between members of a round besides the data: the methods `agree` and `show`.
#
# Every message of the agreement is the request of a unary call, with its round; the empty answer
# says that it arrived. agreement_messages.py has the messages, agreement.py their meaning. `show`
# brings the signed list of a round to a member that waits for it and has not got it from its
# leader: the list needs no other proof than its signatures.


AGREE_LIMIT_BYTES = 1 << 20  # the statements of 1,024 reducers have less than 200 KiB


class UnknownRound(PotluckError):
    """The message is for a round that this peer is not in, or has long forgotten."""


class NotInThisRound(PotluckError):
    """The message is from a peer that is not in the round's signed roster."""


class Agree(Message, frozen=True):
    """One message of the agreement of one round."""

    round_id: Annotated[bytes, Meta(min_length=ROUND_ID_BYTES, max_length=ROUND_ID_BYTES)]
    message: AgreementMessage


class Show(Message, frozen=True):
    """The list of a round that the receiver is in, but has not got or does not know."""

    roster: Roster


AGREE: Final = Method(
    ALLREDUCE_PROTOCOL,
    "agree",
    Agree,
    Empty,
    request_limit_bytes=AGREE_LIMIT_BYTES,
    errors={"unknown-round": UnknownRound, "not-in-this-round": NotInThisRound},
    training=True,
)

SHOW: Final = Method(
    ALLREDUCE_PROTOCOL,
    "show",
    Show,
    Empty,
    request_limit_bytes=AGREE_LIMIT_BYTES,
    errors={"unknown-round": UnknownRound, **CODES},
    training=True,
)
