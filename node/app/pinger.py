"""The work of `potluck ping`: connect, measure, and sum up.

The first call to a peer also opens its stream, which is three round trips. So one call is made
before measuring starts, and not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from nat.connectivity import answering_punches
from node.app.cli.exit_codes import DONE, UNREACHABLE
from node.app.cli.output import Output
from node.core.access.membership import Membership
from node.core.access.one_shot import renew_if_over
from node.core.peer_address import PeerAddress
from node.net import Libp2pSettings, open_libp2p_network
from protocols.errors import DeadlineExceeded, PotluckError, ProtocolNotServed, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import LinkFacts, Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import PING, Rpc, open_rpc
from protocols.rpc import ping as ping_once

EVERYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
LINK_PING = "the link's own ping"

Measure = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class PingPlan:
    """How many, how often, and how long to wait for the connection and for each answer."""

    count: int
    interval_seconds: float
    timeout_seconds: float


async def ping(
    identity: Identity,
    target: PeerAddress,
    pings: PingPlan,
    output: Output,
    member: Membership | None = None,
) -> int:
    """Ping as planned, and print each answer and a summary. Returns the exit code."""
    if member is not None:
        await renew_if_over(member)
    settings = Libp2pSettings(
        # a hole leads to the port that this node listens on
        listen_addresses=EVERYWHERE if target.relayed else (),
        dial_seconds=pings.timeout_seconds,
        handshake_seconds=pings.timeout_seconds,
    )
    async with (
        open_libp2p_network(identity, settings) as network,
        open_rpc(network, member.guard(network) if member else None) as rpc,
        answering_punches(network),
    ):
        network.learn_addresses(target.peer, [target.text])
        started = trio.current_time()
        link = await _connect(network, target, pings.timeout_seconds)
        connect_ms = (trio.current_time() - started) * 1000
        measure, through = await _way_to_measure(
            network, rpc, target.peer, pings.timeout_seconds, is_member=member is not None
        )
        _tell_connected(link, connect_ms, through, output)
        times = await _measure_all(network, target.peer, measure, pings, output)
        _tell_summary(target.peer, pings.count, times, output)
    return DONE if times else UNREACHABLE


async def _connect(network: Network, target: PeerAddress, seconds: float) -> LinkFacts:
    try:
        # the network gives up in time, with reasons; twice that is for a call that hangs
        with trio.fail_after(2 * seconds):
            return await network.connect(target.peer)
    except trio.TooSlowError:
        raise Unreachable(
            f"{target.peer} did not answer within {2 * seconds:g} seconds.",
            why=f"{target.text} was tried.",
            advice="Check that the node is running, and that no firewall is in between.",
        ) from None


async def _way_to_measure(
    network: Network, rpc: Rpc, peer: PeerId, seconds: float, *, is_member: bool
) -> tuple[Measure, str]:
    """Potluck's echo if the peer serves it, otherwise the link's own ping.

    The link's ping is also used if the peer serves its run's members only, and we are none. A
    member that is refused gets the error.
    """

    async def through_rpc() -> float:
        return await ping_once(rpc, peer, timeout=seconds)

    async def through_link() -> float:
        try:
            with trio.fail_after(seconds):
                return await network.ping(peer)
        except trio.TooSlowError:
            raise DeadlineExceeded(f"No answer within {seconds:g} seconds.") from None

    try:
        await through_rpc()
    except ProtocolNotServed:
        return through_link, LINK_PING
    except NotAllowed:
        if is_member:
            raise
        return through_link, LINK_PING
    except DeadlineExceeded:
        pass  # a slow start: the pings will show it
    return through_rpc, PING


async def _measure_all(
    network: Network, peer: PeerId, measure: Measure, pings: PingPlan, output: Output
) -> list[float]:
    times: list[float] = []
    next_at = trio.current_time()
    for sequence in range(1, pings.count + 1):
        await trio.sleep_until(next_at)
        next_at = max(next_at + pings.interval_seconds, trio.current_time())
        try:
            seconds = await measure()
        except PotluckError as error:
            _tell_lost(sequence, error, output)
        else:
            times.append(seconds * 1000)
            _tell_pong(sequence, peer, seconds * 1000, network.link(peer), output)
    return times


def _tell_connected(link: LinkFacts, connect_ms: float, through: str, output: Output) -> None:
    value = {
        "event": "connected",
        "peer": link.peer,
        "reach": link.way,
        "address": link.remote_address,
        "connect_ms": round(connect_ms, 3),
        "measured_by": through,
    }
    text = f"Connected to {link.peer} in {connect_ms:.1f} ms, {link.way}, "
    text += f"{link.remote_address}"
    if through == LINK_PING:
        text += "\nIt does not answer potluck's ping, so the link's own ping is measured."
    if output.json:
        output.data(value, text)
    else:
        output.say(text)


def _tell_pong(
    sequence: int, peer: PeerId, milliseconds: float, link: LinkFacts | None, output: Output
) -> None:
    reach = link.way if link else "none"
    address = link.remote_address if link else ""
    value = {
        "event": "pong",
        "sequence": sequence,
        "round_trip_ms": round(milliseconds, 3),
        "reach": reach,
        "address": address,
    }
    output.data(value, f"{sequence}: {milliseconds:.2f} ms from {peer}, {reach}, {address}")


def _tell_lost(sequence: int, error: PotluckError, output: Output) -> None:
    output.data(
        {"event": "lost", "sequence": sequence, "reason": error.what},
        f"{sequence}: no answer: {error.what}",
    )


def _tell_summary(peer: PeerId, sent: int, times: list[float], output: Output) -> None:
    lost = sent - len(times)
    value: dict[str, Any] = {
        "event": "summary",
        "peer": peer,
        "sent": sent,
        "received": len(times),
        "loss": round(lost / sent, 4),
        "min_ms": None,
        "median_ms": None,
        "max_ms": None,
    }
    text = f"{sent} pings, {len(times)} answers, {lost / sent:.0%} lost"
    if times:
        least, median, most = min(times), statistics.median(times), max(times)
        value |= {
            "min_ms": round(least, 3),
            "median_ms": round(median, 3),
            "max_ms": round(most, 3),
        }
        text += f"; min {least:.2f}, median {median:.2f}, max {most:.2f} ms"
    output.data(value, text)
