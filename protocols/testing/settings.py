"""The settings of a simulated world and of its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from nat.kinds import Nat
from protocols.testing.link_model import LinkSettings

MEBIBYTE = 1_048_576


@dataclass(frozen=True)
class WorldSettings:
    """The behaviour of the network as a whole.

    `link`: the path between two nodes, unless `set_path` gave them another.
    `window_bytes`: how much may be unread on one stream before its sender waits. One stream
    carries at most this per round trip, as with any window.
    `packet_bytes`: the bytes of a stream are read in packets of up to this size, each when all of
    it is here, as if they were encrypted; on a slow link that takes seconds. None: as they arrive.
    `connect_round_trips`: TCP, Noise, the muxer and two negotiations, as in py-libp2p.
    `open_round_trips`: the protocol negotiation of a new stream; a first request is one more.
    `dial_timeout_seconds`: the timeout of a dial to an address that does not answer.
    `dial_head_start_seconds`: the time between the dials to one address and to the next.
    `silence_seconds`: after this a link that carries nothing is given up (keep-alive).
    `started_at`: the time of a correct clock at the start, in seconds since 1970.
    """

    link: LinkSettings = field(default_factory=LinkSettings)
    window_bytes: int = MEBIBYTE
    packet_bytes: int | None = None
    connect_round_trips: int = 5
    open_round_trips: int = 2
    dial_timeout_seconds: float = 5.0
    dial_head_start_seconds: float = 0.25
    silence_seconds: float = 15.0
    started_at: float = 1_767_225_600.0  # 2026-01-01, so that tokens and expiries look real


@dataclass(frozen=True)
class NodeSettings:
    """One node's machine and home connection.

    `upload_bytes_per_second`, `download_bytes_per_second`: shared by all its links; None: no
    limit. To make a node read slowly, give it a slow download.
    `clock_skew_seconds`: how far its clock is ahead of a correct one.
    `dialable`: False for a node behind a NAT that accepts nothing unsolicited.
    `nat`: the kind of its router, for `nat/`; all but NONE accept nothing unsolicited either.
    `inbound_links`: it refuses links of others beyond this number.
    `inbound_streams_per_link`: a peer that opens more than this many at once gets a reset.
    """

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    clock_skew_seconds: float = 0.0
    dialable: bool = True
    nat: Nat = Nat.NONE
    inbound_links: int = 4096
    inbound_streams_per_link: int = 1024
