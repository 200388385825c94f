"""One question to a router by UDP, and its answer. PCP and NAT-PMP share this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from nat.mapping.lease import MappingFailed

Answer = TypeVar("Answer")

# RFC 6887, 7: the largest PCP message. One more byte shows that a datagram is larger.
LARGEST_DATAGRAM_BYTES: Final = 1100

# A router of the same network answers within milliseconds, so a question is repeated soon, against
# losses on Wi-Fi. The RFCs go on for a minute; a router without the protocol would cost us that.
REPEAT_AFTER_SECONDS: Final = (0.25, 0.5, 1.0)


def udp_socket() -> trio.socket.SocketType:
    return trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)


async def local_host_towards(host: str, port: int) -> str:
    """Our address in the network of that host. Sends nothing. OSError if there is no route."""
    with udp_socket() as probe:
        await probe.connect((host, port))
        local: str = probe.getsockname()[0]
        return local


async def ask(
    host: str, port: int, question: bytes, read: Callable[[bytes], Answer | None]
) -> Answer:
    """Send a question, repeat it, and return the first answer that `read` accepts.

    `read` returns None for a datagram that is no answer to this question: it is ignored. It raises
    MappingFailed for an answer that refuses. If there is no answer at all, MappingFailed says so.

    The socket is connected, so the kernel lets through only datagrams from that host and port.
    """
    try:
        with udp_socket() as link:
            await link.connect((host, port))
            for seconds in REPEAT_AFTER_SECONDS:
                await link.send(question)
                with trio.move_on_after(seconds):
                    return await _first_accepted(link, read)
    except OSError as error:  # no route, or nothing listens there: the machine tells us so
        raise MappingFailed("the router does not serve it", silent=True) from error
    raise MappingFailed("the router does not answer", silent=True)


async def _first_accepted(
    link: trio.socket.SocketType, read: Callable[[bytes], Answer | None]
) -> Answer:
    while True:
        data = await link.recv(LARGEST_DATAGRAM_BYTES + 1)
        if len(data) <= LARGEST_DATAGRAM_BYTES and (answer := read(data)) is not None:
            return answer
