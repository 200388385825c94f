"""One exchange of a few members on the simulated network, without matchmaking or agreement.

    group = exchange([1.0, 2.0, 0.0], layout=layout("float16"), fractions=[1, 1, 1])
    group[0].report, group[0].result

Every member runs a `Butterfly` of its own, as a node does. `exchange` is for the ordinary case;
tests in which something happens meanwhile write a scenario for `among`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
import trio
from torch import Tensor

from protocols.moshpit.ballots import Ballot, Suspicion
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.exchange import (
    ExchangeFailed,
    ExchangePlan,
    ExchangeReport,
    Participant,
)
from protocols.moshpit.layout import Layout, Segment, cut
from protocols.rpc import Rpc, open_rpc
from protocols.tensors import CodecName
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

ROUND_ID = bytes(range(32))
BALLOT = Ballot(0, 0)
CHUNK_BYTES = 8_192
LATENCY_SECONDS = 0.02
LONGEST_SECONDS = 600.0  # of virtual time: a longer wait would never end

Result = TypeVar("Result")


def layout_of(*codecs: CodecName, values: int = 5_000) -> Layout:
    """As many tensors as codecs, of different odd sizes."""
    return Layout(
        tuple(
            Segment(f"tensor {number}", values + 7 * number, codec)
            for number, codec in enumerate(codecs)
        )
    )


@dataclass
class Peer:
    """One member: its values, and its result."""

    index: int
    network: SimulatedNetwork
    rpc: Rpc
    butterfly: Butterfly | None
    plan: ExchangePlan
    source: Tensor
    result: Tensor
    report: ExchangeReport | None = None
    suspicion: Suspicion | None = None
    ended: float = 0.0

    async def exchange(self, plan: ExchangePlan | None = None) -> None:
        """Run the exchange to its end, and keep its result."""
        assert self.butterfly is not None
        try:
            self.report = await self.butterfly.exchange(plan or self.plan, self.source, self.result)
        except ExchangeFailed as failed:
            (self.suspicion,) = failed.suspicions
        finally:
            self.ended = trio.current_time()

    @property
    def code(self) -> str:
        """Its suspicions, as `code member`."""
        assert self.suspicion is not None, f"member {self.index} suspects nobody"
        return f"{self.suspicion.code} {self.suspicion.member}"


@dataclass
class Exchanging:
    """All members of one exchange, and their world."""

    world: SimulatedWorld
    peers: tuple[Peer, ...]

    def __getitem__(self, index: int) -> Peer:
        return self.peers[index]

    async def exchange(self, *without: int) -> None:
        """Let all members but these exchange, until each has ended."""
        with trio.fail_after(LONGEST_SECONDS):
            async with trio.open_nursery() as nursery:
                for peer in self.peers:
                    if peer.index not in without:
                        nursery.start_soon(peer.exchange)

    def average(self) -> Tensor:
        """The expected result of the exchange, in float64."""
        weights = [member.weight for member in self.peers[0].plan.members]
        total = sum(weights)
        return sum(
            (
                peer.source.double() * (weight / total)
                for peer, weight in zip(self.peers, weights, strict=True)
            ),
            torch.zeros_like(self.peers[0].source, dtype=torch.float64),
        )

    def check_all_hold_the_same(self) -> None:
        """Every member has a result, with the same bits and the same digest."""
        first = self.peers[0]
        assert first.report is not None, first.suspicion
        for peer in self.peers:
            assert peer.report is not None, peer.suspicion
            assert peer.report.result_digest == first.report.result_digest
            assert bits(peer.result) == bits(first.result)


def bits(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def values_of(layout: Layout, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if layout.dtype == "float64" else torch.float32
    return torch.randn(layout.values, generator=generator, dtype=dtype)


def among(
    scenario: Callable[[Exchanging], Awaitable[Result]],
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    *,
    layout: Layout | None = None,
    fractions: Sequence[float] | None = None,
    sources: Sequence[Tensor] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    seconds: float = float("inf"),
    window_bytes: int = 1 << 20,
    packet_bytes: int | None = None,
    hostile: Sequence[int] = (),
    rates: Sequence[float] = (),
    uplinks: Sequence[float | None] = (),
    seed: int = 0,
) -> Result:
    """Run a scenario with a member for each weight, which all know each other.

    The windows of all streams to a slow reader fill the buffer before it, as on a real line.
    Hostile members have no butterfly: the test speaks for them, through their rpc. `rates`: what
    the members have declared, of both directions. `uplinks`: what they can send, in bytes per
    second.
    """
    vector = layout or layout_of("none", "none")

    async def in_world(world: SimulatedWorld) -> Result:
        networks = [
            world.add_node(settings=NodeSettings(upload_bytes_per_second=uplink))
            for uplink in uplinks or [None] * len(weights)
        ]
        world.introduce(*networks)
        members = tuple(
            Participant(index, network.peer_id, weight, rate, rate)
            for index, (network, weight, rate) in enumerate(
                zip(networks, weights, rates or [0.0] * len(weights), strict=True)
            )
        )
        cuts = cut(vector, fractions or [1.0] * len(weights))
        async with AsyncExitStack() as opened:
            peers = []
            for index, network in enumerate(networks):
                rpc = await opened.enter_async_context(open_rpc(network))
                source = sources[index] if sources else values_of(vector, seed=100 + index)
                plan = ExchangePlan(
                    ROUND_ID, BALLOT, index, members, cuts, vector, chunk_bytes, seconds
                )
                result = torch.full_like(source, float("nan"))
                butterfly = None if index in hostile else Butterfly(rpc, network)
                peers.append(Peer(index, network, rpc, butterfly, plan, source, result))
            return await scenario(Exchanging(world, tuple(peers)))

    link = LinkSettings(latency_seconds=LATENCY_SECONDS)
    settings = WorldSettings(link=link, window_bytes=window_bytes, packet_bytes=packet_bytes)
    return run_simulation(in_world, seed=seed, settings=settings)


def exchange(
    weights: Sequence[float],
    *,
    layout: Layout | None = None,
    fractions: Sequence[float] | None = None,
    sources: Sequence[Tensor] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Exchanging:
    """Run one exchange without faults, to its end."""

    async def scenario(group: Exchanging) -> Exchanging:
        await group.exchange()
        return group

    return among(
        scenario,
        weights,
        layout=layout,
        fractions=fractions,
        sources=sources,
        chunk_bytes=chunk_bytes,
    )
