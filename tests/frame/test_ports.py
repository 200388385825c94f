"""A server can come back at its port: other tests rely on this."""

from __future__ import annotations

import socket
import sys

import pytest
import trio

from tests.ports import LOOPBACK, held_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux only")


def test_a_held_port_refuses_connections_and_other_servers() -> None:
    with held_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port))
        with socket.socket() as passer_by, pytest.raises(OSError, match="in use"):
            passer_by.bind((LOOPBACK, port))


async def test_servers_listen_at_a_held_port_one_after_the_other() -> None:
    with held_port() as port:
        for _ in range(2):
            (server,) = await trio.open_tcp_listeners(port, host=LOOPBACK)
            async with server, await trio.open_tcp_stream(LOOPBACK, port) as client:
                stream = await server.accept()
                await stream.send_all(b"x")
                assert await client.receive_some(1) == b"x"
                await stream.aclose()  # first: its end is what lingers
