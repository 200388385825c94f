"""A newcomer gets in, even if its fetch takes longer than an epoch of the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import trio

from protocols.accumulation import results, state_serving
from protocols.accumulation.keeping_up import (
    MOST_OF_LINK,
    ROOM_OF_STATE,
    Demand,
    KeepingUp,
    TooSlow,
)
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.results import (
    FOLLOWED_SECONDS,
    STEPS_FOLLOWED,
    Made,
    Offered,
    lone_step,
    usual_bytes,
)
from protocols.accumulation.state_download import (
    OLD_SECONDS,
    Choice,
    FetchAccount,
    FetchSettings,
    Paces,
    choose,
    rank,
)
from protocols.accumulation.state_fetching import (
    Following,
    FollowWanted,
    StateSource,
    follow_run,
)
from protocols.accumulation.state_messages import (
    MOST_RESULTS,
    ROOM_OF_SMALL_BYTES,
    ResultKind,
)
from protocols.accumulation.state_pace import KEPT_SECONDS
from protocols.accumulation.state_serving import StateServingSettings
from protocols.identity import PeerId
from protocols.rpc import Rpc, open_rpc
from protocols.rpc.rpc import SETTLING_SECONDS
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from tests.accumulation.followed_runs import (
    RESULT_BYTES,
    RUN,
    STATE_BYTES,
    FollowedRun,
    RunDonor,
    RunMember,
    start_run,
)

EPOCH_SECONDS = 20.0
IN_SECONDS = 2.0  # to get into a run of short steps, dialling and all
SMALL_VALUES = 4 << 10
LINK = STATE_BYTES / (3 * EPOCH_SECONDS)
"""Bytes a second: a state alone takes three epochs, and a result half of one."""

Scenario = Callable[[SimulatedWorld, trio.Nursery, SimulatedNetwork, Rpc], Awaitable[None]]


def with_newcomer(
    scenario: Scenario, *, bytes_per_second: float = LINK, latency_seconds: float = 0.02
) -> None:
    """A newcomer with a slow downlink, in virtual time."""

    async def main(world: SimulatedWorld) -> None:
        slow = NodeSettings(download_bytes_per_second=bytes_per_second)
        network = world.add_node("newcomer", slow)
        async with open_rpc(network) as rpc, trio.open_nursery() as nursery:
            with trio.fail_after(100 * EPOCH_SECONDS):
                await scenario(world, nursery, network, rpc)
            nursery.cancel_scope.cancel()

    run_simulation(main, settings=WorldSettings(link=LinkSettings(latency_seconds=latency_seconds)))


async def one_more_step(run: FollowedRun) -> None:
    """A run that a newcomer can follow, and whose state is named."""
    for donor in run.donors:
        donor.member.results.follow(STATE_BYTES)
    run.step()
    await run.named()


def check_is_there(run: FollowedRun, newcomer: RunMember) -> None:
    """It has exactly the same bytes as the others."""
    assert newcomer.at == run.at
    assert newcomer.capture().digest == run.donors[0].member.capture().digest


@pytest.mark.slow
def test_a_newcomer_whose_fetch_takes_three_epochs_gets_in() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer, began = RunMember(seed=1), run.at.epoch
        fetched = await run.fetch(rpc, newcomer)
        assert fetched.state.epoch == began
        assert len(fetched.results) >= 3
        newcomer.take(fetched.state, fetched.results)
        check_is_there(run, newcomer)
        assert run.told == []

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_newcomer_follows_results_that_are_factors_of_gradients() -> None:
    """PowerSGD: each step needs the factors of the one before, which came with the state."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        member = partial(RunMember, powersgd_rank=4)
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, member=member)
        newcomer = member(seed=1)
        fetched = await run.fetch(rpc, newcomer)
        assert len(fetched.results) >= 1
        newcomer.take(fetched.state, fetched.results)
        check_is_there(run, newcomer)

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_newcomer_whose_link_carries_little_more_than_the_results_gets_in_piece_by_piece() -> (
    None
):
    """It may not hold all results at once: it makes steps from those it has, and goes on."""
    settings = FetchSettings(most_result_bytes=ROOM_OF_STATE * STATE_BYTES)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer, takes = RunMember(seed=1), 1
        fetched = await run.fetch(rpc, newcomer, settings=settings)
        held = sum(len(one.memory) for one in fetched.results)
        assert STATE_BYTES < held <= settings.most_result_bytes
        newcomer.take(fetched.state, fetched.results)
        while newcomer.at != run.at:
            followed = await follow_run(
                rpc, run.sources, newcomer.look(), newcomer.layouts, settings=settings
            )
            assert followed is not None
            newcomer.take(None, followed.results)
            takes += 1
        check_is_there(run, newcomer)
        assert takes >= 2
        assert run.told == []

    with_newcomer(scenario, bytes_per_second=1.4 * RESULT_BYTES / EPOCH_SECONDS)


@pytest.mark.slow
def test_a_newcomer_that_may_hold_nothing_holds_one_result_at_once() -> None:
    """It makes a step of it, and goes on. A second one is not begun in vain: over this link, which
    carries two in a step's time, it would never come to the end."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=1)
        newcomer, (donor,) = RunMember(seed=1), run.donors
        newcomer.take(donor.member.capture(), ())
        for _ in range(3):
            await one_more_step(run)
        held, settings = [], FetchSettings(most_result_bytes=0.0)
        while newcomer.at != run.at:
            followed = await follow_run(
                rpc, run.sources, newcomer.look(), newcomer.layouts, settings=settings
            )
            assert followed is not None
            held.append(len(followed.results))
            newcomer.take(None, followed.results)
        assert len(held) >= 3
        assert set(held) == {1}

    with_newcomer(scenario, bytes_per_second=LINK)


@pytest.mark.slow
@pytest.mark.parametrize(("epoch_seconds", "slot_seconds"), [(0.15, 1.0), (0.03, 0.15)])
def test_a_newcomer_gets_into_a_run_whose_states_are_over_before_it_hears_of_them(
    epoch_seconds: float, slot_seconds: float
) -> None:
    """It is not left behind: it always gets the results that follow its state."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        small = partial(RunMember, values=SMALL_VALUES)
        run = await start_run(world, nursery, network, epoch_seconds=epoch_seconds, member=small)
        nursery.start_soon(run.hand_on_slots, slot_seconds)
        await trio.sleep(2 * slot_seconds)
        newcomer = small(seed=1)
        with trio.fail_after(IN_SECONDS):
            fetched = await run.fetch(rpc, newcomer, run.old_sources)
        newcomer.take(fetched.state, fetched.results)
        for _ in range(4):
            await trio.sleep(slot_seconds / 2)
            followed = await follow_run(rpc, run.old_sources, newcomer.look(), newcomer.layouts)
            assert followed is not None
            newcomer.take(None, followed.results)
        assert newcomer.at in run.places

    latency_seconds = epoch_seconds / 10  # or no result could come in the time of a step
    with_newcomer(scenario, bytes_per_second=1000 * STATE_BYTES, latency_seconds=latency_seconds)


@pytest.mark.parametrize(("epoch_seconds", "slot_seconds"), [(0.6, 0.8), (0.4, 1.0)])
def test_a_newcomer_gets_a_large_state_of_a_run_of_short_steps_from_all_donors(
    epoch_seconds: float, slot_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state is over before the newcomer hears of it. So all donors keep one for it, while the
    results follow."""
    monkeypatch.setattr(state_serving, "LARGEST_BYTES", 1)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=epoch_seconds, donors=3)
        nursery.start_soon(run.hand_on_slots, slot_seconds)
        await trio.sleep(10 * epoch_seconds)
        newcomer, began = RunMember(seed=1), trio.current_time()
        fetched = await run.fetch(rpc, newcomer, run.old_sources)
        assert trio.current_time() - began < 4.0 + slot_seconds + 6 * epoch_seconds
        assert len(fetched.bytes_from) == 3
        assert len(fetched.results) >= 2
        newcomer.take(fetched.state, fetched.results)
        assert newcomer.at in run.places
        assert all(one.server is not None and one.server.copies == 1 for one in run.donors)

    with_newcomer(scenario, bytes_per_second=STATE_BYTES / epoch_seconds)


def test_a_liar_that_names_the_donors_earlier_state_as_their_newest_makes_no_liars_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is first in the order in which the newcomer asks, and nobody can reach it."""
    monkeypatch.setattr(state_serving, "LARGEST_BYTES", 1)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=1.0, donors=2)
        await trio.sleep(10.0)
        donors = {one.network.peer_id for one in run.donors}
        first = min(rank(one, network.peer_id) for one in donors)
        strangers = (world.add_node(f"liar-{number}").peer_id for number in range(12))
        liar = next(one for one in strangers if rank(one, network.peer_id) < first)

        def sources() -> list[StateSource]:
            told = run.sources()
            if not all(one.is_earlier for one in told):
                return []
            return [*told, replace(told[0], peer=liar, is_earlier=False)]

        fetched = await run.fetch(rpc, RunMember(seed=1), sources)
        assert set(fetched.bytes_from) == donors
        assert not set(fetched.liars) & donors

    with_newcomer(scenario, bytes_per_second=STATE_BYTES / 2)


def test_a_donor_of_a_large_state_serves_one_newcomer_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the first downloads there is a step, whose state nobody needs yet. When the copy is
    forgotten, the second one waits for no further step."""
    monkeypatch.setattr(state_serving, "LARGEST_BYTES", 1)
    epoch_seconds = 12 * EPOCH_SECONDS

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        second = world.add_node("second", NodeSettings())
        async with open_rpc(second) as rpc_of_second:
            run = await start_run(
                world, nursery, network, second, epoch_seconds=epoch_seconds, donors=1
            )
            await trio.sleep(2 * epoch_seconds - 10.0)
            began = run.at.epoch
            await run.fetch(rpc, RunMember(seed=1))
            assert run.at.epoch == began + 1
            server = run.donors[0].server
            assert server is not None
            while server.copies:
                server.needed()  # others' slots say so all the time
                await trio.sleep(1.0)
            asked = trio.current_time()
            await run.fetch(rpc_of_second, RunMember(seed=2))
            assert trio.current_time() - asked < IN_SECONDS

    with_newcomer(scenario, bytes_per_second=STATE_BYTES / (2 * EPOCH_SECONDS))


def test_a_step_just_before_a_large_state_is_copied_leaves_no_newcomer_without_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy was of the new state already, and the old one was noted as named."""
    monkeypatch.setattr(state_serving, "LARGEST_BYTES", 1)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=12 * EPOCH_SECONDS, donors=1)
        server = run.donors[0].server
        assert server is not None
        place = server._place

        def step_before() -> tuple[Lineage, int]:
            found = place()
            monkeypatch.setattr(server, "_place", place)
            run.step()
            return found

        monkeypatch.setattr(server, "_place", step_before)
        run.step()
        await trio.sleep(2 * KEPT_SECONDS)
        asked = trio.current_time()
        fetched = await run.fetch(rpc, RunMember(seed=1))
        assert trio.current_time() - asked < IN_SECONDS + 2 * KEPT_SECONDS
        assert fetched.state.epoch + len(fetched.results) == run.at.epoch

    with_newcomer(scenario, bytes_per_second=STATE_BYTES)


@pytest.mark.slow
def test_lone_steps_and_averaged_parameters_are_followed_like_steps() -> None:
    def kinds(epoch: int) -> Sequence[ResultKind]:
        return ("lone step", "parameters") if epoch % 2 else ("step",)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=1)
        run.kinds = kinds
        newcomer = RunMember(seed=1)
        fetched = await run.fetch(rpc, newcomer)
        assert {one.kind for one in fetched.results} == {"step", "lone step", "parameters"}
        newcomer.take(fetched.state, fetched.results)
        check_is_there(run, newcomer)

    with_newcomer(scenario, bytes_per_second=2.5 * LINK)


@pytest.mark.slow
def test_results_of_fragments_are_followed_each_with_the_layout_of_its_epoch() -> None:
    """The newcomer goes on with the one that is next. Every other step is made alone."""

    def kinds(epoch: int) -> Sequence[ResultKind]:
        return ("lone step",) if epoch % 2 else ("step",)

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        parts = partial(RunMember, values=SMALL_VALUES, fragments=3)
        run = await start_run(
            world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=1, member=parts
        )
        run.kinds = kinds
        await trio.sleep(2.5 * EPOCH_SECONDS)
        newcomer, donor = parts(seed=1), run.donors[0].member
        fetched = await run.fetch(rpc, newcomer)
        newcomer.take(fetched.state, fetched.results)
        await trio.sleep(3 * EPOCH_SECONDS)
        followed = await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts)
        assert followed is not None
        assert len({len(one.memory) for one in followed.results[:3]}) == 3
        newcomer.take(None, followed.results)
        assert newcomer.at == donor.at
        assert newcomer.capture().digest == donor.capture().digest

    with_newcomer(scenario)


def test_a_lone_step_that_nobody_follows_is_neither_hashed_nor_offered() -> None:
    kept = results.ResultsKept(RunMember(seed=1).layouts, clock=lambda: 5.0)
    values = torch.zeros(kept.layouts.of("lone step", 0).values)
    before = Lineage(3, b"h" * 16)
    assert not kept.is_followed
    first, second = (
        lone_step(values, kept.layouts, 0, nonce, followed=False)
        for nonce in (b"1" * 16, b"2" * 16)
    )
    assert first.digest != second.digest  # it still leads to a history of its own
    kept.follow()  # somebody begins just now
    assert kept.is_followed
    kept.add(before, first, values)
    assert kept.following(before) is None
    followed = lone_step(values, kept.layouts, 0, b"1" * 16, followed=True)
    kept.add(before, followed, values)
    assert kept.following(before) is not None


@pytest.mark.slow
def test_a_newcomer_that_can_never_keep_up_is_told_the_rate_that_would_be_enough() -> None:
    """A result alone takes longer than the run needs for a step."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer = RunMember(seed=1)
        with pytest.raises(TooSlow) as raised:
            await run.fetch(rpc, newcomer)
        needed = RESULT_BYTES / EPOCH_SECONDS / MOST_OF_LINK
        assert raised.value.needed_bytes_per_second == pytest.approx(needed, rel=0.15)
        assert raised.value.bytes_per_second < RESULT_BYTES / EPOCH_SECONDS
        assert "would need" in run.told[0].what  # long before it was over
        assert len(run.told) == 1

    with_newcomer(scenario, bytes_per_second=0.6 * RESULT_BYTES / EPOCH_SECONDS)


@pytest.mark.slow
def test_a_donor_that_dies_is_done_without() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer = RunMember(seed=1)

        async def kill_one() -> None:
            await trio.sleep(2.5 * EPOCH_SECONDS)
            world.crash(run.donors[1].network)

        nursery.start_soon(kill_one)
        fetched = await run.fetch(rpc, newcomer)
        newcomer.take(fetched.state, fetched.results)
        check_is_there(run, newcomer)

    with_newcomer(scenario)


def test_an_invented_later_state_is_not_taken_although_nothing_else_was_known_at_first() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        invented = RunMember(seed=7)
        invented.take(run.donors[0].member.capture(), ())
        invented.at = Lineage(10**6, b"?" * 16)
        liar = RunDonor(world.add_node("liar"), invented, StateServingSettings())
        world.introduce(network, liar.network)
        world.start(liar.network, liar.run)
        await liar.ready.wait()
        met = trio.current_time() + 0.5

        def sources() -> list[StateSource]:
            others = run.sources() if trio.current_time() > met else []
            return [liar.source(), *others]

        newcomer = RunMember(seed=1)
        fetched = await run.fetch(rpc, newcomer, sources)
        assert fetched.bytes_from[liar.network.peer_id], "it was chosen first"
        newcomer.take(fetched.state, fetched.results)
        assert newcomer.at in run.places

    with_newcomer(scenario, bytes_per_second=10 * LINK)


@pytest.mark.slow
def test_a_donor_that_trickles_a_result_holds_nobody_up_for_long() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        trickling = NodeSettings(upload_bytes_per_second=RESULT_BYTES / 140)
        run = await start_run(
            world, nursery, network, epoch_seconds=1e6, machines=[NodeSettings(), trickling]
        )
        newcomer, paces = RunMember(seed=1), Paces()
        newcomer.take(run.donors[0].member.capture(), ())
        await one_more_step(run)
        honest, slow = (one.network.peer_id for one in run.donors)
        paces.sent(honest, RESULT_BYTES, 1.0)  # so that the one that is not known yet comes first
        began = trio.current_time()
        followed = await follow_run(
            rpc, run.sources, newcomer.look(), newcomer.layouts, paces=paces
        )
        assert followed is not None
        assert followed.bytes_from[honest] > RESULT_BYTES
        assert OLD_SECONDS < trio.current_time() - began < OLD_SECONDS + 10.0
        assert paces.ordered(run.sources())[-1].peer == slow

    with_newcomer(scenario, bytes_per_second=10 * LINK)


@pytest.mark.slow
def test_a_direct_link_that_trickles_gives_way_to_one_through_a_relay() -> None:
    """With one direct source alone its result was waited for without end."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        trickling = NodeSettings(upload_bytes_per_second=RESULT_BYTES / 3600)
        run = await start_run(
            world, nursery, network, epoch_seconds=1e6, machines=[NodeSettings(), trickling]
        )
        behind, _ = run.donors
        world.set_path(network, behind.network, RELAYED)
        for one in run.donors:
            await network.connect(one.network.peer_id)
        newcomer = RunMember(seed=1)
        newcomer.take(run.donors[0].member.capture(), ())
        await one_more_step(run)
        account, began = FetchAccount(rpc, FetchSettings(give_up_seconds=1e4)), trio.current_time()
        wanted = FollowWanted(RUN, newcomer.layouts, float(STATE_BYTES))

        def choice_now() -> Choice | None:
            return choose(run.sources(), network.peer_id, named=False)

        following = Following(account, wanted, newcomer.at, choice_now)
        async with trio.open_nursery() as fetching:
            fetching.start_soon(following.run)
            assert await following.caught_up()
            fetching.cancel_scope.cancel()
        assert following.end == run.at
        assert trio.current_time() - began < 2 * OLD_SECONDS

    with_newcomer(scenario, bytes_per_second=10 * LINK)


@pytest.mark.slow
def test_a_newcomer_with_room_for_one_result_gets_its_state_and_then_the_others() -> None:
    """When its room was full, its download was given up, however much of it was here."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer, settings = RunMember(seed=1), FetchSettings(most_result_bytes=0.0)
        fetched = await run.fetch(rpc, newcomer, settings=settings)
        assert len(fetched.results) == 1
        assert sum(fetched.bytes_from.values()) < 1.1 * (STATE_BYTES + 2 * RESULT_BYTES)
        newcomer.take(fetched.state, fetched.results)
        while newcomer.at != run.at:
            followed = await follow_run(
                rpc, run.sources, newcomer.look(), newcomer.layouts, settings=settings
            )
            assert followed is not None
            newcomer.take(None, followed.results)

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_donor_that_sends_other_bytes_is_named_and_the_others_are_asked() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=3)
        newcomer = RunMember(seed=1)
        newcomer.take(run.donors[0].member.capture(), ())
        for donor in run.donors:
            donor.member.results.follow(STATE_BYTES)
        run.step()
        await run.named()
        liars = run.donors[:2]
        for liar in liars:
            _change_first_value(liar.member)
        followed = await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts)
        assert followed is not None
        newcomer.take(None, followed.results)
        check_is_there(run, newcomer)
        asked = {donor.network.peer_id for donor in run.donors} - followed.bytes_from.keys()
        assert set(followed.liars) == {one.network.peer_id for one in liars} - asked
        assert sum(followed.bytes_from.values()) <= 3 * usual_bytes(newcomer.layouts)

    with_newcomer(scenario, bytes_per_second=10 * LINK)


def _change_first_value(member: RunMember) -> None:
    """The donor keeps another result than the committed one, and claims that it is the same."""
    kept = member.results.following
    lying: dict[Lineage, Offered] = {}

    def following(before: Lineage) -> Offered | None:
        found = kept(before)
        if found is None or before in lying:
            return lying.get(before)
        other = bytearray(found.first.memory)
        other[0] ^= 1
        changed = replace(found.first, memory=memoryview(other))
        lying[before] = Offered((changed, *found.results[1:]), found.layouts, found.part_digests)
        return lying[before]

    member.results.following = following  # type: ignore[method-assign]


@pytest.mark.slow
def test_results_are_requested_from_the_fastest_recent_sender() -> None:
    """One slow uplink must not keep a newcomer a step behind for ever."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        slow = NodeSettings(upload_bytes_per_second=LINK)
        run = await start_run(
            world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=3, machines=[slow, slow]
        )
        newcomer, paces, asked = RunMember(seed=1), Paces(), list[set[PeerId]]()
        newcomer.take(run.donors[0].member.capture(), ())
        for _ in range(6):
            await one_more_step(run)
            mine = newcomer.look()
            followed = await follow_run(rpc, run.sources, mine, newcomer.layouts, paces=paces)
            assert followed is not None
            newcomer.take(None, followed.results)
            asked.append(set(followed.bytes_from))
        fast = run.donors[2].network.peer_id
        assert asked[3:] == [{fast}] * 3
        check_is_there(run, newcomer)

    with_newcomer(scenario, bytes_per_second=100 * LINK)


def test_a_place_that_another_transfer_of_the_same_peer_gives_up_is_taken_anew() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=1)
        newcomer, (donor,) = RunMember(seed=1), run.donors
        newcomer.take(donor.member.capture(), ())
        await one_more_step(run)
        assert donor.server is not None
        kept, desk = donor.member.results.following, donor.server._desk

        def following(before: Lineage) -> Offered | None:
            """Meanwhile the other one has come and gone."""
            assert not desk.ask(network.peer_id, trio.current_time())
            desk.begin(network.peer_id, trio.current_time(), 1)
            desk.end(network.peer_id)
            return kept(before)

        donor.member.results.following = following  # type: ignore[method-assign]
        followed = await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts)
        assert followed is not None
        newcomer.take(None, followed.results)
        check_is_there(run, newcomer)

    with_newcomer(scenario, bytes_per_second=10 * LINK)


def test_the_result_of_a_step_that_has_been_announced_and_is_being_made_is_waited_for() -> None:
    """Otherwise the newcomer, which was told of the step, would fetch the whole next state."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=1000.0, donors=2)
        await run.named()
        newcomer, (donor, other) = RunMember(seed=1), run.donors
        newcomer.take(donor.member.capture(), ())
        donor.member.results.follow(STATE_BYTES)
        values = torch.ones(donor.member.layouts.exchanged[0].values)
        made = donor.member.made(values, "step")
        other.member.step(made, values)
        announced = StateSource(donor.network.peer_id, *other.member.at)
        lock = donor.member.lock
        reading = lock.reading

        @contextmanager
        def once_it_is_made() -> Iterator[None]:
            lock.reading = reading  # type: ignore[method-assign]
            donor.member.step(made, values)
            with reading():
                yield

        lock.reading = once_it_is_made  # type: ignore[method-assign]
        followed = await follow_run(rpc, lambda: [announced], newcomer.look(), newcomer.layouts)
        assert followed is not None
        newcomer.take(None, followed.results)
        assert newcomer.at == other.member.at

    with_newcomer(scenario, bytes_per_second=10 * LINK)


def test_a_request_for_a_missing_result_gets_no_place() -> None:
    """In this way five at once once got five places, before any of them asked for the state."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        other = world.add_node("other")
        run = await start_run(
            world,
            nursery,
            network,
            other,
            epoch_seconds=EPOCH_SECONDS,
            donors=1,
            serving=StateServingSettings(most_downloads=1),
        )
        newcomer = RunMember(seed=1)
        assert await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts) is None
        async with open_rpc(other) as others_rpc:
            with trio.fail_after(KEPT_SECONDS / 2):  # a place would be kept for longer
                await run.fetch(others_rpc, RunMember(seed=2))

    with_newcomer(scenario, bytes_per_second=LINK)


def test_results_of_a_history_that_no_other_peer_has_are_not_fetched() -> None:
    """The donor makes its next step alone, but its slot says that it is where the others are. No
    byte of a result that cannot be the run's is taken."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS, donors=2)
        newcomer = RunMember(seed=1)
        newcomer.take(run.donors[0].member.capture(), ())
        for donor in run.donors:
            donor.member.results.follow(STATE_BYTES)
        lone, honest = run.donors
        run.donors.remove(lone)
        values = torch.ones(lone.member.layouts.exchanged[0].values)
        lone.member.step(lone.member.made(values, "step"), values)
        run.step()
        await run.named()

        def sources() -> list[StateSource]:
            (right,) = run.sources()
            return [replace(right, peer=lone.network.peer_id)]

        assert await follow_run(rpc, sources, newcomer.look(), newcomer.layouts) is None
        followed = await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts)
        assert followed is not None
        assert set(followed.bytes_from) == {honest.network.peer_id}

    with_newcomer(scenario, bytes_per_second=10 * LINK)


@pytest.mark.slow
def test_nothing_is_kept_once_nobody_has_asked_for_some_steps_and_some_seconds() -> None:
    now = [0.0]
    member = RunMember(values=SMALL_VALUES, clock=lambda: now[0])

    def step(seconds: float) -> int:
        now[0] += seconds
        random_step(member)
        return len(member.results)

    assert step(10.0) == 0
    member.results.follow(STATE_BYTES)
    assert [step(10.0) for _ in range(STEPS_FOLLOWED)] == [1, 2, 3]
    assert step(10.0) == 0
    member.results.follow(STATE_BYTES)
    assert [step(0.25 * FOLLOWED_SECONDS) for _ in range(5)] == [1, 2, 3, 0, 0]
    for _ in range(2 * MOST_RESULTS):
        member.results.follow(STATE_BYTES)
        assert step(0.01) <= MOST_RESULTS
    assert len(member.results) == MOST_RESULTS


@pytest.mark.slow
def test_never_more_is_kept_than_a_copy_of_the_state_unless_that_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = 4 << 20
    assert room < ROOM_OF_SMALL_BYTES
    monkeypatch.setattr(results, "ROOM_OF_SMALL_BYTES", room)
    values = room // 5  # in float16: two results are less than this, and three more
    member = RunMember(values=values, clock=lambda: 0.0)

    def most_bytes(state_bytes: int, steps: int) -> int:
        most = 0
        for _ in range(steps):
            member.results.follow(state_bytes)
            random_step(member)
            most = max(most, member.results.bytes)
        return most

    assert 2 * values < most_bytes(0, 3) <= room
    assert len(member.results) == 2
    assert most_bytes(8 * values, 3) <= 8 * values
    assert len(member.results) == 3
    member.results.limit(5 * values)
    assert most_bytes(8 * values, 3) <= 5 * values, "the owner allows no more"
    assert len(member.results) == 2
    member.results.limit(0)
    most_bytes(8 * values, 3)
    assert len(member.results) == 1


def random_step(member: RunMember) -> None:
    values = torch.randn(member.layouts.exchanged[0].values)
    values[-4:] = torch.tensor([1.0, 2.0, 1.0, 0.0])
    member.step(member.made(values, "step"), values)


def test_a_result_that_a_reducer_encoded_unusually_is_offered_to_nobody() -> None:
    """Its digest is of other bytes than those that members get by encoding it again."""
    member = RunMember(clock=lambda: 0.0)
    member.results.follow(STATE_BYTES)
    values = torch.zeros(member.layouts.exchanged[0].values)
    made = member.made(values, "step")
    member.results.add(member.at, replace(made, digest=b"x" * 32), values)
    assert len(member.results) == 1
    assert member.results.following(member.at) is None
    assert len(member.results) == 0


def test_results_over_a_grid_are_not_kept() -> None:
    member = RunMember(clock=lambda: 0.0)
    member.results.follow(STATE_BYTES)
    values = torch.zeros(member.layouts.exchanged[0].values)
    member.results.add(member.at, Made("step", b"x" * 32, None), values)
    assert len(member.results) == 0


def test_the_needed_rate_is_a_little_more_than_a_result_for_each_step_or_a_state() -> None:
    assert Demand(300, 18, 10.0).needed_bytes_per_second == pytest.approx(2.0)
    assert Demand(300, 0, 10.0).needed_bytes_per_second == pytest.approx(30.0)


@pytest.mark.parametrize("into_a_step", [0.01, 0.5, 0.99])
def test_how_long_a_step_takes_does_not_depend_on_when_the_fetch_began(into_a_step: float) -> None:
    """With steps of 10 s, a link that carries a result in 9 s is never called too slow; one that
    needs 10 s is, in the third step at the latest."""
    for speed, is_enough in ((1000 / 8.9, True), (1000 / 10.0, False)):
        keeping_up, told = KeepingUp(), 0
        keeping_up.wants(0.0)
        for tenth in range(400):
            now = tenth / 10
            keeping_up.saw(7 + int(now / 10.0 + into_a_step), now)
            told += keeping_up.too_slow(now, 1000, 1000) is not None
            keeping_up.came(int(speed * (now + 0.1)) - int(speed * now))
        assert bool(told) is not is_enough


def test_a_run_that_has_stopped_after_two_steps_close_together_is_not_called_fast() -> None:
    for came_bytes, is_enough in ((3000, True), (1500, False)):
        keeping_up = KeepingUp()
        keeping_up.wants(0.0)
        for now, epoch in ((0.0, 1), (1.0, 2), (1.5, 3), (30.0, 3)):
            keeping_up.saw(epoch, now)
        keeping_up.came(came_bytes)
        assert (keeping_up.too_slow(30.0, 1000, 1000) is None) is is_enough


# Sources behind a relay

RELAYED = LinkSettings(latency_seconds=0.02, relayed=True)
CUT_OFF_BY = 3  # steps


async def with_one_relayed(
    world: SimulatedWorld,
    nursery: trio.Nursery,
    network: SimulatedNetwork,
    relayed: int,
    epoch_seconds: float,
) -> FollowedRun:
    """A run of two donors that the newcomer is linked to, with one of them through a relay."""
    run = await start_run(world, nursery, network, epoch_seconds=epoch_seconds)
    donor = run.donors[relayed].network
    world.set_path(network, donor, RELAYED)
    for one in run.donors:
        await network.connect(one.network.peer_id)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("relayed", [0, 1])
def test_a_state_and_its_results_come_from_the_source_with_a_direct_link(relayed: int) -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await with_one_relayed(world, nursery, network, relayed, epoch_seconds=0.5)
        direct, behind = run.donors[1 - relayed], run.donors[relayed]
        newcomer, began = RunMember(seed=1), trio.current_time()
        fetched = await run.fetch(rpc, newcomer)
        # it waits for no new link through a relay to become direct
        assert trio.current_time() - began < SETTLING_SECONDS
        assert fetched.bytes_from[direct.network.peer_id] >= STATE_BYTES
        newcomer.take(fetched.state, fetched.results)

        for donor in run.donors:
            donor.member.results.follow(STATE_BYTES)
        for _ in range(CUT_OFF_BY):
            run.step()
        followed = await follow_run(rpc, run.sources, newcomer.look(), newcomer.layouts)
        assert followed is not None
        assert set(followed.bytes_from) == {direct.network.peer_id}
        assert behind.network.peer_id not in followed.bytes_from

    with_newcomer(scenario, bytes_per_second=100 * STATE_BYTES)


def test_results_come_through_a_relay_when_no_other_source_has_them() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await with_one_relayed(world, nursery, network, 0, epoch_seconds=EPOCH_SECONDS)
        behind, direct = run.donors
        behind.member.results.follow(STATE_BYTES)  # the other keeps none
        start = run.at
        run.step()
        await run.named()
        assert direct.member.results.following(start) is None
        settings = FetchSettings()
        account = FetchAccount(rpc, settings)
        wanted = FollowWanted(RUN, behind.member.layouts, float(STATE_BYTES))

        def choice_now() -> Choice | None:
            return choose(run.sources(), network.peer_id, named=False)

        following = Following(account, wanted, start, choice_now)
        async with trio.open_nursery() as fetching:
            fetching.start_soon(following.run)
            assert await following.caught_up()
            fetching.cancel_scope.cancel()
        assert following.end == run.at
        assert set(account.bytes_from) == {behind.network.peer_id}

    with_newcomer(scenario, bytes_per_second=100 * STATE_BYTES)
