"""Links through a relay on the real network: relays that meddle, and a direct link taking over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import base58
import pytest
import trio

from nat import messages
from nat.circuits import CircuitTaker
from nat.kinds import Nat
from nat.messages import Hop, HopType, Status, Stop, StopType
from nat.punching import Outside, Puncher
from nat.relay_limits import RelayLimits
from nat.relaying import HOP, STOP, Relay
from nat.reservations import reserve
from node.net.network import Libp2pNetwork, open_libp2p_network
from protocols.errors import PotluckError, Unreachable
from protocols.guard import Caller
from protocols.identity import Identity, PeerId
from protocols.network import Reach, Stream
from protocols.rpc import Empty, Method, Rpc, open_rpc
from protocols.rpc.ping import ECHO, EchoRequest, serve_ping
from tests.libp2p.nodes import LOOPBACK, echo
from tests.waiting import PATIENCE_SECONDS, until

TALK = "/potluck/echo/1.0.0"
SECRET = b"between us, and nobody else"
HURRIED = replace(
    LOOPBACK,
    dial_seconds=0.5,
    handshake_seconds=0.5,
    sign_of_life_seconds=0.3,
    surplus_idle_seconds=0.1,
)
DELAY_SECONDS = 0.05

REWRITE, DROP, DELAY, REPLAY = "rewrites", "drops", "delays", "replays"


class Meddler:
    """A relay without rules that does something to the bytes that it carries, once it is armed."""

    def __init__(self, network: Libp2pNetwork, does: str) -> None:
        self.network = network
        self.does = does
        self.armed = False
        self.carried = bytearray()
        self.brings_to: PeerId | None = None  # instead of to the peer that was asked for
        self.names: PeerId | None = None  # instead of the peer that asks
        network.serve(HOP, self._answer)

    async def _answer(self, near: Stream) -> None:
        asked = await messages.read(near, Hop)
        target = self.brings_to or PeerId(base58.b58encode(asked.peer.id).decode())
        far = await self.network.open(target, STOP)
        ask = Stop(type=StopType.CONNECT)
        ask.peer.id = base58.b58decode(self.names or near.remote_peer)
        await messages.send(far, ask)
        await messages.read(far, Stop)
        await messages.send(near, Hop(type=HopType.STATUS, status=Status.OK))
        async with trio.open_nursery() as nursery:
            for source, to in ((near, far), (far, near)):
                nursery.start_soon(self._carry, source, to, nursery.cancel_scope)
        near.reset()
        far.reset()

    async def _carry(self, source: Stream, to: Stream, ends: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while part := await source.receive_some():
                self.carried += part
                for piece in await self._meddled(part) if self.armed else [part]:
                    await to.send_all(piece)
        ends.cancel()

    async def _meddled(self, part: bytes) -> list[bytes]:
        if self.does == REWRITE:
            return [part[:-1] + bytes([part[-1] ^ 1])]
        if self.does == REPLAY:
            return [part, part]
        if self.does == DELAY:
            await trio.sleep(DELAY_SECONDS)
            return [part]
        self.armed = False  # one is enough, and what follows has to be seen
        return []


@asynccontextmanager
async def strangers(count: int) -> AsyncIterator[list[Libp2pNetwork]]:
    """Networks that know nothing of each other."""
    async with AsyncExitStack() as stack:
        opened = [open_libp2p_network(Identity.generate(), HURRIED) for _ in range(count)]
        yield [await stack.enter_async_context(one) for one in opened]


def circuit_to(peer: Libp2pNetwork, relay: Libp2pNetwork) -> str:
    return f"{relay.addresses()[0]}/p2p-circuit/p2p/{peer.peer_id}"


@asynccontextmanager
async def meddled(
    does: str = "",
) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork, Libp2pNetwork, Meddler]]:
    """Two peers and a third whose only way to each other is the meddler."""
    async with strangers(4) as (hub, first, second, third):
        meddler = Meddler(hub, does)
        for one in (first, second, third):
            one.learn_addresses(hub.peer_id, hub.addresses())
            await one.connect(hub.peer_id)
            one.serve(TALK, echo)
            one.serve(STOP, CircuitTaker(one, lambda _: True).answer)
        first.learn_addresses(second.peer_id, [circuit_to(second, hub)])
        yield first, second, third, meddler


async def talk(near: Libp2pNetwork, far: Libp2pNetwork) -> None:
    """Fail unless what is said comes back as it was."""
    stream = await near.open(far.peer_id, TALK)
    try:
        for _ in range(3):
            await stream.send_all(SECRET)
            got = bytearray()
            while len(got) < len(SECRET) and (part := await stream.receive_some()):
                got += part
            if got != SECRET:
                raise trio.BrokenResourceError("it ended")
    finally:
        stream.reset()


async def talk_until_it_breaks(near: Libp2pNetwork, far: Libp2pNetwork) -> None:
    while True:
        try:
            with trio.move_on_after(0.2):  # what was dropped is waited for in vain
                await talk(near, far)
        except (trio.BrokenResourceError, PotluckError):
            return


async def test_a_relay_reads_nothing_of_what_it_carries() -> None:
    async with meddled() as (first, second, _, meddler):
        await talk(first, second)
        link = first.link(second.peer_id)
        assert link is not None
        assert link.reach is Reach.RELAYED
        assert len(meddler.carried) > 1000
        assert SECRET not in meddler.carried
        assert TALK.encode() not in meddler.carried


@pytest.mark.parametrize("does", [REWRITE, DROP, REPLAY])
async def test_a_relay_that_meddles_breaks_its_link_and_nothing_else(does: str) -> None:
    async with meddled(does) as (first, second, third, meddler):
        await talk(first, second)
        third.learn_addresses(first.peer_id, first.addresses())
        await talk(third, first)
        others = first.link(meddler.network.peer_id), first.link(third.peer_id)
        meddler.armed = True
        with trio.fail_after(PATIENCE_SECONDS):
            await talk_until_it_breaks(first, second)
        await until(lambda: first.link(second.peer_id) is None, PATIENCE_SECONDS)
        await until(lambda: second.link(first.peer_id) is None, PATIENCE_SECONDS)
        for before in others:
            assert before is not None
            now = first.link(before.peer)
            assert now is not None
            assert now.connected_at == before.connected_at
        meddler.armed = False
        await talk(first, second)


@pytest.mark.parametrize("does", [REWRITE, DROP, REPLAY])
async def test_a_relay_that_meddles_with_the_handshake_makes_no_link(does: str) -> None:
    async with meddled(does) as (first, second, _, meddler):
        meddler.armed = True
        with pytest.raises(Unreachable):
            await first.connect(second.peer_id)
        assert first.link(second.peer_id) is None
        await until(lambda: second.link(first.peer_id) is None, PATIENCE_SECONDS)
        meddler.armed = False
        await talk(first, second)


async def test_a_slow_relay_is_only_slow() -> None:
    async with meddled(DELAY) as (first, second, _, meddler):
        await first.connect(second.peer_id)
        meddler.armed = True
        await talk(first, second)
        assert await first.ping(second.peer_id) >= 2 * DELAY_SECONDS


@pytest.mark.slow
async def test_after_a_relay_has_cut_a_circuit_another_relay_is_preferred() -> None:
    quiet = replace(HURRIED, listen_addresses=())
    async with (
        strangers(2) as (liar, honest),
        open_libp2p_network(Identity.generate(), quiet) as near,
        open_libp2p_network(Identity.generate(), quiet) as far,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Relay(liar, RelayLimits(circuit_bytes=4000)).run)
        await nursery.start(Relay(honest, RelayLimits()).run)
        for one in (near, far):
            one.serve(TALK, echo)
            one.serve(STOP, CircuitTaker(one, lambda _: True).answer)
            for relay in (liar, honest):
                one.learn_addresses(relay.peer_id, relay.addresses())
                await reserve(one, relay.peer_id)
        circuits = [circuit_to(far, relay) for relay in (honest, liar)]  # the newest is tried first
        near.learn_addresses(far.peer_id, circuits)
        assert liar.peer_id in (await near.connect(far.peer_id)).remote_address
        with trio.fail_after(PATIENCE_SECONDS):
            await talk_until_it_breaks(near, far)
        await until(lambda: near.link(far.peer_id) is None, PATIENCE_SECONDS)
        for _ in range(100):  # far more than the liar carries
            await talk(near, far)
        link = near.link(far.peer_id)
        assert link is not None
        assert honest.peer_id in link.remote_address
        nursery.cancel_scope.cancel()


async def test_another_peer_at_the_end_of_a_circuit_is_refused() -> None:
    async with meddled() as (first, second, third, meddler):
        meddler.brings_to = third.peer_id
        with pytest.raises(Unreachable, match="another node answers"):
            await first.connect(second.peer_id)
        assert [link.peer for link in first.links()] == [meddler.network.peer_id]
        await until(lambda: third.link(first.peer_id) is None, PATIENCE_SECONDS)


async def test_another_peer_than_the_relay_names_is_refused() -> None:
    async with meddled() as (first, second, _, meddler):
        meddler.names = Identity.generate().peer_id
        with suppress(Unreachable):
            await first.connect(second.peer_id)
        await until(lambda: first.link(second.peer_id) is None, PATIENCE_SECONDS)
        assert [link.peer for link in second.links()] == [meddler.network.peer_id]


async def test_the_far_side_sees_the_relay_as_the_place_of_the_link() -> None:
    async with meddled() as (first, second, _, meddler):
        await first.connect(second.peer_id)
        link = second.link(first.peer_id)
        assert link is not None
        assert link.remote_address.endswith(f"{meddler.network.peer_id}/p2p-circuit")


# ---- a direct link takes over

WAIT = Method("/potluck/waiting/1.0.0", "wait", Empty, Empty)


async def test_calls_move_to_the_direct_link_and_the_relayed_one_is_let_go() -> None:
    async with strangers(3) as (hub, left, right), trio.open_nursery() as nursery:
        relay = Relay(hub, RelayLimits())
        await nursery.start(relay.run)
        may_punch = trio.Event()
        for one in (left, right):
            one.learn_addresses(hub.peer_id, hub.addresses())
            one.serve(STOP, CircuitTaker(one, lambda _: True).answer)
            await nursery.start(Puncher(one, _outside_of(one, may_punch)).run)
        await reserve(right, hub.peer_id)
        left.learn_addresses(right.peer_id, [circuit_to(right, hub)])
        async with open_rpc(left) as calling, open_rpc(right) as called:
            serve_ping(called)
            waiting = Waiting(called)

            async def echoes(payload: bytes) -> None:
                request = EchoRequest(payload)
                await calling.call(right.peer_id, ECHO, request, timeout=PATIENCE_SECONDS)

            nursery.start_soon(waiting.call, calling, right.peer_id)
            await waiting.asked.wait()
            assert _reach(left, right) is _reach(right, left) is Reach.RELAYED
            may_punch.set()
            await until(lambda: _reach(left, right) is Reach.DIRECT, PATIENCE_SECONDS)
            await until(lambda: _reach(right, left) is Reach.DIRECT, PATIENCE_SECONDS)
            assert relay.counts().circuits == 1, "as long as a call runs on it"
            carried = relay.counts().carried_bytes
            for _ in range(20):
                await echoes(bytes(4000))
            assert relay.counts().carried_bytes - carried < 20 * 4000
            assert not waiting.answered.is_set()
            waiting.may_answer.set()
            with trio.fail_after(PATIENCE_SECONDS):
                await waiting.answered.wait()
            await until(lambda: relay.counts().circuits == 0, PATIENCE_SECONDS)
            assert _reach(left, right) is _reach(right, left) is Reach.DIRECT
            await echoes(b"still there?")
        nursery.cancel_scope.cancel()


class Waiting:
    """A method that answers when it may, and one call of it."""

    def __init__(self, called: Rpc) -> None:
        self.asked, self.may_answer, self.answered = trio.Event(), trio.Event(), trio.Event()
        called.serve(WAIT, self._answer)

    async def _answer(self, _caller: Caller, _request: Empty) -> Empty:
        self.asked.set()
        await self.may_answer.wait()
        return Empty()

    async def call(self, calling: Rpc, peer: PeerId) -> None:
        await calling.call(peer, WAIT, Empty(), timeout=PATIENCE_SECONDS)
        self.answered.set()


def _reach(one: Libp2pNetwork, other: Libp2pNetwork) -> Reach:
    link = one.link(other.peer_id)
    return Reach.NONE if link is None else link.reach


def _outside_of(network: Libp2pNetwork, may_punch: trio.Event) -> Callable[[], Awaitable[Outside]]:
    async def outside() -> Outside:
        await may_punch.wait()
        return Outside(Nat.UNKNOWN, network.listened_addresses())

    return outside
