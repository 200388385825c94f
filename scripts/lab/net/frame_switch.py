"""The internet, as a program: a switch that delays frames. The kernel's netem is not everywhere.

    python frame_switch.py DELAY_SECONDS

It runs in a namespace of its own and reads orders from its standard input, one a line: `attach
INTERFACE` and `detach INTERFACE`. Each is answered by a line on its standard output. It ends with
its standard input.

A frame that arrives at one interface leaves at another after the delay: at the one where its
destination was last seen, or at all of them if that is not known. Every frame waits equally long,
so they leave in the order in which they came. ARP and neighbour discovery do not wait: on the real
internet no question of that kind goes further than to the next router.

The kernel hands over what it has not cut into packets yet, and has computed no checksum for. With
PACKET_VNET_HDR a header says so, and goes back to the kernel unchanged with the frame. So a system
call carries up to 64 KiB, and Python is fast enough.

The file imports nothing of ours, so that it starts in hundredths of a second.
"""

from __future__ import annotations

import gc
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3  # linux/if_ether.h
SOL_PACKET = 263  # linux/socket.h
PACKET_VNET_HDR = 15  # linux/if_packet.h
PACKET_IGNORE_OUTGOING = 23  # since Linux 4.20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h

HEADER = 10  # struct virtio_net_hdr; the frame begins behind it
LARGEST_FRAME_BYTES = HEADER + 14 + 65536
BUFFER_BYTES = 64 * 1024 * 1024  # a frame that waits for a processor is not lost
MOST_UNDERWAY_BYTES = 128 * 1024 * 1024  # 4 GB/s at 30 ms; past it frames are dropped
BATCH = 64  # frames read from one interface before those that are due are sent

ARP = b"\x08\x06"
IPV6 = b"\x86\xdd"
ICMPV6 = 58
NEIGHBOUR_DISCOVERY = range(133, 138)  # types of ICMPv6


class FrameSwitch:
    """Carries frames between its interfaces.

    `underway_bytes` is the size of all that is in `_underway`, which is sorted by time.
    """

    def __init__(self, delay_seconds: float) -> None:
        self._delay = delay_seconds
        self._interfaces: dict[str, socket.socket] = {}
        self._where: dict[bytes, socket.socket] = {}  # by hardware address
        self._underway: deque[tuple[float, socket.socket, bytes]] = deque()
        self._underway_bytes = 0

    def attach(self, name: str) -> None:
        """Carry the frames of that interface from now on."""
        if name in self._interfaces:
            return
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        raw.setblocking(False)
        raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        raw.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
        raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        raw.bind((name, ETH_P_ALL))
        self._interfaces[name] = raw

    def detach(self, name: str) -> None:
        """Neither take nor deliver frames there, from now on."""
        raw = self._interfaces.pop(name, None)
        if raw is not None:
            self._where = {to: at for to, at in self._where.items() if at is not raw}
            raw.close()  # frames that are underway to it fail to be sent

    def run(self, orders: int) -> None:
        """Carry frames and obey orders until there is an end of them."""
        while True:
            inputs: list[int | socket.socket] = [orders, *self._interfaces.values()]
            readable, _, _ = select.select(inputs, [], [], self._until_next())
            for one in readable:
                if isinstance(one, int):
                    order = sys.stdin.readline()  # the next comes after our answer
                    if not order:
                        return
                    self._obey(order)
                elif one.fileno() >= 0:  # an order may have closed it just now
                    self._take_from(one)
            self._deliver()

    def _obey(self, line: str) -> None:
        order, name = line.split()
        try:
            (self.attach if order == "attach" else self.detach)(name)
        except OSError as error:
            print(f"{name}: {error}", flush=True)
        else:
            print("done", flush=True)

    def _until_next(self) -> float | None:
        if not self._underway:
            return None
        return max(0.0, self._underway[0][0] - time.monotonic())

    def _take_from(self, source: socket.socket) -> None:
        where, underway = self._where, self._underway
        due = time.monotonic() + self._delay
        for _ in range(BATCH):
            try:
                frame = source.recv(LARGEST_FRAME_BYTES)
            except OSError:  # there is none; or the interface is down, and will come up again
                return
            to, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            where[sender] = source
            sink = where.get(to)
            sinks = [sink] if sink is not None else list(self._interfaces.values())
            now = not self._delay or is_about_neighbours(frame)
            for sink in sinks:
                if sink is source:
                    continue
                if now:
                    send(sink, frame)
                elif self._underway_bytes < MOST_UNDERWAY_BYTES:
                    underway.append((due, sink, frame))
                    self._underway_bytes += len(frame)

    def _deliver(self) -> None:
        underway = self._underway
        now = time.monotonic()
        while underway and underway[0][0] <= now:
            _, sink, frame = underway.popleft()
            self._underway_bytes -= len(frame)
            send(sink, frame)


def is_about_neighbours(frame: bytes) -> bool:
    """Whether it asks or says which hardware has an address."""
    kind = frame[HEADER + 12 : HEADER + 14]
    if kind == ARP:
        return True
    inner = HEADER + 14
    return (
        kind == IPV6
        and len(frame) > inner + 40
        and frame[inner + 6] == ICMPV6
        and frame[inner + 40] in NEIGHBOUR_DISCOVERY
    )


def send(sink: socket.socket, frame: bytes) -> None:
    """Put a frame on an interface. Like a real one, it loses what it cannot take."""
    try:  # noqa: SIM105 - contextlib.suppress would cost a fifth of the program's time
        sink.send(frame)
    except OSError:
        pass


def main() -> None:
    gc.disable()  # there are no cycles, and a collection would delay frames
    FrameSwitch(float(sys.argv[1])).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
