"""A node at one end of a line of the network lab, in a process of its own.

`python -m tests.libp2p.line_peer HOST` listens there, and reads lines of JSON:
`{"know": [address]}` makes it connect, `{"fill": peer}` fills the link to a peer with bulk in both
directions, for ever. It prints `{"listens": address}`, and then each change of a link, with the
time on this machine's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time

import trio

from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity, PeerId
from protocols.network import Network, Stream

BULK = "/potluck/bulk/1.0.0"
CHUNK = bytes(64 * 1024)
STREAMS = 4  # in each direction: more than one part of a round


async def pour(stream: Stream) -> None:
    while True:
        await stream.send_all(CHUNK)


async def drain(stream: Stream) -> None:
    while await stream.receive_some():
        pass


async def both_ways(stream: Stream) -> None:
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour, stream)
            nursery.start_soon(drain, stream)
    except* trio.BrokenResourceError:
        pass  # the link is gone, which is told anyway


async def fill(network: Network, peer: PeerId) -> None:
    await both_ways(await network.open(peer, BULK))


async def do_as_told(network: Network) -> None:
    async with trio.open_nursery() as nursery:
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            said = json.loads(line)
            for address in said.get("know", ()):
                peer = PeerId(address.rpartition("/")[2])
                network.learn_addresses(peer, [address])
                await network.connect(peer)
            if "fill" in said:
                for _ in range(STREAMS):
                    nursery.start_soon(fill, network, PeerId(said["fill"]))
        nursery.cancel_scope.cancel()


async def main(host: str) -> None:
    settings = Libp2pSettings(listen_addresses=(f"/ip4/{host}/tcp/0",))
    async with open_libp2p_network(Identity.generate(), settings) as network:
        network.serve(BULK, both_ways)
        with network.link_events() as events:
            print(json.dumps({"listens": network.addresses()[0]}), flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(do_as_told, network)
                async for event in events:
                    told = {"peer": event.peer, "reach": event.reach.value, "at": time.monotonic()}
                    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
