"""The commands for the membership of a running node, through the control socket.

    access reload               take the pass that `potluck login` has just put on disk
    access revocations LIST KEYS
                                take a signed revocation list, and spread it through the directory

The second is for an outage of the auth server: its moderator signs a list (`potluck auth revoke`),
and any node of the run can spread it. The node trusts the signature, not the person who brings the
list. The auth keys come with it, because it may be signed by one that the node does not know yet.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from auth.documents import WHAT_BAD_BYTES_RAISE
from auth.errors import AuthError
from auth.keyring import KeyRecord, KeyRecords
from node.core.access.membership import Membership
from node.core.control import Answering, ControlServer
from node.core.wrong_use import WrongUse
from protocols.dht import Dht
from protocols.errors import PotluckError

RELOAD = "access reload"
REVOCATIONS = "access revocations"


class NotInARun(PotluckError):
    """The running node has no membership that could be changed."""


def add_access_questions(control: ControlServer, membership: Membership | None, dht: Dht) -> None:
    """Answer both commands from now on."""

    async def reload(_arguments: Mapping[str, Any], answer: Answering) -> None:
        changed = await _member(membership).reload()
        await answer({"changed": changed, "run": _member(membership).run_name})

    async def revocations(arguments: Mapping[str, Any], answer: Answering) -> None:
        following = _member(membership).following
        try:
            is_news = following.take(
                _bytes_of(arguments.get("list")), _keys_in(arguments.get("keys"))
            )
        except AuthError as error:
            raise PotluckError(error.what, why=error.why, advice=error.advice) from None
        await following.save()
        try:
            await following.publish(dht)
        except PotluckError as error:
            raise PotluckError(
                "This node has taken the list, but the directory has not.",
                why=error.what,
                advice="It goes on trying while it runs. Let it run, and spread the list from "
                "another machine of the run.",
            ) from None
        await answer({"news": is_news, "number": following.revocations.number})

    control.add(RELOAD, reload)
    control.add(REVOCATIONS, revocations)


def _member(membership: Membership | None) -> Membership:
    if membership is None:
        raise NotInARun(
            "The running node is in an open run, which has no passes and no revocations.",
            why="There was no access pass when it started.",
            advice="Restart it: it reads the present pass when it starts.",
        )
    return membership


def _bytes_of(value: object) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error:
            pass
    raise WrongUse("A revocation list has to be in base64.")


def _keys_in(value: object) -> tuple[KeyRecord, ...]:
    """The key records; none from a command of an earlier version."""
    if value is None:
        return ()
    try:
        return msgspec.msgpack.decode(_bytes_of(value), type=KeyRecords)
    except WHAT_BAD_BYTES_RAISE:
        raise WrongUse("The keys have to be records of auth keys.") from None
