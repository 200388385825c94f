"""A machine behind a router, as a process: `python -m tests.nat.home_machine PORT`.

It accepts connections at the port and answers each with "here". It keeps the port mapped at its
default gateway, and prints each change as a line of JSON. It leaves when its standard input ends.
"""

from __future__ import annotations

import json
import sys

import trio

from nat.mapping import Mapping, PortMapper


async def answer(stream: trio.SocketStream) -> None:
    await stream.send_all(b"here")


def tell(mapping: Mapping | None) -> None:
    line = None
    if mapping is not None:
        at = (mapping.external_host, mapping.external_port)
        line = {"protocol": mapping.protocol.value, "at": at, "is_public": mapping.is_public}
    print(json.dumps(line), flush=True)


async def main(port: int) -> None:
    mapper = PortMapper(port, tell)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_tcp, answer, port)
        nursery.start_soon(mapper.run)
        await trio.lowlevel.FdStream(sys.stdin.fileno()).receive_some(1)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
