"""Every moderator's act as it is asked for: a name and arguments in, plain data out.

`potluck auth …` runs `perform` itself when the server is stopped; the running server runs it for
whoever asks on its local socket. One function for both: the same act gives the same answer.

The arguments come from a command that may be newer or older than the server, so their types are
checked here; what they mean (a name, a peer, a key that is not there) is checked by `Moderation`,
which does each act in one transaction with its record in the audit log, or not at all.

Easy to get wrong: the answer is shown to whoever asked, and perhaps kept in a shell's history. A
code in clear is in the answer of `codes-new` and nowhere else; a private key is in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from node.version import VERSION
from node.wrong_use import WrongUse, nearest
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from auth.server.moderation import Moderation

# One answer must fit through the control socket: 4 MiB, at up to 1.5 KiB for each record.
LARGEST_LIMIT = 2_500


class Allow(msgspec.Struct, forbid_unknown_fields=True):
    target: str
    role: list[str] | None = None
    rebind: bool = False
    reason: str = ""
    providers: list[str] = []


class Deny(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    reason: str = ""
    providers: list[str] = []


class Revoke(msgspec.Struct, forbid_unknown_fields=True):
    target: str
    reason: str = ""
    providers: list[str] = []


class Courier(msgspec.Struct, forbid_unknown_fields=True):
    """A token for a throw-away key, that brings the list of revocations into the swarm."""

    peer: str  # its public key, in hexadecimal


class List(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    role: str | None = None
    state: str | None = None
    tokens: bool = False
    revocations: bool = False
    limit: int = 50
    providers: list[str] = []


class CodesNew(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    uses: int = 1
    life: int = 7 * 86_400_000  # ms
    role: list[str] | None = None
    reason: str = ""


class CodesList(msgspec.Struct, forbid_unknown_fields=True):
    all: bool = False
    limit: int = 50


class CodesCancel(msgspec.Struct, forbid_unknown_fields=True):
    code: str
    reason: str = ""


class KeysList(msgspec.Struct, forbid_unknown_fields=True):
    pass


class KeysRotate(msgspec.Struct, forbid_unknown_fields=True):
    overlap: int | None = None  # ms; how long the old key still signs
    reason: str = ""


class KeysWithdraw(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    reason: str = ""


class Audit(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    of_act: str | None = None
    since_ms: int | None = None
    limit: int = 50


class AuditVerify(msgspec.Struct, forbid_unknown_fields=True):
    head: str | None = None


class Backup(msgspec.Struct, forbid_unknown_fields=True):
    folder: str  # absolute: the server's working directory is another one
    reason: str = ""


ARGUMENTS: dict[str, type[msgspec.Struct]] = {
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
    "audit": Audit,
    "audit-verify": AuditVerify,
    "backup": Backup,
}


def perform(
    moderation: Moderation, act: str, arguments: Mapping[str, Any], actor: str
) -> dict[str, Any]:
    """Do one act in the name of `actor`. Blocks for a commit, or for as long as a backup takes.

    PotluckError or AuthError if it is not done; then nothing of it is.
    """
    kind = ARGUMENTS.get(act)
    if kind is None:
        raise _not_understood(act, "There is no such act in it.")
    try:
        asked = msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        raise _not_understood(act, str(error)) from None
    # As it would come out of the socket: lists and not tuples, bytes in base64.
    said = msgspec.json.encode(_answer(moderation, asked, actor))
    answer: dict[str, Any] = msgspec.json.decode(said)
    return answer


def _answer(moderation: Moderation, asked: msgspec.Struct, actor: str) -> object:
    match asked:
        case Allow(target, role, rebind, reason, providers):
            return moderation.allow(
                target,
                roles=role,
                rebind=rebind,
                actor=actor,
                reason=reason,
                note=reason,
                providers=providers,
            )
        case Deny(name, reason, providers):
            return moderation.deny(name, actor=actor, reason=reason, providers=providers)
        case Revoke(target, reason):
            return moderation.revoke(target, actor=actor, reason=reason)
        case Courier(peer):
            token = moderation.courier_token(
                _bytes_of(peer), actor=actor, reason="to bring the revocations into the swarm"
            )
            return {"token": token}
        case List():
            return _listed(moderation, asked)
        case CodesNew() | CodesList() | CodesCancel():
            return _about_codes(moderation, asked, actor)
        case KeysList() | KeysRotate() | KeysWithdraw():
            return _about_keys(moderation, asked, actor)
        case Audit(name, of_act, since_ms, limit):
            act = None if of_act is None else _act_named(of_act)
            return moderation.audit(since_ms=since_ms, name=name, act=act, limit=_bounded(limit))
        case AuditVerify(head):
            return moderation.verify(head=head)
        case Backup(folder, reason):
            return moderation.backup(Path(folder), actor=actor, reason=reason)
        case _:
            raise AssertionError(asked)


def _listed(moderation: Moderation, asked: List) -> object:
    limit = _bounded(asked.limit)
    if asked.revocations:
        return moderation.revocations(limit=limit)
    if asked.tokens:
        return moderation.tokens(limit=limit)
    if asked.name is not None:
        return {
            "account": moderation.account(asked.name),
            **msgspec.structs.asdict(moderation.tokens(asked.name, limit=limit)),
        }
    return moderation.accounts(state=asked.state, role=asked.role, limit=limit)


def _about_codes(
    moderation: Moderation, asked: CodesNew | CodesList | CodesCancel, actor: str
) -> object:
    match asked:
        case CodesNew(name, uses, life, role, reason):
            return moderation.code_new(
                uses=uses,
                life_ms=life,
                name=name or "",
                roles=role or ("volunteer",),
                note=reason,
                actor=actor,
                reason=reason,
            )
        case CodesList(everything, limit):
            return moderation.codes(open_only=not everything, limit=_bounded(limit))
        case CodesCancel(code, reason):
            return moderation.code_cancel(code, actor=actor, reason=reason)


def _about_keys(
    moderation: Moderation, asked: KeysList | KeysRotate | KeysWithdraw, actor: str
) -> object:
    match asked:
        case KeysList():
            return moderation.keys()
        case KeysRotate(None, reason):
            return moderation.key_rotate(actor=actor, reason=reason)
        case KeysRotate(int() as overlap, reason):
            return moderation.key_rotate(overlap_ms=overlap, actor=actor, reason=reason)
        case KeysWithdraw(key, reason):
            return moderation.key_withdraw(key, actor=actor, reason=reason)
        case _:
            raise AssertionError(asked)


def _act_named(word: str) -> str:
    """The act as the log spells it: `code-made` is "code made"."""
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
        why=f"It is version {VERSION}; the command that asked may be newer or older. {why}",
        advice="Restart the server, so that both are of one version.",
    )
