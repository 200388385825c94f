"""A network that goes and comes back: training stands still meanwhile, and says why. (F5, F6)"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from node.core.training_view import TrainerPhase
from node.training.happenings import PeerCame, PeerWent
from node.training.network_watch import (
    FIRST_TRY_SECONDS,
    LOST_SECONDS,
    STAYS_SECONDS,
    watch_network,
)
from node.training.session import TrainingSession
from protocols.accumulation.progress_slot import SLOT_SECONDS
from protocols.dht import DhtSettings
from protocols.testing.world import LinkSettings, SimulatedWorld
from tests.dht.members import Member, joined, member, simulated
from tests.trainer.recorded import Recorded

OUTAGE_SECONDS = 600.0
BACK_SECONDS = DhtSettings().longest_retry_seconds + 5.0


async def watched(
    world: SimulatedWorld, one: Member, *, begins: bool = False
) -> tuple[TrainingSession, Recorded]:
    shown = Recorded()
    session = TrainingSession(shown)
    session.entered()

    async def watch() -> None:
        await watch_network(one.network, one.dht, session, begins=begins)

    world.nursery.start_soon(watch)
    return session, shown


@pytest.mark.slow
@simulated
async def test_ten_minutes_without_a_network_are_told_and_over_by_themselves(
    world: SimulatedWorld,
) -> None:
    keeper = member(world, "keeper")
    await joined(keeper)
    volunteer = member(world, "volunteer", [keeper])
    await joined(volunteer)
    session, shown = await watched(world, volunteer)
    assert session.gate.is_open
    cuts = world.partition([keeper.network], [volunteer.network])

    await trio.sleep(SLOT_SECONDS + FIRST_TRY_SECONDS)
    assert not session.gate.is_open
    told = session.view()
    assert told.phase is TrainerPhase.NETWORK_LOST
    assert "known address" in told.doing
    assert "continues by itself" in told.advice

    await trio.sleep(OUTAGE_SECONDS)
    assert not session.gate.is_open
    world.heal(cuts)
    await trio.sleep(BACK_SECONDS)
    assert session.gate.is_open
    assert shown.kinds().count("NetworkLost") == shown.kinds().count("NetworkBack") == 1


@simulated
async def test_a_short_silence_between_two_links_is_no_loss(world: SimulatedWorld) -> None:
    keeper = member(world, "keeper")
    await joined(keeper)
    volunteer = member(world, "volunteer", [keeper])
    await joined(volunteer)
    session, shown = await watched(world, volunteer)
    world.break_link(keeper.network, volunteer.network)
    await trio.sleep(LOST_SECONDS / 2)
    await volunteer.network.connect(keeper.network.peer_id)
    await trio.sleep(2 * LOST_SECONDS)
    assert session.gate.is_open
    assert "NetworkLost" not in shown.kinds()


@simulated
async def test_a_first_dial_that_is_under_way_is_no_loss(world: SimulatedWorld) -> None:
    """On a loaded machine it takes some seconds, as over this link."""
    keeper = member(world, "keeper")
    await joined(keeper)
    network = world.add_node("volunteer")
    slow = LinkSettings(latency_seconds=LOST_SECONDS)
    world.set_path(keeper.network, network, slow)
    volunteer = Member(world, network, DhtSettings(bootstrap=(keeper.network.address,)))
    await volunteer.ready.wait()
    session, shown = await watched(world, volunteer)
    with trio.fail_after(60):  # it takes 29.8 to 30.8 s, by the pauses between tries
        await volunteer.dht.joined()
    assert session.gate.is_open
    assert "NetworkLost" not in shown.kinds()


@simulated
async def test_the_organisers_first_peer_trains_on_alone(world: SimulatedWorld) -> None:
    keeper = member(world, "keeper")
    await joined(keeper)
    session, _ = await watched(world, keeper, begins=True)
    await trio.sleep(SLOT_SECONDS)
    assert session.gate.is_open


@simulated
async def test_a_peer_that_hangs_up_at_once_is_not_told_of(world: SimulatedWorld) -> None:
    volunteer = member(world, "volunteer")
    await volunteer.ready.wait()
    _, shown = await watched(world, volunteer)
    stranger, other = world.add_node("stranger"), world.add_node("other")
    await trio.testing.wait_all_tasks_blocked()
    for one in (stranger, other):
        one.learn_addresses(volunteer.network.peer_id, [volunteer.network.address])
        await one.connect(volunteer.network.peer_id)
    await stranger.disconnect(volunteer.network.peer_id)
    await trio.sleep(2 * STAYS_SECONDS)
    await other.disconnect(volunteer.network.peer_id)
    await trio.sleep(2 * STAYS_SECONDS)
    assert shown.kinds() == ["PeerCame", "PeerWent"]
    came, went = shown.happenings
    assert isinstance(came, PeerCame)
    assert isinstance(went, PeerWent)
    assert came.peer == went.peer == other.peer_id
