"""What this machine carries through a plain TCP socket: the limit that no transport passes.

One way, megabyte by megabyte, into one buffer that is used again; no encryption, no framing.
"""

from __future__ import annotations

import socket
import time

CHUNK_BYTES = 1 << 20
PATIENCE_SECONDS = 30.0  # so that neither end outlives a bench that was killed


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE_SECONDS)
    return listener


def receive_all(listener: socket.socket) -> tuple[int, float]:
    """How many bytes one client sent, and when the last of them was here."""
    with listener, listener.accept()[0] as connection:
        connection.settimeout(PATIENCE_SECONDS)
        buffer = bytearray(CHUNK_BYTES)
        total = 0
        while received := connection.recv_into(buffer):
            total += received
    return total, time.monotonic()


def send_all(port: int, block: list[bytes], chunks: int) -> float:
    """Send so many chunks; when it began."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        began = time.monotonic()
        for number in range(chunks):
            connection.sendall(block[number % len(block)])
    return began
