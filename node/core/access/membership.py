"""This node's membership in a run: its token, its trusted keys, and server time.

    membership = open_membership(configuration, identity)      # None: no pass, an open run
    rpc = open_rpc(network, membership.guard(network))
    ...
    nursery.start_soon(membership.run, network, rpc, dht)

`run` keeps these current as long as the node lives: it renews the token (renewal.py), measures
server time, and follows the revocations (revocation_follower.py). It ends only if it is cancelled,
or with `MembershipEnded` if the auth server refuses.

It also acts on revocations. The guard refuses the next message of a revoked peer by itself. It
cannot end a transfer of an hour, a handler that waits, or the link. That is done here after each
newer list or keyring.

All data from the server or the disk is verified before use, and a pass that does not verify changes
nothing.

The keyring is one object for the life of the node, and the keys of a pass are added to it.
Replacing it by the pass's keyring would forget which keys were withdrawn. A person who is allowed
again comes with a new token, over a new link. So links of a revoked peer are not refused at once;
they are closed if no better token was shown on them within SHUT_OUT_SECONDS.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from auth.errors import AuthError
from auth.passes import OpenedPass, open_pass
from auth.refusals import Reason
from auth.revocations import Revocations
from auth.roles import may_train
from node.core.access.auth_client import AuthClient, open_auth_client
from node.core.access.auth_http import Outage
from node.core.access.pass_file import KeptPass, keep_pass, load_pass
from node.core.access.renewal import RenewalSchedule, TokenStanding, Validity, renew_for_ever
from node.core.access.revocation_follower import RevocationFollower
from node.core.access.server_time import ServerTime
from node.core.configuration import Configuration
from node.core.key_file import load_identity
from node.core.private_file import UnusableFile
from node.core.status import MembershipStatus
from node.net import Clocks, machine_clocks
from protocols.access import Access, TokenGuard, end_refused, hang_up_on_strangers
from protocols.dht import Dht
from protocols.errors import PotluckError
from protocols.identity import Identity, PeerId
from protocols.network import Network, Reach
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc

# A peer that is allowed again may show it in a call of its own every 5 s.
SHUT_OUT_SECONDS = 10.0
# If an auth key is withdrawn, all need a new token at once; a thousand nodes are 200 a second.
EVERYBODY_RENEWS_WITHIN_SECONDS = 5.0
HANGING_UP_AT_ONCE = 64  # links waiting to be closed; further ones are closed without waiting

log = logging.getLogger("potluck.access")


async def enforce(membership: Membership, network: Network, rpc: Rpc) -> None:
    """After each change, end everything with the peers that are now refused. For ever."""
    while True:
        changed = membership.following.changed
        if membership.is_revoked:
            log.warning("this node's own token was revoked; the auth server is asked for another")
            membership.renew_within(0.0)
        elif membership.key_was_withdrawn:
            log.warning("the auth key behind this node's token was withdrawn; it gets a new token")
            membership.renew_within(EVERYBODY_RENEWS_WITHIN_SECONDS)
        refused = await end_refused(rpc, membership.access)
        async with trio.open_nursery() as nursery:
            for peer in refused:
                nursery.start_soon(network.disconnect, peer)
        for peer in refused:
            if not _was_revoked(rpc, peer):
                rpc.readmit(peer)
        await changed.wait()


def _was_revoked(rpc: Rpc, peer: PeerId) -> bool:
    """Whether the peer itself was revoked, and not the auth key behind its token.

    If a key is withdrawn, all peers need a new token. If they all shut each other out until they
    see one, no peer could show its own to another.
    """
    error = rpc.shut_out(peer)
    return isinstance(error, NotAllowed) and error.reason is Reason.REVOKED


async def hang_up_on_the_refused(network: Network, rpc: Rpc) -> None:
    """Close new links of peers that are shut out, unless they are readmitted soon. For ever."""
    waiting: set[PeerId] = set()

    async def hang_up_later(peer: PeerId) -> None:
        await trio.sleep(SHUT_OUT_SECONDS)
        waiting.discard(peer)
        if rpc.shut_out(peer) is not None:
            await network.disconnect(peer)

    with network.link_events() as events:
        async with trio.open_nursery() as nursery:
            async for event in events:
                peer = event.peer
                if event.reach is Reach.NONE or peer in waiting or rpc.shut_out(peer) is None:
                    continue
                if len(waiting) >= HANGING_UP_AT_ONCE:
                    nursery.start_soon(network.disconnect, peer)
                else:
                    waiting.add(peer)
                    nursery.start_soon(hang_up_later, peer)


class PassNotProven(PotluckError):
    """A pass that does not count here, whatever its signature."""


class Membership:
    """The membership of this node.

    Invariant: `access` holds the token of `kept`, and `keyring` only has keys that the fingerprint
    in `kept` vouches for.
    """

    def __init__(
        self,
        kept: KeptPass,
        opened: OpenedPass,
        identity: Identity,
        configuration: Configuration,
        clocks: Clocks,
        chance: random.Random,
    ) -> None:
        self.run_name = opened.access_pass.run
        self.keyring = opened.keyring
        self.server_time = ServerTime(clocks, kept.clock_offset_ms)
        self.trouble = ""
        """Why the last request to the auth server failed; empty if it answered."""
        self.hurry = trio.Event()
        """Set, and replaced by a new one, when the schedule has changed."""
        self._identity = identity
        self._pass_file = configuration.places.pass_file
        self._chance = chance
        self._server = kept.auth_url, kept.pin
        self._server_has_moved = trio.Event()
        self.following = RevocationFollower(
            self.run_name, self.keyring, configuration.places.revocations_file, chance
        )
        self.access = Access(
            identity,
            self.run_name,
            self.keyring,
            self.following.revocations,
            self.server_time.now_ms,
            grace_ms=opened.access_pass.token_grace_ms,
        )
        self._take(kept, opened)
        if kept.refused:
            self.schedule.at_once(0)

    def _take(self, kept: KeptPass, opened: OpenedPass) -> None:
        """Use a verified pass."""
        access_pass, token = opened.access_pass, opened.token
        self.kept, self.access_pass, self.token = kept, access_pass, token
        if (kept.auth_url, kept.pin) != self._server:
            self._server = kept.auth_url, kept.pin
            self._server_has_moved.set()
        self.server_time.is_at_least(access_pass.server_time_ms)
        self.access.token = access_pass.token
        self.access.grace_ms = access_pass.token_grace_ms
        validity = Validity(token.issued_ms, token.expires_ms, access_pass.token_grace_ms)
        self.schedule = RenewalSchedule(validity, self._chance)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The auth server's addresses to join the swarm at."""
        return self.access_pass.endpoints

    @property
    def may_train(self) -> bool:
        """Whether the roles in the token allow more than watching."""
        return may_train(self.token.roles)

    @property
    def standing(self) -> TokenStanding:
        return self.schedule.validity.standing(self.server_time.now_ms())

    @property
    def is_revoked(self) -> bool:
        """Whether a genuine list revokes our own token."""
        return self.following.revocations.refuses(self.token)

    @property
    def key_was_withdrawn(self) -> bool:
        """Whether the auth key of our token was withdrawn, so that nobody's token counts."""
        return self.keyring.allows(self.token) is None

    def guard(self, network: Network) -> TokenGuard:
        return TokenGuard(self.access, network.random)

    # -- new passes

    async def adopt(self, signed: bytes, opened: OpenedPass) -> None:
        """Go on with a new pass, and keep it on disk. PassNotProven if it does not count."""
        self.following.take_keys(opened.access_pass.keys)
        self._check_keys(opened)
        kept = msgspec.structs.replace(
            self.kept,
            access_pass=signed,
            auth_url=opened.access_pass.auth_url or self.kept.auth_url,
            clock_offset_ms=self.server_time.offset_ms,
            refused="",
        )
        self._take(kept, opened)
        self.trouble = ""
        await self._save(kept)

    def _check_keys(self, opened: OpenedPass) -> None:
        """A pass is verified against the invite alone; this also checks for withdrawn keys."""
        by = self.keyring.find(opened.access_pass.key_id)
        if by is None or self.keyring.allows(opened.token) is None:
            raise PassNotProven(
                "The auth server sent a pass under a withdrawn key.",
                why="Somebody else may have that key.",
                advice="Tell the moderators of the run.",
            )

    async def reload(self) -> bool:
        """Take the pass that `potluck login` may have put on disk; return whether it is another."""
        kept = await trio.to_thread.run_sync(load_pass, self._pass_file)
        if kept is None or kept.access_pass == self.kept.access_pass:
            return False
        opened = opened_from_disk(kept, self._identity, self._pass_file)
        if opened.access_pass.run != self.run_name:
            raise PassNotProven(
                f"The pass on disk is for the run {opened.access_pass.run}; this node is in "
                f"{self.run_name}.",
                advice="Restart the node to change to that run.",
            )
        self.following.take_keys(opened.access_pass.keys)
        self._check_keys(opened)
        self._take(kept, opened)
        self.be_quick()
        return True

    def renew_within(self, seconds: float) -> None:
        """Renew soon, at a random moment."""
        delay_ms = int(1000 * seconds * self._chance.random())
        self.schedule.at_once(self.server_time.now_ms() + delay_ms)
        self.be_quick()

    def be_quick(self) -> None:
        """Check the schedule now: it has changed."""
        self.hurry.set()
        self.hurry = trio.Event()

    async def remember_refusal(self, words: str) -> None:
        """The auth server will not renew. Send nothing more, and after a restart ask it first."""
        self.access.token = None
        await self._save(msgspec.structs.replace(self.kept, refused=words))

    async def _save(self, kept: KeptPass) -> None:
        try:
            with trio.CancelScope(shield=True):  # a few milliseconds in a thread
                await trio.to_thread.run_sync(keep_pass, self._pass_file, kept)
        except OSError as error:
            self.trouble = f"The pass could not be kept at {self._pass_file}: {error.strerror}."
        self.kept = kept

    # -- running

    async def run(self, network: Network, rpc: Rpc, dht: Dht) -> None:
        """Keep everything current until cancelled. MembershipEnded if the server refuses."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_server)
            nursery.start_soon(self.following.keep_on_disk)
            nursery.start_soon(self.following.follow_directory, dht, network.peer_id)
            nursery.start_soon(enforce, self, network, rpc)
            nursery.start_soon(hang_up_on_the_refused, network, rpc)
            nursery.start_soon(hang_up_on_strangers, network, rpc, self.access)

    async def _ask_server(self) -> None:
        """All requests to the auth server; restarted when a pass says that the server has moved."""
        while True:
            self._server_has_moved = moved = trio.Event()
            async with self.open_client() as client, trio.open_nursery() as nursery:
                nursery.start_soon(keep_time, self.server_time, client)
                nursery.start_soon(renew_for_ever, self, client)
                nursery.start_soon(self.following.poll, client, self._unknown_keys_met)
                await moved.wait()
                nursery.cancel_scope.cancel()

    def _unknown_keys_met(self) -> int:
        """How many requests and answers were refused because their token's key is unknown."""
        access, unknown = self.access, Reason.UNKNOWN_AUTH_KEY
        return access.refused_requests[unknown] + access.refused_answers[unknown]

    @asynccontextmanager
    async def open_client(self) -> AsyncIterator[AuthClient]:
        """A client for the auth server of this membership."""
        async with open_auth_client(
            self._identity,
            url=self.kept.auth_url,
            run=self.run_name,
            fingerprint=self.kept.fingerprint,
            pin=self.kept.pin,
            time=self.server_time,
        ) as client:
            client.keyring = self.keyring
            yield client

    def status(self) -> MembershipStatus:
        """The current state of the membership."""
        now_ms = self.server_time.now_ms()
        return MembershipStatus(
            open=False,
            run=self.run_name,
            username=self.token.username,
            roles=tuple(role.value for role in self.token.roles),
            standing=self.standing.value,
            expires_in_seconds=_seconds(self.token.expires_ms - now_ms),
            grace_seconds=_seconds(self.access_pass.token_grace_ms),
            renewed_in_seconds=_seconds(max(0, self.schedule.next_ms - now_ms)),
            trouble=self.trouble or self.kept.refused,
            clock_offset_ms=self.server_time.offset_ms,
            clock_measured=self.server_time.is_measured,
            auth_url=self.kept.auth_url,
            fingerprint=self.kept.fingerprint,
            revocations=max(0, self.following.revocations.number),
        )


async def refused_by(client: AuthClient, member: Membership) -> Reason | None:
    """Why nobody accepts the member's token, by the present word of the server, which the client
    has met; None if it is good. The member may have been away when it changed."""
    keyring = client.keyring
    assert keyring is not None
    newest = Revocations(member.run_name)
    polled = await client.revocations(member.following.revocations.newest)
    if polled.signed_list is not None:
        newest.accept(polled.signed_list, keyring)  # and withdraws keys
    if keyring.allows(member.token) is None or member.key_was_withdrawn:
        return Reason.UNKNOWN_AUTH_KEY
    # by the newer list, or by the one that is here already
    is_revoked = member.is_revoked if polled.signed_list is None else newest.refuses(member.token)
    return Reason.REVOKED if is_revoked else None


def open_membership(
    configuration: Configuration,
    identity: Identity,
    *,
    clocks: Clocks | None = None,
) -> Membership | None:
    """The membership by the pass on disk; None without a pass.

    UnusableFile if the pass does not count: a node that was in a run never goes on as if it were in
    none.
    """
    path = configuration.places.pass_file
    kept = load_pass(path)
    if kept is None:
        return None
    opened = opened_from_disk(kept, identity, path)
    clocks = clocks or machine_clocks()
    return Membership(kept, opened, identity, configuration, clocks, random.SystemRandom())


def membership_on_disk(configuration: Configuration) -> tuple[PeerId | None, MembershipStatus]:
    """The peer id, if there is a key, and the membership that the pass gives it."""
    identity = load_identity(configuration.key_file)
    if identity is None:
        return None, MembershipStatus()
    membership = open_membership(configuration, identity)
    return identity.peer_id, membership.status() if membership else MembershipStatus()


def opened_from_disk(kept: KeptPass, identity: Identity, path: Path) -> OpenedPass:
    """The verified pass of the file; UnusableFile if it does not count for this node."""
    try:
        return open_pass(
            kept.access_pass,
            run=kept.run,
            fingerprint=kept.fingerprint,
            peer=identity.public_key,
            challenge=None,
        )
    except AuthError as error:
        raise UnusableFile(
            f"This node cannot use the access pass {path}.",
            why=str(error.why or error.what),
            advice="Run `potluck login INVITE` again; or remove the file to leave the run.",
        ) from None


def _seconds(milliseconds: int) -> float:
    return round(milliseconds / 1000, 3)


# Keep server time measured while a node runs, and tell a person once if their clock is wrong.


# How often to check whether the machine has slept, or its clock was set. Requests that are 30 s off
# are refused, and a machine that wakes up soon gets requests.
LOOK_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 60.0


async def keep_time(server_time: ServerTime, client: AuthClient) -> None:
    """Measure whenever server time is only a guess. For ever.

    Each renewal measures too, so this sends a request only at the start and after a sleep.
    """
    seconds = LOOK_SECONDS
    while True:
        if server_time.wants_measuring:
            try:
                await client.measure_time()
                seconds = LOOK_SECONDS
            except Outage as outage:
                log.debug("the auth server could not be asked for the time: %s", outage)
                seconds = min(LONGEST_RETRY_SECONDS, 2 * seconds)
        news = server_time.news()
        if news is not None:
            log.warning("%s", news)
        await trio.sleep(seconds)
