"""F22, Ctrl-C anywhere: out within two seconds, exit code 130, no traceback, a clean disk.

Moments are counted from when our own signal handlers stand: before that it is Python's own start
that is interrupted, which is not ours to tidy. The kernel says when they do.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity, PeerId
from protocols.rpc import Empty, open_rpc
from tests.commands.console import LOOPBACK, files_of_a_running_node, running, running_node
from tests.leaving import LEAVE_SECONDS
from tests.processes.generous import CHUNK_BYTES, TAKE
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("really_started")

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"
LISTEN = ("listen", "--listen", LOOPBACK)

A_FEW_MOMENTS = [0.0, 0.3]
MANY_MOMENTS = [  # every fourth for everybody
    pytest.param(moment / 1000, marks=[pytest.mark.soak] if place % 4 else [])
    for place, moment in enumerate(range(20, 1400, 60))
]


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{PEER}"


def check_interruption(
    words: tuple[str, ...], moment: float, home: Path, number: signal.Signals = signal.SIGINT
) -> None:
    with running(*words, home=home) as command:
        command.wait_until_it_handles_signals()
        time.sleep(moment)
        code, seconds, errors = command.stop(number)
    codes = {signal.SIGINT: {130}, signal.SIGTERM: {143, 0}}[number]
    assert code in codes, errors
    assert "Traceback" not in errors
    assert "error:" not in errors
    assert seconds < LEAVE_SECONDS
    assert files_of_a_running_node(home) == []


@pytest.mark.parametrize("moment", A_FEW_MOMENTS)
def test_ctrl_c_while_a_node_starts(moment: float, tmp_path: Path) -> None:
    check_interruption(LISTEN, moment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MANY_MOMENTS)
def test_ctrl_c_at_many_moments_of_a_start(moment: float, tmp_path: Path) -> None:
    check_interruption(LISTEN, moment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MANY_MOMENTS[::3])
def test_sigterm_at_many_moments_of_a_start(moment: float, tmp_path: Path) -> None:
    check_interruption(LISTEN, moment, tmp_path, signal.SIGTERM)


@pytest.mark.parametrize("moment", A_FEW_MOMENTS)
def test_ctrl_c_while_a_ping_connects(moment: float, tmp_path: Path, silent_address: str) -> None:
    check_interruption(("ping", "--timeout", "60", silent_address), moment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MANY_MOMENTS[::2])
def test_ctrl_c_at_many_moments_of_a_ping(
    moment: float, tmp_path: Path, silent_address: str
) -> None:
    check_interruption(("ping", "--timeout", "60", silent_address), moment, tmp_path)


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.02])
def test_ctrl_c_while_the_key_is_made_leaves_a_whole_key_or_none(
    moment: float, tmp_path: Path
) -> None:
    with running("id", home=tmp_path) as command:
        command.wait_until_it_handles_signals()
        time.sleep(moment)
        code, _, errors = command.stop()
    assert code in (0, 130)
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] in ([], ["identity.key"])


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_pings(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (_, started):
        words = ("ping", "--json", "--interval", "0.05", "--count", "100000")
        with running(*words, started["addresses"][0], home=tmp_path / "b") as ping:
            assert ping.next_object()["event"] == "connected"
            assert ping.next_object()["event"] == "pong"
            code, seconds, errors = ping.stop()
    assert (code, errors) == (130, "")
    assert seconds < LEAVE_SECONDS
    assert files_of_a_running_node(tmp_path / "b") == []


@pytest.mark.slow
def test_ctrl_c_during_status_watch(tmp_path: Path) -> None:
    with (
        running_node(tmp_path),
        running("status", "--watch", "--json", "--interval", "0.1", home=tmp_path) as watch,
    ):
        watch.next_object()
        code, seconds, errors = watch.stop()
    assert (code, errors) == (130, "")
    assert seconds < LEAVE_SECONDS


@pytest.mark.slow
async def test_ctrl_c_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    """A peer sends data to the node as fast as it takes it, and the node is told to end."""
    chunk = bytes(CHUNK_BYTES)

    async def pour(peer: PeerId, address: str, task_status: trio.TaskStatus[None]) -> None:
        settings = Libp2pSettings(listen_addresses=())
        async with (
            open_libp2p_network(Identity.generate(), settings) as network,
            open_rpc(network) as rpc,
        ):
            network.learn_addresses(peer, [address])
            async with rpc.open_bulk(peer, TAKE, Empty(), timeout=20) as transfer:
                for number in range(10_000):
                    await transfer.send_chunk(chunk)
                    if number == 3:
                        task_status.started()

    async def pour_until_it_breaks(
        peer: PeerId, address: str, task_status: trio.TaskStatus[None]
    ) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - the kind is the transport's to test
            await pour(peer, address, task_status)

    with running_node(tmp_path, program="tests.processes.generous") as (node, started):
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                peer, address = PeerId(started["peer_id"]), started["addresses"][0]
                await nursery.start(pour_until_it_breaks, peer, address)
                code, seconds, errors = await trio.to_thread.run_sync(node.stop)
    assert code == 130
    # what it says at its start, and no more
    assert errors == "" or (errors.startswith("OPEN RUN") and errors.count("\n") == 1)
    assert seconds < LEAVE_SECONDS
    assert files_of_a_running_node(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "running_line", "number"),
    [
        ("simulate dht --nodes 3000", "letting 3000 nodes join", signal.SIGINT),
        ("bench transport --quick --only cpu_s_per_GB", "measuring", signal.SIGTERM),
    ],
)
def test_a_measurement_that_is_stopped_says_so_in_one_sentence(
    words: str, running_line: str, number: signal.Signals, tmp_path: Path
) -> None:
    with running(*words.split(), home=tmp_path) as command:
        command.wait_until_it_says(running_line)
        code, seconds, errors = command.stop(number)
    assert code == 128 + number
    assert errors == "Stopped before the end: nothing is measured.\n"
    assert seconds < LEAVE_SECONDS


@pytest.mark.slow
def test_a_simulated_run_that_is_stopped_tells_what_it_has_measured(tmp_path: Path) -> None:
    words = ("simulate", "run", "--peers", "4", "--steps", "100000")
    with running(*words, home=tmp_path) as command:
        command.wait_until_it_says("100000 steps")
        command.process.send_signal(signal.SIGTERM)
        figures, errors = command.process.communicate(timeout=PATIENCE_SECONDS)
    assert command.process.returncode == 143
    assert errors.decode().startswith("Stopped after ")
    assert errors.count(b"\n") == 1
    assert re.search(rb"^variants_max +1$", figures, re.MULTILINE)


@pytest.mark.slow
def test_a_simulated_run_that_is_stopped_before_its_first_step_says_so(tmp_path: Path) -> None:
    with running("simulate", "run", "--peers", "200", home=tmp_path) as command:
        command.wait_until_it_says("200 peers join")
        code, _, errors = command.stop(signal.SIGINT)
    assert (code, errors) == (130, "Stopped before the end: nothing is measured.\n")
