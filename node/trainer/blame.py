"""Nobody of the run answers: what was tried, and whose fault it probably is. Pure.

A refused connection comes from a machine that is there, so the node on it is not running. No route
and no name come from this machine's own connection. Silence says nothing: the other machine may be
off, or a firewall between may swallow what is sent.

Easy to get wrong: with several addresses one sign of life is enough. If one machine refuses and
another is silent, this machine is online.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protocols.dht.bootstrap import BootstrapState

ELSEWHERE: Final = ("another node answers", "no potluck node")
THEIRS: Final = (*ELSEWHERE, "connection refused", "listens there", "not allowed")
OURS: Final = ("no route", "does not resolve", "network is unreachable")
MOST_SHOWN: Final = 3
LONGEST_CHARACTERS: Final = 160  # of one address and its failure


def blame_of(state: BootstrapState) -> str:
    """In one or two sentences."""
    failures = [(one.address, one.failure) for one in state.addresses if one.failure]
    tried = len(state.addresses)
    what = f"none of {tried} known addresses answers"
    if tried == 1:
        what = "the only known address does not answer"
    if not tried:
        what = "no peer can be reached"
    if state.cached_peers:
        what += f", nor any of {_count(state.cached_peers, 'peer', 'peers')} known from before"
    shown = "; ".join(_shown(*one) for one in failures[:MOST_SHOWN])
    return f"{what}{f' ({shown})' if shown else ''}. {_whose(failure for _, failure in failures)}"


def _whose(failures: Iterable[str]) -> str:
    said = [one.lower() for one in failures]
    if not said:
        return "This machine may be offline, or the others are."
    if all(any(sign in one for sign in ELSEWHERE) for one in said):
        return (
            "This machine is online: the fault is at the other end, where something else runs at "
            "that address now. An invite of today would lead to the right one."
        )
    if any(sign in one for one in said for sign in THEIRS):
        return "This machine is online: the fault is at the other end, where no node is running."
    if all(any(sign in one for sign in OURS) for one in said):
        return "The fault is this machine's connection: it has no way out."
    return "They may be off, or a firewall between swallows what is sent."


def _shown(address: str, failure: str) -> str:
    """The place, and the first sentence of what was said about it, without its peer's long id."""
    place, _, peer = address.partition("/p2p/")
    failure = " ".join(failure.split())
    of_place = failure.partition(f"{place}: ")[2].partition(";")[0]
    detail = (of_place or failure).partition(". ")[0].rstrip(".").replace(peer, "it")
    return f"{place}: {detail}"[:LONGEST_CHARACTERS]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
