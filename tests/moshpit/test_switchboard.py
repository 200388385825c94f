"""Messages find their round: a running one, one about to begin, one that is over, or none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from protocols.errors import Busy, MalformedMessage, PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.agreement_messages import AgreementMessage, BallotQuery
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.round import CALL_SECONDS, MOST_WAITING, Outbox
from protocols.moshpit.switchboard import (
    AGREE,
    HOLD_SECONDS,
    MOST_HELD_OF_A_PEER,
    ROUNDS_REMEMBERED,
    SHOW,
    Agree,
    Show,
    Switchboard,
    UnknownRound,
)
from protocols.rpc import Empty, Rpc, open_rpc
from protocols.testing.world import SimulatedWorld
from tests.dht.members import LATENCY_SECONDS, simulated
from tests.moshpit.unsigned_lists import ROUND, unsigned_group

Heard = list[tuple[PeerId, AgreementMessage]]


def silent_as_a_stone(_member: int) -> bool:
    return False


def query(number: int = 0) -> BallotQuery:
    return BallotQuery(Ballot(number, 0))


class Listener:
    """A node with a switchboard, and a peer that sends it messages."""

    def __init__(self, world: SimulatedWorld, rpc: Rpc, switchboard: Switchboard, talker: Rpc):
        self.world, self.rpc, self.switchboard, self.talker = world, rpc, switchboard, talker
        self.heard: Heard = []

    @property
    def peer(self) -> PeerId:
        return self.rpc.network.peer_id

    def hear(self, peer: PeerId, message: AgreementMessage) -> None:
        self.heard.append((peer, message))

    async def tell(self, message: AgreementMessage, round_id: bytes = ROUND) -> None:
        await self.talker.call(self.peer, AGREE, Agree(round_id, message), timeout=10.0)


@asynccontextmanager
async def listener(world: SimulatedWorld) -> AsyncIterator[Listener]:
    one, other = world.add_node("listener"), world.add_node("talker")
    world.introduce(one, other)
    async with open_rpc(one) as rpc, open_rpc(other) as talker:
        yield Listener(world, rpc, Switchboard(rpc), talker)


@simulated
async def test_a_message_reaches_the_round_that_it_names(world: SimulatedWorld) -> None:
    async with listener(world) as node:
        with node.switchboard.running(ROUND, node.hear):
            await node.tell(query(1))
        assert node.heard == [(node.talker.network.peer_id, query(1))]


@simulated
async def test_a_message_that_comes_too_early_waits_for_the_round(world: SimulatedWorld) -> None:
    async with listener(world) as node, trio.open_nursery() as nursery:
        nursery.start_soon(node.tell, query(1))
        await trio.sleep(HOLD_SECONDS / 2)
        assert not node.heard
        with node.switchboard.running(ROUND, node.hear):
            await trio.sleep(LATENCY_SECONDS)
            assert len(node.heard) == 1


@simulated
async def test_a_message_for_no_round_is_refused_by_name(world: SimulatedWorld) -> None:
    async with listener(world) as node:
        began = trio.current_time()
        with pytest.raises(UnknownRound):
            await node.tell(query())
        assert HOLD_SECONDS <= trio.current_time() - began < HOLD_SECONDS + 1.0


@simulated
async def test_nobody_can_make_us_hold_more_than_a_few_messages(world: SimulatedWorld) -> None:
    async with listener(world) as node:
        refused: list[PotluckError] = []

        async def tell(number: int) -> None:
            try:
                await node.tell(query(), bytes([number]) * 32)
            except PotluckError as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(2 * MOST_HELD_OF_A_PEER):
                nursery.start_soon(tell, number)
        kinds = [type(error) for error in refused]
        assert kinds.count(Busy) == kinds.count(UnknownRound) == MOST_HELD_OF_A_PEER


@simulated
async def test_a_round_that_is_over_answers_for_a_while(world: SimulatedWorld) -> None:
    async with listener(world) as node:
        for number in range(ROUNDS_REMEMBERED + 1):
            with node.switchboard.running(bytes([number]) * 32, node.hear):
                pass
        await node.tell(query(), bytes([1]) * 32)
        with pytest.raises(UnknownRound):
            await node.tell(query(), bytes([0]) * 32)
        assert len(node.heard) == 1


@simulated
async def test_a_round_that_was_cancelled_is_not_remembered(world: SimulatedWorld) -> None:
    async with listener(world) as node:
        with trio.CancelScope() as scope, node.switchboard.running(ROUND, node.hear):
            scope.cancel()
            await trio.sleep(1.0)
        with pytest.raises(UnknownRound):
            await node.tell(query())


@simulated
async def test_a_peer_whose_messages_no_member_would_send_is_avoided(world: SimulatedWorld) -> None:
    def outraged(_peer: PeerId, _message: AgreementMessage) -> None:
        raise MalformedMessage("This is not for the leader to say.")

    async with listener(world) as node:
        with node.switchboard.running(ROUND, outraged):
            with pytest.raises(PotluckError):
                await node.tell(query())
            await trio.testing.wait_all_tasks_blocked()
            assert node.rpc.avoided_for(node.talker.network.peer_id) > 0.0


@simulated
async def test_messages_arrive_in_order_and_no_member_waits_for_another(
    world: SimulatedWorld,
) -> None:
    async with listener(world) as node, trio.open_nursery() as nursery:
        silent = world.add_node("silent")
        node.talker.network.learn_addresses(silent.peer_id, silent.addresses())
        world.crash(silent, silently=True)
        failed: list[int] = []
        outbox = Outbox(
            node.talker,
            nursery,
            unsigned_group([silent.peer_id, node.peer]),
            lambda member, _error: failed.append(member),
            silent_as_a_stone,
        )
        with node.switchboard.running(ROUND, node.hear):
            for number in range(20):
                outbox.post(0, query(number))
                outbox.post(1, query(number))
            await trio.sleep(CALL_SECONDS / 2)
            assert [message for _, message in node.heard] == [query(n) for n in range(20)]
            await trio.sleep(CALL_SECONDS)
            assert failed == [0]  # once: the others behind it made no sense without it
        assert not nursery.child_tasks


@simulated
async def test_a_member_that_takes_nothing_does_not_fill_our_memory(world: SimulatedWorld) -> None:
    async with listener(world) as node, trio.open_nursery() as nursery:
        errors: list[PotluckError] = []
        outbox = Outbox(
            node.talker,
            nursery,
            unsigned_group([node.peer]),
            lambda _member, error: errors.append(error),
            silent_as_a_stone,
        )
        with node.switchboard.running(ROUND, node.hear):
            for number in range(3 * MOST_WAITING):
                outbox.post(0, query(number % 1000))
        await trio.sleep(CALL_SECONDS)
        assert len(node.heard) <= MOST_WAITING
        assert errors == []


@simulated
async def test_a_member_that_does_not_know_the_round_is_shown_its_list(
    world: SimulatedWorld,
) -> None:
    async with listener(world) as node, trio.open_nursery() as nursery:
        group = unsigned_group([node.peer])
        shown: list[Show] = []

        async def take(_caller: Caller, request: Show) -> Empty:
            shown.append(request)
            nursery.start_soon(take_part)
            return Empty()

        async def take_part() -> None:
            with node.switchboard.running(group.round_id, node.hear):
                await trio.sleep(1.0)

        node.rpc.serve(SHOW, take)
        errors: list[PotluckError] = []
        outbox = Outbox(
            node.talker,
            nursery,
            group,
            lambda _member, error: errors.append(error),
            silent_as_a_stone,
        )
        outbox.post(0, query(1))
        outbox.post(0, query(2))
        await trio.sleep(HOLD_SECONDS + 1.0)
        assert shown == [Show(group.roster)]
        assert [message for _, message in node.heard] == [query(1), query(2)]
        assert errors == []


@simulated
async def test_a_member_that_does_not_want_the_list_is_out_of_reach(world: SimulatedWorld) -> None:
    async with listener(world) as node, trio.open_nursery() as nursery:
        shown: list[Show] = []

        async def refuse(_caller: Caller, request: Show) -> Empty:
            shown.append(request)
            raise UnknownRound("No.")

        node.rpc.serve(SHOW, refuse)
        errors: list[PotluckError] = []
        outbox = Outbox(
            node.talker,
            nursery,
            unsigned_group([node.peer]),
            lambda _member, error: errors.append(error),
            silent_as_a_stone,
        )
        for number in range(2):
            outbox.post(0, query(number))
            await trio.sleep(2 * HOLD_SECONDS + 1.0)
        assert len(shown) == 1  # once is enough
        assert [type(error) for error in errors] == [UnknownRound, UnknownRound]
