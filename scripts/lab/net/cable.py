"""A cable: two interfaces that are joined, with a rate in each direction.

Its near end is in a machine or a router, its far end in an `Outlet`: the network of a home, or the
internet.
"""

from __future__ import annotations

from typing import Protocol

from lab.net.namespace import Namespace

LONGEST_WAIT_SECONDS = 0.1  # in the queue before a slow link: home routers buffer about that much
SMALLEST_QUEUE_BYTES = 64 * 1024
BURST_SECONDS = 0.002  # what may pass at once after a pause; short, so that a rate is one
SMALLEST_BURST_BYTES = 10 * 1514  # ten full frames


class Outlet(Protocol):
    """Where cables are plugged in. All that is plugged in and connected is one segment."""

    namespace: Namespace

    def new_interface(self) -> str:
        """A name for the far end of one more cable."""

    def connect(self, interface: str) -> None:
        """Carry frames of that cable."""

    def disconnect(self, interface: str) -> None:
        """Lose all frames of that cable. The link of the near end stays up."""


class Cable:
    """From the interface `near` to an outlet. It is up when it is made.

    `upload` and `download` are bits per second out of and into the near end; None is no limit.
    """

    def __init__(
        self,
        namespace: Namespace,
        near: str,
        outlet: Outlet,
        upload: float | None = None,
        download: float | None = None,
    ) -> None:
        self._namespace, self._near, self._outlet = namespace, near, outlet
        self._far = outlet.new_interface()
        namespace.ip(
            f"link add {near} type veth peer name {self._far} netns {outlet.namespace.name}",
            f"link set {near} up",
        )
        outlet.namespace.ip(f"link set {self._far} up")
        outlet.connect(self._far)
        if upload is not None:
            namespace.tc(_shaping(near, upload))
        if download is not None:
            outlet.namespace.tc(_shaping(self._far, download))

    def pull(self) -> None:
        """Take it out of the outlet: the near end loses its link, and keeps its addresses."""
        self._outlet.namespace.ip(f"link set {self._far} down")

    def plug_in(self) -> None:
        self._outlet.namespace.ip(f"link set {self._far} up")

    def lose(self) -> None:
        """Lose everything from now on, in silence."""
        self._outlet.disconnect(self._far)

    def carry(self) -> None:
        """Lose nothing any more."""
        self._outlet.connect(self._far)

    def remove(self) -> None:
        self._outlet.disconnect(self._far)
        self._namespace.ip(f"link delete {self._near}")


def _shaping(interface: str, bits_per_second: float) -> str:
    bytes_per_second = bits_per_second / 8
    burst = max(SMALLEST_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
    queue = max(SMALLEST_QUEUE_BYTES, round(bytes_per_second * LONGEST_WAIT_SECONDS))
    rate = f"rate {round(bits_per_second)}bit burst {burst} limit {queue}"
    return f"qdisc add dev {interface} root tbf {rate}"
