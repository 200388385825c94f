"""The asking side: the newest definition of a run that any of some peers has.

    signed = await fetch_definition(rpc, peers, "poem", accept)

All are asked at once. What one answers is verified by `accept` (node/run/signed.py), which raises
NotTheDefinition for what is not genuine; the others are then waited for. The first that is genuine
gives the rest a moment, and the newest of them is taken.

Promises: it ends within `timeout`; it takes one peer that answers, whatever the others do.

Easy to get wrong: a peer that serves an older, genuine definition is not lying: it has not been
restarted since. So the first answer is not the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.rpc import Rpc
from protocols.runs.messages import (
    DEFINITION,
    DefinitionRequest,
    NoDefinition,
    NotTheDefinition,
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
    came was not genuine. Whatever else `accept` raises comes out of here: it is of the genuine one.
    """
    asked = list(dict.fromkeys(peers))[:MOST_ASKED]
    found: list[Accepted] = [] if known is None else [known]
    failures: dict[PeerId, str] = {}
    rejected: list[NotTheDefinition] = []
    fatal: list[PotluckError] = []
    with trio.move_on_after(timeout) as patience:
        async with trio.open_nursery() as nursery:

            async def ask(peer: PeerId) -> None:
                request = DefinitionRequest(run, b"" if known is None else digest_of(known.data))
                try:
                    answer = await rpc.call(peer, DEFINITION, request, timeout=timeout)
                except PotluckError as error:
                    failures[peer] = error.what
                    return
                if not answer.definition:
                    if not answer.is_known:
                        failures[peer] = "It is not in this run."
                        return
                else:
                    try:
                        found.append(accept(answer.definition))
                    except NotTheDefinition as error:
                        failures[peer] = error.what
                        rejected.append(error)
                        return
                    except PotluckError as error:
                        fatal.append(error)
                patience.deadline = min(patience.deadline, trio.current_time() + OTHERS_SECONDS)

            for peer in asked:
                nursery.start_soon(ask, peer)
    if found and not (fatal and len(found) == (known is not None)):
        return max(found, key=lambda one: one.signed_ms)
    if fatal:
        raise fatal[0]
    if rejected:
        raise rejected[0]
    raise _nobody_has_it(run, asked, failures)


def _nobody_has_it(run: str, asked: list[PeerId], failures: dict[PeerId, str]) -> NoDefinition:
    told = [f"{peer}: {failures.get(peer, 'no answer.')}" for peer in asked[:MOST_TOLD]]
    more = f" And {len(asked) - MOST_TOLD} more." if len(asked) > MOST_TOLD else ""
    return NoDefinition(
        f"Nobody could say what the run {run} is.",
        why=(" ".join(told) + more) if told else "There is no peer that could be asked.",
        advice="The peers in the invite may be away: try again, or ask the organiser.",
    )
