"""Naming in the log whose messages are refused: each peer and reason once, then rarely.

Easy to get wrong: whoever is refused can be refused a thousand times a second. What they cause to
be written must not depend on how often they try. And the name of a method is the asker's own text.
Whoever makes a new key for each try is bounded where the log is written, by the application.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import trio

from auth.refusals import AccessRefused, Reason
from protocols.guard import Exchange
from protocols.identity import PeerId

log = logging.getLogger("potluck.access")

AGAIN_SECONDS = 600.0  # the same peer for the same reason: often enough to see that it goes on
LARGEST_COUNT = 4096  # peers and reasons; well under 1 MiB


class Complaints:
    """What was said of whom, and when."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[PeerId, Reason, bool], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._said)

    def about_request(self, exchange: Exchange, refusal: AccessRefused) -> None:
        level = logging.INFO if self._is_news(exchange, refusal, answer=False) else logging.DEBUG
        log.log(
            level,
            "refused %r of %s to peer %s: %s",
            exchange.method,
            exchange.protocol,
            exchange.peer,
            refusal.what,
        )

    def about_answer(self, exchange: Exchange, refusal: AccessRefused) -> None:
        level = logging.WARNING if self._is_news(exchange, refusal, answer=True) else logging.DEBUG
        log.log(
            level,
            "peer %s answered %s of %s without proving that it may: %s",
            exchange.peer,
            exchange.method or "a stream",
            exchange.protocol,
            refusal.what,
        )

    def _is_news(self, exchange: Exchange, refusal: AccessRefused, *, answer: bool) -> bool:
        about = (exchange.peer, refusal.reason, answer)
        now = trio.current_time()
        said = self._said.get(about)
        if said is not None and now - said < AGAIN_SECONDS:
            return False
        self._said.pop(about, None)
        self._said[about] = now
        if len(self._said) > LARGEST_COUNT:
            self._said.popitem(last=False)
        return True
