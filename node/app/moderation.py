"""The table of moderators' acts, `ACTS`: a name and arguments in, plain data out.

A new act is a class here: its fields are its arguments on the wire, and `do` performs it.
`potluck auth` sends the typed flags that have the name of a field.

`potluck auth` runs `perform` itself when the server is stopped. The running server runs it for each
command that asks on its local socket. So the same act gives the same answer both ways.

The arguments come from a command that may be newer or older than the server, so their types are
checked here. Their meaning (is there such a name, peer or key?) is checked by `Moderation`, which
does each act in one transaction with its record in the audit log, or not at all.

The answer is shown on a terminal, and perhaps kept in a shell's history. A code in clear is only in
the answer of `codes-new`; a private key is in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from node.core.wrong_use import WrongUse, nearest
from node.net import VERSION
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from auth.server.moderation import Moderation

# One answer must fit through the control socket: 4 MiB, at up to 1.5 KiB for each record.
LARGEST_LIMIT = 2_500


# A server that is stopped never answers.
ACT_SECONDS = 30.0  # one transaction; the disk may be busy
LONG_ACT_SECONDS = 600.0  # all of a large database, or of a long audit log, on a slow disk


class ModeratorsAct(msgspec.Struct, forbid_unknown_fields=True):
    """A moderator's request. `longest_seconds`: how long a command waits for the answer."""

    longest_seconds: ClassVar[float] = ACT_SECONDS

    def do(self, moderation: Moderation, actor: str, /) -> object:
        """Perform it in the name of `actor`; returns the answer, which msgspec can encode."""
        raise NotImplementedError


class Allow(ModeratorsAct):
    target: str
    role: list[str] | None = None
    rebind: bool = False
    reason: str = ""
    providers: list[str] = []

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.allow(
            self.target,
            roles=self.role,
            rebind=self.rebind,
            actor=actor,
            reason=self.reason,
            note=self.reason,
            providers=self.providers,
        )


class Deny(ModeratorsAct):
    name: str
    reason: str = ""
    providers: list[str] = []

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.deny(self.name, actor=actor, reason=self.reason, providers=self.providers)


class Revoke(ModeratorsAct):
    target: str
    reason: str = ""
    providers: list[str] = []

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.revoke(self.target, actor=actor, reason=self.reason)


class Courier(ModeratorsAct):
    """A token for a throw-away key that brings the list of revocations into the swarm."""

    peer: str  # its public key, in hexadecimal

    def do(self, moderation: Moderation, actor: str) -> object:
        reason = "to bring the revocations into the swarm"
        return {"token": moderation.courier_token(_bytes_of(self.peer), actor=actor, reason=reason)}


class List(ModeratorsAct):
    name: str | None = None
    role: str | None = None
    state: str | None = None
    tokens: bool = False
    revocations: bool = False
    limit: int = 50
    providers: list[str] = []

    def do(self, moderation: Moderation, _actor: str) -> object:
        limit = _bounded(self.limit)
        if self.revocations:
            return moderation.revocations(limit=limit)
        if self.tokens:
            return moderation.tokens(limit=limit)
        if self.name is not None:
            return {
                "account": moderation.account(self.name),
                **msgspec.structs.asdict(moderation.tokens(self.name, limit=limit)),
            }
        return moderation.accounts(state=self.state, role=self.role, limit=limit)


class CodesNew(ModeratorsAct):
    name: str | None = None
    uses: int = 1
    life: int = 7 * 86_400_000  # ms
    role: list[str] | None = None
    reason: str = ""

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.code_new(
            uses=self.uses,
            life_ms=self.life,
            name=self.name or "",
            roles=self.role or ("volunteer",),
            note=self.reason,
            actor=actor,
            reason=self.reason,
        )


class CodesList(ModeratorsAct):
    all: bool = False
    limit: int = 50

    def do(self, moderation: Moderation, _actor: str) -> object:
        return moderation.codes(open_only=not self.all, limit=_bounded(self.limit))


class CodesCancel(ModeratorsAct):
    code: str
    reason: str = ""

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.code_cancel(self.code, actor=actor, reason=self.reason)


class KeysList(ModeratorsAct):
    def do(self, moderation: Moderation, _actor: str) -> object:
        return moderation.keys()


class KeysRotate(ModeratorsAct):
    overlap: int | None = None  # ms; how long the old key still signs
    key_file: str | None = None  # absolute: the server's working directory is another one
    reason: str = ""

    def do(self, moderation: Moderation, actor: str) -> object:
        if self.key_file is not None:
            file = Path(self.key_file)
            return moderation.key_rotate(key_file=file, actor=actor, reason=self.reason)
        if self.overlap is None:
            return moderation.key_rotate(actor=actor, reason=self.reason)
        return moderation.key_rotate(overlap_ms=self.overlap, actor=actor, reason=self.reason)


class KeysWithdraw(ModeratorsAct):
    key: str
    reason: str = ""

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.key_withdraw(self.key, actor=actor, reason=self.reason)


class ReadAudit(ModeratorsAct):
    name: str | None = None
    of_act: str | None = None
    since_ms: int | None = None
    limit: int = 50

    def do(self, moderation: Moderation, _actor: str) -> object:
        act = None if self.of_act is None else _act_named(self.of_act)
        return moderation.audit(
            since_ms=self.since_ms, name=self.name, act=act, limit=_bounded(self.limit)
        )


class AuditVerify(ModeratorsAct):
    longest_seconds = LONG_ACT_SECONDS

    head: str | None = None

    def do(self, moderation: Moderation, _actor: str) -> object:
        return moderation.verify(head=self.head)


class Backup(ModeratorsAct):
    longest_seconds = LONG_ACT_SECONDS

    folder: str  # absolute: the server's working directory is another one
    reason: str = ""

    def do(self, moderation: Moderation, actor: str) -> object:
        return moderation.backup(Path(self.folder), actor=actor, reason=self.reason)


ACTS: dict[str, type[ModeratorsAct]] = {
    "allow": Allow,
    "deny": Deny,
    "revoke": Revoke,
    "courier": Courier,
    "list": List,
    "codes-new": CodesNew,
    "codes-list": CodesList,
    "codes-cancel": CodesCancel,
    "keys-list": KeysList,
    "keys-rotate": KeysRotate,
    "keys-withdraw": KeysWithdraw,
    "audit": ReadAudit,
    "audit-verify": AuditVerify,
    "backup": Backup,
}
"""By the words of `potluck auth`, joined by a dash."""


def perform(
    moderation: Moderation, act: str, arguments: Mapping[str, Any], actor: str
) -> dict[str, Any]:
    """Perform one act in the name of `actor`. Blocks for a commit, or for as long as a backup
    takes.

    PotluckError or AuthError if it fails; then nothing of it is done.
    """
    kind = ACTS.get(act)
    if kind is None:
        raise _not_understood(act, "There is no such act in it.")
    try:
        asked = msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        raise _not_understood(act, str(error)) from None
    # As it comes out of the socket: lists and not tuples, bytes in base64.
    said = msgspec.json.encode(asked.do(moderation, actor))
    answer: dict[str, Any] = msgspec.json.decode(said)
    return answer


def _act_named(word: str) -> str:
    """The act's name in the log: `code-made` is "code made"."""
    from auth.server.audit import Act

    known = [act.value for act in Act]
    act = word.strip().lower().replace("-", " ")
    if act not in known:
        meant = nearest(act, known)
        hint = f"Did you mean {meant}? " if meant else ""
        raise WrongUse(
            f"No act in the audit log is called {word[:40]!r}.",
            advice=f"{hint}There are: {', '.join(known)}.",
        )
    return act


def _bytes_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise WrongUse("A key is given in hexadecimal.") from None


def _bounded(limit: int) -> int:
    return max(1, min(limit, LARGEST_LIMIT))


def _not_understood(act: str, why: str) -> PotluckError:
    return PotluckError(
        f"The auth server does not understand `potluck auth {act.replace('-', ' ')[:40]}`.",
        why=f"It is version {VERSION}; the command may be newer or older. {why}",
        advice="Restart the server, so that both have the same version.",
    )
