"""The quota's ledger on disk: what was used of this month survives a restart, and `kill -9`.

The file is replaced whole, so it is the old one or the new one. It is written when a megabyte more
was carried or a while has passed: a kill loses the last seconds of counting, and no more.

Easy to get wrong: a file that cannot be written must not end the training, and must not be silent
either. Whoever calls `save` says what it returns.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from node.caps.ledger import Accounts
from node.private_file import UnusableFile, read_private_file, replace_private_file

LARGEST_LEDGER_BYTES = 4096

SAVED_AFTER_BYTES = 1_000_000
LOOKED_AFTER_SECONDS = 5.0
SAVED_AFTER_SECONDS = 60.0


class LedgerFile:
    """One node's; whoever holds the node's lock is its only writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = Accounts()
        self._saved_at = float("-inf")
        self._looked_at = float("-inf")

    def load(self) -> tuple[Accounts, str]:
        """What is on disk, and what to tell the owner about it, if anything."""
        try:
            content = read_private_file(self.path, LARGEST_LEDGER_BYTES)
            if content is not None:
                self._saved = msgspec.json.decode(content, type=Accounts)
        except (UnusableFile, msgspec.MsgspecError, ValueError) as error:
            return Accounts(), (
                f"What was used of the quota could not be read, so it is counted from zero: {error}"
            )
        return self._saved, ""

    def is_due(self, accounts: Accounts, now: float) -> bool:
        """Whether enough has changed to be written."""
        if accounts == self._saved or now - self._looked_at < LOOKED_AFTER_SECONDS:
            return False
        self._looked_at = now
        changed = abs(accounts.now.total_bytes - self._saved.now.total_bytes)
        return (
            changed >= SAVED_AFTER_BYTES
            or accounts.now.month != self._saved.now.month
            or now - self._saved_at >= SAVED_AFTER_SECONDS
        )

    def save(self, accounts: Accounts, now: float) -> str:
        """Write it, which waits for the disk; what to tell the owner if that failed. There is no
        file before there is anything to count."""
        try:
            if accounts.now.total_bytes or accounts.before.total_bytes:
                replace_private_file(self.path, msgspec.json.encode(accounts))
        except OSError as error:
            return (
                f"What was used of the quota could not be written to {self.path}: {error.strerror}."
            )
        self._saved, self._saved_at = accounts, now
        return ""
