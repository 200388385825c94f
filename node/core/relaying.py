"""The relay of a node, by its owner's settings, with the month's budget.

    relay.serve = true
    relay.limits = "circuits=64, rate=20MB/s, month=500GB/month"

What is not written in `relay.limits` has the default of nat/relay_limits.py.

`RelayMonth` counts what is relayed in a calendar month, also across restarts. It is the quota's
ledger (node/core/caps/ledger.py) with another file. A byte counts once, though a server receives
and sends it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from nat.relay_limits import RelayLimits
from node.core.caps.ledger import LOOKED_AFTER_SECONDS, Ledger, LedgerFile, month_of
from node.core.caps.units import NONE, Measure, amount
from node.core.wrong_use import WrongUse
from protocols.blocking import in_thread
from protocols.network import TrafficFacts

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

MEMBERS: Final = "members"
EVERYBODY: Final = "everybody"

log = logging.getLogger("potluck.relay")

EXAMPLE: Final = "circuits=64, rate=20MB/s, month=500GB/month"

MOST_PLACES: Final = 4096  # each may need a file descriptor and a task


def _places(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 0 < int(text) <= MOST_PLACES:
        raise WrongUse(f"{text!r} is no number from 1 to {MOST_PLACES}.")
    return int(text)


def _seconds(text: str) -> int:
    if text == NONE:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise WrongUse(f"{text!r} is no number of seconds above zero, and not none.")
    return int(text)


def _bytes(measure: Measure, text: str) -> int:
    return round(amount(text, measure) or 0)


_READ: Final[Mapping[str, tuple[str, Callable[[str], int]]]] = {
    "reservations": ("reservations", _places),
    "reservations-per-site": ("reservations_per_site", _places),
    "circuits": ("circuits", _places),
    "circuits-per-peer": ("circuits_per_peer", _places),
    "circuit-seconds": ("circuit_seconds", _seconds),
    "circuit-bytes": ("circuit_bytes", partial(_bytes, Measure.SIZE)),
    "circuit-rate": ("circuit_bytes_per_second", partial(_bytes, Measure.RATE)),
    "rate": ("bytes_per_second", partial(_bytes, Measure.RATE)),
    "month": ("month_bytes", partial(_bytes, Measure.QUOTA)),
}


def relay_limits(text: str) -> RelayLimits:
    """The limits as written; WrongUse names what is wrong and what is possible."""
    limits = RelayLimits()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = (piece.strip() for piece in part.partition("="))
        if not found or name not in _READ:
            raise WrongUse(
                f"{part!r} is no limit of a relay.",
                why=f"The limits are {', '.join(_READ)}.",
                advice=f'Write for example "{EXAMPLE}".',
            )
        field, read = _READ[name]
        try:
            limits = replace(limits, **{field: read(value)})
        except WrongUse as error:
            raise WrongUse(f"{name}: {error.what}", why=error.why, advice=error.advice) from None
    return limits


def as_written(text: str) -> str:
    """The limits in one form, for the settings."""
    relay_limits(text)
    return ", ".join(part.strip() for part in text.split(",") if part.strip())


def as_admitted(text: str) -> str:
    """Whom a relay is for; WrongUse if it is neither."""
    if text not in (MEMBERS, EVERYBODY):
        raise WrongUse(
            f"A relay is for {MEMBERS} or for {EVERYBODY}.",
            advice=f"{MEMBERS}: of the run that this node is in. {EVERYBODY}: strangers, too.",
        )
    return text


class RelayMonth:
    """What is relayed in this calendar month.

    A kill loses the count of the last seconds. Its end writes it whole. If the disk does not take
    it, the relay goes on, and the log says so once.
    """

    def __init__(self, file: Path, wall: Callable[[], datetime]) -> None:
        self._file = LedgerFile(file, "relay's month")
        self._wall = wall
        self._carried = 0  # by this process
        self._counted = 0  # of those, in the ledger
        self._said = ""
        accounts, trouble = self._file.load()
        self._say(trouble)
        self._ledger = Ledger(accounts, None)
        self._count(0.0)

    @property
    def month(self) -> str:
        return self._ledger.accounts.now.month

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes + self._carried - self._counted

    def spend(self, size: int) -> None:
        self._carried += size

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the calendar and write the file, until cancelled."""
        task_status.started()
        try:
            while True:
                await trio.sleep(LOOKED_AFTER_SECONDS)
                self._count(LOOKED_AFTER_SECONDS)
                if self._file.is_due(self._ledger.accounts, trio.current_time()):
                    await self._save()
        finally:
            self._count(0.0)
            with trio.CancelScope(shield=True):
                await self._save()

    def _count(self, seconds: float) -> None:
        self._ledger.count(TrafficFacts(sent_bytes=self._carried), month_of(self._wall()), seconds)
        self._counted = self._carried

    async def _save(self) -> None:
        accounts, now = self._ledger.accounts, trio.current_time()
        self._say(await in_thread(self._file.save, accounts, now))

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._said:
            log.warning("%s", trouble)
        self._said = trouble
