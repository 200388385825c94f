"""`potluck` whose nodes also take what a test sends: `python -m tests.processes.generous listen`.

A node serves no transfer that any stranger may begin. Tests of a node that has to end in the middle
of one run this in place of `python -m node`.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from protocols.guard import Caller
from protocols.rpc import BulkMethod, Empty, Rpc, Transfer, serve_ping

CHUNK_BYTES: Final = 1 << 20
PROTOCOL: Final = "/potluck/generous/1.0.0"

TAKE: Final = BulkMethod(PROTOCOL, "take", Empty, Empty, Empty, Empty, CHUNK_BYTES)
# A chunk comes back for each that goes there
GIVE_BACK: Final = BulkMethod(PROTOCOL, "give-back", Empty, Empty, Empty, Empty, CHUNK_BYTES)


async def _take(_caller: Caller, transfer: Transfer[Any, Empty, Empty], _opening: Empty) -> None:
    await transfer.accept(Empty())
    buffer = bytearray(CHUNK_BYTES)
    while await transfer.receive_chunk_into(buffer) is not None:
        pass
    await transfer.finish(Empty())


async def _give_back(
    _caller: Caller, transfer: Transfer[Any, Empty, Empty], _opening: Empty
) -> None:
    await transfer.accept(Empty())
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while (size := await transfer.receive_chunk_into(buffer)) is not None:
        await transfer.send_chunk(buffer[:size])
    await transfer.finish(Empty())


def serve(rpc: Rpc) -> None:
    serve_ping(rpc)
    rpc.serve_bulk(TAKE, _take)
    rpc.serve_bulk(GIVE_BACK, _give_back)


def main() -> int:
    from node.app.main import main as potluck
    from node.core import node

    vars(node)["serve_ping"] = serve
    return potluck()


if __name__ == "__main__":
    sys.exit(main())
