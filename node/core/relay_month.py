"""What a relay carries in a calendar month, counted across restarts.

It is the quota's ledger (node/core/caps/ledger.py) with another file. A byte counts once, though a
server receives and sends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from node.core.caps.ledger import LOOKED_AFTER_SECONDS, Ledger, LedgerFile, month_of
from protocols.blocking import in_thread
from protocols.network import TrafficFacts

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

log = logging.getLogger("potluck.relay")


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
