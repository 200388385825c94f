"""`/potluck/run/1.0.0`: the signed definition of a run, served by peers and fetched from any.

    serve_definition(rpc, run, lambda: signed_bytes)        # at every peer that is in the run
    found = await fetch_definition(rpc, peers, run, accept) # at a newcomer; from the first that has

Protocols know nothing of what is in it: `accept` verifies and reads the bytes (node/run/signed.py)
and raises for what is not genuine; then the next peer is asked, and the last reason is told.

Easy to get wrong: a peer that serves an older, genuine definition is not lying. The newest of what
a few peers have is taken, not the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from protocols.rpc import Rpc

PROTOCOL = "/potluck/run/1.0.0"
LARGEST_DEFINITION_BYTES = (64 << 10) + 256

Accepted = TypeVar("Accepted")


def serve_definition(rpc: Rpc, run: str, current: Callable[[], bytes | None]) -> None:
    """Answer whoever asks for this run's definition; once in a node's life."""
    raise NotImplementedError


async def fetch_definition(
    rpc: Rpc, peers: Sequence[str], run: str, accept: Callable[[bytes], Accepted]
) -> Accepted:
    """The newest accepted one; NoDefinition if nobody has one, with what each of them said."""
    raise NotImplementedError
