"""When a publisher's node has to repeat its slots, and to which peers.

A slot lives as long as its publisher repeats it. Well before a slot expires it is signed again,
with the next sequence and a later expiry. In between, the same slot is sent again to the peers that
are now closest, to replace replicas that left. That goes on until the publisher withdraws the slot
or, if it is not to be kept up, until it expires.

Times are spread: each slot takes a random part of its interval. They are also gathered: they are
rounded down to a grid, so that hundreds of slots are due in a few batches, and `batches` makes one
message a peer of each instead of hundreds. The grid has a random phase, so that publishers that
started together do not send together.

Sequences are `max(previous + 1, milliseconds of swarm time)`, so a publisher that restarts without
its disk continues above its earlier ones.

A withdrawn slot is still validly signed until it expires. So the withdrawal lives, and is repeated,
as long as the longest-lived slot that it replaces. Swarm time can also be corrected backwards by
hours. Then nothing would be due for hours, so after such a correction everything is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocols.dht.due_index import DueIndex
from protocols.dht.slots import LARGEST_NUMBER, Slot, sign_slot
from protocols.errors import ProtocolMisuse
from protocols.identity import Identity, PeerId

SHORTEST_TTL_MS = 1000  # in less than a second a slot is gone before it is everywhere

CLOCK_WENT_BACK_MS = 5000  # less is the usual noise of an estimate

GRID_STEPS_PER_INTERVAL = 16  # with a quarter of jitter four to eight batches an interval

SLOTS_PER_BATCH = 128  # about 12 ms of checking signatures for the receiving peer
BYTES_PER_BATCH = 64 * 1024  # of values and keys: a message that a slow uplink sends in a second


@dataclass(frozen=True)
class PublishingSettings:
    """How often a publisher repeats its slots."""

    longest_interval_seconds: float = 600.0
    """However long a slot lives, it is repeated this often.

    Even if half of all nodes leave every 20 minutes, one of 20 replicas is almost certainly left
    after this.
    """

    of_life: float = 0.5
    """A slot is repeated after at most this part of its life, so that one attempt may fail."""

    jitter: float = 0.25
    """Each interval is shortened by a random part, up to this."""

    first_retry_seconds: float = 2.0
    """After a failure to publish; doubles with each further one, up to the usual interval."""

    def __post_init__(self) -> None:
        if not (
            self.longest_interval_seconds > 0
            and 0 < self.of_life <= 0.5
            and 0 <= self.jitter < 1
            and self.first_retry_seconds > 0
        ):
            raise ProtocolMisuse(f"These settings leave no time to publish: {self}.")


@dataclass
class _Publication:
    """One own slot, as last signed. `latest_end` is the latest expiry ever signed for its key."""

    slot: Slot
    ttl_ms: int
    keep_up: bool
    latest_end: int
    failures: int = 0


@dataclass(frozen=True)
class SlotBatch:
    """The same slots for several peers: encode once, send to each."""

    slots: tuple[Slot, ...]
    peers: tuple[PeerId, ...]


def next_sequence(previous: int, now_ms: int) -> int:
    """The sequence of the next slot after one with this sequence; 0 if there was none."""
    sequence = max(previous + 1, now_ms, 0)
    if sequence > LARGEST_NUMBER:
        raise ProtocolMisuse(
            "The slot under this key has the highest possible sequence, so it cannot be replaced.",
            why="Another program published under this identity with that number.",
            advice="Write this key again when that slot has expired.",
        )
    return sequence


class Publisher:
    """The own slots of one identity, and when each has to be repeated.

    Signs, but sends nothing: `put`, `withdraw` and `due` return slots that the caller now has to
    send to their replicas; `failed` reports that it could not. Invariant: every publication with
    something left to repeat is in the index.
    """

    def __init__(
        self,
        identity: Identity,
        chance: random.Random,
        settings: PublishingSettings | None = None,
    ) -> None:
        self._identity = identity
        self._public_key = identity.public_key
        self._chance = chance
        self._settings = settings or PublishingSettings()
        self._phase = chance.getrandbits(62)
        self._latest_now = 0
        self._publications: dict[str, _Publication] = {}
        self._index: DueIndex[str] = DueIndex()

    def __len__(self) -> int:
        return len(self._publications)

    def slots(self, now_ms: int) -> list[Slot]:
        """Our current slots, without withdrawn ones."""
        return [
            one.slot
            for one in self._publications.values()
            if not one.slot.withdrawn and one.slot.expires > now_ms
        ]

    def slot_of(self, key: str) -> Slot | None:
        """Our last slot under this key."""
        publication = self._publications.get(key)
        return None if publication is None else publication.slot

    def put(
        self, key: str, value: bytes, ttl_ms: int, now_ms: int, *, keep_up: bool = True
    ) -> Slot:
        """Make a new slot under this key, to publish now and keep up from then on.

        With `keep_up=False` it is repeated until it ends in `ttl_ms`, and never signed again.
        """
        if ttl_ms < SHORTEST_TTL_MS:
            raise ProtocolMisuse(
                f"A slot cannot live for {ttl_ms} ms.", why=f"{SHORTEST_TTL_MS} is the least."
            )
        known = self._publications.get(key)
        slot = self._sign(known, key, value, now_ms, now_ms + ttl_ms)
        latest_end = max(slot.expires, known.latest_end if known else 0)
        self._publications[key] = _Publication(slot, ttl_ms, keep_up, latest_end)
        self._schedule(key, now_ms)
        return slot

    def withdraw(self, key: str, now_ms: int, longest_ttl_ms: int) -> Slot:
        """Make a slot that withdraws this key's slot, to publish now.

        It lives as long as anything that this publisher has signed for the key. If this node does
        not know what it signed (it may have restarted), it lives for the longest possible time.
        """
        known = self._publications.get(key)
        # a slot signed by a clock that was ahead may end later than any node would keep it
        end = now_ms + longest_ttl_ms
        if known is not None and known.latest_end > now_ms:
            end = min(end, known.latest_end)
        slot = self._sign(known, key, b"", now_ms, end, withdrawn=True)
        self._publications[key] = _Publication(slot, end - now_ms, False, end)
        self._schedule(key, now_ms)
        return slot

    def met(self, slot: Slot, now_ms: int) -> Slot | None:
        """The slot to publish instead, if this verified slot is ours and blocks our current one.

        That happens if the clock was ahead in an earlier life. Ours is then signed again with a
        higher sequence, to be published now. It also happens if another node runs with our key. So
        that the two do not outbid each other without end, further attempts are left to `failed`.
        """
        known = self._publications.get(slot.key)
        if (
            slot.publisher != self._public_key
            or known is None
            or slot.sequence < known.slot.sequence
            or slot == known.slot
        ):
            return None
        known.latest_end = max(known.latest_end, slot.expires)
        end = known.latest_end if known.slot.withdrawn else known.slot.expires
        sequence = next_sequence(slot.sequence, now_ms)
        known.slot = sign_slot(
            self._identity, slot.key, known.slot.value, sequence, end, known.slot.withdrawn
        )
        return known.slot

    def due(self, now_ms: int, at_most: int | None = None) -> list[Slot]:
        """The slots to send to their replicas now, signed again where necessary.

        No more than `at_most` are checked. There are more if `next_due` has come.
        """
        slots = []
        if now_ms < self._latest_now - CLOCK_WENT_BACK_MS:
            for key in self._publications:
                self._index.set(key, now_ms)
        self._latest_now = now_ms
        for key in self._index.pop_due(now_ms, at_most):
            publication = self._publications[key]
            if self._is_to_be_renewed(publication, now_ms):
                slot = publication.slot
                end = now_ms + publication.ttl_ms
                publication.slot = self._sign(publication, key, slot.value, now_ms, end)
                publication.latest_end = max(publication.latest_end, end)
            elif publication.slot.expires <= now_ms:
                del self._publications[key]
                continue
            slots.append(publication.slot)
            self._schedule(key, now_ms)
        return slots

    def next_due(self) -> int | None:
        """When `due` will next have something to do, in milliseconds of swarm time."""
        return self._index.next_due()

    def published(self, key: str) -> None:
        """The slot under this key has reached its replicas."""
        publication = self._publications.get(key)
        if publication is not None:
            publication.failures = 0

    def failed(self, key: str, now_ms: int) -> None:
        """The slot under this key did not reach its replicas: try again before the usual time."""
        publication = self._publications.get(key)
        usual = self._index.due_of(key)
        if publication is None or usual is None:
            return
        doublings = min(publication.failures, 30)  # longer than any interval, and no huge number
        publication.failures += 1
        delay_ms = int(self._settings.first_retry_seconds * 1000) << doublings
        self._index.set(key, min(usual, now_ms + self._shortened(delay_ms)))

    def _sign(
        self,
        known: _Publication | None,
        key: str,
        value: bytes,
        now_ms: int,
        end: int,
        withdrawn: bool = False,
    ) -> Slot:
        sequence = next_sequence(known.slot.sequence if known else 0, now_ms)
        return sign_slot(self._identity, key, value, sequence, end, withdrawn)

    def _is_to_be_renewed(self, publication: _Publication, now_ms: int) -> bool:
        """Whether to sign a kept-up slot again: the next time would be late in its life."""
        left = publication.slot.expires - now_ms
        least = publication.ttl_ms * self._settings.of_life + self._interval_ms(publication)
        ends_too_late = left > publication.ttl_ms  # signed by a clock that was ahead
        return publication.keep_up and (left < least or ends_too_late)

    def _interval_ms(self, publication: _Publication) -> int:
        return int(
            min(
                publication.ttl_ms * self._settings.of_life,
                self._settings.longest_interval_seconds * 1000,
            )
        )

    def _shortened(self, interval_ms: int) -> int:
        return max(1, int(interval_ms * (1 - self._settings.jitter * self._chance.random())))

    def _schedule(self, key: str, now_ms: int) -> None:
        publication = self._publications[key]
        interval_ms = self._interval_ms(publication)
        due = now_ms + self._shortened(interval_ms)
        self._latest_now = max(self._latest_now, now_ms)
        self._index.set(key, max(now_ms + 1, on_grid(due, interval_ms, self._phase)))


def on_grid(moment: int, interval_ms: int, phase: int) -> int:
    """The last grid time at or before a moment, on a grid that suits the interval.

    Steps are powers of two, and the grid of a longer interval is part of that of a shorter one, so
    that slots of different lives share times.
    """
    step = 1 << max(0, (interval_ms // GRID_STEPS_PER_INTERVAL).bit_length() - 1)
    return moment - (moment - phase) % step


def batches(
    replicas: Mapping[Slot, Sequence[PeerId]] | Iterable[tuple[Slot, Sequence[PeerId]]],
    slots_per_batch: int = SLOTS_PER_BATCH,
    bytes_per_batch: int = BYTES_PER_BATCH,
) -> Iterator[SlotBatch]:
    """The messages to send: few for each peer, each slot once to each of its replicas.

    Peers that get exactly the same slots share a batch.
    """
    pairs = replicas.items() if isinstance(replicas, Mapping) else replicas
    for_peer: dict[PeerId, dict[Slot, None]] = {}
    for slot, peers in pairs:
        for peer in peers:
            for_peer.setdefault(peer, {})[slot] = None
    alike: dict[tuple[Slot, ...], list[PeerId]] = {}
    for peer, slots in for_peer.items():
        alike.setdefault(tuple(slots), []).append(peer)
    for together, peers_alike in alike.items():
        for cut in _cut(together, slots_per_batch, bytes_per_batch):
            yield SlotBatch(cut, tuple(peers_alike))


def _cut(
    slots: tuple[Slot, ...], slots_per_batch: int, bytes_per_batch: int
) -> Iterator[tuple[Slot, ...]]:
    batch: list[Slot] = []
    size = 0
    for slot in slots:
        slot_size = len(slot.key.encode("utf-8")) + len(slot.value)
        if batch and (len(batch) >= slots_per_batch or size + slot_size > bytes_per_batch):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(slot)
        size += slot_size
    if batch:
        yield tuple(batch)
