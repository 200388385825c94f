"""A relay that lies: `python -m lab.bench.lying_relay PORT`, for `scripts/bench nat-relays`.

It is made of the relay's own parts. With every place it promises a day and a terabyte for each
circuit, and it ends each circuit after a megabyte.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import trio

from lab.bench.orders import obey
from nat.connectivity import Connectivity
from nat.relay_limits import MIB, RelayLimits
from nat.relaying import Relay
from node.net import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity

CUT_BYTES: Final = MIB
PROMISED_BYTES: Final = 10**12
PROMISED_SECONDS: Final = 86_400


class LyingRelay(Relay):
    """Takes no orders."""

    def _add_limit(self, message: Any) -> None:
        message.limit.duration = PROMISED_SECONDS
        message.limit.data = PROMISED_BYTES


async def main(port: str) -> None:
    logging.getLogger().setLevel(logging.ERROR)
    settings = Libp2pSettings(listen_addresses=(f"/ip4/0.0.0.0/tcp/{port}",))
    async with (
        open_libp2p_network(Identity.generate(), settings) as network,
        trio.open_nursery() as nursery,
    ):
        relay = LyingRelay(network, RelayLimits(circuit_bytes=CUT_BYTES))
        await nursery.start(relay.run)
        await nursery.start(Connectivity(network, tuple).run)  # others ask it where they come from
        await obey(relay, {"peer_id": network.peer_id})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
