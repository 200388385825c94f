"""A person's queries to a directory, and the answers as data.

A running node is asked through its control socket, and a one-shot client directly. Both have a
`Dht` and call `answer`.

Expiry is in swarm time, and the user's clock may be hours off. So the answer also has how long a
slot still lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import trio

from node.core.control import Answering, ControlHandler, ControlServer
from node.core.directory import FAMILIES
from node.core.wrong_use import WrongUse
from protocols.dht import Dht
from protocols.errors import DeadlineExceeded
from protocols.network import Network

# For requests through the socket without a timeout; the command always gives one.
USUAL_SECONDS = 30.0

Question = TypeVar("Question")


class GetQuestion(msgspec.Struct, frozen=True):
    key: str
    first: bool = False


class PutQuestion(msgspec.Struct, frozen=True):
    key: str
    value: str
    ttl: float


class FoundSlot(msgspec.Struct, frozen=True):
    """One publisher's slot."""

    publisher: str
    value: Any
    sequence: int
    expires: float  # seconds since 1970, in swarm time
    expires_in_seconds: float


class FoundSlots(msgspec.Struct, frozen=True):
    """`peers_known`: the peers that this node knows. With 0 it asked only itself."""

    key: str
    slots: tuple[FoundSlot, ...]
    peers_known: int


class StoredSlot(msgspec.Struct, frozen=True):
    """The result of a put: how many nodes hold the slot, and the peer id of this node."""

    key: str
    publisher: str
    replicas: int
    sequence: int
    expires: float
    expires_in_seconds: float


@dataclasses.dataclass(frozen=True)
class Asked:
    """A directory and the network that it is on."""

    dht: Dht
    network: Network

    def now_ms(self) -> int:
        """Swarm time."""
        return int(self.network.wall_time() * 1000) + self.dht.statistics().clock_offset_ms


async def answer(asked: Asked, action: str, question: Mapping[str, Any]) -> object:
    """Answer one query; DeadlineExceeded if it takes longer than it may."""
    seconds = question.get("timeout_seconds")
    if not isinstance(seconds, int | float) or not seconds > 0:
        seconds = USUAL_SECONDS
    try:
        with trio.fail_after(seconds):
            return await _ACTIONS[action](asked, question)
    except trio.TooSlowError:
        raise DeadlineExceeded(
            f"The directory did not answer within {seconds:g} seconds.",
            why=f"This node knows {asked.dht.statistics().peers_in_table} others.",
            advice="Try again, or wait longer with --timeout.",
        ) from None


def add_questions(control: ControlServer, asked: Asked) -> None:
    """Let the owner of a running node query its directory."""
    for action in _ACTIONS:
        control.add(f"dht {action}", _handler(asked, action))


def _handler(asked: Asked, action: str) -> ControlHandler:
    async def handle(arguments: Mapping[str, Any], answering: Answering) -> None:
        await answering(await answer(asked, action, arguments))

    return handle


async def _get(asked: Asked, arguments: Mapping[str, Any]) -> FoundSlots:
    question = _read(GetQuestion, arguments)
    entries = await asked.dht.get(question.key, latest_enough=question.first)
    now_ms = asked.now_ms()
    slots = [
        FoundSlot(
            publisher=entry.publisher,
            value=entry.value,
            sequence=entry.sequence,
            expires=entry.expires / 1000,
            expires_in_seconds=_seconds_left(entry.expires, now_ms),
        )
        for entry in entries.values()
    ]
    newest_first = sorted(slots, key=lambda slot: slot.sequence, reverse=True)
    return FoundSlots(question.key, tuple(newest_first), asked.dht.statistics().peers_in_table)


async def _put(asked: Asked, arguments: Mapping[str, Any]) -> StoredSlot:
    question = _read(PutQuestion, arguments)
    value = value_in(question.key, question.value)
    written = await asked.dht.put(question.key, value, question.ttl, keep_up=False)
    slot = written.slot
    return StoredSlot(
        key=slot.key,
        publisher=slot.publisher_peer,
        replicas=written.replicas,
        sequence=slot.sequence,
        expires=slot.expires / 1000,
        expires_in_seconds=_seconds_left(slot.expires, asked.now_ms()),
    )


async def _stats(asked: Asked, _arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All counts of the directory, as flat data, and how it joined the swarm."""
    await trio.lowlevel.checkpoint()
    joining = asked.dht.bootstrap_state()
    return {
        "joined": joining.joined.value,
        "bootstrap": [dataclasses.asdict(one) for one in joining.addresses],
        "cached_peers": joining.cached_peers,
        **dataclasses.asdict(asked.dht.statistics()),
    }


_ACTIONS: dict[str, Callable[[Asked, Mapping[str, Any]], Awaitable[object]]] = {
    "get": _get,
    "put": _put,
    "stats": _stats,
}


def value_in(key: str, typed: str) -> Any:
    """The value typed for this key: the text itself if the family has text, else parsed as JSON."""
    family = FAMILIES.family_of(key)
    if family.type is str:
        return typed
    try:
        return msgspec.json.decode(typed.encode(), type=family.type)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WrongUse(
            f"{typed[:80]!r} is not a value of the family {family.name}.",
            why=str(error),
            advice="Values that are not text have to be JSON.",
        ) from None


def _read(type_: type[Question], arguments: Mapping[str, Any]) -> Question:
    try:
        return msgspec.convert(dict(arguments), type_)
    except msgspec.ValidationError as error:
        raise WrongUse("That is not a request to the directory.", why=str(error)) from None


def _seconds_left(expires_ms: int, now_ms: int) -> float:
    return round(max(0, expires_ms - now_ms) / 1000, 3)
