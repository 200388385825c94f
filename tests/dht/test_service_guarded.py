"""The directory among people with tokens: who writes, who only reads, and who is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from auth.refusals import Reason
from auth.roles import Role
from protocols.dht import Breadth, DhtSettings, Slot, SlotEntry
from protocols.dht.messages import STORE, StoreRequest
from protocols.dht.slots import SlotRefusal, sign_slot
from protocols.errors import Busy
from protocols.identity import Identity, PeerId
from protocols.not_allowed import NotAllowed
from protocols.rpc import encode
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


def invented(one: Member, key: str, value: str = "lies") -> Slot:
    """A slot of nobody's, well signed."""
    now_ms = int(one.network.wall_time() * 1000)
    return sign_slot(Identity.generate(), key, encode(value), now_ms, now_ms + 600_000)


async def after_one_has_gone(world: SimulatedWorld, admission: Admission) -> list[Member]:
    """Alice and Bob, who keep what a third member has written, and that member, which has died."""
    members = await admitted(world, admission, "alice", "bob", "gone")
    await members[2].dht.put("note/hello", "hello", 600)
    await trio.sleep(1)
    members[2].crash()
    return members


def reading_at(one: Member) -> DhtSettings:
    """Of a node that keeps nothing itself, so that others hand it nothing over."""
    return DhtSettings(client=True, bootstrap=(one.address,))


def values_in(found: dict[PeerId, SlotEntry]) -> list[str]:
    return sorted(entry.value for entry in found.values())


@simulated
async def test_no_node_keeps_slots_of_publishers_that_a_member_has_invented(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob")
    liar, other = members
    slot = invented(liar, "note/hello")
    for copies in (False, True):
        request = StoreRequest((slot,), copies=copies, tokens=(b"no token",))
        response = await liar.rpc.call(other.peer, STORE, request, timeout=5)
        assert list(response.refusals) == [SlotRefusal.STRANGER]
    assert other.dht.statistics().slots_stored == 0
    assert other.dht.statistics().copies_cached == 0


@simulated
async def test_readers_pass_over_invented_publishers_and_find_the_members(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob", "carol")
    reader, liar, honest = members
    await honest.dht.put("note/hello", "hello", 600)
    for number in range(3):
        slot = invented(liar, "note/hello", f"lie {number}")
        liar.dht._state.storage.store(slot, liar.dht._state.now_ms())
    for _ in range(3):
        await trio.sleep(30)
        assert values_in(await reader.dht.get("note/hello")) == ["hello"]
        assert values_in((await reader.dht.look("note/hello", Breadth.ALL))[0]) == ["hello"]
    counted = reader.dht.statistics()
    assert counted.strangers_slots_read == 3 * 3, "once in each survey"
    assert counted.bad_slots_read == 0
    assert table_sizes(members) == [2] * 3, "nobody is blamed for what others have published"


@simulated
async def test_slots_of_a_member_that_has_gone_are_believed_by_those_that_never_met_it(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await after_one_has_gone(world, admission)
    newcomer = await one_of(world, admission, "dave", members[:2])
    assert values_in(await newcomer.dht.get("note/hello")) == ["hello"]
    await trio.sleep(60)
    assert newcomer.dht.statistics().slots_stored == 1, "it keeps the slot for others as well"
    members[0].crash()
    members[1].crash()
    last = await one_of(world, admission, "erin", [newcomer])
    assert values_in(await last.dht.get("note/hello")) == ["hello"], "now it vouches itself"


@simulated
async def test_a_replica_that_vouches_for_nobody_hides_no_slot_that_another_has(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await after_one_has_gone(world, admission)
    silent, honest = members[:2]
    access = admission.of(silent.network)
    access._shown.pop(members[2].network.peer_id)  # as after a restart
    for name, first in (("dave", silent), ("erin", honest)):
        newcomer = await one_of(world, admission, name, members, reading_at(first))
        assert values_in(await newcomer.dht.get("note/hello")) == ["hello"]
        for _ in range(3):
            assert values_in((await newcomer.dht.look("note/hello"))[0]) == ["hello"]
            await trio.sleep(20)


@simulated
async def test_slots_are_asked_for_again_if_nobody_could_be_asked_to_vouch(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await after_one_has_gone(world, admission)
    newcomer = await one_of(world, admission, "dave", members, reading_at(members[0]))
    requester = newcomer.dht._requester
    vouch = requester.vouch

    async def fails(*_arguments: object) -> Sequence[bytes]:
        raise Busy("Not now.")

    requester.vouch = fails  # type: ignore[method-assign]
    assert not await newcomer.dht.get("note/hello")
    requester.vouch = vouch  # type: ignore[method-assign]
    assert values_in(await newcomer.dht.get("note/hello")) == ["hello"]


@simulated
async def test_what_a_revoked_member_has_written_is_not_read_any_more(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob", "gone")
    for key in ("note/before", "note/after"):
        await members[2].dht.put(key, "hello", 600)
    assert values_in(await members[0].dht.get("note/before")) == ["hello"]
    for one in members[:2]:
        access = admission.of(one.network)
        at_ms = access.clock_ms()
        access.revocations.accept(admission.authority.revoke("gone", at_ms=at_ms), access.keyring)
    for key in ("note/before", "note/after"):
        assert not await members[0].dht.get(key), "nor by those that have kept it"
    members[2].crash()
    newcomer = await one_of(world, admission, "dave", members[:2])
    access = admission.of(newcomer.network)
    signed = admission.authority.revoke("gone", at_ms=access.clock_ms())
    access.revocations.accept(signed, access.keyring)
    assert not await newcomer.dht.get("note/after")


@simulated
async def test_an_older_token_does_not_take_the_place_of_the_one_that_a_peer_has_shown(
    world: SimulatedWorld,
) -> None:
    admission = Admission()
    members = await admitted(world, admission, "alice", "bob")
    access, bob = admission.of(members[0].network), members[1].network
    now_ms = access.clock_ms()
    authority = admission.authority
    newer, older = (
        authority.token(bob.identity.public_key, now_ms, name="bob", life_ms=life_ms)
        for life_ms in (7_200_000, 1_000)
    )
    for token in (newer, older):
        access.note_vouched(token)
    assert access.tokens_of([bob.peer_id]) == (newer,)
    access.note_vouched(b"no token")
    assert access.tokens_of([members[0].network.peer_id, bob.peer_id]) == (newer,)
