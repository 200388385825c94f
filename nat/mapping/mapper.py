"""The task that keeps a port of this node mapped at the router: the lease's decisions, carried out.

A search looks for all three protocols at once, and then asks for the mapping in one after the
other, the preferred one first, until one grants it. So a router that speaks several never has two
mappings of ours: with many routers they would be one, and releasing the one would end the other.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import trio

from nat.mapping import nat_pmp, pcp
from nat.mapping.datagrams import LARGEST_DATAGRAM_BYTES, udp_socket
from nat.mapping.gateway import default_gateway
from nat.mapping.lease import Grant, Lease, Mapping, MappingFailed, MappingProtocol
from nat.mapping.nat_pmp import NatPmp
from nat.mapping.pcp import NONCE_BYTES, Pcp
from nat.mapping.upnp import Upnp

log = logging.getLogger(__name__)

PORT_CONTROL_PORT: Final = 5351
SSDP_PORT: Final = 1900
ANNOUNCEMENT_PORT: Final = 5350

# A search ends after that. Without an answer it takes 2 s (PCP, while the others look) and 1 s
# (UPnP); the rest is for routers that take their time in UPnP, up to 3 s for each request.
SEARCH_SECONDS: Final = 20.0

# A node leaves within five seconds, and this is one of the things that it does then. A router
# answers in a fraction of it; if one does not, the mapping ends with its life.
RELEASE_SECONDS: Final = 1.5

# The same, if no router ever granted anything: it may have the request, or hears nothing at all.
UNHEARD_RELEASE_SECONDS: Final = 0.3

# What is released at the end, if the router was searched again in the meantime: the last protocols.
MOST_REMEMBERED: Final = 9


@dataclass(frozen=True)
class Router:
    """Where a router is asked. The ports are those of the standards; tests have others."""

    host: str
    port_control_port: int = PORT_CONTROL_PORT
    ssdp_port: int = SSDP_PORT


async def default_router() -> Router | None:
    """The default gateway of this machine."""
    host = await default_gateway()
    return Router(host) if host is not None else None


class _Client(Protocol):
    """One protocol with one router, for one of our ports. What fails raises MappingFailed."""

    @property
    def protocol(self) -> MappingProtocol: ...

    @property
    def may_hold(self) -> bool: ...

    async def look(self) -> None: ...

    async def map(self, external_port: int) -> Grant: ...

    async def unmap(self) -> None: ...


class PortMapper:
    """Keeps a TCP port of this node mapped at the router, from `run` until `run` is cancelled.

        mapper = PortMapper(port, on_change)
        nursery.start_soon(mapper.run)

    `on_change` is called in trio's thread with each new mapping, and with None when one is lost.
    It is not called when only the life of a mapping changed, nor when `run` ends. It must not
    block; an error that it raises ends `run`.

    A mapping is a claim of the router. Whether it lets anybody in is seen only from outside, and
    not at all if it is not `is_public`.
    """

    def __init__(
        self,
        port: int,
        on_change: Callable[[Mapping | None], None],
        *,
        find_router: Callable[[], Awaitable[Router | None]] = default_router,
        announcement_port: int = ANNOUNCEMENT_PORT,
    ) -> None:
        if not 0 < port < 65536:
            raise ValueError(f"{port} is no port")
        self._port = port
        self._on_change = on_change
        self._find_router = find_router
        self._announcement_port = announcement_port
        self._lease: Lease | None = None
        self._told: Mapping | None = None
        self._trouble = "the router has not been asked yet"
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._router: Router | None = None
        self._client: _Client | None = None  # the one that the mapping is from
        self._asked: list[_Client] = []  # all that may have made a mapping, the newest last
        self._external_port = port
        self._wake = trio.Event()

    @property
    def mapping(self) -> Mapping | None:
        """The mapping as it is now."""
        return self._lease.mapping if self._lease is not None else None

    @property
    def trouble(self) -> str:
        """Why there is no mapping, or why it is of no use; empty if all is well. For a person."""
        mapping = self.mapping
        if mapping is None:
            return self._trouble
        if not mapping.is_public:
            return (
                f"the router's own address, {mapping.external_host}, is not one of the internet: "
                "it is behind another router, or behind the provider's"
            )
        return ""

    def network_changed(self) -> None:
        """Tell that this machine is in another network, or has slept: the router is asked anew.

        What the old router holds ends with its life. Another router often has the same address, and
        must not be told to delete what it never made for us.
        """
        if self._lease is not None:
            self._asked.clear()
            self._client = None
            self._lease.network_changed(trio.current_time())
            self._wake.set()

    async def run(self) -> NoReturn:
        """Keep the port mapped until cancelled; then release the mapping.

        Releasing is shielded from cancellation, and takes `RELEASE_SECONDS` at most. No thread is
        used, and nothing goes on after the end.
        """
        lease = self._lease = Lease(trio.current_time())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, lease)
                while True:
                    await self._wait_until_due(lease)
                    await self._ask(lease)
                    self._tell(lease)
        finally:
            seconds = UNHEARD_RELEASE_SECONDS if self._client is None else RELEASE_SECONDS
            with trio.CancelScope(shield=True), trio.move_on_after(seconds):
                await self._release()

    # -- asking ----------------------------------------------------------------------------

    async def _wait_until_due(self, lease: Lease) -> None:
        while True:
            self._wake = trio.Event()
            lease.tick(trio.current_time())
            self._tell(lease)
            if trio.current_time() >= lease.due:
                return
            with trio.move_on_at(lease.next_deadline):
                await self._wake.wait()

    async def _ask(self, lease: Lease) -> None:
        """Renew, or else search; the lease hears how it went."""
        lease.asked(trio.current_time())
        try:
            with trio.fail_after(SEARCH_SECONDS):
                grant = await self._renewed(lease) or await self._search()
        except MappingFailed as failure:
            self._note_trouble(str(failure), silent=failure.silent)
            lease.failed(trio.current_time())
        except trio.TooSlowError:
            self._note_trouble("the router takes too long")
            lease.failed(trio.current_time())
        else:
            self._external_port = grant.mapping.external_port
            lease.granted(grant, trio.current_time())

    async def _renewed(self, lease: Lease) -> Grant | None:
        if lease.mapping is None or self._client is None:
            return None
        try:
            return await self._client.map(self._external_port)
        except MappingFailed as failure:
            log.debug("%s no longer renews: %s", self._client.protocol.value, failure)
            return None

    async def _search(self) -> Grant:
        """A mapping in the first protocol, in order of preference, in which one is granted."""
        self._router = router = await self._find_router()
        if router is None:
            raise MappingFailed("this machine has no router", silent=True)
        looks = [_Look(client) for client in self._clients_of(router)]
        async with trio.open_nursery() as nursery:
            for look in looks:
                nursery.start_soon(look.run)
            for look in looks:
                await look.done.wait()
                if look.failure is not None:
                    continue
                self._remember(look.client)
                try:
                    grant = await look.client.map(self._external_port)
                except MappingFailed as failure:
                    look.failure = failure
                else:
                    self._client = look.client
                    nursery.cancel_scope.cancel()
                    return grant
        raise _summary(looks)

    def _clients_of(self, router: Router) -> tuple[_Client, ...]:
        control = (router.host, router.port_control_port, self._port)
        return (
            Pcp(*control, self._nonce),
            NatPmp(*control),
            Upnp(router.host, router.ssdp_port, self._port),
        )

    def _remember(self, client: _Client) -> None:
        self._asked = [*(one for one in self._asked if one.may_hold), client][-MOST_REMEMBERED:]

    # -- telling ---------------------------------------------------------------------------

    def _tell(self, lease: Lease) -> None:
        mapping = lease.mapping
        if mapping is None and self._told is None:
            return
        if mapping is not None and mapping.leads_where(self._told):
            return
        self._told = mapping
        if mapping is None:
            self._note_trouble("the router's mapping was lost")
        else:
            place = f"{mapping.external_host}, port {mapping.external_port}"
            log.info("the router forwards %s to us (%s)", place, mapping.protocol.value)
            if self.trouble:
                log.info("nobody gets to us that way: %s", self.trouble)
        self._on_change(mapping)

    def _note_trouble(self, trouble: str, *, silent: bool = False) -> None:
        """Log it once: a router that refuses is asked for days. One that is silent is no news."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.log(logging.DEBUG if silent else logging.INFO, "no port is mapped: %s", trouble)

    # -- announcements ---------------------------------------------------------------------

    async def _listen(self, lease: Lease) -> None:
        """Hear routers announce that they have restarted.

        RFC 6886, 3.2.1 and RFC 6887, 14.1: by multicast to 224.0.0.1, which every machine receives.
        """
        try:
            with udp_socket() as link:
                link.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
                if sys.platform == "darwin":  # where several nodes need it to hear the same
                    link.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEPORT, 1)
                await link.bind(("", self._announcement_port))
                while True:
                    data, source = await link.recvfrom(LARGEST_DATAGRAM_BYTES)
                    if self._router is not None and source[0] == self._router.host:
                        self._hear(lease, data)
        except OSError as error:
            log.debug("restarts of the router are noticed late from now on: %s", error)

    def _hear(self, lease: Lease, data: bytes) -> None:
        now = trio.current_time()
        if (epoch := pcp.announced_epoch(data)) is not None:
            lease.epoch_announced(MappingProtocol.PCP, epoch, now)
        elif (epoch := nat_pmp.announced_epoch(data)) is not None:
            lease.epoch_announced(MappingProtocol.NAT_PMP, epoch, now)
        self._wake.set()

    # -- releasing -------------------------------------------------------------------------

    async def _release(self) -> None:
        async with trio.open_nursery() as nursery:
            for client in self._asked:
                if client.may_hold:
                    nursery.start_soon(_release_one, client)


async def _release_one(client: _Client) -> None:
    try:
        await client.unmap()
    except MappingFailed as failure:
        log.debug("%s: the mapping was not released: %s", client.protocol.value, failure)


class _Look:
    """One protocol's look for the router, in a task of its own."""

    def __init__(self, client: _Client) -> None:
        self.client = client
        self.failure: MappingFailed | None = None
        self.done = trio.Event()

    async def run(self) -> None:
        try:
            await self.client.look()
        except MappingFailed as failure:
            self.failure = failure
        self.done.set()


def _summary(looks: list[_Look]) -> MappingFailed:
    """Why there is no mapping, in one sentence: silence counts only if there is nothing else."""
    failures = [(look.client.protocol, look.failure) for look in looks if look.failure is not None]
    spoken = [(protocol, failure) for protocol, failure in failures if not failure.silent]
    if not spoken:
        return MappingFailed("the router answers in no protocol for mapping ports", silent=True)
    reasons = "; ".join(f"{failure} ({protocol.value})" for protocol, failure in spoken)
    return MappingFailed(reasons)
