"""The ping protocol measures a link, and gives a stranger no more than it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protocols.rpc.ping import LONGEST_ECHO_BYTES, ping, serve_ping
from tests.protocols.pair import FIRST_CALL_SECONDS, ROUND_TRIP, Pair, between_two


def test_a_ping_takes_the_round_trip_once_connected() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        first = await ping(pair.asking, pair.bob_id, timeout=5)
        assert first == pytest.approx(FIRST_CALL_SECONDS)
        assert await ping(pair.asking, pair.bob_id, bytes(4096), timeout=5) == pytest.approx(
            ROUND_TRIP
        )

    between_two(scenario)


def test_an_echo_is_no_longer_than_its_request_and_bounded() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        await ping(pair.asking, pair.bob_id, bytes(LONGEST_ECHO_BYTES), timeout=5)
        assert pair.asking.statistics().calls_answered == 1

    between_two(scenario)


@pytest.mark.slow
def test_ping_needs_neither_torch_nor_libp2p() -> None:
    program = (
        "import sys, protocols.rpc.ping, protocols.rpc.rpc\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'libp2p')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
