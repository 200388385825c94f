"""Progress on nodes of a simulated swarm: what each publishes, reads and concludes."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest
import trio
import trio.testing

from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.claims import (
    FASTER_COHORT,
    MORE_OF_A_PEER,
    MOST_EXCUSED_ROUNDS,
    OVERDUE_SECONDS,
    Brought,
    Past,
)
from protocols.accumulation.known import LONGEST_READ_SECONDS, PATIENCE_SECONDS
from protocols.accumulation.progress import FOLLOWER_AGAIN_SECONDS, WAITED_AGAIN
from protocols.accumulation.progress_slot import (
    SLOT_SECONDS,
    name_of_sum,
    progress_key,
    sums_key,
)
from protocols.accumulation.tracker import FEWEST_THAT_WAIT, WAITS_FOR_MOST_SECONDS
from protocols.dht import contact_of
from protocols.identity import PeerId
from protocols.moshpit.closing_time import FOR_MORE_SECONDS
from protocols.moshpit.cohorts import cohort_of
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.accumulation.progress_slots import OTHER_MODEL, history, slot
from tests.accumulation.trackers import TARGET, TrackingPeer, peer_in, trackers
from tests.dht.members import SETTINGS, simulated
from tests.dht.test_service_swarm import MemoryKeeper

KEEPS = msgspec.structs.replace(slot(role="auxiliary"), keeps=True)


@pytest.mark.slow
@simulated
async def test_all_see_at_nearly_the_same_time_that_the_step_is_due(world: SimulatedWorld) -> None:
    peers = await trackers(world, 4)
    due: list[float] = []

    async def watch(one: TrackingPeer) -> None:
        while not one.tracker.estimate.is_due:
            await one.tracker.changed()
        due.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as computing:
        for number, one in enumerate(peers):
            # 8, 16, 32 and 64 samples a second: 120 together, in batches of unequal size
            computing.start_soon(one.computes, 4 * 2**number, 0.5, 40)
        with trio.fail_after(30):
            async with trio.open_nursery() as watching:
                for one in peers:
                    watching.start_soon(watch, one)
        computing.cancel_scope.cancel()
    assert max(due) - min(due) < 0.6
    true_moment = began + TARGET / 120
    assert abs(min(due) - true_moment) < 0.8
    assert abs(max(due) - true_moment) < 0.8


@pytest.mark.slow
@simulated
async def test_sixteen_peers_write_and_read_seldom(world: SimulatedWorld) -> None:
    peers = await trackers(world, 16)
    before = [one.dht.statistics() for one in peers]
    began = trio.current_time()
    async with trio.open_nursery() as computing:
        for one in peers:
            computing.start_soon(one.computes, 2, 0.5, 1000)
        with trio.fail_after(60):
            while not peers[0].tracker.estimate.is_due:
                await peers[0].tracker.changed()
        computing.cancel_scope.cancel()
    seconds = trio.current_time() - began
    after = [one.dht.statistics() for one in peers]
    puts = sum(b.puts - a.puts for a, b in zip(before, after, strict=True)) / len(peers)
    gets = sum(b.gets - a.gets for a, b in zip(before, after, strict=True)) / len(peers)
    assert abs(seconds - TARGET / 64) < 1.5
    assert puts / seconds < 0.4
    assert gets / seconds < 1.5


@simulated
async def test_the_others_see_that_a_peer_begins_a_round(world: SimulatedWorld) -> None:
    peers = await trackers(world, 3)
    for one in peers:
        one.counts(310)
    assert not peers[0].tracker.estimate.is_due
    peers[1].note(averaging=True)
    with trio.fail_after(2 * LONGEST_READ_SECONDS):
        while not peers[0].tracker.estimate.is_due:
            await peers[0].tracker.changed()


async def with_a_keeper(world: SimulatedWorld) -> tuple[TrackingPeer, TrackingPeer]:
    """A peer that knows a keeper of the run, and the keeper."""
    one = (await trackers(world, 1))[0]
    keeper = peer_in(world, "keeper", [one], KEEPS)
    await keeper.ready.wait()
    with trio.fail_after(SLOT_SECONDS):
        while not one.tracker.estimate.keepers:
            await one.tracker.changed()
    return one, keeper


@simulated
async def test_a_keeper_that_falls_silent_is_remembered_until_it_is_back(
    world: SimulatedWorld,
) -> None:
    one, keeper = await with_a_keeper(world)
    world.stop(keeper.network)
    await trio.sleep(2 * SLOT_SECONDS)
    assert not one.tracker.estimate.keepers
    assert one.tracker.estimate.silent_keepers == {keeper.network.peer_id}
    world.resume(keeper.network)
    with trio.fail_after(SLOT_SECONDS):
        while not one.tracker.estimate.keepers:
            await one.tracker.changed()
    assert not one.tracker.estimate.silent_keepers


@simulated
async def test_a_keeper_that_leaves_is_not_remembered(world: SimulatedWorld) -> None:
    one, keeper = await with_a_keeper(world)
    await keeper.leave()
    await trio.sleep(2 * SLOT_SECONDS)
    assert not one.tracker.estimate.keepers
    assert not one.tracker.estimate.silent_keepers


@simulated
async def test_a_batch_that_outlasts_the_delayed_round_it_is_computed_beside_is_measured_whole(
    world: SimulatedWorld,
) -> None:
    """It was once assumed to begin when the round ended."""
    one = (await trackers(world, 1))[0]
    one.note(batch=8)
    one.note(samples=8, averaging=True)
    one.note(under_way=0.0)
    await trio.sleep(1.0)
    epoch = one.tracker.mine().epoch + 1
    one.note(epoch=epoch, samples=0, averaging=False)
    assert one.tracker.mine().under_way == pytest.approx(1.0)
    await trio.sleep(2.0)
    one.note(samples=8, under_way=-1.0)
    assert one.tracker.mine().batch_seconds == pytest.approx(3.0)


@simulated
async def test_a_peer_is_not_spared_for_ever_because_its_first_batch_took_long(
    world: SimulatedWorld,
) -> None:
    await measures_again(world, before=0)


@simulated
async def test_a_peer_is_not_spared_for_ever_because_its_machine_slept_in_a_batch(
    world: SimulatedWorld,
) -> None:
    await measures_again(world, before=3)


async def measures_again(world: SimulatedWorld, before: int) -> None:
    """After a long batch, with this many short ones before it."""
    one = (await trackers(world, 1))[0]
    first = one.tracker.mine().epoch
    one.note(batch=8)
    for batch in range(before):
        one.note(under_way=0.0)
        await trio.sleep(0.01)
        one.note(samples=8 * (batch + 1), under_way=-1.0)
    one.note(under_way=0.0)
    await trio.sleep(50.0)
    one.note(samples=8 * (before + 1), under_way=-1.0)
    for epoch in range(first, first + MOST_SPARED + 2):
        assert one.tracker.mine().batch_seconds == pytest.approx(50.0, rel=0.1)
        slot = msgspec.structs.replace(one.tracker.mine(), batch_seconds=0.0)
        one.tracker.note(msgspec.structs.replace(slot, averaging=True))
        one.tracker.note(msgspec.structs.replace(slot, epoch=epoch + 1, samples=0))
    assert one.tracker.mine().batch_seconds == 0.0, "it is taken to be as fast as the others"


@simulated
async def test_the_time_in_which_the_process_was_stopped_is_not_part_of_a_batch(
    world: SimulatedWorld,
) -> None:
    """Or this peer would seem so slow that no step is planned with it."""
    one = (await trackers(world, 1))[0]
    one.note(batch=8)
    one.note(under_way=0.0)
    await trio.sleep(2.0)
    one.note(samples=8)
    await trio.sleep(1.5)
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    before = trio.current_time()
    clock.jump(60.0)
    assert trio.current_time() == before + 60.0
    await trio.sleep(0.5)
    one.note(samples=16, under_way=-1.0)
    assert one.tracker.mine().batch_seconds == pytest.approx(2.0, rel=0.1)
    assert one.tracker.mine().samples_per_second == pytest.approx(4.0, rel=0.1)


@simulated
async def test_a_batch_time_that_was_a_little_wrong_is_published_anew_only_with_the_next_epoch(
    world: SimulatedWorld,
) -> None:
    one = (await trackers(world, 1))[0]
    one.note(batch=8)
    for done, seconds in enumerate([3.0, 3.0, *[3.6] * 8], 1):
        one.note(under_way=0.0)
        await trio.sleep(seconds)
        one.note(samples=8 * done, under_way=-1.0)
        assert one.tracker.mine().batch_seconds == pytest.approx(3.0)
    one.note(averaging=True)
    assert one.tracker.mine().batch_seconds == pytest.approx(3.0)
    one.note(epoch=one.tracker.mine().epoch + 1, samples=0, averaging=False)
    assert one.tracker.mine().batch_seconds == pytest.approx(3.6, rel=0.02)


@simulated
async def test_batches_beside_a_delayed_round_are_measured(world: SimulatedWorld) -> None:
    one = (await trackers(world, 1))[0]
    one.note(batch=8)
    one.note(samples=8, averaging=True)
    one.note(under_way=0.0)
    for done in (8, 16):
        await trio.sleep(2.0)
        one.note(beside=done)
        assert one.tracker.mine().under_way == 0.0
        assert one.tracker.mine().batch_seconds == pytest.approx(2.0)
    await trio.sleep(0.5)
    one.note(averaging=False, samples=8 + 16, beside=0)  # the round has failed
    assert one.tracker.mine().under_way == pytest.approx(0.5)


@simulated
async def test_a_peer_that_is_invited_to_a_round_looks_once_however_often_it_is_invited(
    world: SimulatedWorld,
) -> None:
    peers = await trackers(world, 2)
    one = peers[0]
    with trio.fail_after(10):  # just behind a reading: the next one is seconds away
        await one.tracker.looked(after=one.tracker.estimate.number)
    peers[1].note(epoch=6)
    await trio.sleep(0.5)
    before, reads = one.tracker.estimate.number, one.dht.statistics().gets
    for _ in range(20):
        one.tracker.was_asked(6, begins=True)
        await trio.sleep(0.01)
    assert one.tracker.estimate.number > before
    assert one.tracker.estimate.behind is not None
    assert one.dht.statistics().gets - reads <= 2


@simulated
async def test_an_estimate_tells_that_this_peer_was_asked_into_a_round_since_its_last_one(
    world: SimulatedWorld,
) -> None:
    (one,) = await trackers(world, 1)
    epoch = one.tracker.mine().epoch

    async def is_asked(into: int) -> bool:
        one.tracker.was_asked(into, begins=True)
        await trio.sleep(0.5)
        return one.tracker.estimate.is_asked

    assert not await is_asked(epoch + 1)
    one.note(averaging=True)
    assert not await is_asked(epoch), "it is in that round"
    one.note(averaging=False)
    one.tracker.was_asked(epoch, begins=False)
    await trio.sleep(0.5)
    assert not one.tracker.estimate.is_asked, "into the round of the heads, which is not the first"
    assert await is_asked(epoch)
    one.note(averaging=True)
    await trio.sleep(0.5)
    assert not one.tracker.estimate.is_asked
    one.note(averaging=False)
    assert await is_asked(epoch)
    one.note(epoch=epoch + 1)
    await trio.sleep(0.5)
    assert not one.tracker.estimate.is_asked


@simulated
async def test_a_round_is_begun_again_until_the_wait_for_most_is_nearly_over(
    world: SimulatedWorld,
) -> None:
    (one,) = await trackers(world, 1)

    async def is_again(after: float) -> bool:
        await trio.sleep(after)
        return (await one.tracker.changed()).is_again

    assert not await is_again(0.0)
    one.tracker.round_ended(Brought(), applied=False)
    assert await is_again(0.0)
    lasts = WAITS_FOR_MOST_SECONDS - FOR_MORE_SECONDS
    assert await is_again(lasts - 5.0)
    assert not await is_again(5.0)
    one.note(epoch=one.tracker.mine().epoch + 1)
    one.tracker.round_ended(Brought(), applied=False)
    assert await is_again(0.0)
    one.note(epoch=one.tracker.mine().epoch + 1)
    assert not await is_again(0.5)


@simulated
async def test_a_peer_that_leaves_is_gone_soon_and_a_dead_one_when_its_slot_expires(
    world: SimulatedWorld,
) -> None:
    peers = await trackers(world, 5)
    first = peers[0].tracker
    await peers[4].leave()
    with trio.fail_after(8):
        while len(first.estimate.peers) > 3:
            await first.changed()
    await peers[3].is_cancelled()
    with trio.fail_after(8):
        while len(first.estimate.peers) > 2:
            await first.changed()
    peers[2].kill()
    with trio.fail_after(SLOT_SECONDS + 5):
        while len(first.estimate.peers) > 1:
            await first.changed()


@pytest.mark.slow
@simulated
async def test_nobody_counts_on_a_peer_that_is_away_and_all_do_when_it_is_back(
    world: SimulatedWorld,
) -> None:
    first, away, other = await trackers(world, 3)
    away.counts(600)
    other.counts(300)
    with trio.fail_after(SLOT_SECONDS):
        while first.tracker.estimate.samples < 900:
            await first.tracker.changed()
    away.tracker.set_away(is_away=True)
    with trio.fail_after(2 * LONGEST_READ_SECONDS):  # and not when its slot would have ended
        while away.network.peer_id in first.tracker.estimate.peers:
            await first.tracker.changed()
    assert first.tracker.estimate.samples < 900
    assert first.tracker.estimate.expected == 2
    await trio.sleep(SLOT_SECONDS)
    assert away.network.peer_id not in first.tracker.slots()
    assert other.network.peer_id in away.tracker.slots()
    away.tracker.set_away(is_away=False)
    with trio.fail_after(2 * LONGEST_READ_SECONDS):
        while first.tracker.estimate.samples < 900:
            await first.tracker.changed()


@pytest.mark.slow
@simulated
async def test_a_volunteer_whose_network_swallows_everything_believes_nobody_gone(
    world: SimulatedWorld,
) -> None:
    """F5: otherwise it would make a step alone, which no other peer has."""
    first, other = await trackers(world, 2)
    network = world.add_node("volunteer")
    addresses = [one.network.address for one in (first, other)]
    volunteer = TrackingPeer(world, network, addresses, slot(), counts_silence=False)
    await volunteer.ready.wait()
    with trio.fail_after(10):
        while len(volunteer.tracker.estimate.peers) < 2:
            await volunteer.tracker.changed()
    cuts = world.partition([first.network, other.network], [network])
    await trio.sleep(3 * SLOT_SECONDS)
    assert len(volunteer.tracker.estimate.peers) == 2
    assert volunteer.tracker.estimate.company == 2
    assert len(first.tracker.estimate.peers) == 1  # as nobody waits for it
    world.heal(cuts)
    other.kill()
    with trio.fail_after(30 + SLOT_SECONDS):
        while len(volunteer.tracker.estimate.peers) > 1:
            await volunteer.tracker.changed()


@simulated
async def test_a_peer_that_may_begin_the_run_does_not_wait_for_ever_for_peers_of_an_earlier_session(
    world: SimulatedWorld,
) -> None:
    """The organiser's peer restarts when all others have left. It once waited until one came."""
    (gone,) = await trackers(world, 1)
    keeper = MemoryKeeper()
    keeper.save_contacts([contact_of(gone.network.peer_id, [gone.network.address])])
    gone.kill()
    organiser = TrackingPeer(world, world.add_node("organiser"), (), slot(), keeper=keeper)
    volunteer = TrackingPeer(
        world, world.add_node("volunteer"), (), slot(), counts_silence=False, keeper=keeper
    )
    await organiser.ready.wait()
    await volunteer.ready.wait()
    with trio.fail_after(60):
        await organiser.tracker.looked()
    with trio.move_on_after(120) as waited:
        await volunteer.tracker.looked()
    assert waited.cancelled_caught


@simulated
async def test_a_peer_that_restarts_counts_with_what_it_has_now(world: SimulatedWorld) -> None:
    peers = await trackers(world, 3)
    peers[1].counts(400)
    tracker = peers[0].tracker
    with trio.fail_after(10):
        while tracker.estimate.samples < 400:
            await tracker.changed()
    peers[1].kill()
    network = world.restart(peers[1].network)
    again = TrackingPeer(world, network, [peers[0].network.address], slot())
    await again.ready.wait()
    with trio.fail_after(10):
        while tracker.estimate.samples > 0:
            await tracker.changed()
    again.counts(50)
    with trio.fail_after(10):
        while tracker.estimate.samples < 50:
            await tracker.changed()
    assert tracker.estimate.samples < 400


@simulated
async def test_nothing_may_be_decided_before_the_swarm_was_met(world: SimulatedWorld) -> None:
    gone = world.add_node("gone")
    address = gone.address
    world.crash(gone)
    one = TrackingPeer(world, world.add_node("one"), [address], slot())
    await one.ready.wait()
    with trio.move_on_after(60) as waited:
        await one.tracker.looked()
    assert waited.cancelled_caught
    assert one.tracker.estimate.number == 0


@simulated
async def test_the_first_peer_of_a_run_looks_and_is_alone(world: SimulatedWorld) -> None:
    one = peer_in(world, "one")
    await one.ready.wait()
    with trio.fail_after(5):
        found = await one.tracker.looked()
    assert (found.peers, found.company, found.expected) == ((), 0, 1)
    with trio.fail_after(10):
        await one.tracker.looked(after=found.number + 1)


@simulated
async def test_a_newcomer_sees_that_it_is_behind_within_seconds(world: SimulatedWorld) -> None:
    peers = await trackers(world, 3, slot(epoch=40, at=4))
    newcomer = peer_in(world, "newcomer", peers, slot(epoch=0))
    await newcomer.ready.wait()
    with trio.fail_after(5):
        found = await newcomer.tracker.looked()
        while found.behind is None:
            found = await newcomer.tracker.changed()
    assert found.behind.epoch == 40
    assert set(found.behind.peers) == {one.network.peer_id for one in peers}
    assert {one.epoch for one in newcomer.tracker.slots().values()} == {40}


@pytest.mark.slow
@simulated
async def test_a_lone_peer_waits_for_one_that_follows_for_a_moment_and_not_soon_again(
    world: SimulatedWorld,
) -> None:
    """It waits though the newcomer only claims to follow, but not again soon for one that came."""
    (lone,) = await trackers(world, 1, slot(epoch=9))
    behind = msgspec.structs.replace(slot(epoch=8), follows=True)
    follower = peer_in(world, "follower", [lone], behind)
    await follower.ready.wait()

    async def held_back(*, comes: bool = False) -> float:
        """How long it waits, once it has all samples of the step. Then the step is made, with the
        follower in its round if it `comes`."""
        lone.note(samples=0, epoch=lone.tracker.mine().epoch + 1)
        behind = lone.tracker.mine().epoch - 1
        follower.note(epoch=behind)
        while lone.tracker.slots()[follower.network.peer_id].epoch < behind:
            await lone.tracker.changed()
        lone.note(samples=TARGET)
        began = trio.current_time()
        while not lone.tracker.estimate.is_due:
            await lone.tracker.changed()
        seconds = trio.current_time() - began
        members = {follower.network.peer_id: 0.0} if comes else {}
        lone.tracker.round_ended(Brought(members, is_weighed=True), applied=False)
        return seconds

    with trio.fail_after(60):
        while not lone.tracker.estimate.peers:
            await lone.tracker.changed()
        assert await held_back() == pytest.approx(PATIENCE_SECONDS, abs=0.5)
        assert await held_back() < 0.5
        await trio.sleep(FOLLOWER_AGAIN_SECONDS)
        assert await held_back(comes=True) == pytest.approx(PATIENCE_SECONDS, abs=0.5)
        assert await held_back() < 0.5, "it was let in just now"
        lone.note(samples=0)
        await trio.sleep(FOLLOWER_AGAIN_SECONDS)
        assert await held_back() == pytest.approx(PATIENCE_SECONDS, abs=0.5)


@pytest.mark.parametrize("seconds", [0.1, PATIENCE_SECONDS])
def test_a_peer_that_waited_in_vain_waits_again_after_eight_times_as_long(seconds: float) -> None:
    """If another peer leads, the list may be closed before this one has waited at all."""
    run_simulation(lambda world: waits_again_after(world, seconds), settings=SETTINGS)


async def waits_again_after(world: SimulatedWorld, seconds: float) -> None:
    first, _second = await trackers(world, 2, slot(epoch=9))
    behind = msgspec.structs.replace(slot(epoch=8), follows=True)
    follower = peer_in(world, "follower", [first], behind)
    await follower.ready.wait()
    tracker, peer = first.tracker, follower.network.peer_id
    with trio.fail_after(60):
        while not tracker.estimate.followers:
            await tracker.changed()
        first.note(averaging=True)
        while not tracker.mine().averaging:
            await tracker.changed()
        await trio.sleep(seconds)
        tracker.gathered()
        began = trio.current_time()
        tracker.round_ended(Brought(is_weighed=True), applied=True)
        first.note(averaging=False)
        while tracker.estimate.followers:
            await tracker.changed()
        while not tracker.estimate.followers:
            await tracker.changed()
    assert tracker.estimate.followers == {peer}
    assert trio.current_time() - began == pytest.approx(WAITED_AGAIN * seconds, abs=1.1)


@simulated
async def test_after_a_split_the_smaller_side_gives_way_and_only_it(world: SimulatedWorld) -> None:
    peers = await trackers(world, 5, slot(epoch=7, at=1))
    for one in peers[3:]:
        one.note(history=history(2))
    with trio.fail_after(30):
        for one in peers[3:]:
            while one.tracker.estimate.fork is None:
                await one.tracker.changed()
    for one in peers[:3]:
        assert one.tracker.estimate.fork is None
    found = peers[3].tracker.estimate.fork
    assert found is not None
    assert found.history == history(1)


@simulated
async def test_one_liar_about_its_epoch_drags_nobody_along(world: SimulatedWorld) -> None:
    peers = await trackers(world, 4, slot(epoch=7))
    peers[3].note(epoch=7000)
    with trio.fail_after(60):
        number = peers[0].tracker.estimate.number
        found = await peers[0].tracker.looked(after=number + 5)
    assert peers[3].tracker.mine().epoch == 7000
    assert found.behind is None
    assert found.fork is None


@simulated
async def test_a_peer_that_claims_samples_and_does_not_come_is_not_counted_again(
    world: SimulatedWorld,
) -> None:
    peers = await trackers(world, 3)
    liar, honest, first = peers
    liar.counts(900)
    honest.counts(60)
    first.counts(60)
    tracker = first.tracker
    with trio.fail_after(10):
        while not tracker.estimate.is_due:
            await tracker.changed()
    first.note(averaging=True)
    brought = {first.network.peer_id: 60.0, honest.network.peer_id: 60.0}
    tracker.round_ended(Brought(brought, is_weighed=True), applied=False)
    first.note(averaging=False)
    found = await tracker.changed()
    assert not found.is_due
    assert found.samples < 300
    assert [one.kind for one in found.ignored] == ["doubted"]


async def trackers_with_samples(
    world: SimulatedWorld, count: int, samples: int
) -> list[TrackingPeer]:
    """Each has so many samples, and the first expects all of them."""
    peers = await trackers(world, count)
    for one in peers:
        one.counts(samples)
    tracker = peers[0].tracker
    with trio.fail_after(10):
        while tracker.estimate.expected < count:
            await tracker.changed()
    return peers


@simulated
async def test_halves_of_a_group_that_make_no_step_expect_each_other_again(
    world: SimulatedWorld,
) -> None:
    peers = await trackers_with_samples(world, 8, 150)
    first, tracker = peers[0], peers[0].tracker
    first.note(averaging=True)
    brought = {one.network.peer_id: 150.0 for one in peers[:3]}
    tracker.round_ended(Brought(brought, is_weighed=True), applied=False)
    first.note(averaging=False)
    found = await tracker.changed()
    assert found.expected == len(peers)


@simulated
async def test_a_third_of_a_run_that_claims_samples_and_never_comes_is_not_counted_for_long(
    world: SimulatedWorld,
) -> None:
    peers = await trackers_with_samples(world, 12, 50)
    first, tracker = peers[0], peers[0].tracker
    brought = {one.network.peer_id: 50.0 for one in peers[:8]}
    rounds = 0
    while not tracker.estimate.ignored:
        first.note(averaging=True)
        tracker.round_ended(Brought(brought, is_weighed=True), applied=False)
        first.note(averaging=False)
        rounds += 1
        assert rounds <= MOST_EXCUSED_ROUNDS + 1
    never_came = {one.network.peer_id for one in peers[8:]}
    assert {one.peer for one in tracker.estimate.ignored} == never_came


@simulated
async def test_after_a_step_of_many_most_of_them_are_needed_for_some_minutes(
    world: SimulatedWorld,
) -> None:
    first, newcomer = await trackers(world, 2, slot(epoch=7, at=1))
    tracker = first.tracker
    for number, (size, needed) in enumerate(((20, 11), (FEWEST_THAT_WAIT - 1, 0), (40, 21)), 8):
        members = {PeerId(str(one)): 0.0 for one in range(size)}
        tracker.round_ended(Brought(members, is_weighed=True), applied=True)
        first.note(averaging=True)
        first.note(epoch=number, history=history(number), averaging=False)
        assert (await tracker.changed()).needs == needed
    newcomer.note(epoch=10, history=history(10), follows=True)
    with trio.fail_after(10):
        while newcomer.tracker.estimate.needs != 21:
            await newcomer.tracker.changed()
    began = trio.current_time()
    tracker.round_ended(Brought(), applied=False)
    while tracker.estimate.needs:
        await trio.sleep(1.0)
        await tracker.changed()
    assert trio.current_time() - began == pytest.approx(WAITS_FOR_MOST_SECONDS, abs=3.0)


@simulated
async def test_a_round_without_any_samples_is_remembered_until_there_are_some(
    world: SimulatedWorld,
) -> None:
    (one,) = await trackers(world, 1, slot(epoch=7, at=1))
    none = Brought({one.network.peer_id: 0.0, PeerId("another"): 0.0})
    for ends in ({"samples": 1}, {"samples": 0, "epoch": 8, "history": history(8)}):
        one.note(averaging=True)
        one.tracker.round_ended(none, applied=False)
        one.note(averaging=False)
        assert one.tracker._in_vain
        one.note(**ends)
        assert not one.tracker._in_vain
        one.note(samples=0)


@simulated
async def test_what_the_last_steps_were_made_of_is_remembered_until_a_state_is_fetched(
    world: SimulatedWorld,
) -> None:
    (one,) = await trackers(world, 1, slot(epoch=7, at=1))
    tracker, small, large = one.tracker, PeerId("small"), PeerId("large")
    brought = Brought({small: 10.0, large: 1e12}, {large: 100.0}, is_weighed=True)

    async def make_step(epoch: int, *, fails: bool = False) -> Past:
        await trio.sleep(5.0)
        one.note(averaging=True)
        if fails:
            tracker.round_ended(Brought(), applied=False)
            await trio.sleep(50.0)
        tracker.round_ended(brought, applied=True)
        one.note(epoch=epoch, history=history(epoch), averaging=False)
        return tracker._past

    assert (await make_step(8)).rate_of(0) == math.inf, "it was not there when that step began"
    assert (await make_step(9, fails=True)).rate_of(0) == math.inf, "it waited for others"
    past = await make_step(10)
    assert past.rate_of(0) == pytest.approx(FASTER_COHORT * 100.0 / 5.0)
    assert past.most_of(large, 1.0) == MORE_OF_A_PEER * TARGET + (10.0 + TARGET) / 2
    one.note(epoch=20, history=history(20))
    assert tracker._past.most_of(large, 1.0) == tracker._past.rate_of(0) == math.inf


def test_another_model_and_a_second_node_with_our_identity_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await trackers(world, 2)
        stranger = peer_in(world, "stranger", peers, slot(signature=OTHER_MODEL))
        await stranger.ready.wait()
        one = peers[0]
        for _ in range(3):
            await trio.sleep(4)
            # what a second node with the same key would say, above what this one has said
            await one.dht.put(progress_key("poem"), slot(5, epoch=99), SLOT_SECONDS)
        await trio.sleep(8)

    with caplog.at_level(logging.WARNING, "potluck.accumulation"):
        scenario()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("another model" in one for one in texts) == 4, "each side of each pair says it once"
    assert sum("Another node publishes" in one for one in texts) == 1


def test_another_release_of_torch_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        one, other = await trackers(world, 2)
        one.note(torch="2.13.0+cpu")
        other.note(torch="2.4.1+cu118")
        await trio.sleep(10)
        one.counts(5)
        other.counts(5)
        await trio.sleep(10)

    with caplog.at_level(logging.WARNING, "potluck.accumulation"):
        scenario()
    texts = [record.getMessage() for record in caplog.records if "with torch" in record.msg]
    assert sum("trains with torch 2.4 and this peer with torch 2.13" in one for one in texts) == 1
    assert len(texts) == 2, "each side says it once"


# ---- by cohorts, what proves that others are further

COHORTS = 4


async def in_cohorts(world: SimulatedWorld, size: int = 24) -> dict[int, list[TrackingPeer]]:
    """The peers of a run by cohorts, by the numbers of their cohorts."""
    first = slot(10, 1.0)
    found: dict[int, list[TrackingPeer]] = {number: [] for number in range(COHORTS)}
    peers: list[TrackingPeer] = []
    for number in range(size):
        peers.append(peer_in(world, f"peer-{number}", peers, first))
        await peers[-1].ready.wait()
        peers[-1].tracker._divide(COHORTS)
        found[cohort_of("poem", peers[-1].network.peer_id, COHORTS)].append(peers[-1])
    await trio.sleep(30.0)
    assert all(one.tracker.estimate.cohort is not None for one in peers)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cohorts",
    [1, *(pytest.param(one, marks=pytest.mark.soak) for one in (COHORTS, 37, 2 * COHORTS))],
)
def test_peers_that_name_a_later_state_for_their_cohorts_move_nobody(cohorts: int) -> None:
    """Two of 24, each in another cohort, also if they say that the run has another number of
    cohorts, and publish there. Before, all others dropped their samples."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        run = await in_cohorts(world)
        liars = [
            next(one for one in run[number] if one.tracker.estimate.sum is None)
            for number in (0, 1)
        ]
        honest = [one for members in run.values() for one in members if one not in liars]
        lie = msgspec.structs.replace(
            liars[0].tracker.mine(), epoch=6, history=b"x" * 16, cohorts=cohorts
        )
        named: dict[TrackingPeer, set[PeerId]] = {one: set() for one in honest}
        for _ in range(40):
            for liar in liars:
                number = cohort_of("poem", liar.network.peer_id, cohorts)
                claim = msgspec.structs.replace(lie, peers=6)
                await liar.dht.put(sums_key("poem"), claim, SLOT_SECONDS)
                if cohorts != COHORTS:
                    key = progress_key("poem", cohorts, number)
                    await liar.dht.put(key, lie, SLOT_SECONDS)
            await trio.sleep(1.0)
            for one in honest:
                found = one.tracker.estimate
                assert found.behind is None
                assert not found.ahead
                named[one] |= {ignored.peer for ignored in found.ignored}
        for names in named.values():
            assert names == {liar.network.peer_id for liar in liars}, names

    scenario()


@pytest.mark.parametrize("signature", ["that of the run", "another"])
@pytest.mark.parametrize("epoch", ["the next", "a later one"])
@pytest.mark.parametrize("first", [0, 5])
def test_one_peer_that_names_a_number_of_cohorts_moves_nobody_that_has_made_a_step(
    first: int, epoch: str, signature: str
) -> None:
    """Those that make the step first find nobody else there, and once believed whoever was. It
    publishes the same as a peer and as the head of a cohort."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        liar, *honest = await trackers(world, 6, slot(epoch=first, at=first))
        at = {"epoch": first + 1, "history": history(7)}
        where = at if epoch == "the next" else {"epoch": 1 << 40, "history": history(9)}
        for one in (liar, *honest):
            one.note(averaging=True)
        await trio.sleep(10.0)
        lie = msgspec.structs.replace(liar.tracker.mine(), **where, cohorts=64, peers=1)
        if signature == "another":
            lie = msgspec.structs.replace(lie, signature=OTHER_MODEL)
        await liar.dht.put(sums_key("poem"), lie, SLOT_SECONDS)
        with trio.fail_after(60.0):
            for one in honest:
                while name_of_sum(liar.network.peer_id) not in one.tracker._seen.slots:
                    await one.tracker.changed()
        own = msgspec.structs.replace(lie, peers=0)
        with trio.fail_after(60.0):  # its own tracker publishes what is true in between
            while not all(is_heard_by(one, liar) for one in honest):
                await liar.dht.put(progress_key("poem"), own, SLOT_SECONDS)
                await trio.sleep(1.0)
        for one in honest:
            one.note(**at, averaging=False)
            assert one.tracker.mine().cohorts == 1
        await trio.sleep(10.0)
        assert all(one.tracker.mine().cohorts == 1 for one in honest)

    scenario()


@simulated
async def test_a_peer_that_moves_to_other_cohorts_and_back_at_once_does_not_withdraw_its_slot(
    world: SimulatedWorld,
) -> None:
    one, other = await trackers(world, 2)
    for count in (COHORTS, 1):
        one.tracker._divide(count)
    for _ in range(20):
        await trio.sleep(0.1)
        assert one.network.peer_id in await other.dht.get(progress_key("poem"))


def is_heard_by(one: TrackingPeer, liar: TrackingPeer) -> bool:
    seen = one.tracker._seen.slots.get(liar.network.peer_id)
    return seen is not None and seen.slot.cohorts == 64


@simulated
async def test_those_that_have_averaged_their_parameters_still_need_most_of_the_last_step(
    world: SimulatedWorld,
) -> None:
    peers = await trackers(world, FEWEST_THAT_WAIT)
    for one in peers:
        one.note(epoch=5, history=history(5), averaging=True)
        one.tracker._next_step_peers = len(peers)
    for one in peers:
        one.note(epoch=6, history=history(6), averaging=False)
    await trio.sleep(5.0)
    for one in peers:
        one.note(history=history(60))
    await trio.sleep(5.0)
    for one in peers:
        assert one.tracker.mine().step_peers == len(peers)
        assert one.tracker.estimate.needs == len(peers) // 2 + 1
        assert one.tracker.mine().epoch_seconds > 9.0


@pytest.mark.slow
@pytest.mark.parametrize(("averaging", "seconds"), [(False, 3.0), (True, 3.0 + OVERDUE_SECONDS)])
def test_a_peer_learns_that_the_other_cohorts_are_further_also_while_it_averages(
    seconds: float, *, averaging: bool
) -> None:
    """Its head may do nothing."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        run = await in_cohorts(world)
        me = next(one for one in run[0] if one.tracker.estimate.sum is None)
        me.note(averaging=averaging)
        for number, members in run.items():
            for one in members if number else ():
                one.note(epoch=6, history=history(7))
        with trio.fail_after(seconds):
            while me.tracker.estimate.behind is None:
                await me.tracker.changed()

    scenario()
