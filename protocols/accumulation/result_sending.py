"""Sending one result to a peer that follows the run: its description, then its encoded chunks.

    await send_result(transfer, offered, turn)

Easy to get wrong: the chunks are those of the round, not as the uplink would like them: what they
are checked by are hashes over exactly these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from protocols.accumulation.committed_result import chunks
from protocols.accumulation.results_kept import Offered
from protocols.accumulation.state_messages import ResultAccepted, ResultLink, ResultPart
from protocols.bulk import Transfer
from protocols.messages import Empty

ResultTransfer = Transfer[ResultAccepted, Empty, Empty]


async def send_result(
    transfer: ResultTransfer, offered: Offered, turn: Callable[[int], Awaitable[None]]
) -> None:
    """From accepting to the end. `turn` waits until so many bytes may be sent."""
    result, end = offered.first, 0
    await transfer.accept(_described(offered))
    for chunk in chunks(offered.layouts.of(result.kind), result.cut):
        place = result.memory[end : end + chunk.encoded_bytes]
        end += len(place)
        await turn(len(place))
        await transfer.send_chunk(place)
    await transfer.finish(Empty())


def _described(offered: Offered) -> ResultAccepted:
    result = offered.first
    return ResultAccepted(
        links=tuple(ResultLink(one.kind, one.digest) for one in offered.results),
        parts=tuple(
            ResultPart(one.reducer, one.start, one.stop, offered.part_digests[one.reducer])
            for one in result.cut.parts
        ),
        chunk_bytes=result.cut.chunk_bytes,
        nonce=result.nonce,
    )
