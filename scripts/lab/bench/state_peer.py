"""A node that serves a state or fetches one: `python -m lab.bench.state_peer AUTH_SEED`.

In addition to the orders of interference_guest.py: `hold` makes a model with AdamW statistics and
serves it, `corrupt` turns every byte of the copy that is being served, `begin_fetch` starts a
fetch, `until_half` waits for the middle of it, `fetched` for its end.

Orders are obeyed one after the other, so a fetch that others disturb has to run beside them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import trio

from lab.bench.admission import RUN
from lab.bench.holdings import PeakMemory
from lab.bench.interference_guest import TrainingGuest
from lab.bench.orders import obey
from lab.bench.peer import open_bench_network
from models.uncompiled import AdamW
from protocols.accumulation.state_fetching import FetchedState, StateSource, fetch_state
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_serving import StateServer
from protocols.accumulation.training_state import LiveState, look
from protocols.identity import PeerId
from protocols.network import Network
from protocols.rpc import Rpc

EPOCH = 1
HISTORY = bytes(16)
BYTES_PER_PARAMETER = 12  # float32, and AdamW's two statistics
LAYER = 1 << 20  # parameters in one tensor: a model has many


class StatePeer(TrainingGuest):
    """The orders of this process: each public coroutine is one."""

    def __init__(
        self, network: Network, rpc: Rpc, memory: PeakMemory, nursery: trio.Nursery
    ) -> None:
        super().__init__(network, rpc, memory, nursery)
        self._parameters: list[tuple[str, torch.nn.Parameter]] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._server: StateServer | None = None
        self._fetched: FetchedState | None = None
        self._half, self._ended = trio.Event(), trio.Event()

    async def hold(
        self, state_bytes: int, serve: bool, as_one_who_trains: bool = False
    ) -> dict[str, Any]:
        """A model whose state has this many bytes; its digest, and the time to compute that.

        It is served as fast as can be, or at the pace of a peer that trains.
        """
        self._make_model(state_bytes // BYTES_PER_PARAMETER, stepped=serve)
        if not serve:
            return {}
        cost = self.cost if as_one_who_trains else None
        self._server = StateServer(self._rpc, self._look, StateLock(), cost=cost)
        began = time.perf_counter()
        self._nursery.start_soon(self._server.run)
        offer = await self._server.offered()
        return {"digest": offer.digest.hex(), "digest_s": time.perf_counter() - began}

    async def corrupt(self) -> None:
        """Every byte of the copies that are being served, from now on."""
        assert self._server is not None
        for state in self._server.served_states():
            state.memory.bitwise_xor_(0xFF)

    async def begin_fetch(self, sources: list[str], digest: str) -> None:
        """Fetch from these peers, which all name this digest."""
        self._half, self._ended = trio.Event(), trio.Event()
        self._nursery.start_soon(self._fetch, sources, bytes.fromhex(digest))

    async def until_half(self) -> None:
        await self._half.wait()

    async def fetched(self) -> dict[str, Any]:
        """The result of the fetch."""
        await self._ended.wait()
        assert self._fetched is not None
        fetched = self._fetched
        return {
            "seconds": fetched.seconds,
            "ended": time.monotonic(),
            "bytes": len(fetched.state.memory),
            "digest": fetched.state.digest.hex(),
            "bytes_from": dict(fetched.bytes_from),
            "given_up": dict(fetched.given_up),
            "liars": dict(fetched.liars),
        }

    async def forget(self) -> None:
        """Free the fetched state: the next fetch takes memory of its own."""
        self._fetched = None

    async def cpu(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}

    def _make_model(self, values: int, *, stepped: bool) -> None:
        chance = torch.Generator().manual_seed(0)
        sizes = [LAYER] * (values // LAYER) + ([values % LAYER] if values % LAYER else [])
        self._parameters = [
            (f"layers.{number}.weight", torch.nn.Parameter(torch.randn(size, generator=chance)))
            for number, size in enumerate(sizes)
        ]
        self._optimizer = AdamW(self._parameters, lr=1e-3)
        if stepped:
            for _, parameter in self._parameters:
                parameter.grad = parameter.detach().clone()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _look(self) -> LiveState:
        return look(self._parameters, (), self._optimizer, run=RUN, epoch=EPOCH, history=HISTORY)

    async def _fetch(self, sources: list[str], digest: bytes) -> None:
        slots = [StateSource(PeerId(one), EPOCH, HISTORY, digest) for one in sources]

        def progress(here: int, of_all: int) -> None:
            if 2 * here >= of_all:
                self._half.set()

        self._fetched = await fetch_state(self._rpc, lambda: slots, self._look(), progress=progress)
        self._ended.set()


async def main() -> None:
    torch.set_num_threads(1)
    auth_seed = bytes.fromhex(sys.argv[1]) if sys.argv[1:] else b""
    async with (
        open_bench_network(auth_seed) as (network, rpc, memory),
        trio.open_nursery() as nursery,
    ):
        peer = StatePeer(network, rpc, memory, nursery)
        await obey(peer, peer.introduction())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
