"""The directory among people with tokens: who writes, who only reads, and who is refused."""

from __future__ import annotations

import pytest
import trio

from auth.refusals import Reason
from auth.roles import Role
from protocols.dht import DhtSettings
from protocols.not_allowed import NotAllowed
from protocols.testing.world import SimulatedWorld
from tests.dht.members import Member, joined, member, simulated, table_sizes
from tests.protocols.admitted import Admission


async def admitted(world: SimulatedWorld, admission: Admission, *names: str) -> list[Member]:
    """Nodes of these people, who have come one after the other."""
    members: list[Member] = []
    for name in names:
        members.append(await one_of(world, admission, name, members))
    await trio.sleep(5)
    return members


async def one_of(
    world: SimulatedWorld,
    admission: Admission,
    name: str,
    others: list[Member],
    settings: DhtSettings | None = None,
) -> Member:
    one = member(
        world,
        name,
        others[:3],
        settings=settings,
        guard=lambda network: admission.admit(network, name),
    )
    await joined(one)
    return one


@simulated
async def test_a_monitor_reads_and_does_not_write(world: SimulatedWorld) -> None:
    admission = Admission(watcher=(Role.MONITOR,))
    members = await admitted(world, admission, "alice", "bob", "carol")
    settings = DhtSettings(client=True, bootstrap=(members[0].address,))
    monitor = await one_of(world, admission, "watcher", members, settings)
    await members[0].dht.put("note/hello", "hello", 600)
    assert [one.value for one in (await monitor.dht.get("note/hello")).values()] == ["hello"]
    with pytest.raises(NotAllowed) as caught:
        await monitor.dht.put("note/mine", "hello", 600)
    assert caught.value.reason is Reason.ROLE
    await trio.sleep(60)
    assert not await members[1].dht.get("note/mine")
    assert monitor.dht.statistics().peers_in_table == 3, "nobody is worse for saying no"


@simulated
async def test_a_monitor_in_a_table_costs_writers_a_question_and_no_failure(
    world: SimulatedWorld,
) -> None:
    admission = Admission(watcher=(Role.MONITOR,))
    members = await admitted(world, admission, "alice", "bob", "watcher", "dave")
    written = await members[0].dht.put("note/hello", "hello", 600)
    await trio.sleep(3)
    assert written.replicas == 3
    assert table_sizes(members) == [3] * 4
    assert members[0].dht.statistics().peers_lost == 0


@pytest.mark.slow
@simulated
async def test_a_node_whose_token_expired_keeps_its_table_and_goes_on_with_a_new_one(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob", "carol", "dave")
    late = members[3]
    for one in members[:3]:
        admission.renew(one.network, one.network.name, life_ms=24 * 3_600_000)
    await trio.sleep(3700)
    written = await late.dht.put("note/late", "hello", 600)
    assert written.replicas == 1, "nobody but itself"
    assert written.not_allowed is not None
    assert written.not_allowed.reason is Reason.TOKEN_EXPIRED
    assert late.dht.statistics().peers_in_table == 3
    admission.renew(late.network, "dave")
    await late.dht.put("note/late", "hello", 600)
    assert [one.value for one in (await members[0].dht.get("note/late")).values()] == ["hello"]
    await trio.sleep(700)
    assert table_sizes(members) == [3] * 4


@simulated
async def test_a_node_without_a_token_is_in_nobodys_table(world: SimulatedWorld) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob", "carol")
    stranger = member(world, "stranger", members)
    await stranger.ready.wait()
    await trio.sleep(120)
    assert table_sizes(members) == [2] * 3
    assert not stranger.dht._bootstrap.joined.is_set()
    state = stranger.dht.bootstrap_state()
    assert all("refused" in one.failure for one in state.addresses), state


@simulated
async def test_a_node_that_all_refuse_is_told_their_reason_at_once(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob")
    stranger = member(world, "stranger", members)
    await stranger.ready.wait()
    with trio.fail_after(5):
        refusal = await stranger.dht.turned_away()
    assert refusal.reason is Reason.TOKEN_MISSING


@simulated
async def test_one_refusal_is_not_final_while_another_node_does_not_answer(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob")
    world.crash(members[1].network, silently=True)
    stranger = member(world, "stranger", members)
    await stranger.ready.wait()
    with trio.move_on_after(120) as patience:
        await stranger.dht.turned_away()
    assert patience.cancelled_caught
