"""The acts of moderators on enrolment codes: making and cancelling them.

Easy to get wrong: a code in clear exists in one place, the answer to whoever made it. The log and
the database know its number.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from auth.roles import Role
from auth.server import accounts, codes, listings
from auth.server.account_names import AccountName, BareName, account_name, parse_name
from auth.server.accounts import State
from auth.server.acting import NotDone, act, counted, log_act, read_roles
from auth.server.audit import Act
from auth.server.store import Store
from auth.server.transaction import Transaction

MOST_OPEN_CODES = 10_000  # so that a script gone wild ends
DEFAULT_CODE_LIFE_MS = 7 * 24 * 3600 * 1000


class NewCode(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """In clear: shown once, kept nowhere."""
    view: listings.CodeView


class CodeActs:
    def __init__(self, store: Store) -> None:
        self._store = store

    def new(
        self,
        *,
        uses: int | None = 1,
        life_ms: int | None = DEFAULT_CODE_LIFE_MS,
        name: str = "",
        roles: Iterable[str] = (Role.VOLUNTEER.value,),
        note: str = "",
        actor: str,
        reason: str = "",
    ) -> NewCode:
        """A new code. None for `uses` or `life_ms` is without end. With a name it is for one
        person; without, each use makes a new account."""
        if uses is not None and not 0 < uses <= codes.MOST_USES:
            raise NotDone(
                f"A code cannot have {uses} uses.",
                why=f"One to {codes.MOST_USES:,} can be counted, or any number.",
                advice="Choose another number.",
            )
        if life_ms is not None and life_ms <= 0:
            raise NotDone(
                "A code cannot have expired before it is made.",
                why="Its life is not longer than nothing.",
                advice="Choose a longer one.",
            )
        wanted = read_roles(roles)
        login = _code_login(name) if name else None
        code = codes.spell_code(secrets.token_bytes(codes.CODE_RANDOM_BYTES))
        code_hash = codes.hash_of(code)
        assert code_hash is not None

        def operation(transaction: Transaction) -> NewCode:
            connection, now_ms = transaction.connection, transaction.now_ms
            if login is not None:
                _check_name(transaction, login)
            _, open_now = codes.listed(connection, now_ms, open_only=True, limit=0, offset=0)
            if open_now >= MOST_OPEN_CODES:
                raise NotDone(
                    f"There are {open_now:,} open codes already.",
                    why="A script may have gone wild.",
                    advice="Cancel some, or make one code with many uses.",
                )
            made = codes.add(
                connection, code_hash, login=login, roles=wanted, uses=uses, by=actor, note=note,
                expires_ms=None if life_ms is None else now_ms + life_ms, now_ms=now_ms,
            )  # fmt: skip
            view = listings.code_view(made, now_ms)
            uses_text = "any number of uses" if uses is None else counted(uses, "use")
            log_act(
                transaction, Act.CODE_MADE, actor, reason or note, name=view.name,
                detail=f"{made.code_id}, {uses_text}",
            )  # fmt: skip
            return NewCode(code=code, view=view)

        return act(self._store, operation)

    def cancel(self, code_id: str, *, actor: str, reason: str = "") -> listings.CodeView:
        """Nobody gets in by this code any more. Who has got in keeps what they have."""
        number = code_id.strip().lower().removeprefix("c")

        def operation(transaction: Transaction) -> listings.CodeView:
            found = (
                codes.by_number(transaction.connection, int(number))
                if number.isascii() and number.isdigit() and len(number) <= 18
                else None
            )
            if found is None or found.cancelled_ms is not None:
                said = "was cancelled already" if found else "does not exist"
                raise NotDone(
                    f"The code {code_id[:40]!r} {said}.",
                    why="Codes are named by their number, as in c7, and not by their letters.",
                    advice="`potluck auth codes list` shows them.",
                )
            codes.cancel(transaction.connection, found.code, transaction.now_ms)
            log_act(transaction, Act.CODE_CANCELLED, actor, reason, detail=found.code_id)
            changed = codes.by_number(transaction.connection, found.code)
            assert changed is not None
            return listings.code_view(changed, transaction.now_ms)

        return act(self._store, operation)


def _check_name(transaction: Transaction, login: str) -> None:
    found = accounts.by_name(transaction.connection, AccountName(codes.PROVIDER, login))
    if found is not None and found.state is not State.ALLOWED:
        raise NotDone(
            f"{found.name} may not take part, so a code would not let them in.",
            why=f"The name is {found.state.value}.",
            advice=f"`potluck auth allow {found.name}` first.",
        )


def _code_login(name: str) -> str:
    parsed = parse_name(name)
    if isinstance(parsed, BareName):
        parsed = account_name(codes.PROVIDER, parsed.login)
    if codes.is_made_up(parsed.login):
        raise NotDone(
            f"A code cannot be for {parsed.login}.",
            why="Codes without a name call people so, and the next of them would be this one.",
            advice="Choose another name.",
        )
    if parsed.provider != codes.PROVIDER:
        raise NotDone(
            f"A code cannot be for {parsed}.",
            why=f"Who gets in by a code has a name of the provider `{codes.PROVIDER}`.",
            advice=f"Use {codes.PROVIDER}:{parsed.login}, or allow the name and let them log in.",
        )
    return parsed.login
