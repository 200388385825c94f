"""Nodes that announce experts and look for them: `python -m lab.bench.experts_search_peer`.

They are nodes of the directory's bench (dht_peer.py), with further orders.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import trio
from torch import Tensor

from lab.bench.dht_peer import DhtBenchPeer
from lab.bench.experts_search import BATCH, CHOSEN, GRID
from lab.bench.orders import obey_with_nursery
from protocols.dht import Dht
from protocols.experts import EXPERTS, ExpertDirectory, Uid, select_experts

RUN = "bench"


class SearchBenchPeer(DhtBenchPeer):
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery, [EXPERTS])

    async def host(self, node: int, uids: list[str]) -> dict[str, Any]:
        """Announce these experts from now on."""
        experts = ExpertDirectory(*self._nodes[node], RUN)
        hosted = frozenset(map(GRID.uid, uids))
        lost = await experts.announce(hosted)
        self._nursery.start_soon(
            experts.keep_announcing, lambda: hosted, lambda: 0.0, lambda _lost: None
        )
        return {"lost": len(lost)}

    async def search(self, node: int, live: list[str], seed: int, warm: int) -> dict[str, Any]:
        """Search with an empty cache, and then `warm` times with what was read."""
        network, dht = self._nodes[node]
        experts = ExpertDirectory(network, dht, RUN)
        uids = sorted(map(GRID.uid, live))
        chance = torch.Generator().manual_seed(seed)
        milliseconds = []
        wrong = 0
        requests = 0
        for number in range(1 + warm):
            scores = [torch.randn(BATCH, size, generator=chance) for size in GRID.sizes]
            before = _requests_of(dht)
            began = time.perf_counter()
            found = await select_experts(scores, CHOSEN, GRID, experts.active)
            milliseconds.append((time.perf_counter() - began) * 1000)
            if not number:
                requests = _requests_of(dht) - before
            chosen = [[uid for uid, _ in row] for row in found]
            wrong += chosen != best_of_all(scores, uids)
        return {
            "cold_ms": milliseconds[0],
            "warm_ms": milliseconds[1:],
            "wrong": wrong,
            "requests": requests,
        }


def best_of_all(scores: list[Tensor], uids: list[Uid]) -> list[list[Uid]]:
    """The best experts of each example by a look at all of them, which are in order."""
    cells = torch.tensor([uid.cells for uid in uids])
    total = sum(gate[:, cells[:, place]] for place, gate in enumerate(scores))
    assert isinstance(total, Tensor)
    order = total.sort(dim=1, descending=True, stable=True).indices[:, :CHOSEN]
    return [[uids[place] for place in row] for row in order.tolist()]


def _requests_of(dht: Dht) -> int:
    counts = dht.statistics()
    return counts.finds_sent + counts.stores_sent


if __name__ == "__main__":
    torch.set_num_threads(1)
    trio.run(obey_with_nursery, SearchBenchPeer)
