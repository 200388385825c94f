"""Looking at an auth server's state without the right to change it, also beside a running server.

Easy to get wrong: two reads are two moments. What belongs together is read inside one `reading`,
which sees one state of the database, whatever is written meanwhile.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from auth.keys import VerifyingKey
from auth.server import database, revoked, signing_keys
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import damaged
from auth.server.store_paths import StorePaths, wall_ms


class Published(msgspec.Struct, frozen=True):
    """What the database says at the last commit, for those who only look."""

    keys: SigningKeys
    revocations: revoked.SignedList


class Reader:
    """The state of a folder for those who only read, beside a running server or without one."""

    def __init__(self, folder: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        self.paths = StorePaths(folder)
        self.clock_ms = clock_ms

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the database, whatever is written meanwhile."""
        with database.reading(self.paths.database) as connection:
            yield connection

    def run(self, connection: sqlite3.Connection) -> str:
        return store_row(connection, self.paths.database)[0]

    def published(self) -> Published:
        with self.reading() as connection:
            return published_in(connection, self.run(connection), self.paths)

    def verifying_keys(self, connection: sqlite3.Connection) -> dict[bytes, VerifyingKey]:
        return signing_keys.load(connection, self.run(connection), self.paths.keys).verifying()


def store_row(connection: sqlite3.Connection, path: Path) -> tuple[str, int, int]:
    row = connection.execute("SELECT run, last_serial, grace_ms FROM store").fetchone()
    if row is None:
        raise damaged(path, "it does not say for which run it is")
    run, serial, grace_ms = row
    return str(run), int(serial), int(grace_ms)


def published_in(connection: sqlite3.Connection, run: str, paths: StorePaths) -> Published:
    issued = revoked.newest_list(connection)
    if issued is None:
        raise damaged(paths.database, "it has no revocation list")
    return Published(signing_keys.load(connection, run, paths.keys), issued)
