"""Strangers use our relay and we use theirs, and each asks the other by AutoNAT v2.

Everybody is on loopback and could dial everybody, and js-libp2p and go-libp2p do as soon as they
learn an address. So only the relays listen here, and the tests look at what a circuit carried.

AutoNAT v2 ends early on loopback, since js-libp2p judges no private address; so it is also asked
elsewhere. p2pd does not know it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.abc import HalfCloseableStream

from nat import messages
from nat.circuits import CircuitTaker
from nat.messages import AutoNat
from nat.reachability import DIAL_REQUEST, DialBacks, DialVerdict, Judge
from nat.relay_limits import RelayLimits
from nat.relaying import STOP, Refusal, Relay
from nat.reservations import Reservations
from protocols.errors import MalformedMessage, ProtocolNotServed, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import Network, Reach, TraversableNetwork
from tests.strangers.conftest import start_go, start_javascript
from tests.strangers.conversations import ECHO, echo, exchange, receive_exactly
from tests.strangers.go_stranger import DOES_NOT_LISTEN, GoStranger
from tests.strangers.javascript_stranger import JavascriptStranger
from tests.strangers.sides import our_node
from tests.strangers.stranger import Stranger, StrangerRefused
from tests.waiting import PATIENCE_SECONDS, until

EXCHANGED_BYTES = 300_000  # past the first window of a stream
# By default their relays carry 128 KiB and two minutes, js-libp2p both ways together. p2pd is told
# of other limits, but starts a relay with these as well, and which one answers is a matter of luck.
LITTLE_BYTES = 20_000
AUTONAT_1 = "/libp2p/autonat/1.0.0"
# For documents (RFC 6676). js-libp2p takes the others that are for documents to be private.
ELSEWHERE = "/ip4/233.252.0.7/tcp/4001"

OWN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
GO_IS_A_RELAY = ("-forceReachabilityPublic", "-relay=true", "-relayService=true")
GO_USES_RELAYS = (DOES_NOT_LISTEN, "-relay=true", "-relayService=false")
GO_NEEDS_A_RELAY = (
    *GO_USES_RELAYS,
    *("-forceReachabilityPrivate", "-dhtClient", "-autoRelay", "-relayDiscovery=false"),
)


@pytest.fixture(scope="module")
def js(cache: Path) -> Iterator[JavascriptStranger]:
    stranger = start_javascript(cache, "guest")
    yield stranger
    stranger.stop()


@pytest.fixture(scope="module")
def calling_js(cache: Path) -> Iterator[JavascriptStranger]:
    stranger = start_javascript(cache, "guest")
    yield stranger
    stranger.stop()


@pytest.fixture(scope="module")
def relaying_js(cache: Path) -> Iterator[JavascriptStranger]:
    stranger = start_javascript(cache, "relay")
    yield stranger
    stranger.stop()


@pytest.fixture(scope="module")
def calling_go(cache: Path) -> Iterator[GoStranger]:
    stranger = start_go(cache, *GO_USES_RELAYS)
    yield stranger
    stranger.stop()


@pytest.fixture(scope="module")
def relaying_go(cache: Path) -> Iterator[GoStranger]:
    stranger = start_go(cache, *GO_IS_A_RELAY, "-autonat")
    yield stranger
    stranger.stop()


@pytest.fixture(params=["js", "go"])
def caller(request: pytest.FixtureRequest) -> Stranger:
    """A stranger that dials circuits."""
    found: Stranger = request.getfixturevalue(f"calling_{request.param}")
    return found


@pytest.fixture(params=["js", "go"])
def their_relay(request: pytest.FixtureRequest) -> Stranger:
    found: Stranger = request.getfixturevalue(f"relaying_{request.param}")
    return found


@dataclass
class Hub:
    """A node of ours that relays."""

    network: Network
    relay: Relay

    @property
    def address(self) -> str:
        return self.network.addresses()[0]

    def circuit_to(self, peer: str) -> str:
        return f"{self.address}/p2p-circuit/p2p/{peer}"

    def carried_an_exchange(self) -> bool:
        counts = self.relay.counts()
        return counts.connected == 1 and counts.carried_bytes > 2 * EXCHANGED_BYTES


@asynccontextmanager
async def our_relay(
    limits: RelayLimits | None = None,
    admits: Callable[[PeerId], Awaitable[bool]] | None = None,
) -> AsyncIterator[Hub]:
    async with our_node() as network, trio.open_nursery() as nursery:
        relay = Relay(network, limits or RelayLimits(), admits=admits)
        await nursery.start(relay.run)
        yield Hub(network, relay)
        nursery.cancel_scope.cancel()


@dataclass
class Home:
    """A node of ours that does not listen, with a place at a relay; it serves ECHO."""

    network: TraversableNetwork
    reservations: Reservations

    @property
    def address(self) -> str:
        return f"{self.reservations.addresses()[0]}/p2p/{self.network.peer_id}"

    def reach_of(self, peer: str) -> Reach:
        link = self.network.link(PeerId(peer))
        return Reach.NONE if link is None else link.reach


@asynccontextmanager
async def our_home(relay: str, relay_address: str) -> AsyncIterator[Home]:
    async with our_node(listens=False) as network, trio.open_nursery() as nursery:
        network.learn_addresses(PeerId(relay), [relay_address])
        await network.connect(PeerId(relay))
        reservations = Reservations(network, lambda: [PeerId(relay)])
        network.serve(STOP, CircuitTaker(network, reservations.holds).answer)
        network.serve(ECHO, echo)
        nursery.start_soon(reservations.run)
        await reservations.asked_once.wait()
        assert reservations.held, reservations.why_none()
        yield Home(network, reservations)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def placed_js(js: JavascriptStranger, hub: Hub) -> AsyncIterator[Stranger]:
    """js-libp2p, with a place at our relay."""
    assert hub.circuit_to(js.peer) in await js.reserve(hub.address)
    async with js.serving(ECHO, echo):
        yield js


@asynccontextmanager
async def placed_go(cache: Path, hub: Hub) -> AsyncIterator[Stranger]:
    """p2pd, with a place at our relay: it is told of relays when it starts, and then alone."""
    go = start_go(cache, *GO_NEEDS_A_RELAY, f"-trustedRelays={hub.address}")
    try:
        await until(lambda: hub.relay.counts().reservations == 1, PATIENCE_SECONDS)
        async with go.serving(ECHO, echo):
            yield go
    finally:
        go.stop()


Placed = Callable[[Hub], AbstractAsyncContextManager[Stranger]]


@pytest.fixture(params=["js", "go"])
def placed(request: pytest.FixtureRequest, cache: Path) -> Placed:
    """A stranger with a place at the relay of ours that it is given; it serves ECHO."""
    if request.param == "go":
        return partial(placed_go, cache)
    return partial(placed_js, request.getfixturevalue("js"))


async def exchange_with(
    opening: Network | Stranger, peer: str, count: int = EXCHANGED_BYTES
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        stream = await opening.open(PeerId(peer), ECHO)
        async with stream:
            await exchange(stream, count)


async def exchange_in_turns(stream: HalfCloseableStream, count: int) -> None:
    """With an `echo`, one task after the other, so that a broken stream is one error."""
    for _ in range(count // LITTLE_BYTES):
        await stream.send_all(bytes(LITTLE_BYTES))
        await receive_exactly(stream, LITTLE_BYTES)


# ---- our relay


async def test_we_reach_a_stranger_with_a_place_at_our_relay(placed: Placed) -> None:
    async with our_relay() as hub, placed(hub) as stranger, our_node(listens=False) as we:
        them = PeerId(stranger.peer)
        we.learn_addresses(them, [hub.circuit_to(them)])

        assert (await we.connect(them)).reach is Reach.RELAYED
        await exchange_with(we, them)

        assert 0 < await we.ping(them) < 5
        assert 0 <= await stranger.ping(we.peer_id) < 5
        assert hub.carried_an_exchange()


async def test_a_stranger_reaches_us_with_a_place_at_our_relay(caller: Stranger) -> None:
    async with (
        our_relay() as hub,
        our_home(hub.network.peer_id, hub.address) as home,
        caller.serving(ECHO, echo),
    ):
        await caller.connect(home.address)
        await exchange_with(caller, home.network.peer_id)
        await exchange_with(home.network, caller.peer)

        assert 0 < await home.network.ping(PeerId(caller.peer)) < 5
        assert 0 <= await caller.ping(home.network.peer_id) < 5
        assert home.reach_of(caller.peer) is Reach.RELAYED
        assert hub.carried_an_exchange()


async def test_two_strangers_meet_through_our_relay(placed: Placed, caller: Stranger) -> None:
    async with our_relay() as hub, placed(hub) as stranger:
        await caller.connect(hub.circuit_to(stranger.peer))
        await exchange_with(caller, stranger.peer)

        assert hub.carried_an_exchange()


async def test_js_learns_the_limits_of_our_relay(js: JavascriptStranger) -> None:
    limits = RelayLimits(circuit_seconds=600, circuit_bytes=1 << 30)
    async with our_relay(limits) as hub, placed_js(js, hub), our_node(listens=False) as we:
        we.learn_addresses(PeerId(js.peer), [hub.circuit_to(js.peer)])
        await exchange_with(we, js.peer)

        (link,) = await js.links(we.peer_id)

        assert link.address == hub.circuit_to(we.peer_id)
        assert link.seconds is not None
        assert 500 < link.seconds <= 600
        assert link.bytes is not None
        assert (1 << 29) < link.bytes < 1 << 30


async def test_a_circuit_with_limits_is_good_enough_for_a_stranger(
    placed: Placed, caller: Stranger
) -> None:
    """An implementation may refuse to open streams on a circuit that has limits."""
    limits = RelayLimits(circuit_seconds=600, circuit_bytes=1 << 30)
    async with our_relay(limits) as hub, placed(hub) as stranger:
        await caller.connect(hub.circuit_to(stranger.peer))
        await exchange_with(caller, stranger.peer)

        assert hub.relay.counts().carried_bytes > 2 * EXCHANGED_BYTES


async def test_js_is_told_that_it_may_not_have_a_place_at_our_relay(
    js: JavascriptStranger,
) -> None:
    async def nobody(_peer: PeerId) -> bool:
        return False

    async with our_relay(admits=nobody) as hub:
        with pytest.raises(StrangerRefused, match="PERMISSION_DENIED"):
            await js.reserve(hub.address)

        assert hub.relay.refusals == {Refusal.NOT_ADMITTED: 1}


async def test_a_stranger_is_told_that_nobody_has_this_place_at_our_relay(
    caller: Stranger,
) -> None:
    async with our_relay() as hub:
        with pytest.raises(StrangerRefused, match="NO_RESERVATION"):
            await caller.connect(hub.circuit_to(Identity.generate().peer_id))

        assert hub.relay.refusals == {Refusal.NO_RESERVATION: 1}


# ---- their relays


async def test_a_stranger_reaches_us_with_a_place_at_their_relay(
    their_relay: Stranger, caller: Stranger
) -> None:
    async with (
        our_home(their_relay.peer, their_relay.address) as home,
        caller.serving(ECHO, echo),
    ):
        assert home.reservations.addresses()[0] == f"{their_relay.address}/p2p-circuit"

        await caller.connect(home.address)
        await exchange_with(caller, home.network.peer_id, LITTLE_BYTES)
        await exchange_with(home.network, caller.peer, LITTLE_BYTES)

        assert 0 < await home.network.ping(PeerId(caller.peer)) < 5
        assert 0 <= await caller.ping(home.network.peer_id) < 5
        assert home.reach_of(caller.peer) is Reach.RELAYED
        await caller.disconnect(their_relay.peer)


async def test_another_node_of_ours_reaches_us_with_a_place_at_their_relay(
    their_relay: Stranger,
) -> None:
    async with (
        our_home(their_relay.peer, their_relay.address) as home,
        our_node(listens=False) as other,
    ):
        other.learn_addresses(home.network.peer_id, [home.address])
        await exchange_with(other, home.network.peer_id, LITTLE_BYTES)

        assert 0 < await other.ping(home.network.peer_id) < 5
        assert home.reach_of(other.peer_id) is Reach.RELAYED


async def test_we_understand_that_nobody_has_this_place_at_their_relay(
    their_relay: Stranger,
) -> None:
    nobody = Identity.generate().peer_id
    async with our_node() as we:
        we.learn_addresses(nobody, [f"{their_relay.address}/p2p-circuit/p2p/{nobody}"])

        with pytest.raises(Unreachable, match="no reservation there"):
            await we.connect(nobody)


async def test_a_circuit_that_js_ends_at_its_limit_breaks_our_stream(
    relaying_js: JavascriptStranger,
) -> None:
    async with (
        our_home(relaying_js.peer, relaying_js.address) as home,
        our_node(listens=False) as other,
    ):
        other.learn_addresses(home.network.peer_id, [home.address])
        stream = await other.open(home.network.peer_id, ECHO)
        async with stream:
            with trio.fail_after(PATIENCE_SECONDS), pytest.raises(trio.BrokenResourceError):
                await exchange_in_turns(stream, EXCHANGED_BYTES)

        assert other.link(PeerId(relaying_js.peer)) is not None


# ---- AutoNAT v2


@pytest.fixture
def own_namespace() -> tuple[str, ...]:
    """The beginning of a command that runs in a network namespace of its own."""
    if any(shutil.which(name) is None for name in ("unshare", "ip")):
        pytest.skip("needs unshare and ip")
    tried = subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("needs the right to make a network namespace")
    return OWN_NAMESPACE


async def test_js_and_we_find_each_other_public_at_a_public_address(
    own_namespace: tuple[str, ...],
    relaying_js: JavascriptStranger,  # noqa: ARG001  which is installed then
    cache: Path,
) -> None:
    """Also where our peer id is the smaller, and where the larger: the link is another one then."""
    command = [*own_namespace, sys.executable, "-m", "tests.strangers.public_place", str(cache)]
    with trio.fail_after(PATIENCE_SECONDS):
        done = await trio.run_process(command, capture_stdout=True)

    answers = json.loads(done.stdout)
    assert len(answers) == 2
    for found in answers:
        assert found["their_verdict"] == "public"
        assert found["our_outcomes"]["ok"] >= 1


async def test_js_ends_our_question_about_a_private_address_without_an_answer(
    relaying_js: JavascriptStranger,
) -> None:
    async with our_node() as we:
        them = PeerId(relaying_js.peer)
        we.learn_addresses(them, [relaying_js.address])
        dial_backs = DialBacks(we)
        dial_backs.serve()
        (ours,) = we.listened_addresses()
        question = AutoNat()
        question.request.addrs.extend(messages.packed([ours]))
        question.request.nonce = 7

        stream = await we.open(them, DIAL_REQUEST)
        async with stream:
            await messages.send(stream, question)
            with trio.fail_after(PATIENCE_SECONDS), pytest.raises(MalformedMessage, match="ended"):
                await messages.read(stream, AutoNat)

        assert await dial_backs.ask(them, ours) is DialVerdict.UNKNOWN


async def test_js_asks_us_about_an_address_elsewhere_and_takes_our_refusal(
    relaying_js: JavascriptStranger,
) -> None:
    async with our_node() as we, trio.open_nursery() as nursery:
        judge = Judge(we)
        await nursery.start(judge.run)
        await relaying_js.suppose(ELSEWHERE)

        await relaying_js.connect(we.addresses()[0])

        await until(lambda: bool(judge.outcomes), PATIENCE_SECONDS)
        assert judge.outcomes == {"refused": 1}
        assert 0 <= await relaying_js.ping(we.peer_id) < 5
        nursery.cancel_scope.cancel()


async def test_go_judges_by_autonat_1_alone(relaying_go: GoStranger) -> None:
    async with our_node() as we:
        them = PeerId(relaying_go.peer)
        we.learn_addresses(them, [relaying_go.address])
        async with await we.open(them, AUTONAT_1):
            pass

        with pytest.raises(ProtocolNotServed):
            await we.open(them, DIAL_REQUEST)
        (ours,) = we.listened_addresses()
        assert await DialBacks(we).ask(them, ours) is DialVerdict.UNKNOWN
