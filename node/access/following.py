"""Following revocations: from the auth server while it is there, from the directory always.

A list comes from the disk at the start, from the server's `/v1/revocations` at every poll, from
the directory's key `revocations/RUN` whenever somebody there knows a newer one, and from the
node's owner through the control socket. All go through `take`: the signature is verified against
the keyring before anything else, the newest list wins, and whoever waits on `changed` acts on it:
so it is kept on disk, and a restart does not forget it. Nor does a node keep for others, or pass
on, what is no genuine list (`family`).

Promise: with the server up or down, a list that one node of the swarm knows is known by every
node within a poll or a look into the directory, whichever is sooner, and each of these is at most
LONGEST_POLL_SECONDS apart.

Easy to get wrong: after a rotation a list may be signed by a key that this node has not met. So
the keys travel with the list in the directory, and are asked for at the server before a list is
called false.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing
from pathlib import Path

import trio

from auth.errors import AuthError, UntrustedDocument
from auth.keyring import KeyRecord, Keyring
from auth.revocations import LIMIT_BYTES, Revocations
from node.access.auth_client import DEFAULT_POLL_SECONDS, AuthClient
from node.access.auth_http import Outage
from node.access.notice import REVOCATIONS, RevocationNotice, notice_of
from node.access.spreading import LONGEST_WAIT_SECONDS, Copies
from node.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.dht.families import Family
from protocols.dht.service import Dht
from protocols.errors import PotluckError
from protocols.identity import PeerId

# The server says how often it wants to be asked; within these. A revocation has to be with every
# peer within a minute, and nobody's server is asked every second.
SHORTEST_POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 45.0
POLL_JITTER = 0.2  # the part of the interval that is left out by chance, at most
# Keys are rotated some times a year, with days of overlap.
KEYS_ASKED_SECONDS = 300.0
# How often the copies in the directory are counted when there is no news.
COPIES_COUNTED_SECONDS = 60.0
NOTICE_TTL_SECONDS = 6 * 3600.0  # the node that publishes keeps it up; so long after it has gone

log = logging.getLogger("potluck.access")


def revocations_key(run: str) -> str:
    """Where the lists of a run stand in the directory."""
    return f"{REVOCATIONS.name}/{run}"


class Following:
    """Invariant: `revocations` is what the newest verified list says."""

    def __init__(
        self,
        run: str,
        keyring: Keyring,
        path: Path,
        chance: random.Random,
    ) -> None:
        self.revocations = Revocations(run)
        self.changed = trio.Event()
        """Set, and replaced by a fresh one, when a newer list or a new key was taken in."""
        self._keyring = keyring
        self._path = path
        self._chance = chance
        self._key = revocations_key(run)
        self._kept = b""
        self._load()

    def _load(self) -> None:
        """What an earlier life knew. What is damaged is fetched anew, so it is only told of."""
        try:
            known = read_private_file(self._path, LIMIT_BYTES)
            if known:
                self.revocations.accept(known, self._keyring)
                self._kept = known
        except (UnusableFile, AuthError) as error:
            log.warning("the revocations on disk are of no use: %s", error)

    # -- taking in

    def take(self, signed_list: bytes, keys: Iterable[KeyRecord] = ()) -> bool:
        """Take in a list from anywhere; whether it was news.

        MalformedDocument or UntrustedDocument if it is not the auth server's.
        """
        new_keys = self._keyring.add(keys)
        is_newer = self.revocations.accept(signed_list, self._keyring)
        if is_newer:
            log.info("revocation list %d came in", self.revocations.number)
        if is_newer or new_keys:
            self._tell()
        return is_newer

    def take_keys(self, keys: Iterable[KeyRecord]) -> None:
        """Take in auth keys that the server or a pass brought; those that are vouched for."""
        if self._keyring.add(keys):
            log.info("the auth server has a new key")
            self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def keep_on_disk(self) -> None:
        """Keep each newer list. For ever."""
        while True:
            changed = self.changed
            await self.save()
            await changed.wait()

    async def save(self) -> None:
        """Keep the newest list, if it is not kept yet."""
        newest = self.revocations.newest
        if newest == self._kept:
            return
        try:
            with trio.CancelScope(shield=True):  # a few milliseconds of a thread
                await trio.to_thread.run_sync(replace_private_file, self._path, newest)
        except OSError as error:
            log.warning("the revocations could not be kept at %s: %s", self._path, error)
        else:
            self._kept = newest

    # -- the server

    async def poll(self, client: AuthClient, unknown_keys_met: Callable[[], int]) -> None:
        """Ask the auth server for ever.

        `unknown_keys_met` counts the tokens that were refused because their key is not known here:
        when it grows, there may be a new one.
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
                log.warning("the auth server's revocations are of no use: %s", error)
            seconds = max(SHORTEST_POLL_SECONDS, min(seconds, LONGEST_POLL_SECONDS))
            await trio.sleep(seconds * (1 - POLL_JITTER * self._chance.random()))

    async def _poll_once(self, client: AuthClient) -> float:
        polled = await client.revocations(after=self.revocations.number)
        if polled.signed_list is not None:
            try:
                self.take(polled.signed_list)
            except UntrustedDocument:
                self.take(polled.signed_list, await client.keys())
        return polled.poll_seconds

    # -- the directory

    @property
    def family(self) -> Family:
        """The family of revocations, as this node keeps it for others: genuine ones only."""
        return dataclasses.replace(REVOCATIONS, check=self._why_not)

    def _why_not(self, key: str, notice: RevocationNotice) -> str | None:
        """Why a notice cannot stand under this key; None if it can. One that can is taken in."""
        if key != self._key:
            return f"It is not of the run {self.revocations.run}."
        try:
            self.take(notice.revocations, notice.keys)
        except AuthError as error:
            return str(error)
        return None

    async def follow_directory(self, dht: Dht, own: PeerId) -> None:
        """Watch what others know, and bring what they do not. For ever."""
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
                    await self.publish(dht)
            with trio.move_on_after(COPIES_COUNTED_SECONDS):
                await news.wait()

    async def publish(self, dht: Dht) -> None:
        """Put the newest list into this node's slot, and keep it up."""
        notice = notice_of(self.revocations.newest, self._keyring.records)
        try:
            await dht.put(self._key, notice, NOTICE_TTL_SECONDS)
        except PotluckError as error:
            log.debug("nobody has taken the revocations yet: %s", error)
