"""F18: a clock that is set while a node runs is not the network's affair."""

from __future__ import annotations

import time

import pytest

from node.net.clocks import machine_clocks
from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity

HOUR_SECONDS = 3600.0


@pytest.mark.skipif(not machine_clocks().counts_sleep, reason="no clock here goes on in sleep")
@pytest.mark.parametrize("set_by", [HOUR_SECONDS, -HOUR_SECONDS])
async def test_a_changed_wall_clock_does_not_change_the_networks_time(
    monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    began = time.time()
    async with open_libp2p_network(Identity.generate(), Libp2pSettings()) as network:
        monkeypatch.setattr(time, "time", lambda: began + set_by)
        assert abs(network.wall_time() - began) < 60.0
