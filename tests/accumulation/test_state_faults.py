"""Sources that lie, and states that do not fit this peer, are named and never taken."""

from __future__ import annotations

import dataclasses
import logging

import msgspec
import pytest
import torch
import trio

from protocols.accumulation.state_download import rank
from protocols.accumulation.state_fetching import (
    FetchFailed,
    FetchSettings,
    KeptPieces,
    StateSource,
)
from protocols.accumulation.state_manifest import StateRefused, encode, name_of
from protocols.accumulation.state_messages import (
    MANIFEST,
    MOST_RESULTS,
    PIECES,
    ManifestAnswer,
    ManifestRequest,
    PiecesOpening,
    PiecesTransfer,
    wanted_chunk,
)
from protocols.accumulation.state_serving import (
    PART_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    StateServingSettings,
)
from protocols.errors import MalformedMessage, PotluckError
from protocols.guard import Caller
from protocols.rpc import Empty
from protocols.testing.world import SimulatedWorld
from tests.accumulation.followed_runs import RunMember
from tests.accumulation.states import (
    BYTES_PER_SECOND,
    STATE_BYTES,
    Donor,
    Model,
    Newcomer,
    introduce,
    same,
    start_donors,
    with_newcomer,
)
from tests.chunks import next_chunk

SECONDS_ALONE = STATE_BYTES / BYTES_PER_SECOND
IMPATIENT = FetchSettings(give_up_seconds=10.0)


def corrupt(donor: Donor) -> None:
    """From now on this donor's copy has other bytes than its manifest says."""
    for state in donor.server.served_states():
        state.memory.bitwise_xor_(255)


def test_a_source_that_corrupts_what_it_sends_is_named_and_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = await start_donors(world, 3)
        introduce(world, newcomer, donors)
        liar = donors[2]
        begun = False

        def corrupt_half_way(here: int, of_all: int) -> None:
            nonlocal begun
            if here > of_all // 2 and not begun:
                begun = True
                corrupt(liar)

        fetched = await newcomer.fetch(donors, progress=corrupt_half_way)
        assert same(fetched.state, donors[0].model.capture())
        assert set(fetched.liars) == {liar.peer}
        assert "wrong bytes" in fetched.liars[liar.peer]
        assert any(liar.peer in record.message for record in caplog.records)
        return fetched.seconds

    with caplog.at_level(logging.WARNING, "potluck.state"):
        assert with_newcomer(scenario) < 1.2 * (SECONDS_ALONE / 6 + SECONDS_ALONE / 4)


def test_after_one_source_is_killed_and_one_corrupts_the_third_one_finishes() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = await start_donors(world, 3)
        introduce(world, newcomer, donors)
        begun = False

        def misfortune(here: int, of_all: int) -> None:
            nonlocal begun
            if here > of_all // 2 and not begun:
                begun = True
                corrupt(donors[2])
                world.crash(donors[1].network)

        fetched = await newcomer.fetch(donors, progress=misfortune)
        assert same(fetched.state, donors[0].model.capture())
        assert set(fetched.liars) == {donors[2].peer}
        assert donors[1].peer in fetched.given_up
        return fetched.seconds

    assert with_newcomer(scenario) < (SECONDS_ALONE / 6 + SECONDS_ALONE / 2) / 0.9


class OldStateServer(Donor):
    """Answers every request with the same old state."""

    body: bytes
    torch = str(torch.__version__)

    async def serve(self, rpc: object) -> None:
        rpc.serve(MANIFEST, self._manifest)  # type: ignore[attr-defined]
        rpc.serve_bulk(PIECES, self._pieces)  # type: ignore[attr-defined]
        self.ready.set()
        await trio.sleep_forever()

    async def _manifest(self, _caller: Caller, _request: ManifestRequest) -> ManifestAnswer:
        return ManifestAnswer(self.body, self.torch)

    async def _pieces(
        self, _caller: Caller, transfer: PiecesTransfer, _opening: PiecesOpening
    ) -> None:
        await transfer.accept(Empty())
        await transfer.finish(Empty())


async def old_state_server(world: SimulatedWorld, body: bytes, like: Donor) -> OldStateServer:
    """It claims the same as `like`, but has an older state."""
    server = OldStateServer(world.add_node("old"), like.model)
    server.body = body
    server.claim = dataclasses.replace(like.source(), peer=server.peer)
    world.start(server.network, server.run)
    await server.ready.wait()
    return server


@pytest.mark.slow
def test_an_older_state_under_the_newest_digest_is_refused_by_name() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        old = donor.model.capture()
        donor.model.step()
        donor.server.advanced()
        await donor.server.offered(donor.server.offer)
        liar = await old_state_server(world, old.body, donor)
        introduce(world, newcomer, [donor, liar])
        with pytest.raises(FetchFailed) as failed:
            await newcomer.fetch([liar], settings=IMPATIENT)
        assert "a state of epoch 1 under the digest of another, of epoch 2" in failed.value.why
        fetched = await newcomer.fetch([liar, donor])
        assert same(fetched.state, donor.model.capture())

    with_newcomer(scenario)


def test_an_older_state_that_is_said_to_be_newer_is_refused_by_name() -> None:
    """The digest is that of the old state; only the claimed epoch is wrong."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        donor.claim = dataclasses.replace(donor.source(), epoch=9)
        introduce(world, newcomer, [donor])
        with pytest.raises(FetchFailed) as failed:
            await newcomer.fetch([donor], settings=IMPATIENT)
        assert "a state of epoch 1 as that of epoch 9" in failed.value.why

    with_newcomer(scenario)


@pytest.mark.parametrize("epoch", [0, 1 + MOST_RESULTS + 1])
def test_a_state_to_which_no_results_can_lead_is_refused_by_name(epoch: int) -> None:
    """It is said to be of an epoch a little earlier than the donor's."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        donor.claim = dataclasses.replace(donor.source(), epoch=epoch, is_earlier=True)
        introduce(world, newcomer, [donor])
        layouts = RunMember().layouts
        with pytest.raises(FetchFailed) as failed:
            await newcomer.fetch([donor], settings=IMPATIENT, layouts=layouts)
        assert f"a state of epoch 1 as that of epoch {epoch}" in failed.value.why

    with_newcomer(scenario)


def test_an_earlier_state_is_not_fetched_where_no_results_can_be() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        donor.claim = dataclasses.replace(donor.source(), epoch=2, is_earlier=True)
        introduce(world, newcomer, [donor])
        with pytest.raises(FetchFailed) as failed:
            await newcomer.fetch([donor], settings=IMPATIENT)
        assert "No peer offers one." in failed.value.why

    with_newcomer(scenario)


def test_another_model_is_refused_with_its_differences_before_memory_is_taken() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 2)
        introduce(world, newcomer, donors)
        newcomer.model = Model(values=100)
        kept = KeptPieces()
        with pytest.raises(StateRefused, match=r"100 here and 32768 there") as refused:
            await newcomer.fetch(donors, kept=kept)
        assert refused.value.named_by == {one.peer for one in donors}
        with pytest.raises(Exception, match="begun"):
            _ = kept.manifest
        newcomer.model = Model(dtype=torch.bfloat16)
        with pytest.raises(StateRefused, match="model/w is bfloat16 here and float32 there"):
            await newcomer.fetch(donors)
        newcomer.model = Model()
        newcomer.model.optimizer = torch.optim.SGD([newcomer.model.parameter], lr=0.1)  # type: ignore[assignment]
        with pytest.raises(StateRefused, match="the optimizer is SGD here and AdamW there"):
            await newcomer.fetch(donors)

    with_newcomer(scenario)


def test_another_torch_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 1)
        introduce(world, newcomer, donors)
        with monkeypatch.context() as patched:
            patched.setattr("protocols.accumulation.state_serving._version", lambda: "2.4.1+cu118")
            with pytest.raises(StateRefused, match=r"trains with torch 2\.4; here it is"):
                await newcomer.fetch(donors)

    with_newcomer(scenario)


def test_one_donor_that_names_another_torch_turns_nobody_away() -> None:
    """Its release is in no digest, so any peer can claim any release."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        liar = await old_state_server(world, donor.model.capture().body, donor)
        liar.torch = "0.4.1"
        introduce(world, newcomer, [donor, liar])
        assert rank(liar.peer, newcomer.network.peer_id) < rank(
            donor.peer, newcomer.network.peer_id
        )
        fetched = await newcomer.fetch([donor, liar])
        assert same(fetched.state, donor.model.capture())

    with_newcomer(scenario)


def test_a_state_that_only_a_liar_names_is_not_the_others_fault() -> None:
    """They have not named theirs yet, and are asked for the liar's. Before, all of them were
    blamed, and a peer that takes most of the others for the run's word gave up training."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 3)
        liar, *honest = donors
        for one in honest:
            one.claim = dataclasses.replace(one.source(), digest=b"")
        introduce(world, newcomer, donors)
        newcomer.model = Model(values=100)
        with pytest.raises(StateRefused) as refused:
            await newcomer.fetch(donors)
        assert refused.value.named_by == {liar.peer}

    with_newcomer(scenario)


class HoldingServer(OldStateServer):
    """Has an old state, but gives it to no peer: it is busy for ever, or sends a byte at a time."""

    wait_ms = 0

    async def _manifest(self, _caller: Caller, _request: ManifestRequest) -> ManifestAnswer:
        body = b"" if self.wait_ms else self.body
        return ManifestAnswer(body, self.torch, self.wait_ms)

    async def _pieces(
        self, _caller: Caller, transfer: PiecesTransfer, _opening: PiecesOpening
    ) -> None:
        await transfer.accept(Empty())
        while True:
            await transfer.send_chunk(b"?")
            await trio.sleep(5)


@pytest.mark.slow
@pytest.mark.parametrize("wait_ms", [60_000, 0], ids=["busy", "trickling"])
def test_a_source_that_gives_nothing_does_not_hold_a_newcomer_up(wait_ms: int) -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 2)
        holder = HoldingServer(world.add_node("holder"), donors[0].model)
        holder.body, holder.wait_ms = donors[0].model.capture().body, wait_ms
        holder.claim = dataclasses.replace(donors[0].source(), peer=holder.peer)
        world.start(holder.network, holder.run)
        await holder.ready.wait()
        for one in donors:
            one.model.step()
            one.server.advanced()
            await one.server.offered(one.server.offer)
        introduce(world, newcomer, [*donors, holder])
        looked = 0

        def seen() -> list[StateSource]:
            nonlocal looked
            looked += 1
            return [one.source() for one in ([holder] if looked == 1 else [*donors, holder])]

        with trio.fail_after(300):
            fetched = await newcomer.fetch_from(seen)
        assert same(fetched.state, donors[0].model.capture())

    with_newcomer(scenario)


def test_a_state_that_claims_more_than_this_model_can_need_takes_no_memory() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        ballast = torch.zeros(1).expand(1 << 34)
        huge = msgspec.structs.replace(
            donor.model.look({"ballast": ballast})._header(), piece_bytes=4 << 20
        )
        body = encode(
            msgspec.structs.replace(huge, pieces=bytes(32 * ((64 << 30) // (4 << 20) + 1)))
        )
        liar = await old_state_server(world, body, donor)
        liar.claim = dataclasses.replace(liar.source(), digest=name_of(body))
        introduce(world, newcomer, [liar])
        with pytest.raises(StateRefused, match=r"Its statistics take 68,7\d\d,\d\d\d,\d\d\d bytes"):
            await newcomer.fetch([liar])

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_newcomer_that_is_alive_and_reads_nothing_keeps_neither_its_place_nor_others_out() -> (
    None
):
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        settings = StateServingSettings(most_downloads=2, upload_bytes_per_second=None)
        (donor,) = await start_donors(world, 1, settings=settings)
        deaf = await Newcomer.start(world, "deaf")
        for one in (newcomer, deaf):
            introduce(world, one, [donor])
        digest = donor.source().digest
        await deaf.rpc.call(donor.peer, MANIFEST, ManifestRequest("test", digest), timeout=5)
        opening = PiecesOpening("test", digest)
        ended: list[str] = []

        async def read_nothing() -> None:
            async with deaf.rpc.open_bulk(donor.peer, PIECES, opening, timeout=5) as transfer:
                for _ in range(10):
                    await transfer.send_chunk(wanted_chunk(list(range(25))))
                try:
                    while True:
                        await trio.sleep(5)
                        await transfer.say_alive()
                except PotluckError as error:
                    ended.append(error.what)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_nothing)
            await trio.sleep(1)
            assert donor.server.downloads == 1
            with trio.fail_after(3 * SECONDS_ALONE):
                fetched = await newcomer.fetch([donor])
            assert same(fetched.state, donor.model.capture())
            await trio.sleep(PART_SECONDS + STATE_BYTES / SLOWEST_BYTES_PER_SECOND)
            assert donor.server.downloads == 0
            nursery.cancel_scope.cancel()

    with_newcomer(scenario)


@pytest.mark.slow
def test_many_sources_that_are_always_busy_do_not_keep_the_others_from_being_asked() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        me, claims = newcomer.network.peer_id, []
        number = 0
        while len(claims) < FetchSettings().most_sources:
            number += 1
            name = f"busy-{number}"
            if rank(world.identity_of(name).peer_id, me) > rank(donor.peer, me):
                continue  # those in front of the donor take all places
            busy = HoldingServer(world.add_node(name), donor.model)
            busy.body, busy.wait_ms = donor.model.capture().body, 1
            busy.claim = dataclasses.replace(donor.source(), peer=busy.peer)
            world.start(busy.network, busy.run)
            await busy.ready.wait()
            introduce(world, newcomer, [busy])
            claims.append(busy.claim)
        introduce(world, newcomer, [donor])
        with trio.fail_after(60):
            fetched = await newcomer.fetch_from(lambda: [*claims, donor.source()])
        assert same(fetched.state, donor.model.capture())

    with_newcomer(scenario)


def test_a_request_for_pieces_that_do_not_exist_is_refused() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        introduce(world, newcomer, [donor])
        digest = donor.source().digest
        opening = PiecesOpening("test", digest)
        async with newcomer.rpc.open_bulk(donor.peer, PIECES, opening, timeout=5) as transfer:
            await transfer.send_chunk(b"\xff\xff\xff\xff")
            with pytest.raises(MalformedMessage, match="not one of the 25"):
                await next_chunk(transfer)
        assert donor.server.downloads == 0

    with_newcomer(scenario)
