"""What a simulated world and its nodes can be told to be like."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.simulation.link_model import LinkSettings

MEBIBYTE = 1_048_576


@dataclass(frozen=True)
class WorldSettings:
    """How the network as a whole behaves.

    `link`: the path between two nodes for which `set_path` says nothing else.
    `window_bytes`: how much may be under way on one stream, unread, before its sender waits.
    Throughput of one stream is at most this per round trip, as with any window.
    `connect_round_trips`: TCP, Noise, the muxer and two negotiations, as py-libp2p does them.
    `open_round_trips`: the protocol negotiation of a new stream; a first request is one more.
    `dial_timeout_seconds`: an address that answers nothing is given up after this.
    `dial_head_start_seconds`: each further address is tried this much after the one before.
    `silence_seconds`: a link through which nothing gets is given up after this (keep-alive).
    `started_at`: what an honest clock shows at the start, in seconds since 1970.
    """

    link: LinkSettings = field(default_factory=LinkSettings)
    window_bytes: int = MEBIBYTE
    connect_round_trips: int = 5
    open_round_trips: int = 2
    dial_timeout_seconds: float = 5.0
    dial_head_start_seconds: float = 0.25
    silence_seconds: float = 15.0
    started_at: float = 1_767_225_600.0  # 2026-01-01, so that tokens and expiries look real


@dataclass(frozen=True)
class NodeSettings:
    """One node's machine and home connection.

    `upload_bytes_per_second`, `download_bytes_per_second`: shared by all its links; None is
    without limit. A node that reads slowly is one with a slow download.
    `clock_skew_seconds`: how far its clock is ahead of the honest one.
    `dialable`: False for a node behind a NAT that lets nothing unsolicited in.
    `inbound_links`: more than this many links opened by others are refused.
    `inbound_streams_per_link`: a peer that opens more than this many at once gets a reset.
    """

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    clock_skew_seconds: float = 0.0
    dialable: bool = True
    inbound_links: int = 4096
    inbound_streams_per_link: int = 1024
