"""Following revocations: from the auth server while it is up, from the directory always.

A list comes from the disk at the start, from the server's `/v1/revocations` at every poll, from the
directory's key `revocations/RUN` when a peer there has a newer one, and from the node's owner
through the control socket. All go through `take`. It first verifies the signature against the
keyring; the newest list wins, and tasks that wait for `changed` act on it. So it is saved on disk,
and survives a restart. A node does not keep for others, or pass on, a list that is not genuine
(`family`).

With the server up or down, a list that one node of the swarm has reaches every node within a poll
or a read of the directory, whichever is sooner. Each of these happens at least every
LONGEST_POLL_SECONDS.

After a rotation a list may be signed by a key that this node does not know yet. So the keys are
published with the list in the directory, and the server is asked for them before a list is called
false.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import random
from collections.abc import Callable, Hashable, Iterable
from contextlib import aclosing
from pathlib import Path

import trio

from auth.documents import encode
from auth.errors import AuthError, UntrustedDocument
from auth.keyring import KeyRecord, Keyring
from auth.revocations import Revocations
from node.core.access.auth_client import DEFAULT_POLL_SECONDS, AuthClient
from node.core.access.auth_http import Outage
from node.core.access.notice import REVOCATIONS, RevocationNotice, kept_notice, notice_of
from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.dht import LARGEST_VALUE_BYTES, Dht, Family
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.not_allowed import NotAllowed

# The server says how often it wants to be asked, within these limits. A revocation must reach every
# peer within a minute, and no server is asked every second.
SHORTEST_POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 45.0
POLL_JITTER = 0.2  # at most this part of the interval is left out at random
# Keys are rotated a few times a year, with days of overlap.
KEYS_ASKED_SECONDS = 300.0
# How often the copies in the directory are counted without news.
COPIES_COUNTED_SECONDS = 60.0
SAVED_AGAIN_SECONDS = 300.0
NOTICE_TTL_SECONDS = 6 * 3600.0  # the publisher keeps it up; it lives this long after that

log = logging.getLogger("potluck.access")


def revocations_key(run: str) -> str:
    """The key of a run's lists in the directory."""
    return f"{REVOCATIONS.name}/{run}"


class RevocationFollower:
    """Invariant: `revocations` has the content of the newest verified list."""

    def __init__(
        self,
        run: str,
        keyring: Keyring,
        path: Path,
        chance: random.Random,
    ) -> None:
        self.revocations = Revocations(run)
        self.changed = trio.Event()
        """Set, and replaced by a new one, when a newer list or a new key was accepted."""
        self._keyring = keyring
        self._path = path
        self._chance = chance
        self._key = revocations_key(run)
        self._kept = b""
        self._not_taken = b""
        """The server's list, if it is not newer than the one here. It need not come again."""
        self._load()

    def _load(self) -> None:
        """Load the list of the last run. If it is damaged, only log that: it is fetched again."""
        try:
            known = read_private_file(self._path, LARGEST_VALUE_BYTES)
            if known:
                notice = kept_notice(known)
                self._keyring.add(notice.keys)
                self.revocations.accept(notice.revocations, self._keyring)
                self._kept = notice.revocations
        except (UnusableFile, AuthError) as error:
            log.warning("the revocations on disk cannot be used: %s", error)

    # -- accepting lists and keys

    def take(self, signed_list: bytes, keys: Iterable[KeyRecord] = ()) -> bool:
        """Take a list from any source; return whether it was new.

        MalformedDocument or UntrustedDocument if it is not the auth server's.
        """
        new_keys = self._keyring.add(keys)
        is_newer = self.revocations.accept(signed_list, self._keyring)
        if is_newer:
            log.info("revocation list %d has arrived", self.revocations.number)
        if is_newer or new_keys:
            self._tell()
        return is_newer

    def take_keys(self, keys: Iterable[KeyRecord]) -> None:
        """Add auth keys from the server or a pass, if known keys vouch for them."""
        if self._keyring.add(keys):
            log.info("the auth server has a new key")
            self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def keep_on_disk(self) -> None:
        """Save each newer list. For ever."""
        while True:
            changed = self.changed
            await self.save()
            with trio.move_on_after(SAVED_AGAIN_SECONDS):  # the disk may have been full
                await changed.wait()

    async def save(self) -> None:
        """Save the newest list, if it is not saved yet, with the keys to check it: the pass on disk
        may be older than the key that has signed the list."""
        newest = self.revocations.newest
        if newest == self._kept:
            return
        content = encode(notice_of(newest, self._keyring.records))
        try:
            with trio.CancelScope(shield=True):  # a few milliseconds in a thread
                await trio.to_thread.run_sync(replace_private_file, self._path, content)
        except OSError as error:
            log.warning("the revocations could not be kept at %s: %s", self._path, error)
        else:
            self._kept = newest

    # -- the server

    async def poll(self, client: AuthClient, unknown_keys_met: Callable[[], int]) -> None:
        """Poll the auth server, for ever.

        `unknown_keys_met` counts the tokens that were refused because their key is unknown here. If
        it grows, there may be a new key.
        """
        keys_asked, met = trio.current_time(), unknown_keys_met()
        while True:
            seconds = DEFAULT_POLL_SECONDS
            try:
                seconds = await self._poll_once(client)
                now = trio.current_time()
                if unknown_keys_met() != met or now - keys_asked >= KEYS_ASKED_SECONDS:
                    keys_asked, met = now, unknown_keys_met()
                    self.take_keys(await client.keys())
            except Outage as outage:
                log.debug("revocations could not be asked for: %s", outage)
            except AuthError as error:
                log.warning("the auth server's revocations cannot be used: %s", error)
            seconds = max(SHORTEST_POLL_SECONDS, min(seconds, LONGEST_POLL_SECONDS))
            await trio.sleep(seconds * (1 - POLL_JITTER * self._chance.random()))

    async def _poll_once(self, client: AuthClient) -> float:
        polled = await client.revocations(self._not_taken or self.revocations.newest)
        if polled.signed_list is not None:
            try:
                is_taken = self.take(polled.signed_list)
            except UntrustedDocument:
                is_taken = self.take(polled.signed_list, await client.keys())
            self._not_taken = b"" if is_taken else polled.signed_list
        return polled.poll_seconds

    # -- the directory

    @property
    def family(self) -> Family:
        """The family of revocations, as this node keeps it for others: genuine ones only. However
        many have slots under a run's key, there is a place for the newest list."""
        return dataclasses.replace(REVOCATIONS, check=self._why_not, outranks=self._outranks)

    def _why_not(self, key: str, notice: RevocationNotice) -> str | None:
        """Why a notice is invalid under this key; None if it is valid. A valid one is taken."""
        if key != self._key:
            return f"It is not of the run {self.revocations.run}."
        try:
            self.take(notice.revocations, notice.keys)
        except AuthError as error:
            return str(error)
        return None

    def _outranks(self, notice: RevocationNotice, other: RevocationNotice | None) -> bool:
        newest = self.revocations.newest
        is_newest = notice.revocations == newest
        return is_newest and (other is None or other.revocations != newest)

    async def follow_directory(self, dht: Dht, own: PeerId) -> None:
        """Watch the lists of others, and publish a newer one. For ever."""
        copies = Copies(own)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, dht, copies)
            nursery.start_soon(self._spread, dht, own, copies)

    async def _watch(self, dht: Dht, copies: Copies) -> None:
        async with aclosing(dht.watch(self._key)) as changes:
            async for change in changes:
                notice: RevocationNotice | None = change.entry.value if change.entry else None
                copies.saw(change.publisher, notice.revocations if notice else None)
                if notice is None:
                    continue
                try:
                    self.take(notice.revocations, notice.keys)
                except AuthError as error:
                    log.warning("%s spreads false revocations: %s", change.publisher, error)

    async def _spread(self, dht: Dht, own: PeerId, copies: Copies) -> None:
        await dht.joined()
        while True:
            news = self.changed
            if copies.should_publish(self.revocations.newest):
                await trio.sleep(LONGEST_WAIT_SECONDS * self._chance.random())
                if copies.should_publish(self.revocations.newest):
                    copies.saw(own, self.revocations.newest)
                    try:
                        await self.publish(dht)
                    except NotAllowed as error:  # a monitor does not write
                        log.debug("this node does not spread the revocations: %s", error)
                    except PotluckError as error:
                        log.info("no node has taken the revocations yet: %s", error)
                        copies.saw(own, None)
            with trio.move_on_after(COPIES_COUNTED_SECONDS):
                await news.wait()

    async def publish(self, dht: Dht) -> None:
        """Put the newest list into this node's slot, and keep it up. PotluckError if no replica has
        taken it. (In a small run this node is one itself, and tells whoever comes.)"""
        notice = notice_of(self.revocations.newest, self._keyring.records)
        await dht.put(self._key, notice, NOTICE_TTL_SECONDS)


# Which revocation lists are in the directory, and which node publishes one. Pure.
#
# Every node watches one key of the directory. Under it a few nodes, those that knew it first, keep
# the newest list. A node that finds too few copies of it waits a random time, looks again, and then
# publishes one. So a list spreads while the auth server is down, as soon as any node has it, and a
# thousand nodes do not keep a thousand copies.
#
# A publisher's slot is only a claim. A copy counts only if it is, byte for byte, the newest list
# that this node has verified. So a forged list does not keep other nodes from publishing.


ENOUGH_COPIES = 3  # publishers that would all have to be lost at once

# The longest wait before publishing a copy. Within it, the first few of a thousand nodes that got a
# list from the server in the same poll have published it.
LONGEST_WAIT_SECONDS = 6.0


class Copies:
    """Which publisher keeps which list in the directory. `own` is this node."""

    def __init__(self, own: Hashable) -> None:
        self._own = own
        self._held: dict[Hashable, bytes] = {}

    def saw(self, publisher: Hashable, signed_list: bytes | None) -> None:
        """The current content of a publisher's slot; None if there is no slot any more."""
        if signed_list is None:
            self._held.pop(publisher, None)
        else:
            self._held[publisher] = _digest(signed_list)

    def of(self, newest: bytes) -> int:
        """How many publishers keep exactly this list."""
        digest = _digest(newest)
        return sum(1 for held in self._held.values() if held == digest)

    def should_publish(self, newest: bytes) -> bool:
        """Whether this node should put the newest list that it has into its slot."""
        if not newest:
            return False
        mine = self._held.get(self._own)
        if mine is not None:
            return mine != _digest(newest)  # ours is old, and is still there under our name
        return self.of(newest) < ENOUGH_COPIES


def _digest(signed_list: bytes) -> bytes:
    return hashlib.sha256(signed_list).digest()
