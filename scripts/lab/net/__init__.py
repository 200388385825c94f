"""The network lab: homes behind routers of every kind, on an internet of their own.

A laboratory is made of Linux network namespaces, and takes root. Real programs and sockets run in
it, over a real kernel, and see the addresses, delays, rates and troubles of homes:

    with NetworkLab(round_trip_seconds=0.06) as lab:
        relay = lab.host("relay")
        left = lab.home("left", RouterKind.PORT_RESTRICTED, upload_bits_per_second=5e6)
        process = left.popen(["potluck", "join", ...])
        left.router.change_address()

It is removed when the block is left, and when its owner is killed.
"""

from lab.bench.own_network import NetworkCommandFailed, NoOwnNetwork
from lab.net.addresses import AddressFamilies
from lab.net.machine import Machine
from lab.net.namespace import missing_for_lab
from lab.net.network_lab import NetworkLab
from lab.net.router import HomeRouter
from lab.net.rules import RouterKind

__all__ = [
    "AddressFamilies",
    "HomeRouter",
    "Machine",
    "NetworkCommandFailed",
    "NetworkLab",
    "NoOwnNetwork",
    "RouterKind",
    "missing_for_lab",
]
