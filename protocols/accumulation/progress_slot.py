"""The slot in which each peer of a run publishes its progress, under `progress/<run>`; by cohorts,
under `progress/<run>/<count>.<number>`.

    await dht.put(progress_key("poem"), slot, ttl=SLOT_SECONDS)

A slot says how far its peer is (epoch and history), how many samples it has for the round that ends
this epoch, how fast it computes them, and whether others can fetch its state. It expires soon, so a
peer that is gone is soon forgotten. It carries no clock times, because clocks differ: a reader uses
the moment at which it saw the slot.

Easy to get wrong: a slot is only a claim of its peer. claims.py decides how much of it counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.lineage import HISTORY_BYTES, Lineage
from protocols.dht import Family
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.cohorts import LARGEST_UPLINK, MOST_COHORTS
from protocols.rpc import Message

SLOT_SECONDS: Final = 18.0
"""How long a slot lives: a peer that was killed is forgotten after this time. It is three times
`SAY_AGAIN_SECONDS`, so that two lost writes in a row make no peer disappear."""

SAY_AGAIN_SECONDS: Final = 6.0
"""A peer publishes its slot at least this often, even if nothing has changed."""

CARRIED_SECONDS: Final = 2 * SAY_AGAIN_SECONDS
"""For how long a slot is extrapolated at its rate. A live peer has published a new one by then,
even if one of its writes was lost."""

LARGEST_EPOCH: Final = 1 << 40  # a step every microsecond for two weeks
LARGEST_SAMPLES: Final = 1 << 50  # exact as a float, with room to add up a thousand of them
LONGEST_SECONDS: Final = 1e9  # thirty years; no batch and no epoch lasts this long
SIGNATURE_BYTES: Final = 16
STATE_DIGEST_BYTES: Final = 32
LONGEST_TORCH = 32  # characters of a version such as 2.13.0+cu130
LONGEST_NAME = 24  # characters; four bytes each at most
LONGEST_DEVICE = 8  # characters of what torch calls it
SLOT_LIMIT_BYTES = 320  # some 150 are used, and a hundred more with the longest name
MOST_PEERS = 1024  # of one run, as many as one group of averaging may have

Role = Literal["trains", "auxiliary"]
Epoch = Annotated[int, Meta(ge=0, le=LARGEST_EPOCH)]
Samples = Annotated[int, Meta(ge=0, le=LARGEST_SAMPLES)]
History = Annotated[bytes, Meta(min_length=HISTORY_BYTES, max_length=HISTORY_BYTES)]


class ProgressSlot(Message, frozen=True):
    """One peer's progress.

    - `epoch`, `history`: how many steps made its parameters, and which steps (lineage.py).
    - `samples`: the samples that it has for the round that ends this epoch. While the round is
      under way, these are the samples in it, even if samples of the next epoch are being computed
      beside it.
    - `samples_per_second`: how fast they grow; 0 while they do not.
    - `role`: "auxiliary" comes to rounds without samples.
    - `client`: it can only dial out.
    - `signature`: of the model's tensors and optimizer; peers with another one cannot take part.
    - `state_digest`: of its state at this epoch, which others may fetch; empty while there is none.
    - `averaging`: it has begun the round that ends this epoch.
    - `keeps`: it keeps the run's checkpoints, so a run may begin with it.
    - `follows`: it has taken its state from others and made no step with it since, so it has no
      vote on which state is the run's (lineage.py).
    - `name`: the name that its owner chose. It proves nothing and may be any text: clean it before
      you show it.
    - `batch`: samples of one of its batches; 0 if it has computed none yet and does not know.
    - `batch_seconds`: how long one batch takes; before its first batch, as it was measured before
      the peer joined; 0 if unknown.
    - `under_way`: for how many seconds it has computed the batch under way; negative if there is
      none.
    - `epoch_seconds`: how long after the round that began this epoch the slot was written. All
      members of that round know when it ended, so they need not guess how old a slot is. Other
      peers take the time from the members' slots; negative until they have read one.
    - `beside`: samples of the next epoch that it has already, while it averages (delayed).
    - `leaves`: it begins no more batches, and only brings what it has.
    - `spared`: how many of the last steps in a row were made without samples of it.
    - `cohorts`: how many cohorts the run has in this epoch (moshpit/cohorts.py), as it knows.
    - `peers`: 0 in a peer's own slot. Otherwise this is a *sum*: samples, rate and batches are
      those of so many peers together, of which the publisher is the head; the rest is its own.
    - `rest_cohorts`: 0 unless this is the own slot of a cohort's head that has read the sums of so
      many other cohorts. `rest_samples`, `rest_per_second` are what those have together, so that
      its members need not read all of them.
    - `earlier_digest`: of the state of an earlier epoch, of which it keeps a copy for others. The
      results that it keeps lead on from there to its own epoch and history.
    - `step_peers`: how many peers were in the step that made its state; 0 if it does not know.
    - `uplink`: the class of its link; the fastest of a cohort is its head (moshpit/cohorts.py).
    - `device`: what computes its samples, as torch calls it (cpu, cuda, mps), for people to read;
      empty if nothing does. Clean it before you show it.
    - `came_seconds`: if it was not in the round that began this epoch, how long after that round it
      came; negative if it was in it. It does not change within an epoch.
    """

    epoch: Epoch
    history: History
    samples: Samples
    samples_per_second: Annotated[float, Meta(ge=0.0)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    role: Role = "trains"
    client: bool = False
    state_digest: Annotated[bytes, Meta(max_length=STATE_DIGEST_BYTES)] = b""
    torch: Annotated[str, Meta(max_length=LONGEST_TORCH)] = ""
    averaging: bool = False
    keeps: bool = False
    follows: bool = False
    name: Annotated[str, Meta(max_length=LONGEST_NAME)] = ""
    batch: Samples = 0
    batch_seconds: Annotated[float, Meta(ge=0.0, le=LONGEST_SECONDS)] = 0.0
    under_way: Annotated[float, Meta(ge=-1.0, le=LONGEST_SECONDS)] = -1.0
    epoch_seconds: Annotated[float, Meta(ge=-1.0, le=LONGEST_SECONDS)] = -1.0
    beside: Samples = 0
    leaves: bool = False
    spared: Annotated[int, Meta(ge=0, le=MOST_SPARED)] = 0
    came_seconds: Annotated[float, Meta(ge=-1.0, le=LONGEST_SECONDS)] = -1.0
    cohorts: Annotated[int, Meta(ge=1, le=MOST_COHORTS)] = 1
    peers: Annotated[int, Meta(ge=0, le=LARGEST_GROUP)] = 0
    rest_cohorts: Annotated[int, Meta(ge=0, le=MOST_COHORTS)] = 0
    rest_samples: Samples = 0
    rest_per_second: Annotated[float, Meta(ge=0.0)] = 0.0
    step_peers: Annotated[int, Meta(ge=0, le=MOST_COHORTS * LARGEST_GROUP)] = 0
    earlier_digest: Annotated[bytes, Meta(max_length=STATE_DIGEST_BYTES)] = b""
    uplink: Annotated[int, Meta(ge=0, le=LARGEST_UPLINK)] = 0
    device: Annotated[str, Meta(max_length=LONGEST_DEVICE)] = ""

    @property
    def at(self) -> Lineage:
        return Lineage(self.epoch, self.history)

    @property
    def was_in_round(self) -> bool:
        """Whether it was in the round that began its epoch."""
        return self.came_seconds < 0.0 <= self.epoch_seconds

    @property
    def has_begun(self) -> bool:
        """Whether it has begun to compute in this epoch. A peer that has just come may wait until
        the others know it."""
        return self.was_in_round or self.samples > 0 or self.under_way >= 0.0


def _check(_key: str, slot: Any) -> str | None:
    """Checks what the types cannot express."""
    if not math.isfinite(slot.samples_per_second + slot.rest_per_second):
        return "Its samples per second are not a finite number."
    times = (slot.batch_seconds, slot.under_way, slot.epoch_seconds, slot.came_seconds)
    if not all(map(math.isfinite, times)):
        return "One of its times is not a finite number."
    for digest in (slot.state_digest, slot.earlier_digest):
        if len(digest) not in (0, STATE_DIGEST_BYTES):
            return f"The digest of its state has {len(digest)} bytes."
    if slot.state_digest and slot.earlier_digest:
        return "It names two states."
    return None


PROGRESS = Family(
    "progress",
    ProgressSlot,
    value_limit_bytes=SLOT_LIMIT_BYTES,
    slots_per_key=MOST_PEERS,
    longest_ttl_seconds=60.0,
    check=_check,
    replicas=8,
)
"""Every node of a swarm that trains declares it (node/core/directory.py)."""


def progress_key(run: str, count: int = 1, number: int = 0) -> str:
    """Where the peers of this cohort publish, if there are `count` of them."""
    return f"{PROGRESS.name}/{run}" + (f"/{count}.{number}" if count > 1 else "")


def sums_key(run: str) -> str:
    """Where the heads of cohorts publish the sums of their cohorts."""
    return f"{PROGRESS.name}/{run}/sums"


def cohorts_told(sums: Iterable[ProgressSlot]) -> int:
    """How many cohorts the run has, as most of these say; 1 if there are none."""
    counts = Counter(one.cohorts for one in sums)
    return max(counts, key=lambda count: (counts[count], count)) if counts else 1


# A head has two slots. In tables of slots by name, its sum has another name than its own slot.

_SUM: Final = "+"  # in no peer id

REST: Final = PeerId(_SUM)
"""The name of all other cohorts together, as the own cohort's head sums them up."""


def name_of_sum(head: PeerId) -> PeerId:
    return PeerId(head + _SUM)


def is_sum(name: PeerId) -> bool:
    return name.endswith(_SUM)


def publisher_of(name: PeerId) -> PeerId:
    """The peer that has published the slot with this name."""
    return PeerId(name.removesuffix(_SUM))
