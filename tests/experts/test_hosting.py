"""A server's life with its experts, on swarms of simulated nodes in virtual time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import pytest
import torch
import trio
from blake3 import blake3

from protocols.errors import Busy, PotluckError, Unreachable
from protocols.experts import (
    ExpertGrid,
    ExpertLost,
    ExpertSaved,
    HostSettings,
    SavingFailed,
    Uid,
    UnknownExpert,
    WrongUid,
    hosting,
    keepers,
)
from protocols.experts.copies import (
    CopyForm,
    CopyStore,
    ExpertSnapshot,
    KeptCopy,
    WrongCopy,
    take_snapshot,
)
from protocols.experts.directory import CACHED_SECONDS, LEAVING_SECONDS, MOST_COPY_RECORDS
from protocols.experts.hosting import (
    BUSY_SECONDS,
    LONGEST_WAIT_SECONDS,
    MOST_FAILED_FETCHES,
    STALE_COPY_SECONDS,
    SWEEP_SECONDS,
    SendingShare,
    Vacancies,
    cells_to_take,
    newest_first,
    wait_before_taking,
)
from protocols.experts.keepers import (
    COPY,
    KEEP,
    KEEPERS,
    LEAST_KEEPERS,
    CopyOffer,
    CopyOpening,
    CopyRefused,
    KeepOpening,
    UnknownCopy,
    ask_offers,
    keepers_of,
)
from protocols.experts.messages import MOST_INFOS
from protocols.experts.runtime import ExpertBackend, ExpertStatistics
from protocols.identity import PeerId
from protocols.rpc import Empty, Rpc
from tests.dht.members import Member
from tests.experts.hosts import (
    CHECKPOINT_SECONDS,
    GRID,
    Cast,
    Server,
    Trainer,
    are_equal,
    batch,
    make,
    origins,
    saved,
    staged,
    values,
)
from tests.waiting import until

MINUTE = 60.0
UID, OTHER = GRID.at(5), GRID.at(6)


def whose(servers: Sequence[Server]) -> dict[Uid, Server]:
    """Which server hosts each expert. No expert may have two."""
    pairs = [(uid, server) for server in servers for uid in server.uids()]
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


# ---- taking cells


@staged
async def test_a_server_takes_free_cells_and_trainers_find_it(cast: Cast) -> None:
    server, trainer = await cast.server(3), await cast.trainer()
    await server.hosting(3)
    assert set(origins(server).values()) == {("new", 0)}
    await trio.sleep(MINUTE)
    assert await trainer.live() == {uid: {server.peer} for uid in server.uids()}
    await trainer.train_all(server)
    assert [one.steps for one in server.host.hosted()] == [1, 1, 1]


@staged
async def test_a_server_hosts_exactly_the_experts_that_were_named(cast: Cast) -> None:
    server = await cast.server(16, [UID, OTHER])
    await trio.sleep(MINUTE)
    assert server.uids() == [UID, OTHER]


@staged
async def test_an_expert_outside_of_all_grids_cannot_be_named(cast: Cast) -> None:
    member = await cast.node("node")
    wrong = Server(member, cast.folder, HostSettings(1, (Uid("ffn", (4, 0)),)))
    with pytest.raises(WrongUid, match=r"ffn\.4\.0 is in no grid"):
        await wrong.run(member.network)


@pytest.mark.slow
@staged
async def test_servers_that_start_together_end_with_each_cell_hosted_once(cast: Cast) -> None:
    servers = [await cast.server(4) for _ in range(4)]
    await trio.sleep(2 * MINUTE)
    assert len(whose(servers)) == GRID.cells


@staged
async def test_a_new_expert_has_the_weights_that_follow_from_its_name(cast: Cast) -> None:
    server = await cast.server(1, [UID])
    await server.hosting(1)
    assert are_equal(values(server.backend(UID)), values(make(UID)))


# ---- dying, restarting, taking over


@pytest.mark.slow
@staged
async def test_all_experts_are_hosted_a_minute_after_half_of_eight_servers_died(
    cast: Cast,
) -> None:
    servers = [await cast.server(2) for _ in range(8)]
    trainer = await cast.trainer()
    await trio.sleep(MINUTE)
    before = whose(servers)
    assert len(before) == GRID.cells
    for server in servers:
        await trainer.train_all(server, steps=3)
    for server in servers:
        await saved(server)
    for server in servers:  # these may be lost
        await trainer.train_all(server, steps=1)
    dead, alive = servers[:4], servers[4:]
    kept = {uid for server in alive for uid in server.kept()}
    for server in dead:
        server.crash()
    died_at = trio.current_time()
    fresh = [await cast.server(2) for _ in range(4)]
    await until(lambda: len(whose(alive + fresh)) == GRID.cells, MINUTE)
    await until(lambda: trainer.finds_all(), died_at + MINUTE - trio.current_time())
    for server in fresh:
        for uid, origin in origins(server).items():
            assert origin == (("taken over", 3) if uid in kept else ("new", 0))
    assert sum(uid in kept for server in fresh for uid in server.uids()) >= 3


@pytest.mark.slow
@staged
async def test_a_server_with_room_takes_over_what_a_dead_one_had(cast: Cast) -> None:
    dying = await cast.server(2)
    await dying.hosting(2)
    others = [await cast.server(8) for _ in range(2)]
    await until(lambda: len(whose(others)) == 14, MINUTE)
    trainer = await cast.trainer()
    experts = dying.uids()
    await trainer.train_all(dying, steps=2)
    await saved(dying)
    was = {uid: values(dying.backend(uid)) for uid in experts}
    dying.crash()
    await until(lambda: set(experts) <= set(whose(others)), MINUTE)
    for uid in experts:
        server = whose(others)[uid]
        assert origins(server)[uid] == ("taken over", 2)
        assert are_equal(values(server.backend(uid)), was[uid])


@pytest.mark.slow
@staged
async def test_an_expert_is_found_at_its_keepers_if_the_directory_has_lost_its_copies(
    cast: Cast,
) -> None:
    keepers = [await cast.server(1, [GRID.at(n)]) for n in range(2)]
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=2)
    await saved(dying)
    dying.crash()
    for server in keepers:
        server.host._keeper._is_own = lambda _: True  # it announces no copies any more
    await trio.sleep(MINUTE)
    assert all(server.kept() == [] for server in keepers)
    fresh = await cast.server(1, [UID])
    await fresh.hosting(1)
    assert origins(fresh)[UID] == ("taken over", 2)


@pytest.mark.slow
@staged
async def test_an_expert_does_not_begin_anew_while_its_keeper_is_out_of_reach_for_a_moment(
    cast: Cast,
) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=2)
    await saved(dying)
    fresh = await cast.server(1, [UID])
    cast.world.partition([fresh.member.network], [keeper.member.network])
    dying.crash()
    await until(lambda: bool(fresh.host._failed_fetches), 2 * MINUTE)
    assert fresh.uids() == []
    cast.world.heal()
    await fresh.hosting(1)
    assert origins(fresh)[UID] == ("taken over", 2)
    assert not fresh.host._failed_fetches, "the next time does not begin with these failures"


@pytest.mark.slow
@staged
async def test_a_server_that_is_offline_makes_no_new_experts(cast: Cast) -> None:
    """It sees neither hosts nor keepers. Back in the swarm, trainers would prefer what it made."""
    other, third = await cast.server(1, [UID]), await cast.node("third")
    await other.hosting(1)
    server = await cast.server(1, [UID])
    cuts = cast.world.partition([server.member.network], [other.member.network, third.network])
    await trio.sleep(5 * MINUTE)
    assert server.uids() == []
    cast.world.heal(cuts)
    other.crash()
    await server.hosting(1, within_seconds=2 * MINUTE)


@pytest.mark.slow
@staged
async def test_the_failures_of_keepers_count_only_until_the_expert_has_a_host(cast: Cast) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    first, trainer = await cast.server(1, [UID]), await cast.trainer()
    await first.hosting(1)
    waiting = await cast.server(1, [UID])
    for number in range(MOST_FAILED_FETCHES):  # of an earlier time without a host
        waiting.host._note_failure(UID, keeper.peer, Unreachable(f"Failure {number}."))
    waiting.host._taking.add(UID)
    await waiting.host._take(UID, trio.CapacityLimiter(1))  # it sees that there is a host
    await trainer.train(first, UID, steps=2)
    await saved(first)
    cast.world.partition([waiting.member.network], [keeper.member.network])
    first.crash()
    before = dict(waiting.host._failed_fetches)
    await until(lambda: dict(waiting.host._failed_fetches) != before, 2 * MINUTE)
    await trio.sleep(1.0)
    assert waiting.uids() == [], "one failure is not enough to begin anew"
    cast.world.heal()
    await waiting.hosting(1, within_seconds=2 * MINUTE)
    assert origins(waiting)[UID] == ("taken over", 2)


@pytest.mark.slow
@staged
async def test_a_server_that_starts_again_goes_on_with_its_own_experts(cast: Cast) -> None:
    others = [await cast.server(1) for _ in range(2)]
    server, trainer = await cast.server(2), await cast.trainer()
    await server.hosting(2)
    await trainer.train_all(server, steps=2)
    await saved(server)
    was = {uid: values(server.backend(uid)) for uid in server.uids()}
    await trainer.train_all(server)
    server.crash()
    again = await cast.restart(server)
    await again.hosting(2, within_seconds=5.0)
    assert origins(again) == dict.fromkeys(was, ("own copy", 2))
    assert all(are_equal(values(again.backend(uid)), was[uid]) for uid in was)
    assert not set(again.uids()) & set(whose(others))


@pytest.mark.slow
@staged
async def test_a_server_that_starts_again_takes_nothing_back_from_others(cast: Cast) -> None:
    await cast.server(1, [OTHER])
    first, trainer = await cast.server(1, [UID]), await cast.trainer()
    second = await cast.server(1, [UID])
    await first.hosting(1)
    await trainer.train(first, UID)
    await saved(first)
    first.crash()
    await second.hosting(1)
    await trainer.train(second, UID, steps=3)
    again = await cast.restart(first)
    await trio.sleep(2 * MINUTE)
    assert (again.uids(), second.uids()) == ([], [UID])
    assert second.host.hosted()[0].steps == 4


async def two_apart(cast: Cast) -> list[Member]:
    """Two nodes that are cut off from each other, each with a third one that answers it."""
    nodes = [await cast.node(name) for name in ("one", "other")]
    sides = [[one.network, (await cast.node(f"by {one.network.name}")).network] for one in nodes]
    cast.world.partition(*sides)
    return nodes


@pytest.mark.slow
@staged
async def test_the_loser_of_a_conflict_stops(cast: Cast) -> None:
    nodes = await two_apart(cast)
    settings = HostSettings(1, (UID,))
    servers = [await cast.start(Server(one, cast.folder / one.peer, settings)) for one in nodes]
    for server in servers:
        await server.hosting(1)
    await trio.sleep(MINUTE)
    cast.world.heal()
    await until(lambda: any(server.told(ExpertLost) for server in servers), 5 * MINUTE)
    await trio.sleep(2 * MINUTE)
    ((_, keeps),) = whose(servers).items()
    (loser,) = [server for server in servers if server is not keeps]
    trainer = await cast.trainer()
    await trainer.train(keeps, UID)
    with pytest.raises(UnknownExpert):
        await trainer.train(loser, UID)
    assert await trainer.live() == {UID: {keeps.peer}}


@pytest.mark.slow
@staged
async def test_of_two_servers_with_one_expert_the_one_that_has_trained_it_further_keeps_it(
    cast: Cast,
) -> None:
    nodes = await two_apart(cast)
    servers = []
    for one, uids in zip(nodes, [(UID, OTHER), (UID,)], strict=True):
        settings = HostSettings(len(uids), uids)
        servers.append(await cast.start(Server(one, cast.folder / one.peer, settings)))
        await servers[-1].hosting(len(uids))
        await trio.sleep(MINUTE / 10)
    early, late = servers
    for server, steps in ((early, 2), (late, 5)):
        for _ in range(steps):
            server.backend(UID).backward(batch(), batch())
    cast.world.heal()
    await until(lambda: any(server.told(ExpertLost) for server in servers), 5 * MINUTE)
    await trio.sleep(2 * MINUTE)
    assert (early.uids(), late.uids()) == ([OTHER], [UID])
    assert early.told(ExpertLost) == [ExpertLost(UID)]
    trainer = await cast.trainer()
    assert await trainer.live() == {UID: {late.peer}, OTHER: {early.peer}}


@pytest.mark.slow
@staged
async def test_each_of_more_experts_than_one_message_names_stays_where_it_was_trained_further(
    cast: Cast,
) -> None:
    uids = [Uid("ffn", (0, number)) for number in range(MOST_INFOS + 44)]
    backend = make(UID)
    servers: list[Server] = []
    for name in ("early", "late"):
        settings = HostSettings(0, checkpoint_seconds=math.inf)
        servers.append(
            await cast.start(Server(await cast.node(name), cast.folder / name, settings))
        )
    for server, steps in zip(servers, ((10, 1), (1, 10)), strict=True):
        for number, uid in enumerate(uids):
            one = copy.copy(backend)
            one.uid, one.statistics = uid, ExpertStatistics(steps=steps[number % 2])
            server.host._host(uid, one, "new")
        await trio.sleep(MINUTE / 60)
    await trio.sleep(2 * MINUTE)
    early, late = (set(server.uids()) for server in servers)
    assert (early, late) == ({*uids[::2]}, {*uids[1::2]})


@pytest.mark.slow
@staged
async def test_a_server_does_not_take_the_experts_of_one_that_its_own_trainer_cannot_call(
    cast: Cast,
) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    other = await cast.server(16)
    await other.hosting(15)
    await trainer.train(server, UID)
    await saved(server)
    assert other.kept() == [UID]
    ends = trio.current_time() + MINUTE
    while trio.current_time() < ends:
        other.host._directory.forget(server.peer)  # as its trainer does after each call that failed
        await trio.sleep(0.3)
    assert UID not in other.uids()


# ---- leaving and pausing


@pytest.mark.slow
@staged
async def test_a_server_that_leaves_hands_over_all_of_its_steps(cast: Cast) -> None:
    leaving = await cast.server(2)
    await leaving.hosting(2)
    staying, trainer = await cast.server(16), await cast.trainer()
    await staying.hosting(14)
    await trio.sleep(CACHED_SECONDS)
    experts = leaving.uids()
    await trainer.train_all(leaving, steps=3)
    was = {uid: values(leaving.backend(uid)) for uid in experts}
    assert leaving.told(ExpertSaved) == []
    began = trio.current_time()
    await leaving.leave()
    assert trio.current_time() - began < 5.0
    await staying.hosting(16, within_seconds=30.0)
    for uid in experts:
        assert origins(staying)[uid] == ("taken over", 3)
        assert are_equal(values(staying.backend(uid)), was[uid])


@staged
async def test_a_server_leaves_in_time_if_nobody_takes_its_copies(cast: Cast) -> None:
    leaving = await cast.server(3)
    await leaving.hosting(3)
    mute, trainer = await cast.server(2), await cast.trainer()
    await mute.hosting(2)
    await trainer.train_all(leaving)
    mute.crash()
    began = trio.current_time()
    await leaving.leave()
    assert trio.current_time() - began < 2.0 + LEAVING_SECONDS + 0.5
    again = CopyStore(leaving.folder, leaving.peer)
    assert len(again.names()) == 3, "they are saved here"


@pytest.mark.slow
@staged
async def test_a_server_that_has_no_time_to_save_all_sends_those_with_most_unsaved_steps(
    cast: Cast,
) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    experts = [GRID.at(number) for number in range(4, 8)]
    leaving, trainer = await cast.server(4, experts), await cast.trainer()
    await leaving.hosting(4)
    await trio.sleep(CACHED_SECONDS)
    for steps, uid in enumerate(experts, 1):
        await trainer.train(leaving, uid, steps)
    save = leaving.host._save

    async def slowly(uid: Uid, one: Any) -> KeptCopy | None:
        await trio.sleep(0.8)  # of the 2 seconds in which it has to leave
        return await save(uid, one)

    leaving.host._save = slowly  # type: ignore[method-assign]
    await leaving.leave()
    assert keeper.kept() == experts[2:]
    assert [one.uid for one in leaving.told(ExpertSaved)] == [experts[3], experts[2]]


@staged
async def test_a_paused_server_is_not_found_and_answers_busy(cast: Cast) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    server.host.pause()
    await trio.sleep(6.0)
    assert await trainer.live() == {}
    with pytest.raises(Busy, match="paused"):
        await trainer.train(server, UID)
    server.host.resume()
    await trio.sleep(6.0)
    assert await trainer.live() == {UID: {server.peer}}
    await trainer.train(server, UID)


@pytest.mark.slow
@staged
async def test_others_take_over_what_a_server_has_paused(cast: Cast) -> None:
    await cast.server(1, [OTHER])
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    other = await cast.server(1, [UID])
    await trainer.train(server, UID)
    await saved(server)
    server.host.pause()
    await other.hosting(1)
    assert origins(other)[UID] == ("taken over", 1)
    server.host.resume()
    await trio.sleep(MINUTE)
    assert (server.uids(), other.uids()) == ([], [UID])


@pytest.mark.slow
@staged
async def test_a_server_that_is_paused_loses_no_step_and_has_none_of_its_experts_afterwards(
    cast: Cast,
) -> None:
    paused, trainer = await cast.server(4), await cast.trainer()
    await paused.hosting(4)
    others = [await cast.server(8) for _ in range(2)]
    await until(lambda: len(whose(others)) == 12, MINUTE)
    experts = paused.uids()
    await trainer.train_all(paused)
    await saved(paused)
    await trainer.train_all(paused, steps=2)  # of which no copy was sent
    paused.host.pause()
    began = trio.current_time()
    await until(lambda: set(experts) <= set(whose(others)), MINUTE)
    assert {origins(whose(others)[uid])[uid] for uid in experts} == {("taken over", 3)}
    await until(lambda: trainer.finds_all(), began + MINUTE - trio.current_time())
    paused.host.resume()
    ended = trio.current_time() + MINUTE
    while trio.current_time() < ended:
        below = await trainer.directory.read({uid.parent for uid in experts})
        for uid in experts:
            hosts = [host.peer for host in below[uid.parent][uid.cells[-1]]]
            assert hosts == [whose(others)[uid].peer], "one host at every moment"
        await trio.sleep(0.3)
    assert len(paused.told(ExpertLost)) == len(experts)
    assert not set(paused.uids()) & set(experts)


@pytest.mark.slow
@staged
async def test_what_another_server_has_trained_on_and_left_is_not_replaced_by_what_was_before(
    cast: Cast,
) -> None:
    keepers = [await cast.server(1, [GRID.at(number)]) for number in range(2)]
    paused, trainer = await cast.server(1, [UID]), await cast.trainer()
    await paused.hosting(1)
    await trainer.train(paused, UID, steps=3)
    await saved(paused)
    paused.host.pause()
    other = await cast.server(1, [UID])
    await other.hosting(1, within_seconds=2 * MINUTE)
    await trainer.train(other, UID, steps=20)
    await saved(other)
    await other.leave()
    assert {one.host._store.find(UID).steps for one in keepers} == {23}
    paused.host.resume()
    await until(
        lambda: paused.host.hosted() != () and paused.host.hosted()[0].steps == 23, 2 * MINUTE
    )
    assert paused.told(ExpertLost) == [ExpertLost(UID)]
    assert origins(paused)[UID] == ("taken over", 23)
    aside = paused.folder / f"{UID}.aside"
    assert CopyForm(make(UID)).check(aside, UID).steps == 3, "what it had itself"


@pytest.mark.slow
@staged
async def test_a_keeper_that_only_offers_more_steps_costs_a_server_nothing_when_it_goes_on(
    cast: Cast,
) -> None:
    liar = await cast.server(1, [GRID.at(0)])
    paused, trainer = await cast.server(1, [UID]), await cast.trainer()
    await paused.hosting(1)
    await trainer.train(paused, UID, steps=3)
    await saved(paused)
    paused.host.pause()
    await trio.sleep(MINUTE)
    boast(liar)
    paused.host.resume()
    await until(lambda: paused.member.rpc.avoided_for(liar.peer) > 0, MINUTE)
    await trio.sleep(MINUTE)
    assert paused.told(ExpertLost) == []
    await trainer.train(paused, UID)
    assert paused.host.hosted()[0].steps == 4
    await saved(paused)
    assert [path.name for path in paused.folder.iterdir()] == [f"{UID}.safetensors"]


@pytest.mark.slow
@staged
async def test_keepers_that_offer_much_and_send_nothing_do_not_prevent_a_take_over_for_ever(
    cast: Cast,
) -> None:
    liars = [await cast.server(1, [GRID.at(number)]) for number in range(2)]
    await cast.server(1, [GRID.at(2)])
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=3)
    await saved(dying)
    dying.crash()
    for liar in liars:
        boast(liar)
    with only_alive(liars[0]), only_alive(liars[1]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosting, "FETCHING_SECONDS", 60.0)  # for both it is not enough
        patch.setattr(keepers, "MOST_SENT_AT_ONCE", 1000)  # they never say that they are busy
        fresh = await cast.server(1, [UID])
        await fresh.hosting(1, within_seconds=10 * MINUTE)
    assert origins(fresh)[UID] == ("taken over", 3)


@staged
async def test_a_server_that_was_paused_for_a_moment_goes_on(cast: Cast) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    for _ in range(3):
        server.host.pause()
        server.host.resume()
    await trio.sleep(1.0)
    await trainer.train(server, UID)
    assert server.told(ExpertLost) == []
    assert server.host.hosted()[0].steps == 2


@staged
async def test_a_node_calls_its_own_experts_without_a_network(cast: Cast) -> None:
    server = await cast.server(1, [UID])
    await server.hosting(1)
    own = Trainer(server.member)
    own.client.own = server.host.runtime
    expected = make(UID)
    x = batch()
    outputs = await own.client.forward(server.peer, UID, x, timeout=1.0)
    assert torch.equal(outputs, expected.forward(x))
    gradients = await own.client.backward(server.peer, UID, x, x, timeout=1.0)
    assert torch.equal(gradients, expected.backward(x, x))
    with pytest.raises(UnknownExpert):
        await own.client.forward(server.peer, OTHER, x, timeout=1.0)


# ---- saving, and keeping copies


@pytest.mark.slow
@staged
async def test_each_checkpoint_is_sent_to_the_first_servers_in_the_expert_s_order(
    cast: Cast,
) -> None:
    servers = [await cast.server(1) for _ in range(5)]
    trainer = await cast.trainer()
    await trio.sleep(MINUTE)
    (uid,) = servers[0].uids()
    assert servers[0].told(ExpertSaved) == [], "an expert without steps needs no copy"
    await trainer.train(servers[0], uid)
    await saved(servers[0], times=2)
    peers = [server.peer for server in servers[1:]]
    expected = tuple(keepers_of(uid, peers)[:KEEPERS])
    assert servers[0].told(ExpertSaved)[-1] == ExpertSaved(uid, 1, expected)
    assert {server.peer for server in servers[1:] if server.kept() == [uid]} == set(expected)
    (hosted,) = servers[0].host.hosted()
    assert hosted.saved is not None
    assert trio.current_time() - hosted.saved <= CHECKPOINT_SECONDS


@pytest.mark.slow
@staged
async def test_a_keeper_that_has_died_is_replaced_with_the_next_copy(cast: Cast) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    others = [await cast.server(1, [GRID.at(number)]) for number in range(5)]
    await until(lambda: len(whose([server, *others])) == 6, MINUTE)
    await trainer.train(server, UID)
    await saved(server)
    dead = next(one for one in others if one.peer == server.told(ExpertSaved)[-1].keepers[0])
    dead.crash()
    await trainer.train(server, UID)
    await saved(server)
    alive = [one.peer for one in others if one is not dead]
    assert server.told(ExpertSaved)[-1].keepers == tuple(keepers_of(UID, alive)[:KEEPERS])


@pytest.mark.slow
@staged
async def test_a_server_whose_link_has_no_time_for_three_copies_sends_two(cast: Cast) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    others = [await cast.server(1, [GRID.at(number)]) for number in range(4)]
    await until(lambda: len(whose([server, *others])) == 5, MINUTE)
    await trainer.train(server, UID)
    await saved(server)
    assert len(server.told(ExpertSaved)[-1].keepers) == KEEPERS
    now = trio.current_time()
    server.host._sending.note(now, now + CHECKPOINT_SECONDS)  # as if it had just sent for so long
    await saved(server)
    assert len(server.told(ExpertSaved)[-1].keepers) == LEAST_KEEPERS
    await saved(server, times=2)
    assert len(server.told(ExpertSaved)[-1].keepers) == KEEPERS


@staged
async def test_a_disk_that_fails_is_told_and_serving_goes_on(cast: Cast) -> None:
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    server.folder.rmdir()
    await until(lambda: bool(server.told(SavingFailed)), 2 * CHECKPOINT_SECONDS)
    assert "No such file" in server.told(SavingFailed)[0].why
    await trainer.train(server, UID)
    server.folder.mkdir()
    await until(lambda: bool(server.told(ExpertSaved)), 2 * CHECKPOINT_SECONDS)


@pytest.mark.slow
@staged
async def test_a_copy_that_is_not_renewed_is_dropped_if_the_expert_is_hosted(cast: Cast) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    await saved(server)
    file = keeper.host._store.path(UID)
    written = file.stat().st_mtime_ns
    await trio.sleep(STALE_COPY_SECONDS + 2 * SWEEP_SECONDS)
    assert keeper.kept() == [UID]
    assert file.stat().st_mtime_ns == written, "it was renewed, and not dropped and sent again"
    server.host._servers = nobody  # type: ignore[method-assign]
    await trio.sleep(STALE_COPY_SECONDS + 2 * SWEEP_SECONDS)
    assert keeper.kept() == []


@pytest.mark.slow
@staged
async def test_the_copy_of_an_orphan_is_never_dropped(cast: Cast) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    await saved(server)
    server.crash()
    await trio.sleep(3 * STALE_COPY_SECONDS)
    assert keeper.kept() == [UID]


@pytest.mark.slow
@staged
async def test_a_copy_is_not_dropped_for_a_server_that_only_announces_the_expert(
    cast: Cast,
) -> None:
    keeper = await cast.server(1, [GRID.at(0)])
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    await saved(server)
    server.host._servers = nobody  # type: ignore[method-assign]
    server.host.runtime._backends.clear()  # it says that it has no such expert
    await trio.sleep(STALE_COPY_SECONDS + 2 * SWEEP_SECONDS)
    assert keeper.kept() == [UID]


@pytest.mark.slow
@staged
async def test_memory_that_is_full_when_an_expert_is_taken_or_saved_ends_no_node(
    cast: Cast,
) -> None:
    first = await cast.server(1, [UID])
    await first.hosting(1)
    server, trainer = await cast.server(1, [UID]), await cast.trainer()
    full, made = [True], server.host._make

    def makes(uid: Uid) -> ExpertBackend:
        if full[0]:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return made(uid)

    def takes(backend: ExpertBackend) -> ExpertSnapshot:
        if full[0]:
            raise MemoryError
        return take_snapshot(backend)

    server.host._make = makes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosting, "take_snapshot", takes)
        first.crash()
        await trio.sleep(2 * MINUTE)
        assert server.uids() == []
        full[0] = False
        await server.hosting(1)
        full[0] = True
        await trainer.train(server, UID)
        await until(lambda: bool(server.told(SavingFailed)), 2 * CHECKPOINT_SECONDS)
        full[0] = False
        await until(lambda: bool(server.told(ExpertSaved)), 2 * CHECKPOINT_SECONDS)


async def nobody() -> set[str]:
    return set()


# ---- hostile peers


class Attack:
    """A keeper, and a peer that tries to make it keep something."""

    def __init__(self, keeper: Server, peer: Trainer, folder: Path) -> None:
        self.keeper, self.peer = keeper, peer
        self.form = CopyForm(make(UID))
        self.store = CopyStore(folder, peer.peer)
        self.store.names()
        self.content = self.copy_of(UID)

    @staticmethod
    async def begin(cast: Cast) -> Attack:
        keeper = await cast.server(1, [GRID.at(0)])
        return Attack(keeper, await cast.trainer(), cast.folder / "attacker")

    def copy_of(self, uid: Uid) -> bytes:
        backend = make(uid)
        backend.backward(batch(), batch())
        self.store.save(take_snapshot(backend), self.form)
        return self.store.path(uid).read_bytes()

    async def announce(self, *uids: Uid) -> None:
        await self.peer.directory.announce(uids)
        await trio.sleep(6.0)  # what was read before is not used any more

    async def send(self, uid: Uid = UID, content: bytes | None = None, **other: Any) -> None:
        content = self.copy_of(uid) if content is None else content
        asked = {"digest": blake3(content).digest(), "size": len(content)} | other
        opening = KeepOpening(str(uid), **asked)
        async with self.peer.rpc.open_bulk(
            self.keeper.peer, KEEP, opening, timeout=5.0
        ) as transfer:
            if transfer.accepted.wanted:
                for start in range(0, len(content), 4096):
                    await transfer.send_chunk(content[start : start + 4096])
            await transfer.finish(Empty())

    async def refused(self, kind: type[PotluckError], told: str, **how: Any) -> None:
        """This is refused, and nothing is left of it."""
        with pytest.raises(kind, match=told):
            await self.send(**how)
        assert self.keeper.kept() == []
        left = [path.name for path in self.keeper.folder.iterdir()]
        assert left == []

    def is_avoided(self) -> bool:
        return self.keeper.member.rpc.avoided_for(self.peer.peer) > 0


@staged
async def test_the_host_of_an_expert_may_send_a_copy(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    await attack.announce(UID)
    await attack.send()
    assert attack.keeper.kept() == [UID]
    await attack.send()
    offers = await ask_offers(attack.peer.rpc, attack.keeper.peer, [UID, OTHER])
    assert offers == {
        UID: CopyOffer(str(UID), 1, blake3(attack.content).digest(), len(attack.content))
    }


@staged
async def test_a_peer_that_does_not_host_the_expert_may_not(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    await attack.announce(OTHER)
    await attack.refused(CopyRefused, "does not host ffn.1.1")
    await attack.refused(CopyRefused, "does not host ffn.0.0", uid=GRID.at(0))
    assert not attack.is_avoided()


@pytest.mark.slow
@staged
async def test_nobody_replaces_the_copy_of_an_expert_that_another_one_hosts(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    server, trainer = await cast.server(1, [UID], name="honest"), attack.peer
    await server.hosting(1)
    await trainer.train(server, UID, steps=2)
    await saved(server)
    kept = attack.keeper.host._store.find(UID)
    await attack.announce(UID)
    with pytest.raises(CopyRefused):
        await attack.send()
    assert attack.keeper.host._store.find(UID) == kept


@staged
async def test_a_uid_of_no_grid_is_refused(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    for uid in (Uid("ffn", (9, 9)), Uid("ffn", (1,)), Uid("attention", (1, 1))):
        await attack.refused(WrongUid, "in no grid", uid=uid, content=b"copy")


@staged
async def test_a_copy_that_is_too_large_is_refused_before_it_is_sent(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    await attack.announce(UID)
    await attack.refused(WrongCopy, "at most", size=attack.form.largest_bytes + 1)
    assert not attack.is_avoided()


Alteration = Callable[[Attack], dict[str, Any]]

HOSTILE: dict[str, Alteration] = {
    "that are not the copy": lambda _: {"digest": bytes(32)},
    "More than": lambda attack: {"size": len(attack.content) - 1},
    "It is no copy": lambda attack: {"content": attack.content[:-1]},
    "with a header of": lambda attack: {"content": b"\x07" * len(attack.content)},
    "not finite": lambda attack: {"content": attack.content[:-4] + b"\0\0\xc0\x7f"},
    "a copy of ffn.1.2": lambda attack: {"content": attack.copy_of(OTHER)},
}


@pytest.mark.parametrize("told", HOSTILE)
def test_bytes_that_are_no_copy_are_refused_and_their_sender_is_avoided(told: str) -> None:
    @staged
    async def play(cast: Cast) -> None:
        attack = await Attack.begin(cast)
        await attack.announce(UID)
        await attack.refused(PotluckError, told, **HOSTILE[told](attack))
        assert attack.is_avoided()

    play()


@pytest.mark.slow
@staged
async def test_a_keeper_takes_no_more_than_its_quota(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    size = len(attack.content)
    attack.keeper.host._keeper._limit_bytes = 4 * size + 3
    uids = [GRID.at(n) for n in range(4, 8)]
    await attack.announce(*uids)
    for uid in uids[:2]:
        await attack.send(uid)
    with pytest.raises(Busy, match="keeps 2 copies"):
        await attack.send(uids[2])  # one peer may fill half
    await attack.send(uids[0])
    assert attack.keeper.kept() == uids[:2]


@staged
async def test_a_keeper_takes_no_more_copies_than_it_can_announce(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    await attack.announce(UID)
    many = [Uid("ffn", (4 + number, 0)) for number in range(MOST_COPY_RECORDS - 1)]
    for uid in many:
        attack.keeper.host._store._kept[uid] = KeptCopy(uid, "somebody", 1, bytes(32), 1)
    with pytest.raises(Busy, match="keeps 111 copies"):
        await attack.send()


@staged
async def test_a_copy_that_a_keeper_does_not_have_cannot_be_fetched(cast: Cast) -> None:
    attack = await Attack.begin(cast)
    await attack.announce(UID)
    await attack.send()
    for uid, digest in ((OTHER, bytes(32)), (UID, bytes(32))):
        opening = CopyOpening(str(uid), digest)
        with pytest.raises(UnknownCopy):
            async with attack.peer.rpc.open_bulk(attack.keeper.peer, COPY, opening, timeout=5.0):
                pass


async def with_liar(
    cast: Cast, lie: Callable[[Server], object], *, honest: bool
) -> tuple[Server, Server]:
    """An expert of 3 steps whose server has died, with a keeper that lies and perhaps an honest
    one. Returns a fresh server that has taken the expert, and the liar."""
    liar = await cast.server(1, [GRID.at(0)])
    if honest:
        await cast.server(1, [GRID.at(1)])
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=3)
    await saved(dying)
    dying.crash()
    lie(liar)
    fresh = await cast.server(1, [UID])
    await fresh.hosting(1, within_seconds=2 * MINUTE)
    return fresh, liar


def boast(server: Server) -> None:
    """Offer a copy with more steps than it has."""
    store = server.host._store
    kept = store._kept[UID]
    store._kept[UID] = replace(kept, steps=1 << 40)


def spoil(server: Server) -> None:
    """Send other bytes than were offered."""
    path = server.host._store.path(UID)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def poison(server: Server) -> None:
    """Offer a copy that looks well, and with which nobody can learn."""
    backend = make(UID)
    for _ in range(9):
        backend.backward(batch(), batch())
    assert backend.optimizer is not None
    for statistics in backend.optimizer.state.values():
        statistics["exp_avg_sq"].fill_(-1.0)
    server.host._store.save(take_snapshot(backend), CopyForm(make(UID)))


def cut_short(server: Server) -> None:
    path = server.host._store.path(UID)
    path.write_bytes(path.read_bytes()[:100])


def misnumber(server: Server) -> None:
    """Offer a copy with a number that the experts' schedule does not take."""
    backend = make(UID)
    backend.backward(batch(), batch())
    snapshot = take_snapshot(backend)
    numbers = {**snapshot.numbers, "schedule/last_epoch": -1}
    store = server.host._store
    store.save(replace(snapshot, numbers=numbers, steps=9), CopyForm(make(UID)))


LIES: list[Callable[[Server], object]] = [boast, spoil, poison, misnumber, cut_short]


@contextmanager
def only_alive(liar: Server) -> Iterator[None]:
    """This keeper accepts transfers of copies, says that it is alive, and does nothing else."""
    receive, send = keepers.receive_copy, keepers._send_file

    async def received(transfer: Any, store: CopyStore, *others: Any) -> Any:
        if store is liar.host._store:
            await trio.sleep_forever()
        return await receive(transfer, store, *others)

    async def sent(transfer: Any, file: BinaryIO) -> None:
        if str(file.name).startswith(str(liar.folder)):
            await trio.sleep_forever()
        await send(transfer, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keepers, "receive_copy", received)
        patch.setattr(keepers, "_send_file", sent)
        yield


@pytest.mark.slow
@staged
async def test_a_keeper_that_is_alive_and_does_nothing_does_not_stop_the_saving(
    cast: Cast,
) -> None:
    liar = await cast.server(1, [GRID.at(0)])
    with only_alive(liar):
        await cast.server(1, [GRID.at(1)])
        server, trainer = await cast.server(1, [UID]), await cast.trainer()
        await server.hosting(1)
        for steps in (1, 2):
            await trainer.train(server, UID)
            await until(lambda steps=steps: steps_saved(server) == steps, 10 * CHECKPOINT_SECONDS)
        keepers = server.told(ExpertSaved)[-1].keepers
        assert len(keepers) == 1, "the honest one has it"
        assert liar.peer not in keepers


def steps_saved(server: Server) -> int:
    """Of its last expert that was saved, and sent to keepers."""
    told = server.told(ExpertSaved)
    return told[-1].steps if told else 0


@pytest.mark.slow
@staged
async def test_a_keeper_that_is_alive_and_does_nothing_does_not_keep_an_orphan_from_being_taken(
    cast: Cast,
) -> None:
    liar, _honest = await cast.server(1, [GRID.at(0)]), await cast.server(1, [GRID.at(1)])
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=3)
    await saved(dying)
    dying.crash()
    boast(liar)
    with only_alive(liar):
        fresh = await cast.server(1, [UID])
        await fresh.hosting(1, within_seconds=5 * MINUTE)
    assert origins(fresh)[UID] == ("taken over", 3)


@pytest.mark.slow
@staged
async def test_a_server_that_is_always_busy_does_not_prevent_new_experts(cast: Cast) -> None:
    liar = await cast.server(1, [GRID.at(0)])

    async def asked(rpc: Rpc, peer: PeerId, uids: Sequence[Uid]) -> dict[Uid, CopyOffer]:
        if peer == liar.peer:
            raise Busy("Again and again.")
        return await ask_offers(rpc, peer, uids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosting, "ask_offers", asked)
        fresh = await cast.server(1, [UID])
        await trio.sleep(BUSY_SECONDS / 2)
        assert not fresh.uids(), "it may have a copy"
        await fresh.hosting(1, within_seconds=BUSY_SECONDS)
    assert origins(fresh)[UID] == ("new", 0)


@pytest.mark.slow
@staged
async def test_an_expert_does_not_begin_anew_because_its_copy_cannot_be_written_here(
    cast: Cast,
) -> None:
    await cast.server(1, [GRID.at(0)])
    dying, trainer = await cast.server(1, [UID]), await cast.trainer()
    await dying.hosting(1)
    await trainer.train(dying, UID, steps=3)
    await saved(dying)
    dying.crash()
    receive = keepers.receive_copy

    async def full(*_arguments: Any) -> Any:
        raise Busy("The disk is full.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keepers, "receive_copy", full)
        fresh = await cast.server(1, [UID])
        await trio.sleep(10 * MINUTE)
        assert not fresh.uids()
        patch.setattr(keepers, "receive_copy", receive)
        await fresh.hosting(1, within_seconds=2 * MINUTE)
    assert origins(fresh)[UID] == ("taken over", 3)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_false_copy_is_refused_and_the_honest_one_is_taken(
    lie: Callable[[Server], object],
) -> None:
    @staged
    async def play(cast: Cast) -> None:
        fresh, liar = await with_liar(cast, lie, honest=True)
        assert origins(fresh)[UID] == ("taken over", 3)
        if lie is boast:
            assert fresh.member.rpc.avoided_for(liar.peer) > 0

    play()


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_an_expert_of_which_all_copies_are_false_begins_anew(
    lie: Callable[[Server], object],
) -> None:
    @staged
    async def play(cast: Cast) -> None:
        fresh, _ = await with_liar(cast, lie, honest=False)
        assert origins(fresh)[UID] == ("new", 0)
        assert are_equal(values(fresh.backend(UID)), values(make(UID)))

    play()


# ---- pure


PEERS = [f"peer-{number}" for number in range(40)]


def test_the_keepers_of_an_expert_stay_the_same_when_another_server_goes() -> None:
    for uid in map(GRID.at, range(GRID.cells)):
        order = keepers_of(uid, PEERS)
        assert sorted(order) == sorted(PEERS)
        for gone in PEERS[:5]:
            left = [peer for peer in PEERS if peer != gone]
            assert keepers_of(uid, left) == [peer for peer in order if peer != gone]
    firsts = {keepers_of(uid, PEERS)[0] for uid in map(GRID.at, range(GRID.cells))}
    assert len(firsts) > GRID.cells / 2, "they are spread"


def test_the_share_of_sending_is_that_of_the_last_interval() -> None:
    share = SendingShare(10.0)
    assert share.at(100.0) == 0.0
    share.note(98.0, 100.0)
    share.note(101.0, 104.0)
    assert share.at(104.0) == pytest.approx(0.5)
    assert share.at(109.0) == pytest.approx(0.4), "of the first, one second is left"
    assert share.at(115.0) == 0.0


def test_servers_wait_for_different_times_before_they_take_an_orphan() -> None:
    waits = [wait_before_taking(UID, peer) for peer in PEERS]
    assert all(0.0 <= wait <= LONGEST_WAIT_SECONDS for wait in waits)
    assert len(set(waits)) == len(PEERS)
    mean = sum(waits) / len(waits)
    assert mean == pytest.approx(LONGEST_WAIT_SECONDS / 2, rel=0.3)


def test_the_time_of_a_vacancy_stays_while_it_is_vacant() -> None:
    vacancies = Vacancies("me")
    vacancies.saw([UID, OTHER], 100.0, at_once=[OTHER])
    due = 100.0 + wait_before_taking(UID, "me")
    assert vacancies.take_due(100.0, 5) == [OTHER]
    vacancies.saw([UID], 101.0)
    assert vacancies.next_at == due
    assert vacancies.take_due(due, 0) == []
    assert vacancies.take_due(due, 1) == [UID]
    vacancies.saw([UID], 200.0)
    vacancies.saw([], 201.0)
    vacancies.saw([UID], 300.0)
    assert vacancies.next_at == 300.0 + wait_before_taking(UID, "me")


def offer(steps: int, digest: bytes) -> CopyOffer:
    return CopyOffer(str(UID), steps, digest * 32, 100)


def test_the_copy_with_most_steps_and_then_most_keepers_comes_first() -> None:
    offers = {
        "a": offer(3, b"x"), "b": offer(7, b"z"), "c": offer(7, b"y"), "d": offer(7, b"y"),
    }  # fmt: skip
    assert [peer for peer, _ in newest_first(offers)] == ["c", "d", "b", "a"]


def test_cells_are_taken_from_all_grids_and_most_from_the_emptiest() -> None:
    grids = [ExpertGrid("a", (4,)), ExpertGrid("b", (4,)), ExpertGrid("c", (4,))]
    chosen = cells_to_take(grids, [], 6, Random(1))
    assert sorted(uid.grid for uid in chosen) == ["a", "a", "b", "b", "c", "c"]
    live = [grids[0].at(n) for n in range(4)] + [grids[1].at(0)]
    chosen = cells_to_take(grids, live, 5, Random(1))
    assert sorted(uid.grid for uid in chosen) == ["b", "b", "c", "c", "c"]
    assert len(set(chosen)) == 5
    assert len(cells_to_take(grids, live, 50, Random(1))) == 7
    assert cells_to_take(grids, live, 0, Random(1)) == []
