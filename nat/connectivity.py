"""How this node can be reached: finds out, does what helps, and says it.

    async with trio.open_nursery() as nursery:
        connectivity = Connectivity(network, bootstrap)
        await nursery.start(connectivity.run)
        await connectivity.stated.wait()
        connectivity.mode                     # ReachMode.PUNCHED

A *helper* is a peer that this node dials itself and that may judge its addresses and relay for it:
its bootstrap peers, and every peer that it has a direct outgoing link with.

The order of things, at the start and whenever the machine's network has changed:

1. Wait for a helper, and let it say from which address we come.
2. Let several helpers dial our addresses back. If one works, the node is `direct`, or `mapped` if
   the router was asked for it; and all is done.
3. Otherwise find out how the router maps ports (`kinds.py`), and take places at relays. The node is
   `punched` if a hole can be punched to it, and `relayed` if some peers reach it only through a
   relay.
4. Without a place it is `dial-out only`: others can only answer it.

The mode is stated within STATED_SECONDS of the start, whatever does not answer; it is corrected
when more is known. It is looked at again after LOOK_AGAIN_SECONDS, and at once after a change.

`mode_of` decides, and is pure.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from nat.addresses import host_of, ip_of, is_global, port_of, tcp_address, without_peer
from nat.circuits import CircuitTaker
from nat.kinds import Nat, kind_of_mapping
from nat.punching import Outside, Puncher
from nat.reachability import DialBacks, DialVerdict, Judge, Verdicts
from nat.relaying import STOP, TALK_SECONDS
from nat.reservations import Reservations
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import Reach, Sighting, TraversableNetwork

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

STATED_SECONDS: Final = 25.0  # the promise is 30
HELPER_SECONDS: Final = 20.0  # to wait for the first helper; dials go on in the background
SECOND_HELPER_SECONDS: Final = 2.0  # to wait for another, which tells more
SIGHTING_SECONDS: Final = 8.0
HELPERS_ASKED: Final = 3
LOOK_AGAIN_SECONDS: Final = 900.0
LOOK_AGAIN_UNKNOWN_SECONDS: Final = 60.0
SIGHTING_KEPT_SECONDS: Final = 30.0  # for the next punches; a router keeps a closed one for longer
LISTENING_CONTACT_SECONDS: Final = 300.0  # a router may remember a closed connection for 2 minutes
MOST_JUDGED: Final = 4
# A helper's dial takes five round trips, and is given up after four seconds. On a line that is
# slower than this, as a full one is, it comes to nothing, whatever the router does.
PROMPT_SECONDS: Final = 0.8

log = logging.getLogger("potluck.nat")


class ReachMode(enum.Enum):
    """How others reach this node. The values are shown to people, and are the glossary's words."""

    UNKNOWN = "not known yet"
    DIRECT = "direct"
    MAPPED = "mapped"
    PUNCHED = "punched"
    RELAYED = "relayed"
    DIAL_OUT_ONLY = "dial-out only"

    @property
    def is_dialable(self) -> bool:
        """Whether anybody can connect without a helper."""
        return self in (ReachMode.DIRECT, ReachMode.MAPPED)

    @property
    def is_reachable(self) -> bool:
        """Whether anybody can connect at all. True, too, as long as it is not known."""
        return self is not ReachMode.DIAL_OUT_ONLY


@dataclass(frozen=True)
class JudgedAddress:
    """One address of ours, and whether it can be dialled."""

    address: str
    verdict: DialVerdict
    mapped: bool = False


@dataclass(frozen=True)
class ReachFacts:
    """What the mode follows from.

    `dialled` says that others have links to us that they made without a relay or a punch, `nobody`
    that no helper could be asked, `listens` that there is a port to punch a hole to.
    """

    addresses: tuple[JudgedAddress, ...] = ()
    nat: Nat = Nat.UNKNOWN
    reservations: int = 0
    dialled: bool = False
    nobody: bool = True
    listens: bool = True


def mode_of(facts: ReachFacts) -> ReachMode:
    """The mode of a node with these facts. Pure."""
    public = [one for one in facts.addresses if one.verdict is DialVerdict.PUBLIC]
    if public:
        return ReachMode.MAPPED if all(one.mapped for one in public) else ReachMode.DIRECT
    if facts.reservations:
        is_met = facts.listens and facts.nat is not Nat.SYMMETRIC
        return ReachMode.PUNCHED if is_met else ReachMode.RELAYED
    if all(one.verdict is DialVerdict.UNKNOWN for one in facts.addresses) and facts.dialled:
        return ReachMode.DIRECT
    return ReachMode.UNKNOWN if facts.nobody else ReachMode.DIAL_OUT_ONLY


def from_outside(sightings: list[Sighting]) -> list[Sighting]:
    """Without those of helpers in this node's own network, if others come from the internet. They
    see an address that nobody else can dial. Pure."""
    return [one for one in sightings if is_global(one.address)] or sightings


@dataclass(frozen=True)
class _Seen:
    """How our listening port looked from outside, when, and to whom."""

    at: float = float("-inf")
    by: PeerId | None = None
    address: str = ""


class Connectivity:
    """Runs everything that traversal needs on this side of the router.

    `bootstrap` names the peers by which the node joins. `mapped` gives the address that the router
    forwards to us, if it does.
    """

    def __init__(
        self,
        network: TraversableNetwork,
        bootstrap: Callable[[], Iterable[PeerId]],
        *,
        mapped: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._network = network
        self._bootstrap = bootstrap
        self._mapped = mapped
        self._verdicts = Verdicts()
        self._judged: tuple[str, ...] = ()
        self._dial_backs = DialBacks(network)
        self._contacted: dict[PeerId, float] = {}  # from the listening port
        self._listening = _Seen()
        self._contacting = trio.Lock()  # only one connection at once can go from a port to a helper
        self._mode = ReachMode.UNKNOWN
        self._nobody = True
        self._keeps_places = False
        self._knows_filter = False
        self._woken = trio.Event()
        self.nat = Nat.UNKNOWN
        """The kind of the router; PORT_RESTRICTED, too, until it is known to filter less."""
        self.outside_host = ""
        """The address from which the internet sees us come."""
        self.stated = trio.Event()
        """Set once the mode is known, or STATED_SECONDS have passed."""
        self.looked = trio.Event()
        """Set when the first look is over, and the kind of the router is known, if it can be."""
        self.changed = trio.Event()
        """Set, and replaced, at each change of the mode or of the announced addresses."""
        self.judge = Judge(network)
        self.reservations = Reservations(network, self.helpers, self._restate)
        self.puncher = Puncher(network, self.outside)
        self._taker = CircuitTaker(network, self.reservations.holds)

    # ---- what is known

    @property
    def mode(self) -> ReachMode:
        return self._mode

    def addresses(self) -> tuple[JudgedAddress, ...]:
        """Our addresses that were judged."""
        mapped = self._mapped()
        return tuple(
            JudgedAddress(one, self._verdicts.of(one), one == mapped) for one in self._judged
        )

    def facts(self) -> ReachFacts:
        dialled = any(
            link.inbound and link.reach is Reach.DIRECT and not link.punched
            for link in self._network.links()
        )
        return ReachFacts(
            self.addresses(),
            self.nat,
            len(self.reservations.held),
            dialled,
            self._nobody,
            bool(self._network.listened_addresses()),
        )

    def helpers(self) -> tuple[PeerId, ...]:
        """The peers that may help: bootstrap peers, then others that this node has dialled."""
        bootstrap, linked = tuple(self._bootstrap()), self._linked_helpers()
        first = [one for one in linked if one in bootstrap]
        return tuple(dict.fromkeys([*first, *bootstrap, *linked]))

    def network_changed(self) -> None:
        """The machine has another address, or slept, or its router forgot: look again at once."""
        self._verdicts.forget()
        self._judged = ()
        self._contacted.clear()
        self._listening = _Seen()
        self.reservations.look_again()
        self._woken.set()

    def mapping_changed(self) -> None:
        """The router forwards another port to us, or none any more."""
        mapped = self._mapped()
        if mapped is not None:
            self._verdicts.keep([one for one in self._judged if one != mapped])
        self._woken.set()

    async def outside(self) -> Outside:
        """How this node looks from outside, for a punch. Asks a helper if the answer is old."""
        addresses = [one for one in self._network.listened_addresses() if is_global(one)]
        seen = await self._listening_address()
        if seen.address:
            addresses.insert(0, seen.address)
        nat = self.nat
        if nat is Nat.PORT_RESTRICTED and not self._knows_filter:
            nat = Nat.UNKNOWN  # what a stricter router could not do is worth a try
        return Outside(nat, tuple(dict.fromkeys(addresses)))

    # ---- finding out

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find out, keep what helps, and follow changes, until cancelled."""
        self._dial_backs.serve()
        self._network.serve(STOP, self._taker.answer)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.judge.run)
                await nursery.start(self.puncher.run)
                nursery.start_soon(self._state_in_time)
                nursery.start_soon(self._wake_for_helpers)
                task_status.started()
                while True:
                    self._woken = trio.Event()
                    known = await self._look(nursery)
                    self.looked.set()
                    pause = LOOK_AGAIN_SECONDS if known else LOOK_AGAIN_UNKNOWN_SECONDS
                    with trio.move_on_after(self._seconds_to_mapping() or pause):
                        await self._woken.wait()
        finally:
            self._network.stop_serving(STOP)
            self._dial_backs.stop()

    async def _state_in_time(self) -> None:
        """A node that joins nobody has nobody to ask, and need not be waited for."""
        if list(self._bootstrap()):
            with trio.move_on_after(STATED_SECONDS):
                await self.stated.wait()
        self.stated.set()

    async def _wake_for_helpers(self) -> None:
        with self._network.link_events() as events:
            async for event in events:
                if event.reach is not Reach.DIRECT or self._mode is not ReachMode.UNKNOWN:
                    continue
                self._woken.set()
                if not list(self._bootstrap()):
                    self._restate()  # nobody else is asked: a peer that has dialled us tells enough

    async def _look(self, nursery: trio.Nursery) -> bool:
        """Steps 1 to 4, once. False if that told nothing, so that what was known still counts."""
        helpers = await self._wait_for_helpers()
        self._nobody, known = not helpers, True
        if helpers:
            sightings = from_outside(await self._sightings(helpers))
            if self._judged and not sightings:  # the line is full, or the helpers are
                return False
            self._judged = self._worth_judging(sightings)
            self._verdicts.keep(list(self._judged))
            known = await self._let_judge(helpers) and bool(sightings)
            if mode_of(self.facts()).is_dialable:
                self.nat = Nat.NONE
                self.reservations.need(is_needed=False)
            else:
                self.nat = kind_of_mapping(sightings)
                self._knows_filter = False
                await self._take_places(nursery)
                self._restate()
                if self.nat is Nat.PORT_RESTRICTED and not self._seconds_to_mapping():
                    if await self._filters_by_address():
                        self.nat = Nat.CONE
                    self._knows_filter = True
        self._restate()
        return known and self._mode is not ReachMode.UNKNOWN

    async def _wait_for_helpers(self) -> list[PeerId]:
        """The peers to ask: those that this node has dialled itself, over a direct link."""
        wanted = min(HELPERS_ASKED, max(1, len(set(self._bootstrap()))))
        deadline = trio.current_time() + HELPER_SECONDS
        with self._network.link_events() as events:
            while trio.current_time() < deadline:
                helpers = self._linked_helpers()
                if len(helpers) >= wanted:
                    break
                if helpers:
                    deadline = min(deadline, trio.current_time() + SECOND_HELPER_SECONDS)
                with trio.move_on_at(deadline):
                    await events.receive()
        return self._linked_helpers()[:HELPERS_ASKED]

    def _linked_helpers(self) -> list[PeerId]:
        bootstrap = set(self._bootstrap())
        linked = [
            link.peer
            for link in self._network.links()
            if link.reach is Reach.DIRECT and not link.inbound and not link.punched
        ]
        return sorted(linked, key=lambda peer: peer not in bootstrap)

    async def _sightings(self, helpers: list[PeerId]) -> list[Sighting]:
        """How helpers see connections from one free port of ours, one after the other.

        Only those over IPv4, if there are any, even if our links to the helpers go over IPv6. A
        node that others can dial over IPv6 alone still needs relays and holes for the many that
        have none.
        """
        found: list[Sighting] = []
        for helper in helpers:
            port = found[0].port if found else 0
            sighting = await self._sighting(helper, port, ipv4=True)
            if sighting is not None:
                found.append(sighting)
        return [one for one in found if ":" not in host_of(one.address)] or found

    async def _sighting(self, helper: PeerId, port: int, *, ipv4: bool = False) -> Sighting | None:
        with trio.move_on_after(SIGHTING_SECONDS):
            try:
                return await self._network.sighting(helper, port=port, ipv4=ipv4)
            except Unreachable as error:
                log.debug("%s does not say from where we come: %s", helper, error)
        return None

    def _worth_judging(self, sightings: list[Sighting]) -> tuple[str, ...]:
        """Addresses at the place that the helpers see us come from: they dial no others."""
        hosts = dict.fromkeys(host_of(one.address) for one in sightings)
        self.outside_host = next(iter(hosts), "")
        mapped = self._mapped()
        own = [without_peer(one) for one in self._network.addresses()]
        found = [one for one in own if ip_of(one) is not None and host_of(one) in hosts]
        for host in hosts:
            version = f"/ip{6 if ':' in host else 4}/"
            ports = [port_of(one) for one in self._network.listened_addresses() if version in one]
            found += [tcp_address(host, port) for port in ports]
        if mapped is not None and host_of(mapped) in hosts:
            found.insert(0, mapped)
        return tuple(dict.fromkeys(found))[:MOST_JUDGED]

    async def _let_judge(self, helpers: list[PeerId]) -> bool:
        """False if dials failed that would have failed anyway, because the line is full, and no
        others told anything. Those take back nothing that is known."""
        now = trio.current_time()
        clean = [
            helper
            for helper in helpers
            if now - self._contacted.get(helper, float("-inf")) > LISTENING_CONTACT_SECONDS
        ]
        counted: set[bool] = set()

        async def ask(helper: PeerId, address: str) -> None:
            was_prompt = await self._is_prompt(helper)
            verdict = await self._dial_backs.ask(helper, address)
            if verdict is DialVerdict.UNKNOWN:
                return
            reached = verdict is DialVerdict.PUBLIC
            counts = reached or (was_prompt and await self._is_prompt(helper))
            counted.add(counts)
            if counts or self._verdicts.of(address) is DialVerdict.UNKNOWN:
                self._verdicts.heard(address, helper, trio.current_time(), reached=reached)

        async with trio.open_nursery() as nursery:
            for helper in clean:
                for address in self._judged:
                    nursery.start_soon(ask, helper, address)
        return counted != {False}

    def _seconds_to_mapping(self) -> float:
        """For how long nobody can judge what the router forwards to us, because all helpers have
        been contacted from our listening port; 0 if somebody can, or has."""
        mapped, now = self._mapped(), trio.current_time()
        helpers = self._linked_helpers()[:HELPERS_ASKED]
        if not helpers or mapped not in self._judged:
            return 0.0
        if self._verdicts.of(mapped) is not DialVerdict.UNKNOWN:
            return 0.0
        clean_at = [
            self._contacted.get(one, float("-inf")) + LISTENING_CONTACT_SECONDS for one in helpers
        ]
        return max(0.0, min(clean_at) - now)

    async def _is_prompt(self, helper: PeerId) -> bool:
        with trio.move_on_after(PROMPT_SECONDS), suppress(Unreachable):
            await self._network.ping(helper)
            return True
        return False

    async def _filters_by_address(self) -> bool:
        """Whether the router lets in what comes from any port of an address that was sent to."""
        seen = await self._listening_address()
        if not seen.address or seen.by is None:
            return False
        # this helper was sent to, from our listening port; its dial comes from another of its ports
        return await self._dial_backs.ask(seen.by, seen.address) is DialVerdict.PUBLIC

    async def _listening_address(self) -> _Seen:
        """How our listening port looks from outside, by a helper's word."""
        async with self._contacting:
            return await self._look_at_listening_address()

    async def _look_at_listening_address(self) -> _Seen:
        now = trio.current_time()
        if now - self._listening.at < SIGHTING_KEPT_SECONDS:
            return self._listening
        for helper in self._linked_helpers()[:HELPERS_ASKED]:
            port = self._listening_port(helper)
            if not port:
                continue
            self._contacted = {
                one: at
                for one, at in self._contacted.items()
                if now - at <= LISTENING_CONTACT_SECONDS
            }
            self._contacted[helper] = now
            sighting = await self._sighting(helper, port)
            if sighting is not None:
                self._listening = _Seen(trio.current_time(), helper, sighting.address)
                return self._listening
        return _Seen()

    def _listening_port(self, helper: PeerId) -> int:
        """The port that we listen on with the version of IP of our link to this helper, or 0."""
        link = self._network.link(helper)
        if link is None:
            return 0
        is_ipv6 = ":" in host_of(link.remote_address)
        listened = self._network.listened_addresses()
        return next((port_of(one) for one in listened if (":" in host_of(one)) is is_ipv6), 0)

    async def _take_places(self, nursery: trio.Nursery) -> None:
        """Begin to keep places at relays, if not begun, and wait for the first answers."""
        self.reservations.need(is_needed=True)
        if not self._keeps_places:
            self._keeps_places = True
            nursery.start_soon(self.reservations.run)
        with trio.move_on_after(TALK_SECONDS):
            await self.reservations.asked_once.wait()

    # ---- saying it

    def _restate(self) -> None:
        mode = mode_of(self.facts())
        public = [one.address for one in self.addresses() if one.verdict is DialVerdict.PUBLIC]
        circuits = () if mode.is_dialable else self.reservations.addresses()
        self._network.announce([*public, *circuits])
        if mode is not self._mode:
            log.info("this node is %s (its router: %s)", mode.value, self.nat.words)
            self._mode = mode
        if mode is not ReachMode.UNKNOWN:
            self.stated.set()
        self.changed.set()
        self.changed = trio.Event()


@asynccontextmanager
async def answering_punches(network: TraversableNetwork) -> AsyncIterator[None]:
    """Help those who are reached through a relay to make the link direct, while the block lasts.

    For a node that lives too short to find out more. Errors of the block come out unwrapped.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(Connectivity(network, tuple).puncher.run)
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
