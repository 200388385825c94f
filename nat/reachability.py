"""Whether others can dial this node: AutoNAT v2, both the asking and the answering side.

    judge = Judge(network)              # answers others
    await nursery.start(judge.run)
    verdict = await DialBacks(network).ask(server, "/ip4/192.0.2.7/tcp/4001")

A server connects to the one address that it was asked about, on a fresh connection from a free
port, and hands over the number that came with the question. Only a number that comes over a
connection that somebody made to us counts: nobody can tell us that we can be dialled if we cannot.

A server could be used to send packets to somebody else's address. So it dials only the address that
the asker's own link comes from, with limits per asker, per site and in all.

`Verdicts` adds up what several servers say, and is pure. A server that this node has lately sent
something to *from its listening port* must not be asked: many routers let in whatever comes from an
address that was sent to, so its dial would succeed where nobody else's does.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

import trio

from nat import messages
from nat.addresses import host_of, ip_of, port_of, site_of
from nat.messages import (
    AutoNat,
    DialBack,
    DialBackResponse,
    DialStatus,
    ResponseStatus,
)
from protocols.errors import PotluckError, ProtocolNotServed, RemoteMisbehaviour, Unreachable
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach, Stream, TraversableNetwork

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

DIAL_REQUEST: Final = "/libp2p/autonat/2/dial-request"
DIAL_BACK: Final = "/libp2p/autonat/2/dial-back"

MESSAGE_SECONDS: Final = 5.0
DIAL_SECONDS: Final = 4.0  # two resent SYNs, or one and the handshake at a long round trip
ASK_SECONDS: Final = 20.0  # for the whole: the server's dial, and its answer
QUESTIONS_PER_MINUTE: Final = 20  # of one asker: a node has a few addresses, and asks again rarely
MOST_AT_ONCE: Final = 32
MOST_AT_ONCE_PER_ASKER: Final = 4  # as many addresses as a node lets judge
MOST_AT_ONCE_PER_SITE: Final = 16  # four machines of one household or lab
ASKERS_REMEMBERED: Final = 1024
NONCE_BITS: Final = 64
SERVERS_HEARD: Final = 8  # per address, the newest
SAID_SECONDS: Final = 2000.0  # two looks of a node that knows its mode (connectivity.py)

log = logging.getLogger("potluck.nat")


class DialVerdict(enum.Enum):
    """Whether an address can be dialled."""

    PUBLIC = "public"
    PRIVATE = "private"
    UNKNOWN = "unknown"


class Verdicts:
    """What servers found about each address. Pure.

    An address is public if as many servers reached it as failed: one of two may have a network
    trouble of its own, and one that lies cannot bring us its number from where it did not connect.
    What was said long before the newest word does not count: a router may have been set up anew.
    """

    def __init__(self) -> None:
        self._heard: dict[str, OrderedDict[PeerId, tuple[float, bool]]] = {}

    def heard(self, address: str, server: PeerId, now: float, *, reached: bool) -> None:
        said = self._heard.setdefault(address, OrderedDict())
        said.pop(server, None)
        for one in [one for one, (at, _) in said.items() if now - at > SAID_SECONDS]:
            del said[one]
        said[server] = now, reached
        while len(said) > SERVERS_HEARD:
            said.popitem(last=False)

    def of(self, address: str) -> DialVerdict:
        said = [reached for _, reached in self._heard.get(address, OrderedDict()).values()]
        if not said:
            return DialVerdict.UNKNOWN
        return DialVerdict.PUBLIC if 2 * sum(said) >= len(said) else DialVerdict.PRIVATE

    def keep(self, addresses: list[str]) -> None:
        """Forget all addresses but these."""
        self._heard = {one: said for one, said in self._heard.items() if one in addresses}

    def forget(self) -> None:
        """The network is another one: nothing that was heard counts any more."""
        self._heard.clear()


# ---- asking


class DialBacks:
    """Asks servers, and takes what they bring. Invariant: one entry for each open question."""

    def __init__(self, network: TraversableNetwork) -> None:
        self._network = network
        self._arrived: dict[int, trio.Event] = {}

    def serve(self) -> None:
        self._network.serve(DIAL_BACK, self._take)

    def stop(self) -> None:
        self._network.stop_serving(DIAL_BACK)

    async def ask(self, server: PeerId, address: str) -> DialVerdict:
        """Let a server dial this address of ours. UNKNOWN if it did not, or did not say."""
        nonce = self._network.random.getrandbits(NONCE_BITS)
        arrived = self._arrived[nonce] = trio.Event()
        try:
            said = None
            with trio.move_on_after(ASK_SECONDS):
                said = await self._ask(server, address, nonce)
            if said == DialStatus.OK and arrived.is_set():
                return DialVerdict.PUBLIC
            return DialVerdict.PRIVATE if said == DialStatus.DIAL_ERROR else DialVerdict.UNKNOWN
        finally:
            del self._arrived[nonce]

    async def _ask(self, server: PeerId, address: str, nonce: int) -> int | None:
        try:
            stream = await self._network.open(server, DIAL_REQUEST)
            try:
                question = AutoNat()
                question.request.addrs.extend(messages.packed([address]))
                question.request.nonce = nonce
                await messages.send(stream, question)
                said = await messages.read(stream, AutoNat)
            finally:
                stream.reset()
        except ProtocolNotServed:
            return None
        except (PotluckError, trio.BrokenResourceError) as error:
            log.debug("%s did not say whether %s can be dialled: %r", server, address, error)
            return None
        if not said.HasField("response") or said.response.status != ResponseStatus.OK:
            return None
        found: int = said.response.dial_status
        return found

    async def _take(self, stream: Stream) -> None:
        with trio.fail_after(MESSAGE_SECONDS):
            brought = await messages.read(stream, DialBack)
            arrived = self._arrived.get(brought.nonce)
            # over a connection that we made, it would prove nothing
            if arrived is None or not stream.over_their_dial:
                stream.reset()
                return
            arrived.set()
            await messages.send(stream, DialBackResponse(status=0))


# ---- answering

OUTCOMES: Final = ("rejected", "refused", "ok", "dial_error", "dial_back_error")
"""Of a question: the asker asked too often; no address is at its own place; a dial, and its end."""


class Judge:
    """Dials askers back. Counts what it did by outcome, for the metrics."""

    def __init__(self, network: TraversableNetwork) -> None:
        self._network = network
        self._asked: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()
        self._at_once: Counter[PeerId] = Counter()
        self._at_once_sites: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._network.serve(DIAL_REQUEST, self._answer)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._network.stop_serving(DIAL_REQUEST)

    async def _answer(self, stream: Stream) -> None:
        with trio.fail_after(MESSAGE_SECONDS):
            asked = await messages.read(stream, AutoNat)
        if not asked.HasField("request"):
            raise RemoteMisbehaviour("An AutoNAT message that is no question.")
        answer = AutoNat()
        peer = stream.remote_peer
        addresses = messages.unpacked_in_place(asked.request.addrs)
        link = self._network.link(peer)
        site = "" if link is None else site_of(link.remote_address)
        index = self._address_to_dial(link, addresses)
        if not self._may_ask(peer, site):
            self.outcomes["rejected"] += 1
            answer.response.status = ResponseStatus.REQUEST_REJECTED
        elif index is None:
            self.outcomes["refused"] += 1
            answer.response.status = ResponseStatus.DIAL_REFUSED
        else:
            status = await self._dial(peer, site, addresses[index], asked.request.nonce)
            self.outcomes[status.name.lower()] += 1
            answer.response.status = ResponseStatus.OK
            answer.response.index = index
            answer.response.dial_status = status
        with trio.fail_after(MESSAGE_SECONDS):
            await messages.send(stream, answer)

    def _address_to_dial(self, link: LinkFacts | None, addresses: tuple[str, ...]) -> int | None:
        """The first address at the place that the asker's own link comes from."""
        if link is None or link.reach is not Reach.DIRECT:
            return None
        home = host_of(link.remote_address)
        for index, address in enumerate(addresses):
            if ip_of(address) is not None and host_of(address) == home and port_of(address):
                return index
        return None

    def _may_ask(self, peer: PeerId, site: str) -> bool:
        now = trio.current_time()
        minute_began, count = self._asked.pop(peer, (now, 0))
        if now - minute_began >= 60.0:
            minute_began, count = now, 0
        self._asked[peer] = (minute_began, count + 1)
        if len(self._asked) > ASKERS_REMEMBERED:
            self._asked.popitem(last=False)
        return (
            count < QUESTIONS_PER_MINUTE
            and self._at_once[peer] < MOST_AT_ONCE_PER_ASKER
            and self._at_once_sites[site] < MOST_AT_ONCE_PER_SITE
            and self._at_once.total() < MOST_AT_ONCE
        )

    async def _dial(self, peer: PeerId, site: str, address: str, nonce: int) -> DialStatus:
        self._at_once[peer] += 1
        self._at_once_sites[site] += 1
        status = DialStatus.DIAL_ERROR
        try:
            with trio.move_on_after(DIAL_SECONDS):
                async with self._network.dial_back(peer, address, DIAL_BACK) as stream:
                    status = DialStatus.DIAL_BACK_ERROR
                    await messages.send(stream, DialBack(nonce=nonce))
                    await messages.read(stream, DialBackResponse)
                    status = DialStatus.OK
        except ProtocolNotServed:
            return DialStatus.DIAL_BACK_ERROR
        except (Unreachable, RemoteMisbehaviour, trio.BrokenResourceError):
            return status
        finally:
            self._at_once -= Counter([peer])  # which drops what is zero
            self._at_once_sites -= Counter([site])
        return status
