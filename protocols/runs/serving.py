"""The answering side: every peer that is in a run serves its signed definition to whoever asks.

    served = serve_definitions(rpc)
    served.keep("poem", signed_bytes)

So a newcomer needs no particular peer, and the organiser may be away.

Easy to get wrong: what is served has been verified by us before. `keep` takes the caller's word.
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
    """What this node answers with. Made by `serve_definitions`."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes]] = {}

    def keep(self, run: str, definition: bytes) -> None:
        """Serve this one from now on, in the place of an earlier one."""
        if not 0 < len(definition) <= LARGEST_DEFINITION_BYTES:
            raise ProtocolMisuse(f"A definition of {len(definition):,} bytes cannot be served.")
        self._kept[run] = digest_of(definition), definition

    def answer(self, _caller: Caller, request: DefinitionRequest) -> DefinitionResponse:
        digest, definition = self._kept.get(request.run, (b"", b""))
        if definition and digest == request.known:
            return DefinitionResponse(is_known=True)
        return DefinitionResponse(definition)


def serve_definitions(rpc: Rpc) -> ServedDefinitions:
    """Answer questions for definitions on this node; once in its life."""
    served = ServedDefinitions()
    rpc.serve(DEFINITION, served.answer)
    return served
