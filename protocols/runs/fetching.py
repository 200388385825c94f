"""The asking side: the newest definition of a run that any of some peers has.

    signed = await fetch_definition(rpc, peers, "poem", accept)

All are asked at once. What one answers is verified by `accept` (node/run/signed.py), which raises
NotTheDefinition for what is not genuine; the others are then waited for. The first that is genuine
gives the rest a moment, and the newest of them decides: if this potluck cannot take part by it, an
older one that it could read is not taken in its place.

Promises: it ends within `timeout`; it takes one peer that answers, whatever the others do.

Easy to get wrong: a peer that serves an older, genuine definition is not lying: it has not been
restarted since. So the first answer is not the last word.
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
FETCH_SECONDS = 20.0  # of connecting over a bad link, a question and an answer of 64 KiB
OTHERS_SECONDS = 2.0  # that others have when one has answered: a few round trips
MOST_TOLD = 5  # peers whose failures an error names


class Dated(Protocol):
    """What `accept` makes of a definition."""

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
    """The newest one that is accepted; `known` if nobody has a newer.

    NoDefinition if there is none, and says what each peer answered. NotTheDefinition if all that
    came was not genuine. UnusableDefinition, which `accept` raised, if the newest is that.
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
    """What came, and what each of the others said instead."""

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
        """Whether it was a genuine one, or that ours still counts."""
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
