"""What the acts of moderators have in common: how they are done, and how they say no.

Easy to get wrong: an act waits for the disk like everything else, but not behind a queue of
renewals: it is `urgent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from auth.errors import AuthError
from auth.roles import Role, in_order
from auth.server.audit import Act, Entry
from auth.server.store import Store
from auth.server.transaction import Transaction

T = TypeVar("T")


class NotDone(AuthError):
    """What was asked makes no sense now: it was done already, or there is no such thing."""


def act(store: Store, operation: Callable[[Transaction], T]) -> T:
    """Do it, and wait until it is on the disk."""
    return store.writer.run(operation, urgent=True)


def log_act(
    transaction: Transaction,
    kind: Act,
    actor: str,
    reason: str,
    *,
    name: str | None = None,
    peer: bytes | None = None,
    serial: int | None = None,
    detail: str = "",
) -> None:
    transaction.log(
        Entry(
            act=kind, actor=actor, reason=reason, name=name, peer=peer, serial=serial,
            detail=detail,
        )
    )  # fmt: skip


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def read_roles(words: Iterable[str]) -> tuple[Role, ...]:
    """Roles from what somebody typed; NotDone for a word that is none, or no word at all."""
    known = {role.value: role for role in Role}
    words = list(words)
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise NotDone(
            f"{', '.join(unknown)[:100]!r} is not a role." if unknown else "No role was given.",
            why=f"The roles are {', '.join(known)}.",
            advice="Choose one or several of them.",
        )
    return in_order(known[word] for word in words)
