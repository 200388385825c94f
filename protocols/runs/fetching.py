"""Fetching the newest definition of a run from a set of peers.

    signed = await fetch_definition(rpc, peers, "poem", accept)

All peers are asked at once. `accept` (node/run/signed.py) verifies an answer, and raises
NotTheDefinition if it is not genuine; then we wait for the others. After the first genuine answer
the others get a moment more, and the newest definition decides. If this potluck cannot take part by
the newest, it does not use an older one instead.

It ends within `timeout`. One peer that answers is enough, whatever the others do.

An older genuine definition is no lie: its peer has only not been restarted. So the first answer may
not be the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.rpc import Rpc
from protocols.runs.messages import (
    DEFINITION,
    DefinitionRequest,
    DefinitionResponse,
    NoDefinition,
    NotTheDefinition,
    UnusableDefinition,
    digest_of,
)

MOST_ASKED = 16  # at once; an invite names as many addresses
FETCH_SECONDS = 20.0  # for connecting over a bad link, one request, and an answer of 64 KiB
OTHERS_SECONDS = 2.0  # for the others after the first answer: a few round trips
MOST_TOLD = 5  # peers whose failures an error lists


class Dated(Protocol):
    """The result of `accept`: a definition with its date."""

    @property
    def data(self) -> bytes: ...

    @property
    def signed_ms(self) -> int: ...


Accepted = TypeVar("Accepted", bound=Dated)


async def fetch_definition(
    rpc: Rpc,
    peers: Iterable[PeerId],
    run: str,
    accept: Callable[[bytes], Accepted],
    *,
    known: Accepted | None = None,
    timeout: float = FETCH_SECONDS,
) -> Accepted:
    """The newest definition that `accept` accepts; `known` if there is no newer one.

    NoDefinition, with each peer's answer, if there is none. NotTheDefinition if no definition that
    came was genuine. UnusableDefinition, raised by `accept`, if the newest one is unusable.
    """
    asked = list(dict.fromkeys(peers))[:MOST_ASKED]
    answers = _Answers(run, accept, known)
    request = DefinitionRequest(run, b"" if known is None else digest_of(known.data))

    async def ask(peer: PeerId) -> None:
        try:
            answer = await rpc.call(peer, DEFINITION, request, timeout=timeout)
        except PotluckError as error:
            answers.failed(peer, error)
            return
        if answers.take(peer, answer):
            scope = nursery.cancel_scope
            scope.deadline = min(scope.deadline, trio.current_time() + OTHERS_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + timeout
        for peer in asked:
            nursery.start_soon(ask, peer)
    return answers.newest(asked)


class _Answers(Generic[Accepted]):
    """The answers so far, and the failures of the other peers."""

    def __init__(
        self, run: str, accept: Callable[[bytes], Accepted], known: Accepted | None
    ) -> None:
        self._run, self._accept, self._known = run, accept, known
        self._accepted: list[Accepted] = []
        self._failures: dict[PeerId, str] = {}
        self._forged: list[NotTheDefinition] = []
        self._unusable: list[UnusableDefinition] = []

    def failed(self, peer: PeerId, error: PotluckError) -> None:
        self._failures[peer] = error.what

    def take(self, peer: PeerId, answer: DefinitionResponse) -> bool:
        """Whether the answer was genuine, or confirmed the definition that we have."""
        if answer.is_known and self._known is not None:
            return True
        if not answer.definition:
            self._failures[peer] = "It is not in this run."
            return False
        try:
            self._accepted.append(self._accept(answer.definition))
        except NotTheDefinition as error:
            self._forged.append(error)
            self._failures[peer] = error.what
            return False
        except UnusableDefinition as error:
            self._unusable.append(error)
        return True

    def newest(self, asked: list[PeerId]) -> Accepted:
        found = self._accepted + ([] if self._known is None else [self._known])
        best = max(found, key=lambda one: one.signed_ms, default=None)
        worst = max(self._unusable, key=lambda one: one.signed_ms, default=None)
        if worst is not None and (best is None or worst.signed_ms > best.signed_ms):
            raise worst
        if best is not None:
            return best
        if self._forged:
            raise self._forged[0]
        said = {peer: self._failures.get(peer, "no answer.") for peer in asked}
        told = [f"{peer}: {said[peer]}" for peer in asked[:MOST_TOLD]]
        more = f" And {len(asked) - MOST_TOLD} more." if len(asked) > MOST_TOLD else ""
        nobody = NoDefinition(
            f"Nobody could say what the run {self._run} is.",
            why=(" ".join(told) + more) if told else "There is no peer that could be asked.",
            advice="The peers in the invite may be away: try again, or ask the organiser.",
        )
        nobody.reasons = frozenset(said.values())
        raise nobody
