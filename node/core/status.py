"""The state of a running node: the answer to `potluck status`.

Plain data, collected in one place from all parts, so that this module defines the JSON of `status
--json`. Every field has a default, because a newer command must be able to show the status of an
older node. Fields are only ever added.

Times inside the node are on trio's clock, which means nothing outside. A time here is either a
duration until now or wall-clock time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from nat.connectivity import Connectivity, ReachMode
from nat.relaying import Relay
from node.core.caps.used import CapsUsed
from node.core.relay_month import RelayMonth
from node.core.training_view import TrainerView
from protocols.dht import Dht
from protocols.network import LinkFacts


class LinkStatus(msgspec.Struct, frozen=True):
    """One link. None means not measured yet."""

    peer: str = ""
    reach: str = "none"  # direct, punched, relayed or none
    direction: str = "out"
    address: str = ""
    connected_seconds: float = 0.0
    round_trip_ms: float | None = None
    send_bytes_per_second: float | None = None
    receive_bytes_per_second: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    streams: int = 0


class DirectoryStatus(msgspec.Struct, frozen=True):
    """A summary of the directory; `potluck dht stats` has the rest."""

    joined: str = ""  # alone, trying or joined
    join_addresses: int = 0  # how many bootstrap addresses there are
    cannot_join: dict[str, str] = {}  # those of them that do not answer, with the reason
    peers_known: int = 0
    slots_stored: int = 0
    bytes_stored: int = 0
    slots_published: int = 0
    clock_offset_ms: int = 0


class MembershipStatus(msgspec.Struct, frozen=True):
    """Whether the run is open, and this node's own membership in a closed one."""

    open: bool = True  # everybody with a key may take part; there is no auth server
    run: str = ""
    username: str = ""
    roles: tuple[str, ...] = ()
    standing: str = ""  # valid, grace (expired while the auth server is away) or over
    expires_in_seconds: float = 0.0  # negative once expired
    grace_seconds: float = 0.0  # how long an expired token is accepted while the server is away
    renewed_in_seconds: float = 0.0
    trouble: str = ""  # why the last request to the auth server failed
    clock_offset_ms: int = 0  # server time less this machine's clock
    clock_measured: bool = False  # False: the offset is that of the last run of this node
    auth_url: str = ""
    fingerprint: str = ""
    revocations: int = 0  # the number of the newest known revocation list


class AddressStatus(msgspec.Struct, frozen=True):
    """One address of this node as others see it."""

    address: str = ""
    verdict: str = "unknown"  # public, private or unknown
    mapped: bool = False  # the router forwards it to us


class ConnectivityStatus(msgspec.Struct, frozen=True):
    """How others reach this node."""

    mode: str = ""  # direct, mapped, punched, relayed, dial-out only, or not known yet
    router: str = ""  # its kind, in words
    outside: str = ""  # the IP address that others see
    addresses: tuple[AddressStatus, ...] = ()
    relays: tuple[str, ...] = ()  # the peers that relay for this node
    trouble: str = ""  # why there is no relay, if one is needed
    dial_backs: dict[str, int] = {}  # addresses of others that were dialled, by outcome
    punches: dict[str, int] = {}  # attempts at a direct link in place of a relayed one, by outcome


class RelayStatus(msgspec.Struct, frozen=True):
    """What this node relays for others."""

    reservations: int = 0
    circuits: int = 0
    carried_bytes: int = 0
    circuits_made: int = 0
    refusals: dict[str, int] = {}
    most_reservations: int = 0
    most_circuits: int = 0
    month: str = ""
    month_bytes: int = 0  # relayed in this month, also before a restart
    month_limit: int | None = None

    @property
    def month_left(self) -> int | None:
        """None if there is no limit."""
        return None if self.month_limit is None else max(0, self.month_limit - self.month_bytes)


class NodeStatus(msgspec.Struct, frozen=True):
    """One node at one moment."""

    peer_id: str = ""
    version: str = ""
    pid: int = 0
    started_at: float = 0.0  # seconds since 1970, by this machine's clock
    uptime_seconds: float = 0.0
    addresses: tuple[str, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    rpc: dict[str, int] = {}
    directory: DirectoryStatus = DirectoryStatus()
    membership: MembershipStatus = MembershipStatus()
    connectivity: ConnectivityStatus = ConnectivityStatus()
    relay: RelayStatus | None = None  # None in a node that does not relay
    memory_bytes: int | None = None
    config_file: str | None = None
    key_file: str = ""
    warnings: tuple[str, ...] = ()
    training: TrainerView | None = None  # None in a node that does not train
    caps: CapsUsed | None = None  # None in a node that does not train


def link_status(link: LinkFacts, now: float) -> LinkStatus:
    """A link as it is shown; `now` is `trio.current_time()`."""
    round_trip = link.round_trip_seconds
    return LinkStatus(
        peer=link.peer,
        reach=link.way,
        direction="in" if link.inbound else "out",
        address=link.remote_address,
        connected_seconds=round(max(0.0, now - link.connected_at), 3),
        round_trip_ms=None if round_trip is None else round(round_trip * 1000, 3),
        send_bytes_per_second=_whole(link.send_bytes_per_second),
        receive_bytes_per_second=_whole(link.receive_bytes_per_second),
        bytes_sent=link.bytes_sent,
        bytes_received=link.bytes_received,
        streams=link.open_streams,
    )


def link_statuses(links: Iterable[LinkFacts], now: float) -> tuple[LinkStatus, ...]:
    """All links, the longest-lived first, so that a list on a screen stays in order."""
    by_age = sorted(links, key=lambda link: link.connected_at)
    return tuple(link_status(link, now) for link in by_age)


def connectivity_status(connectivity: Connectivity) -> ConnectivityStatus:
    """How others reach this node, as `potluck status` shows it."""
    relays = tuple(one.relay for one in connectivity.reservations.held)
    needs_relay = not (connectivity.mode.is_dialable or connectivity.mode is ReachMode.UNKNOWN)
    return ConnectivityStatus(
        mode=connectivity.mode.value,
        router=connectivity.nat.words,
        outside=connectivity.outside_host,
        addresses=tuple(
            AddressStatus(one.address, one.verdict.value, one.mapped)
            for one in connectivity.addresses()
        ),
        relays=relays,
        trouble=connectivity.reservations.why_none() if needs_relay and not relays else "",
        dial_backs=dict(connectivity.judge.outcomes),
        punches={one.value: count for one, count in connectivity.puncher.attempts.items()},
    )


def relay_status(relay: Relay, month: RelayMonth) -> RelayStatus:
    """What this node relays, as `potluck status` and the metrics show it."""
    counts = relay.counts()
    refusals = {refusal.value: count for refusal, count in relay.refusals.items()}
    limits = relay.limits
    return RelayStatus(
        counts.reservations,
        counts.circuits,
        counts.carried_bytes,
        counts.connected,
        refusals,
        most_reservations=limits.reservations,
        most_circuits=limits.circuits,
        month=month.month,
        month_bytes=month.used_bytes,
        month_limit=limits.month_bytes or None,
    )


def directory_status(dht: Dht) -> DirectoryStatus:
    """The directory as `potluck status` shows it."""
    joining = dht.bootstrap_state()
    statistics = dht.statistics()
    return DirectoryStatus(
        joined=joining.joined.value,
        join_addresses=len(joining.addresses),
        cannot_join={one.address: one.failure for one in joining.addresses if one.failure},
        peers_known=statistics.peers_in_table,
        slots_stored=statistics.slots_stored,
        bytes_stored=statistics.bytes_stored,
        slots_published=statistics.slots_published,
        clock_offset_ms=statistics.clock_offset_ms,
    )


def memory_in_use() -> int | None:
    """The memory of this process in bytes.

    None if the system does not tell, or if there is no descriptor left to read it with.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _whole(rate: float | None) -> float | None:
    return None if rate is None else round(rate)
