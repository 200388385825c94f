"""A committed result can be shown to a peer that was not there, and that trusts no other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import trio

from protocols.moshpit.layout import (
    Layout,
    PartCut,
    PartHash,
    ResultCut,
    Segment,
    Vector,
    digest_of_parts,
)
from protocols.moshpit.outcome import Committed
from protocols.tensors import CODECS, CodecName, encode_into
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.dht.members import simulated
from tests.moshpit.averagers import SETTINGS, AveragingPeer, average_all, averagers, peer_in

VALUES = 5_000  # not a whole number of blocks


def digest_of(result: torch.Tensor, layout: Layout, cut: ResultCut) -> bytes:
    """The digests of decoded values, encoded again."""
    digests = {}
    for part in cut.parts:
        digest = PartHash()
        for chunk in cut.chunks_of(part, layout):
            encoded = bytearray(chunk.encoded_bytes)
            encode_into(result[chunk.start : chunk.stop], chunk.codec, encoded, name="w")
            digest.add(memoryview(encoded))
        digests[part.reducer] = digest.digest
    return digest_of_parts(digests)


@pytest.mark.parametrize("codec", CODECS)
def test_decoded_values_have_the_digest_that_the_group_has_decided_on(codec: CodecName) -> None:
    dtype = torch.float64 if codec == "float64" else torch.float32
    settings = dataclasses.replace(SETTINGS, chunk_bytes=4 << 10)

    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 3, settings=settings)
        events = []
        for number, one in enumerate(peers):
            seed = torch.Generator().manual_seed(number)
            own = {"w": torch.randn(VALUES, generator=seed, dtype=dtype), "b": torch.zeros(7)}
            own["b"] = own["b"].to(dtype)
            events.append(one.begin(Vector.of(own, codec=codec), weight=1.0, expected=3))
        with trio.fail_after(60.0):
            for event in events:
                await event.wait()
        layout = Layout((Segment("w", VALUES, codec), Segment("b", 7, codec)))
        for ended in (one.ended[0] for one in peers):
            outcome, result = ended.outcome, ended.result
            assert isinstance(outcome, Committed)
            assert result is not None
            assert outcome.cut is not None
            assert outcome.cut.covers(layout)
            assert len(outcome.cut.parts) == 3
            assert digest_of(result, layout, outcome.cut) == outcome.digest
            result[0] += 1.0
            assert digest_of(result, layout, outcome.cut) != outcome.digest

    run_simulation(scenario, seed=0, settings=WORLD)


@simulated
async def test_each_peer_knows_in_which_chunks_its_values_went_to_the_others(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 3)
    layout = peers[0].vector().layout
    owns = set()
    for peer, ended in zip(peers, await average_all(peers), strict=True):
        assert isinstance(ended.outcome, Committed)
        cut, sent = ended.outcome.cut, ended.outcome.sent
        assert cut is not None
        assert sent is not None
        assert sent.own == ended.outcome.members.index(peer.peer)
        owns.add(sent.own)
        others = [part for part in cut.parts if part.reducer != sent.own]
        assert len(others) == 2
        expected = [chunk for part in others for chunk in cut.chunks_of(part, layout)]
        assert list(sent.chunks(layout)) == expected
    assert owns == {0, 1, 2}


@pytest.mark.parametrize(
    ("rates", "chunk_bytes"),
    [
        pytest.param((4e7, 4e7, 4e7), {128 << 10}, id="fast links"),
        pytest.param((1e5, 1e5, 1e5), {32 << 10}, id="slow links"),
        pytest.param((2.8e7, 4e7, 4e7), {128 << 10, 4 << 10}, id="a small part"),
    ],
)
def test_the_cut_tells_in_which_chunks_each_part_was_sent(
    rates: tuple[float, ...], chunk_bytes: set[int]
) -> None:
    values = 200_000
    layout = Layout((Segment("w", values),))

    async def scenario(world: SimulatedWorld) -> None:
        peers: list[AveragingPeer] = []
        for number, rate in enumerate(rates):
            settings = dataclasses.replace(
                SETTINGS,
                chunk_bytes=128 << 10,
                up_bytes_per_second=rate,
                down_bytes_per_second=rate,
            )
            peers.append(peer_in(world, f"peer-{number}", peers, settings=settings))
            peers[-1].values = values
            await peers[-1].ready.wait()
        for ended in await average_all(peers):
            assert isinstance(ended.outcome, Committed)
            assert ended.result is not None
            cut = ended.outcome.cut
            assert cut is not None
            lengths = {cut.chunks_of(part, layout)[0].encoded_bytes for part in cut.parts}
            assert lengths == chunk_bytes
            assert digest_of(ended.result, layout, cut) == ended.outcome.digest

    run_simulation(scenario, seed=0, settings=WORLD)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        ((0, 0, 9),),
        ((0, 1, 10),),
        ((0, 0, 5), (1, 6, 10)),
        ((0, 0, 5), (0, 5, 10)),
        ((1, 0, 5), (0, 5, 10)),
        ((0, 0, 5), (1, 5, 5), (2, 5, 10)),
    ],
    ids=["none", "short", "late", "gap", "twice", "order", "empty"],
)
def test_a_cut_that_is_not_of_the_vector_is_seen(parts: tuple[tuple[int, int, int], ...]) -> None:
    cut = ResultCut(tuple(PartCut(*one) for one in parts), 4096)
    assert not cut.covers(Layout((Segment("w", 10),)))
