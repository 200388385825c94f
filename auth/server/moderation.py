"""Everything that moderators do and read, over one open store.

`potluck auth …` uses this directly when no server runs, and the running server for requests on its
local socket. All of it is blocking. The acts themselves are in `acts.py`.

    allow NAME     on the list; undoes deny and revoke (tokens from before stay dead)
    deny NAME      off the list, and all its live tokens revoked
    revoke NAME    all its live tokens revoked, and no login or renewal until it is allowed again
    revoke PEER    one key, for good: nothing is issued to it until `allow PEER`
    revoke SERIAL  one token; the node gets the next one by renewing. `allow SERIAL` takes it back

Reading must not wait for writing. Everything that only reads has a connection of its own, and sees
one state of the database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from auth.errors import AuthError, NotAKey
from auth.keys import public_key_of
from auth.server import accounts, audit, backups, database, listings
from auth.server.accounts import BareName, parse_name
from auth.server.acts import CodeActs, KeyActs, NameActs, NotDone, act, log_act
from auth.server.audit import Act, AuditVerdict
from auth.server.backups import BackupMade
from auth.server.store import Reader, Store

MOST_LISTED = 5_000  # of anything at once: a few MB of answer

__all__ = ["Moderation", "NotDone"]


class Moderation:
    """The acts, over an open store. `providers` are the ids that a bare name may belong to."""

    def __init__(self, store: Store, *, providers: Sequence[str] = ()) -> None:
        self._store = store
        self._reader = Reader(store.paths.folder, clock_ms=store.clock_ms)
        names, codes, keys = NameActs(store, providers), CodeActs(store), KeyActs(store)
        self.allow, self.deny, self.revoke = names.allow, names.deny, names.revoke
        self.code_new, self.code_cancel = codes.new, codes.cancel
        self.key_rotate, self.key_withdraw = keys.rotate, keys.withdraw
        self.courier_token = keys.courier_token

    def accounts(
        self,
        *,
        state: str | None = None,
        role: str | None = None,
        text: str = "",
        live: bool = False,
        limit: int = 100,
        offset: int = 0,
    ) -> listings.AccountList:
        """Names, in order. `live`: only those with a live token."""
        with self._reader.reading() as connection:
            return listings.account_list(
                connection, self._now(), state=state, role=role, text=text, live=live,
                limit=_bounded(limit), offset=offset,
            )  # fmt: skip

    def account(self, name: str) -> listings.AccountView:
        with self._reader.reading() as connection:
            found = accounts.meant(connection, parse_name(name))
            return listings.account_view(connection, found, self._now())

    def peers(self, name: str, *, limit: int = 100) -> listings.PeerList:
        """The nodes of one name, also those whose tokens have expired."""
        with self._reader.reading() as connection:
            found = accounts.meant(connection, parse_name(name))
            return listings.peer_list(connection, found, _bounded(limit))

    def tokens(
        self, name: str | None = None, *, limit: int = 100, offset: int = 0
    ) -> listings.TokenList:
        """Live tokens, of one name or of all."""
        with self._reader.reading() as connection:
            account = None if name is None else accounts.meant(connection, parse_name(name))
            return listings.token_list(connection, self._now(), account, _bounded(limit), offset)

    def revocations(self, *, limit: int = 1000) -> listings.RevocationEntries:
        with self._reader.reading() as connection:
            return listings.revocation_entries(connection, self._now(), _bounded(limit))

    def revocation_list(self) -> tuple[int, bytes]:
        """The number and the signed bytes of the newest list."""
        newest = self._store.revocation_list()
        return newest.number, newest.signed

    def codes(
        self, *, open_only: bool = False, limit: int = 100, offset: int = 0
    ) -> listings.CodeList:
        with self._reader.reading() as connection:
            return listings.code_list(
                connection, self._now(), open_only=open_only, limit=_bounded(limit), offset=offset
            )

    def keys(self) -> listings.KeyList:
        return listings.key_list(self._store.keys, self._now())

    def audit(
        self,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        name: str | None = None,
        act: str | None = None,
        peer: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> listings.AuditRows:
        """A part of the log, newest first. A `name` without a provider matches at all of them, even
        if nobody of that name is on the list: refused people are in the log."""
        try:
            key = None if peer is None else public_key_of(peer)
        except NotAKey as error:
            raise NotDone(error.what, why=error.why, advice=error.advice) from None
        full = login = None
        if name is not None:
            parsed = parse_name(name)
            if isinstance(parsed, BareName):
                login = parsed.login
            else:
                full = str(parsed)
        with self._reader.reading() as connection:
            return listings.audit_rows(
                connection, since_ms=since_ms, until_ms=until_ms, name=full, login=login, act=act,
                peer=key, before=before, limit=_bounded(limit),
            )  # fmt: skip

    def verify(self, *, head: str | None = None) -> AuditVerdict:
        """Whether the log is unchanged. `head` is a NUMBER:HASH from earlier."""
        written_down = None
        if head is not None:
            written_down = audit.parse_head(head)
            if written_down is None:
                raise NotDone(
                    f"{head[:100]!r} is not the head of an audit log.",
                    why="It is written NUMBER:HASH, the hash with 64 hexadecimal digits.",
                    advice="Copy it as `potluck auth audit --verify` or a backup showed it.",
                )
        with self._reader.reading() as connection:
            return audit.verify_log(
                connection, self._store.run, self._store.keys.verifying(),
                self._store.paths.head, written_down,
            )  # fmt: skip

    def backup(self, destination: Path, *, actor: str, reason: str = "") -> BackupMade:
        """Copy everything, keys included, to a folder that does not exist yet.

        The row in the log comes first: a copy can sign tokens, so there must be none that the log
        does not record.
        """
        destination = destination.absolute()
        backups.check_is_free(destination)
        self._log(Act.BACKED_UP, actor, reason, f"to {destination}")
        paths = self._store.paths
        try:
            with contextlib.ExitStack() as stack:
                state, keys = act(
                    self._store,
                    lambda _: (
                        stack.enter_context(database.held_state(paths.database)),
                        backups.keys_in(paths.keys),
                    ),
                )
                return backups.make_backup(paths, state, keys, destination, self._now())
        except AuthError as error:
            self._log(Act.BACKUP_FAILED, actor, error.what, f"to {destination}")
            raise

    def _log(self, kind: Act, actor: str, reason: str, detail: str) -> None:
        act(
            self._store,
            lambda transaction: log_act(transaction, kind, actor, reason, detail=detail),
        )

    def _now(self) -> int:
        return self._store.clock_ms()


def _bounded(limit: int) -> int:
    return max(0, min(limit, MOST_LISTED))
