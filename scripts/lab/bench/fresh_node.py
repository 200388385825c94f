"""How long a fresh node takes to be of use: `python -m lab.bench.fresh_node HOME PEER ADDRESS`.

The clock starts after the imports (their time is a figure of its own) and before there is a key:
a whole node starts, as `potluck listen` does, and calls a peer that it has never met. It stops
with the first answer. Prints the seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import trio

import node.net.network  # noqa: F401 - a node imports it when it starts; its time is not ours
from node.core.configuration import read_configuration
from node.core.node import Node
from protocols.identity import PeerId
from protocols.rpc import ping

CALL_SECONDS = 10.0


async def join(home: str, peer: PeerId, address: str) -> float:
    began = time.perf_counter()
    configuration = read_configuration({"network.listen": ("/ip4/127.0.0.1/tcp/0",)}, home=home)
    async with Node(configuration) as node:
        node.network.learn_addresses(peer, [address])
        await ping(node.rpc, peer, timeout=CALL_SECONDS)
        return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps({"seconds": trio.run(join, sys.argv[1], PeerId(sys.argv[2]), sys.argv[3])}))
