"""Whether others can dial us: judges that cannot be misused, and judges that lie."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as some

from nat import messages
from nat.kinds import Nat
from nat.messages import AutoNat, DialBack, DialStatus, ResponseStatus
from nat.reachability import (
    ASK_SECONDS,
    ASKERS_REMEMBERED,
    DIAL_BACK,
    DIAL_REQUEST,
    DIAL_SECONDS,
    MESSAGE_SECONDS,
    MOST_AT_ONCE,
    MOST_AT_ONCE_PER_ASKER,
    MOST_AT_ONCE_PER_SITE,
    QUESTIONS_PER_MINUTE,
    SAID_SECONDS,
    SERVERS_HEARD,
    DialBacks,
    DialVerdict,
    Judge,
    Verdicts,
)
from protocols.identity import PeerId
from protocols.network import Stream
from protocols.testing.world import LinkSettings, NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.simulated.worlds import LATENCY_SECONDS, simulated, time_until_broken

OPEN, CLOSED = NodeSettings(), NodeSettings(nat=Nat.PORT_RESTRICTED)
ADDRESS = "/ip4/192.0.2.7/tcp/4001"

# ---- what several servers say, without a network


def verdict_of(*said: bool) -> DialVerdict:
    verdicts = Verdicts()
    for number, reached in enumerate(said):
        verdicts.heard(ADDRESS, PeerId(str(number)), 0.0, reached=reached)
    return verdicts.of(ADDRESS)


def test_without_a_word_nothing_is_known() -> None:
    assert verdict_of() is DialVerdict.UNKNOWN


@given(some.lists(some.booleans(), min_size=1, max_size=SERVERS_HEARD))
def test_an_address_is_public_if_at_least_half_of_the_servers_reached_it(said: list[bool]) -> None:
    reached = said.count(True) >= said.count(False)
    assert verdict_of(*said) is (DialVerdict.PUBLIC if reached else DialVerdict.PRIVATE)


def test_each_server_has_one_word_its_last() -> None:
    verdicts = Verdicts()
    liar, honest = PeerId("liar"), PeerId("honest")
    for _ in range(100):
        verdicts.heard(ADDRESS, liar, 0.0, reached=False)
    verdicts.heard(ADDRESS, honest, 0.0, reached=True)
    assert verdicts.of(ADDRESS) is DialVerdict.PUBLIC
    verdicts.heard(ADDRESS, honest, 0.0, reached=False)
    assert verdicts.of(ADDRESS) is DialVerdict.PRIVATE


def test_only_the_newest_servers_count() -> None:
    said = [False] * 100 + [True] * SERVERS_HEARD
    assert verdict_of(*said) is DialVerdict.PUBLIC
    assert verdict_of(*reversed(said)) is DialVerdict.PRIVATE


@pytest.mark.parametrize("reached", [True, False])
def test_servers_that_are_not_asked_any_more_do_not_outvote_the_others(reached: bool) -> None:
    verdicts = Verdicts()
    for number in range(5):
        verdicts.heard(ADDRESS, PeerId(str(number)), 0.0, reached=not reached)
    for number in range(5, 8):
        verdicts.heard(ADDRESS, PeerId(str(number)), SAID_SECONDS, reached=reached)
    before = DialVerdict.PRIVATE if reached else DialVerdict.PUBLIC
    assert verdicts.of(ADDRESS) is before
    verdicts.heard(ADDRESS, PeerId("7"), SAID_SECONDS + 1.0, reached=reached)
    assert verdicts.of(ADDRESS) is (DialVerdict.PUBLIC if reached else DialVerdict.PRIVATE)


def test_what_is_forgotten_does_not_count() -> None:
    verdicts = Verdicts()
    for address in (ADDRESS, "/ip4/192.0.2.7/tcp/1"):
        verdicts.heard(address, PeerId("a"), 0.0, reached=True)
    verdicts.keep([ADDRESS])
    assert verdicts.of("/ip4/192.0.2.7/tcp/1") is DialVerdict.UNKNOWN
    assert verdicts.of(ADDRESS) is DialVerdict.PUBLIC
    verdicts.forget()
    assert verdicts.of(ADDRESS) is DialVerdict.UNKNOWN


# ---- a judge, and those that ask it


@asynccontextmanager
async def judging(world: SimulatedWorld) -> AsyncIterator[tuple[SimulatedNetwork, Judge]]:
    network = world.add_node("judge")
    judge = Judge(network)
    async with trio.open_nursery() as nursery:
        await nursery.start(judge.run)
        yield network, judge
        nursery.cancel_scope.cancel()


async def asker_of(
    world: SimulatedWorld,
    judge: SimulatedNetwork,
    settings: NodeSettings = OPEN,
    name: str = "asker",
) -> SimulatedNetwork:
    network = world.add_node(name, settings)
    network.learn_addresses(judge.peer_id, judge.addresses())
    await network.connect(judge.peer_id)
    return network


def dial_backs_of(network: SimulatedNetwork) -> DialBacks:
    dial_backs = DialBacks(network)
    dial_backs.serve()
    return dial_backs


def question(addresses: Iterable[str], nonce: int = 7) -> bytes:
    asked = AutoNat()
    asked.request.addrs.extend(messages.packed(addresses))
    asked.request.nonce = nonce
    return messages.encode(asked)


async def ask(asker: SimulatedNetwork, judge: SimulatedNetwork, raw: bytes) -> tuple[int, int, int]:
    """The status, the index and the dial's status that the judge answers."""
    async with await asker.open(judge.peer_id, DIAL_REQUEST) as stream:
        await stream.send_all(raw)
        said = (await messages.read(stream, AutoNat)).response
    return said.status, said.index, said.dial_status


@pytest.mark.parametrize(
    ("settings", "verdict", "outcome"),
    [(OPEN, DialVerdict.PUBLIC, "ok"), (CLOSED, DialVerdict.PRIVATE, "dial_error")],
    ids=["open", "closed"],
)
@simulated
async def test_an_honest_judge_tells_whether_an_address_can_be_dialled(
    world: SimulatedWorld, settings: NodeSettings, verdict: DialVerdict, outcome: str
) -> None:
    async with judging(world) as (network, judge):
        asker = await asker_of(world, network, settings)
        assert await dial_backs_of(asker).ask(network.peer_id, asker.place) is verdict
        assert judge.outcomes == {outcome: 1}


@simulated
async def test_judging_leaves_the_link_alone_and_makes_no_other(world: SimulatedWorld) -> None:
    async with judging(world) as (network, _):
        asker = await asker_of(world, network)
        before = asker.links()
        await dial_backs_of(asker).ask(network.peer_id, asker.place)
        await trio.sleep(1)
        assert [link.peer for link in asker.links()] == [link.peer for link in before]
        assert [link.connected_at for link in asker.links()] == [
            link.connected_at for link in before
        ]
        assert len(network.links()) == 1


@simulated
async def test_a_judge_dials_nobody_but_its_asker(world: SimulatedWorld) -> None:
    """Otherwise it would send packets wherever somebody wants."""
    async with judging(world) as (network, judge):
        asker, victim = await asker_of(world, network), world.add_node("victim")
        others = [
            victim.place, victim.address, "/ip4/127.0.0.1/tcp/22", "/ip4/192.168.0.1/tcp/80",
            network.place, "/ip6/::1/tcp/22", "/dns/example.org/tcp/80",
            f"{victim.address}/p2p-circuit", "/ip4/10.0.0.1/udp/4001", "/ip4/10.0.0.1/tcp/0",
        ]  # fmt: skip
        with victim.link_events() as events:
            for address in others:
                said = await ask(asker, network, question([address]))
                assert said[0] == ResponseStatus.DIAL_REFUSED
            assert (await ask(asker, network, question(others)))[0] == ResponseStatus.DIAL_REFUSED
            assert judge.outcomes == {"refused": len(others) + 1}
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


@simulated
async def test_of_many_addresses_the_one_at_the_askers_place_is_dialled(
    world: SimulatedWorld,
) -> None:
    async with judging(world) as (network, judge):
        asker, victim = await asker_of(world, network), world.add_node("victim")
        dial_backs_of(asker)
        raw = AutoNat()
        raw.request.addrs.append(b"\xff no address")
        raw.request.addrs.extend(messages.packed([victim.place, asker.place, victim.place]))
        status, index, dial_status = await ask(asker, network, messages.encode(raw))
        # the number is not the asker's own, so that it is dialled and does not take it
        assert (status, index) == (ResponseStatus.OK, 2)
        assert dial_status == DialStatus.DIAL_BACK_ERROR
        assert judge.outcomes == {"dial_back_error": 1}


@simulated
async def test_over_a_relayed_link_nothing_is_judged(world: SimulatedWorld) -> None:
    async with judging(world) as (network, judge):
        asker = world.add_node("asker")
        world.set_path(asker, network, LinkSettings(latency_seconds=0.1, relayed=True))
        asker.learn_addresses(network.peer_id, network.addresses())
        said = await ask(asker, network, question([asker.place]))
        assert said[0] == ResponseStatus.DIAL_REFUSED
        assert judge.outcomes == {"refused": 1}


@simulated
async def test_an_asker_has_so_many_questions_in_a_minute(world: SimulatedWorld) -> None:
    async with judging(world) as (network, _):
        asker = await asker_of(world, network)
        dial_backs = dial_backs_of(asker)
        began = trio.current_time()
        for _ in range(QUESTIONS_PER_MINUTE):
            assert await dial_backs.ask(network.peer_id, asker.place) is DialVerdict.PUBLIC
        assert trio.current_time() - began < 50
        assert await dial_backs.ask(network.peer_id, asker.place) is DialVerdict.UNKNOWN
        other = await asker_of(world, network, name="other")
        assert await dial_backs_of(other).ask(network.peer_id, other.place) is DialVerdict.PUBLIC
        await trio.sleep_until(began + 61)
        assert await dial_backs.ask(network.peer_id, asker.place) is DialVerdict.PUBLIC


@simulated
async def test_an_asker_has_so_many_questions_at_once(world: SimulatedWorld) -> None:
    async with judging(world) as (network, judge):
        asker = await asker_of(world, network, CLOSED)
        async with trio.open_nursery() as nursery:
            for _ in range(MOST_AT_ONCE_PER_ASKER + 3):
                nursery.start_soon(ask, asker, network, question([asker.place]))
        assert judge.outcomes == {"dial_error": MOST_AT_ONCE_PER_ASKER, "rejected": 3}


@simulated
async def test_a_judge_dials_so_many_at_once(world: SimulatedWorld) -> None:
    async with judging(world) as (network, judge):
        askers = [
            await asker_of(world, network, CLOSED, str(number)) for number in range(MOST_AT_ONCE)
        ]
        async with trio.open_nursery() as nursery:
            for asker in (*askers, *askers):
                nursery.start_soon(ask, asker, network, question([asker.place]))
        assert judge.outcomes == {"dial_error": MOST_AT_ONCE, "rejected": MOST_AT_ONCE}
        judge.outcomes.clear()
        await ask(askers[0], network, question([askers[0].place]))
        assert judge.outcomes == {"dial_error": 1}


@simulated
async def test_many_askers_at_one_site_leave_room_for_others(world: SimulatedWorld) -> None:
    async with judging(world) as (network, judge):
        honest = await asker_of(world, network)
        crowd = [await asker_of(world, network, CLOSED, "machine")]
        for _ in range(MOST_AT_ONCE):
            stranger = world.add_stranger(crowd[0])
            stranger.learn_addresses(network.peer_id, network.addresses())
            await stranger.connect(network.peer_id)
            crowd.append(stranger)
        async with trio.open_nursery() as nursery:
            for one in crowd:
                nursery.start_soon(ask, one, network, question([crowd[0].place]))
            await trio.sleep(1)
            assert judge._at_once.total() == MOST_AT_ONCE_PER_SITE
            found = await dial_backs_of(honest).ask(network.peer_id, honest.place)
            assert found is DialVerdict.PUBLIC
        assert judge.outcomes["rejected"] == len(crowd) - MOST_AT_ONCE_PER_SITE
        assert not judge._at_once_sites


@simulated
async def test_only_so_many_askers_are_remembered(world: SimulatedWorld) -> None:
    async with judging(world) as (network, judge):
        for number in range(20):
            judge._asked[PeerId(f"earlier {number}")] = (0.0, 1)
        for number in range(ASKERS_REMEMBERED - 20):
            judge._asked[PeerId(str(number))] = (0.0, 1)
        asker = await asker_of(world, network)
        await ask(asker, network, question([asker.place]))
        assert len(judge._asked) == ASKERS_REMEMBERED


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x05hello", id="no protobuf"),
        pytest.param(b"\xff\xff\xff", id="too long"),
        pytest.param(b"\x00", id="an empty message"),
    ],
)
@simulated
async def test_nonsense_costs_its_sender_the_stream_and_nothing_else(
    world: SimulatedWorld, garbage: bytes
) -> None:
    async with judging(world) as (network, _):
        asker = await asker_of(world, network)
        stream = await asker.open(network.peer_id, DIAL_REQUEST)
        await stream.send_all(garbage)
        assert await time_until_broken(stream) == pytest.approx(2 * LATENCY_SECONDS)
        assert await dial_backs_of(asker).ask(network.peer_id, asker.place) is DialVerdict.PUBLIC


@simulated
async def test_a_silent_asker_is_dropped_in_time(world: SimulatedWorld) -> None:
    async with judging(world) as (network, _):
        asker = await asker_of(world, network)
        stream = await asker.open(network.peer_id, DIAL_REQUEST)
        await stream.send_all(b"\x20half")
        took = await time_until_broken(stream)
        assert took == pytest.approx(MESSAGE_SECONDS, abs=2 * LATENCY_SECONDS)


@simulated
async def test_an_asker_that_takes_the_call_and_is_silent_is_not_waited_for(
    world: SimulatedWorld,
) -> None:
    async with judging(world) as (network, judge):
        asker = await asker_of(world, network)
        asker.serve(DIAL_BACK, _silent)
        with trio.fail_after(DIAL_SECONDS + 1):
            said = await ask(asker, network, question([asker.place]))
        assert said[2] == DialStatus.DIAL_BACK_ERROR
        await trio.sleep(1)
        assert judge._at_once.total() == 0
        assert len(asker.links()) == 1, "and the call has ended"


async def _silent(_stream: Stream) -> None:
    await trio.sleep_forever()


# ---- judges that lie


class Liar:
    """A judge that answers as it likes. `nonces` are those that it was told."""

    def __init__(
        self, world: SimulatedWorld, says: DialStatus, *, by_link: bool = False, brings: int = 0
    ) -> None:
        self.network = world.add_node(f"liar-{says.name}-{by_link}-{brings}")
        self.nonces: list[int] = []
        self._says = says
        self._by_link = by_link
        self._brings = brings
        self.network.serve(DIAL_REQUEST, self._answer)

    async def _answer(self, stream: Stream) -> None:
        asked = (await messages.read(stream, AutoNat)).request
        self.nonces.append(asked.nonce)
        if self._by_link:
            await self._bring(stream.remote_peer, asked.nonce)
        if self._brings:
            await self._bring(stream.remote_peer, self._brings)
        answer = AutoNat()
        answer.response.status = ResponseStatus.OK
        answer.response.dial_status = self._says
        await messages.send(stream, answer)

    async def _bring(self, peer: PeerId, nonce: int) -> None:
        """Over the link that there is, which the asker has made."""
        stream = await self.network.open(peer, DIAL_BACK)
        await messages.send(stream, DialBack(nonce=nonce))
        await trio.sleep(1)


@pytest.mark.parametrize("settings", [OPEN, CLOSED], ids=["open", "closed"])
@simulated
async def test_a_claim_without_the_number_does_not_count(
    world: SimulatedWorld, settings: NodeSettings
) -> None:
    liar = Liar(world, DialStatus.OK)
    asker = await asker_of(world, liar.network, settings)
    found = await dial_backs_of(asker).ask(liar.network.peer_id, asker.place)
    assert found is DialVerdict.UNKNOWN


@simulated
async def test_somebody_elses_number_does_not_count(world: SimulatedWorld) -> None:
    liar = Liar(world, DialStatus.OK, brings=4711)
    asker = await asker_of(world, liar.network, CLOSED)
    found = await dial_backs_of(asker).ask(liar.network.peer_id, asker.place)
    assert found is DialVerdict.UNKNOWN


@simulated
async def test_the_number_of_an_earlier_question_does_not_count(world: SimulatedWorld) -> None:
    async with judging(world) as (network, _):
        first = Liar(world, DialStatus.OK)
        asker = await asker_of(world, network)
        asker.learn_addresses(first.network.peer_id, first.network.addresses())
        dial_backs = dial_backs_of(asker)
        await dial_backs.ask(first.network.peer_id, asker.place)
        stranger = world.add_node("accomplice")
        stranger.learn_addresses(asker.peer_id, asker.addresses())
        stream = await stranger.open(asker.peer_id, DIAL_BACK)
        await messages.send(stream, DialBack(nonce=first.nonces[0]))
        assert await time_until_broken(stream) == pytest.approx(2 * LATENCY_SECONDS)


@simulated
async def test_the_number_counts_only_over_a_connection_that_was_made_to_us(
    world: SimulatedWorld,
) -> None:
    """Over our own link a judge can bring it to a node that nobody can dial."""
    liar = Liar(world, DialStatus.OK, by_link=True)
    asker = await asker_of(world, liar.network, CLOSED)
    found = await dial_backs_of(asker).ask(liar.network.peer_id, asker.place)
    assert found is DialVerdict.UNKNOWN


@pytest.mark.parametrize("status", [DialStatus.DIAL_BACK_ERROR, DialStatus.UNUSED])
@simulated
async def test_a_judge_that_did_not_finish_says_nothing(
    world: SimulatedWorld, status: DialStatus
) -> None:
    liar = Liar(world, status)
    asker = await asker_of(world, liar.network)
    found = await dial_backs_of(asker).ask(liar.network.peer_id, asker.place)
    assert found is DialVerdict.UNKNOWN


@simulated
async def test_one_judge_that_denies_does_not_outweigh_an_honest_one(
    world: SimulatedWorld,
) -> None:
    async with judging(world) as (network, _):
        liar = Liar(world, DialStatus.DIAL_ERROR)
        asker = await asker_of(world, network)
        asker.learn_addresses(liar.network.peer_id, liar.network.addresses())
        dial_backs, verdicts = dial_backs_of(asker), Verdicts()
        for server in (liar.network.peer_id, network.peer_id):
            said = await dial_backs.ask(server, asker.place)
            verdicts.heard(asker.place, server, 0.0, reached=said is DialVerdict.PUBLIC)
        assert verdicts.of(asker.place) is DialVerdict.PUBLIC


@simulated
async def test_a_silent_judge_is_not_waited_for(world: SimulatedWorld) -> None:
    network = world.add_node("judge")
    network.serve(DIAL_REQUEST, _silent)
    asker = await asker_of(world, network)
    dial_backs = dial_backs_of(asker)
    began = trio.current_time()
    assert await dial_backs.ask(network.peer_id, asker.place) is DialVerdict.UNKNOWN
    assert trio.current_time() - began == pytest.approx(ASK_SECONDS)
    assert not dial_backs._arrived


@simulated
async def test_a_peer_that_is_no_judge_says_nothing(world: SimulatedWorld) -> None:
    network = world.add_node("plain")
    asker = await asker_of(world, network)
    assert await dial_backs_of(asker).ask(network.peer_id, asker.place) is DialVerdict.UNKNOWN
    gone = world.identity_of("nobody").peer_id
    assert await dial_backs_of(world.add_node()).ask(gone, asker.place) is DialVerdict.UNKNOWN
