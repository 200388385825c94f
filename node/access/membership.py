"""This node's membership in a run: its token, the keys it trusts, the clock it goes by.

    membership = open_membership(configuration, identity)      # None: no pass, an open run
    rpc = open_rpc(network, membership.guard(network))
    ...
    nursery.start_soon(membership.run, network, rpc, dht)

`run` keeps everything true for as long as the node lives: the token renewed (renewing.py), server
time measured (timekeeping.py), revocations known (following.py) and acted upon (enforcing.py).
It ends only by being cancelled, or with `MembershipEnded` when the auth server has said no.

Promise: whatever comes from the server or the disk is verified before it is used, and a pass that
does not verify changes nothing.

Easy to get wrong: the keyring is one object for the life of the node. A pass brings keys to add
to it; taking the pass's own keyring instead would forget which keys were withdrawn.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from auth.errors import AuthError
from auth.passes import OpenedPass, open_pass
from auth.refusals import Reason
from auth.roles import may_train
from node.access.auth_client import AuthClient, open_auth_client
from node.access.enforcing import enforce, hang_up_on_the_refused
from node.access.following import Following
from node.access.pass_file import KeptPass, keep_pass, load_pass
from node.access.renewal_schedule import RenewalSchedule, Standing, Validity
from node.access.renewing import renew_for_ever
from node.access.server_time import Clocks, ServerTime, machine_clocks
from node.access.timekeeping import keep_time
from node.configuration import Configuration
from node.private_file import UnusableFile
from node.status import MembershipStatus
from protocols.access import Access
from protocols.dht.service import Dht
from protocols.errors import PotluckError
from protocols.identity import Identity
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.strangers import hang_up_on_strangers
from protocols.token_guard import TokenGuard


class PassNotProven(PotluckError):
    """A pass that does not count here, whatever signed it."""


class Membership:
    """Invariant: `access` holds the token of `kept`, and only keys that the fingerprint in it
    vouches for are in `keyring`."""

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
        """Why the auth server could not be asked, when it was tried last; empty if it answered."""
        self.hurry = trio.Event()
        """Set, and replaced by a fresh one, when the schedule has changed."""
        self._identity = identity
        self._pass_file = configuration.places.pass_file
        self._chance = chance
        self._server = kept.auth_url, kept.pin
        self._server_has_moved = trio.Event()
        self.following = Following(
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
        """Use what was verified."""
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
        """Addresses of the swarm to join at, as the auth server gave them."""
        return self.access_pass.endpoints

    @property
    def may_train(self) -> bool:
        """Whether the roles in the token allow more than to look on."""
        return may_train(self.token.roles)

    @property
    def standing(self) -> Standing:
        return self.schedule.validity.standing(self.server_time.now_ms())

    @property
    def is_revoked(self) -> bool:
        """Whether a genuine list refuses our own token."""
        return self.following.revocations.refuses(self.token)

    @property
    def key_was_withdrawn(self) -> bool:
        """Whether the auth key that signed our token counts no more, so that nobody's does."""
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
        """A pass is verified against the invite alone; this is against what was withdrawn, too."""
        by = self.keyring.find(opened.access_pass.key_id)
        if by is None or self.keyring.allows(opened.token) is None:
            raise PassNotProven(
                "The auth server sent a pass under a key that was withdrawn.",
                why="It may be somebody else who has that key.",
                advice="Tell the moderators of the run.",
            )

    async def reload(self) -> bool:
        """Take the pass that `potluck login` has put on disk meanwhile; whether it is another."""
        kept = await trio.to_thread.run_sync(load_pass, self._pass_file)
        if kept is None or kept.access_pass == self.kept.access_pass:
            return False
        opened = opened_from_disk(kept, self._identity, self._pass_file)
        if opened.access_pass.run != self.run_name:
            raise PassNotProven(
                f"The pass on disk is for the run {opened.access_pass.run}; this node is in "
                f"{self.run_name}.",
                advice="Start the node anew to change over.",
            )
        self.following.take_keys(opened.access_pass.keys)
        self._check_keys(opened)
        self._take(kept, opened)
        self.be_quick()
        return True

    def renew_within(self, seconds: float) -> None:
        """Renew soon, at a moment of chance."""
        delay_ms = int(1000 * seconds * self._chance.random())
        self.schedule.at_once(self.server_time.now_ms() + delay_ms)
        self.be_quick()

    def be_quick(self) -> None:
        """Look at the schedule now: it has changed."""
        self.hurry.set()
        self.hurry = trio.Event()

    async def remember_refusal(self, words: str) -> None:
        """The auth server will not renew: nothing is sent any more, nor after a restart unasked."""
        self.access.token = None
        await self._save(msgspec.structs.replace(self.kept, refused=words))

    async def _save(self, kept: KeptPass) -> None:
        try:
            with trio.CancelScope(shield=True):  # a few milliseconds of a thread
                await trio.to_thread.run_sync(keep_pass, self._pass_file, kept)
        except OSError as error:
            self.trouble = f"The pass could not be kept at {self._pass_file}: {error.strerror}."
        self.kept = kept

    # -- running

    async def run(self, network: Network, rpc: Rpc, dht: Dht) -> None:
        """Keep all of it true until cancelled. MembershipEnded when the server says no."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_server)
            nursery.start_soon(self.following.keep_on_disk)
            nursery.start_soon(self.following.follow_directory, dht, network.peer_id)
            nursery.start_soon(enforce, self, network, rpc)
            nursery.start_soon(hang_up_on_the_refused, network, rpc)
            nursery.start_soon(hang_up_on_strangers, network, rpc, self.access)

    async def _ask_server(self) -> None:
        """All that is asked of the auth server; begun anew when a pass says that it has moved."""
        while True:
            self._server_has_moved = moved = trio.Event()
            async with self.open_client() as client, trio.open_nursery() as nursery:
                nursery.start_soon(keep_time, self.server_time, client)
                nursery.start_soon(renew_for_ever, self, client)
                nursery.start_soon(self.following.poll, client, self._unknown_keys_met)
                await moved.wait()
                nursery.cancel_scope.cancel()

    def _unknown_keys_met(self) -> int:
        """How many requests and answers were refused because their token's key is not known."""
        access, unknown = self.access, Reason.UNKNOWN_AUTH_KEY
        return access.refused_requests[unknown] + access.refused_answers[unknown]

    @asynccontextmanager
    async def open_client(self) -> AsyncIterator[AuthClient]:
        """A client of the auth server of this membership."""
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
        """How it stands, now."""
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


def open_membership(
    configuration: Configuration,
    identity: Identity,
    *,
    clocks: Clocks | None = None,
    chance: random.Random | None = None,
) -> Membership | None:
    """The membership that the pass on disk gives this node; None if there is no pass.

    UnusableFile if there is one that does not count: a node that was in a run never goes on as if
    it were in none.
    """
    path = configuration.places.pass_file
    kept = load_pass(path)
    if kept is None:
        return None
    opened = opened_from_disk(kept, identity, path)
    clocks = clocks or machine_clocks()
    return Membership(
        kept, opened, identity, configuration, clocks, chance or random.SystemRandom()
    )


def opened_from_disk(kept: KeptPass, identity: Identity, path: Path) -> OpenedPass:
    """The pass of the file, verified; UnusableFile if it does not count for this node."""
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
            f"The access pass {path} is of no use to this node.",
            why=str(error.why or error.what),
            advice="Run `potluck login INVITE` again; or remove the file, and this node is in no "
            "run.",
        ) from None


def _seconds(milliseconds: int) -> float:
    return round(milliseconds / 1000, 3)
