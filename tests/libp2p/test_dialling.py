"""Racing addresses: head starts, failures, cancellation, and what is said when there is no way."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio
import trio.testing

from node.net.libp2p.addresses import Address, parse
from node.net.libp2p.dial_failure import DialFailure, DialReason
from node.net.libp2p.dialler import (
    CONNECT_HEAD_START_SECONDS,
    HANDSHAKE_HEAD_START_SECONDS,
    LATER_SECONDS,
    LOOKUPS,
    MOST_NAMES,
    Race,
    connect_tcp,
)
from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.errors import Unreachable
from protocols.identity import Identity
from tests.libp2p.nodes import LOOPBACK, networks, open_descriptors
from tests.ports import held_port
from tests.waiting import PATIENCE_SECONDS

NEVER = float("inf")


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an asynchronous test under a clock that jumps over every sleep."""

    @functools.wraps(test)
    def run() -> None:
        trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would see the coroutine function
    return run


class Course:
    """Attempts that connect and end at given times after their start, and what was discarded.

    A plan is (seconds until TCP stands, seconds until the end, whether it succeeds). The last
    `later` addresses are to be tried later.
    """

    def __init__(self, *plans: tuple[float, float, bool], later: int = 0) -> None:
        self._first = len(plans) - later
        self.addresses = [parse(f"/ip4/192.0.2.7/tcp/{n + 1}") for n in range(len(plans))]
        self._plans = dict(zip(self.addresses, plans, strict=True))
        self.began: dict[int, float] = {}
        self.cancelled: list[int] = []
        self.discarded: list[int] = []

    async def attempt(self, address: Address, on_connected: Callable[[], None]) -> int:
        place = self.addresses.index(address)
        connect_seconds, end_seconds, succeeds = self._plans[address]
        self.began[place] = round(trio.current_time() - self.start, 6)
        try:
            await trio.sleep(min(connect_seconds, end_seconds))
            if connect_seconds <= end_seconds:
                on_connected()
                await trio.sleep(end_seconds - connect_seconds)
        except trio.Cancelled:
            self.cancelled.append(place)
            raise
        if not succeeds:
            raise DialFailure(address.text, DialReason.REFUSED, f"no {place}")
        return place

    async def discard(self, place: int) -> None:
        self.discarded.append(place)

    async def run(self) -> int | list[str]:
        self.start = trio.current_time()
        first, later = self.addresses[: self._first], self.addresses[self._first :]
        outcome = await Race(self.attempt, self.discard).run(first, later)
        if isinstance(outcome, list):
            return [failure.detail for failure in outcome]
        address, place = outcome
        assert self.addresses[place] == address
        return place


@in_virtual_time
async def test_a_good_address_beside_a_silent_one_wins_after_one_head_start() -> None:
    course = Course((NEVER, NEVER, False), (0.01, 0.05, True))
    assert await course.run() == 1
    assert course.began == {0: 0, 1: CONNECT_HEAD_START_SECONDS}
    assert course.cancelled == [0]


@in_virtual_time
async def test_a_refusal_starts_the_next_attempt_at_once() -> None:
    course = Course((NEVER, 0.01, False), (0.01, 0.02, True))
    assert await course.run() == 1
    assert course.began == {0: 0, 1: 0.01}


@in_virtual_time
async def test_while_a_handshake_goes_on_the_next_address_waits_longer() -> None:
    course = Course((0.1, 0.9, True), (0, 0, True))
    assert await course.run() == 0
    assert course.began == {0: 0}


@in_virtual_time
async def test_a_handshake_that_hangs_does_not_hold_up_the_others_for_ever() -> None:
    course = Course((0.1, NEVER, True), (0, 0.01, True))
    assert await course.run() == 1
    assert course.began == {0: 0, 1: pytest.approx(0.1 + HANDSHAKE_HEAD_START_SECONDS)}
    assert course.cancelled == [0]


@in_virtual_time
async def test_what_is_to_be_tried_later_begins_when_the_others_have_failed_or_take_long() -> None:
    course = Course((0, 0.2, False), (0, 0.3, False), (0, 0.1, True), later=1)
    assert await course.run() == 2
    assert course.began == {0: 0, 1: 0.2, 2: 0.5}
    course = Course((0, NEVER, False), (0, 0.1, True), later=1)
    assert await course.run() == 1
    assert course.began == {0: 0, 1: HANDSHAKE_HEAD_START_SECONDS + LATER_SECONDS}
    course = Course((0, 0.1, True), later=1)
    assert await course.run() == 0
    assert course.began == {0: 0}


@in_virtual_time
async def test_every_failure_is_reported_in_the_order_of_the_addresses() -> None:
    course = Course((NEVER, 3.0, False), (NEVER, 0.1, False), (0, 0.2, False))
    assert await course.run() == ["no 0", "no 1", "no 2"]


@in_virtual_time
async def test_no_address_no_failure() -> None:
    assert await Course().run() == []


@in_virtual_time
async def test_of_two_that_succeed_in_the_same_moment_one_is_discarded() -> None:
    course = Course((NEVER, 1.0, True), (NEVER, 1.0 - CONNECT_HEAD_START_SECONDS, True))
    winner = await course.run()
    assert isinstance(winner, int)
    assert sorted([winner, *course.discarded, *course.cancelled]) == [0, 1]


@in_virtual_time
async def test_a_cancelled_race_leaves_nothing() -> None:
    course = Course((0.1, NEVER, True), (NEVER, NEVER, True))
    with trio.move_on_after(5) as giving_up:
        await course.run()
    assert giving_up.cancelled_caught
    assert sorted(course.cancelled) == [0, 1]


# -- one dead and one good address, for real


async def test_a_dead_address_does_not_hide_the_good_one() -> None:
    with held_port() as port:
        async with networks(2) as (near, far):
            dead = f"/ip4/127.0.0.1/tcp/{port}"
            (good,) = far.addresses()
            near.learn_addresses(far.peer_id, [good, dead])
            assert near.addresses_of(far.peer_id)[-1].startswith(dead), (
                "the dead one is tried first"
            )
            with trio.fail_after(PATIENCE_SECONDS):
                facts = await near.connect(far.peer_id)
            assert good.startswith(facts.remote_address)


async def test_a_failure_is_not_remembered() -> None:
    """The peer was not there; a moment later it is, at the same address."""
    identity = Identity.generate()
    with held_port() as port:
        async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
            address = f"/ip4/127.0.0.1/tcp/{port}"
            near.learn_addresses(identity.peer_id, [address])
            with pytest.raises(Unreachable):
                await near.connect(identity.peer_id)
            async with open_libp2p_network(identity, Libp2pSettings(listen_addresses=(address,))):
                with trio.fail_after(PATIENCE_SECONDS):
                    await near.connect(identity.peer_id)


# -- what is said when there is no way


async def refusal_of(settings: Libp2pSettings, peer: str, address: str) -> Unreachable:
    async with open_libp2p_network(Identity.generate(), settings) as network:
        network.learn_addresses(peer, [address])  # type: ignore[arg-type]
        with pytest.raises(Unreachable) as refusal:
            await network.connect(peer)  # type: ignore[arg-type]
    return refusal.value


SOMEBODY = Identity.from_seed(bytes(32)).peer_id


async def test_a_refused_connection_is_told_with_its_address_and_what_to_do() -> None:
    with held_port() as port:
        address = f"/ip4/127.0.0.1/tcp/{port}"
        refusal = await refusal_of(LOOPBACK, SOMEBODY, address)
    assert f"{address}: connection refused" in refusal.why
    assert DialReason.REFUSED.advice in refusal.advice


@contextmanager
def silence() -> Iterator[int]:
    """The port of a listener whose queue is full. It answers nothing: to us it is a firewall."""
    with socket.socket() as full, ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        yield full.getsockname()[1]


async def test_silence_is_told_apart_from_refusal() -> None:
    with silence() as port:
        settings = Libp2pSettings(listen_addresses=(), dial_seconds=0.3)
        address = f"/ip4/127.0.0.1/tcp/{port}"
        refusal = await refusal_of(settings, SOMEBODY, address)
    assert f"{address}: timed out after 0.3 s" in refusal.why
    assert DialReason.TIMED_OUT.advice in refusal.advice


async def test_another_node_behind_the_address_is_told_as_such() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as other:
        address = other.addresses()[0].partition("/p2p/")[0]
        refusal = await refusal_of(LOOPBACK, SOMEBODY, address)
    assert f"{address}: another node answers there" in refusal.why
    assert DialReason.WRONG_PEER.advice in refusal.advice


async def test_a_name_that_does_not_resolve_is_told_as_such() -> None:
    address = "/dns4/no-such-host.invalid/tcp/4001"
    refusal = await refusal_of(LOOPBACK, SOMEBODY, address)
    assert f"{address}: the name does not resolve" in refusal.why
    assert DialReason.NAME_NOT_FOUND.advice in refusal.advice


async def test_something_that_is_no_node_is_told_as_such() -> None:
    async def say_hello(stream: trio.SocketStream) -> None:
        await stream.send_all(b"220 mail.example.org ESMTP ready to serve you today\r\n")

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(trio.serve_tcp, say_hello, 0)
        port = listeners[0].socket.getsockname()[1]
        refusal = await refusal_of(LOOPBACK, SOMEBODY, f"/ip4/127.0.0.1/tcp/{port}")
        nursery.cancel_scope.cancel()
    assert "a program answers there, but no potluck node" in refusal.why
    assert DialReason.NOT_LIBP2P.advice in refusal.advice


@pytest.mark.slow
async def test_addresses_of_other_kinds_are_named_as_what_they_are() -> None:
    relay = Identity.from_seed(bytes([7]) * 32).peer_id
    through_relay = f"/ip4/192.0.2.7/tcp/1/p2p/{relay}/p2p-circuit"
    assert through_relay in (await refusal_of(LOOPBACK, SOMEBODY, through_relay)).why
    refusal = await refusal_of(LOOPBACK, SOMEBODY, "/ip4/192.0.2.7/udp/1/quic-v1")
    assert DialReason.OTHER_KIND.advice in refusal.advice


async def test_a_peer_without_any_address_is_told_as_such() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as network:
        with pytest.raises(Unreachable, match="no known address"):
            await network.connect(SOMEBODY)


async def test_a_name_that_stands_for_an_address_leads_there() -> None:
    async with networks(2) as (near, far):
        port = far.addresses()[0].split("/")[4]
        near._book = type(near._book)(peers=4, addresses_per_peer=4)
        near.learn_addresses(far.peer_id, [f"/dns4/localhost/tcp/{port}"])
        await near.connect(far.peer_id)


def this_machine(_host: object, port: object, **_: object) -> Any:
    """Every name stands for this machine, with both versions of IP, IPv4 first."""
    return [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0)),
    ]


async def test_both_versions_of_ip_are_tried_for_a_name_if_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", this_machine)
    with silence() as port, socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", port))
        listener.listen()
        with trio.fail_after(PATIENCE_SECONDS):
            stream = await connect_tcp(parse(f"/dns/node.example/tcp/{port}"))
        async with stream:
            assert stream.socket.getpeername()[0] == "::1"


async def test_name_servers_that_do_not_answer_keep_few_threads_and_other_work_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look-up goes on in its thread after it was given up."""
    asked: list[object] = []
    answer = threading.Event()

    def silent(host: object, *_: object, **__: object) -> Any:
        asked.append(host)
        answer.wait(PATIENCE_SECONDS)
        raise socket.gaierror("nobody answers")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    default = trio.to_thread.current_default_thread_limiter()
    try:
        async with networks(1) as (network,):
            for _ in range(12):
                peer = Identity.generate().peer_id
                names = [f"/dns/{number}.example/tcp/1" for number in range(6)]
                network.learn_addresses(peer, names)
                with trio.move_on_after(0.2):
                    await network.connect(peer)
            assert LOOKUPS.borrowed_tokens == LOOKUPS.total_tokens
            assert default.borrowed_tokens == 0
    finally:
        answer.set()
    assert len(asked) == LOOKUPS.total_tokens
    assert len(set(asked)) == MOST_NAMES
    with trio.fail_after(PATIENCE_SECONDS):
        while LOOKUPS.borrowed_tokens:  # noqa: ASYNC110  it tells nobody
            await trio.sleep(0.01)


async def test_a_name_that_cannot_be_one_is_told_as_such() -> None:
    """By the rules of 2003; those of 2008, which addresses follow, allow a number after Hebrew."""
    with pytest.raises(DialFailure, match="not a valid name"):
        await connect_tcp(parse("/dns/\u05d01.example/tcp/1"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"])
async def test_a_failed_attempt_leaves_no_socket(text: str) -> None:
    before = open_descriptors()
    with pytest.raises(DialFailure):
        await connect_tcp(parse(text))
    assert open_descriptors() == before
