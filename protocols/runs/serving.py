"""Serving a run's signed definition: every peer in a run serves it to all.

    served = serve_definitions(rpc)
    served.keep("poem", signed_bytes)

So a newcomer needs no particular peer, and the organiser may be away.

`keep` does not verify the definition; the caller must have done so.
"""

from __future__ import annotations

from protocols.errors import ProtocolMisuse
from protocols.guard import Caller
from protocols.rpc import Rpc
from protocols.runs.messages import (
    DEFINITION,
    LARGEST_DEFINITION_BYTES,
    DefinitionRequest,
    DefinitionResponse,
    digest_of,
)


class ServedDefinitions:
    """The definitions that this node serves. `serve_definitions` makes it."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes]] = {}

    def keep(self, run: str, definition: bytes) -> None:
        """Serve this definition from now on, instead of an earlier one."""
        if not 0 < len(definition) <= LARGEST_DEFINITION_BYTES:
            raise ProtocolMisuse(f"A definition of {len(definition):,} bytes cannot be served.")
        self._kept[run] = digest_of(definition), definition

    def answer(self, _caller: Caller, request: DefinitionRequest) -> DefinitionResponse:
        digest, definition = self._kept.get(request.run, (b"", b""))
        if definition and digest == request.known:
            return DefinitionResponse(is_known=True)
        return DefinitionResponse(definition)


def serve_definitions(rpc: Rpc) -> ServedDefinitions:
    """Start to serve definitions on this node. Call it only once."""
    served = ServedDefinitions()
    rpc.serve(DEFINITION, served.answer)
    return served
