"""`scripts/bench revocation` measures what it says, in a small swarm."""

from __future__ import annotations

import pytest

from lab.bench.revocation import RevocationEffort, measure_revocation

BAR_SECONDS = 60.0


@pytest.mark.soak
async def test_every_peer_refuses_the_revoked_within_a_minute_server_up_or_down() -> None:
    result = await measure_revocation(RevocationEffort(nodes=4, outlaws=1))
    assert result["revocation_seconds_p95"] < BAR_SECONDS
    assert result["revocation_seconds_server_down_p95"] < BAR_SECONDS
    assert (result["nodes"], result["outlaws"]) == (4, 2)
    assert result["refused_as_revoked_share"] > 0.5
