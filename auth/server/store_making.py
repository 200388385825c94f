"""Making a new run's state: database, first key, head of the log; all of it, or nothing.

It is made in a folder of its own and moved into place, the database last. So where the database
is, everything is, also after `kill -9` in the middle.

Easy to get wrong: the first key's file must be on the disk, with its name, before the database is.
"""

from __future__ import annotations

import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

from auth.fields import LONGEST_RUN, RUN_PATTERN
from auth.keys import SEED_BYTES, SigningKey, fingerprint
from auth.server import audit, database, revoked, signing_keys
from auth.server.audit import Act, Entry
from auth.server.audit_head import sign_head, write_head, write_head_file
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import StoreFailed, told
from auth.server.store_lock import hold_store_lock
from auth.server.store_paths import StorePaths, wall_ms

DRAFT = ".making-"

DEFAULT_GRACE_MS = 3600 * 1000
"""How long peers take tokens that are over, where the settings say nothing (for forgetting)."""


class StoreMade(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    key_id: str
    fingerprint: str


def create_store(
    folder: Path,
    run: str,
    *,
    actor: str,
    reason: str = "",
    clock_ms: Callable[[], int] = wall_ms,
    seed: bytes | None = None,
) -> StoreMade:
    """Make a new run's database and first key: all of it, or nothing. AuthError if there is one."""
    _check_run(run)
    paths = StorePaths(folder)
    try:
        folder.mkdir(mode=database.FOLDER_MODE, parents=True, exist_ok=True)
        database.check_folder(folder)
        with hold_store_lock(paths.lock):
            if paths.database.exists():
                raise StoreFailed(
                    f"There is an auth server's state at {paths.database} already.",
                    why="Making a new one would throw away who may take part, and the keys.",
                    advice="Use it as it is, or choose another folder (POTLUCK_HOME or --home).",
                )
            for left in folder.glob(f"{DRAFT}*"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            draft = StorePaths(folder / f"{DRAFT}{secrets.token_hex(4)}")
            try:
                key = SigningKey(seed or secrets.token_bytes(SEED_BYTES))
                _make(draft, run, key, clock_ms(), actor, reason)
                # The database comes last: where it is, everything is.
                paths.keys.mkdir(mode=database.FOLDER_MODE, exist_ok=True)
                name = signing_keys.file_name(key.key_id)
                (draft.keys / name).rename(paths.keys / name)
                signing_keys.keep_names(paths.keys)
                draft.head.rename(paths.head)
                draft.database.rename(paths.database)
                signing_keys.keep_names(folder)
            finally:
                shutil.rmtree(draft.folder, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise told(error, paths.database) from error
    return StoreMade(run=run, key_id=key.key_id.hex(), fingerprint=fingerprint(key.public_key))


def _make(
    draft: StorePaths, run: str, key: SigningKey, now_ms: int, actor: str, reason: str
) -> None:
    draft.folder.mkdir(mode=database.FOLDER_MODE)
    signing_keys.write_key_file(draft.keys, key)
    connection = database.create_database(draft.database)
    try:
        chain = audit.Chain(0, audit.first_hash(run))
        row = signing_keys.first_row(run, key, now_ms)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO store VALUES (1, ?, ?, 0, ?, 0, NULL)", (run, now_ms, DEFAULT_GRACE_MS)
        )
        signing_keys.keep_row(connection, row)
        chain.append(
            connection, now_ms, Entry(act=Act.MADE, actor=actor, reason=reason, detail=run)
        )
        chain.append(
            connection,
            now_ms,
            Entry(
                act=Act.KEY_MADE, actor=actor, reason="The run's first key.",
                detail=fingerprint(key.public_key),
            ),
        )  # fmt: skip
        keys = SigningKeys(run, (row,), {key.key_id: key})
        revoked.issue_list(connection, keys, now_ms)
        head = sign_head(run, chain.number, chain.hash, key)
        write_head(connection, head)
        connection.execute("COMMIT")
        # As one file it can be put into its place by one rename.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    write_head_file(draft.head, head)


def _check_run(run: str) -> None:
    if len(run) > LONGEST_RUN or not re.match(RUN_PATTERN, run):
        raise StoreFailed(
            f"{run[:LONGEST_RUN]!r} cannot be the name of a run.",
            why="Names have letters, digits and . _ - and begin with a letter or a digit; at most "
            f"{LONGEST_RUN} characters.",
            advice="Choose another one: it stands in every token and invite.",
        )
