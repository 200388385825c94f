"""The experts of a swarm, as a layer of a model sees them (`Experts` in layer.py).

    records = HostRecords()                                   # one for all layers of a model
    experts = SwarmExperts(directory, ExpertClient(rpc), grid, records, codec="float16")
    layer = DMoE(GridGate(width, grid), experts, portal, k=4)

`select` searches the directory. A call goes to the host of its expert. If several servers announce
one expert, as when it has just moved, the one with the least queued work and latency is called. A
backward pass goes to the server that was the last to answer a forward pass of this expert: it
computes that pass again, and two servers with one expert may have other weights.

A server that fails is left alone for a second, and twice as long after each further failure, up to
a minute; its experts are left out of the searches meanwhile. If it could not be reached, they are
left out at least until it has announced itself again. Then one call tries it again. Its next answer
clears it. Backward passes that failed are counted beside that until one is answered: a server that
takes no gradients may well answer forward. An answer forward to a call that began since then only
ends the rest. A failure that concerns one expert (it is not there, its answer is not finite or not
plausible, it does not take the tensor, or has a bug) counts against that expert of that server
only. One that is busy is left alone as a whole, but needs no new announcement.

A server that accepts calls and never answers would cost every batch the whole grace time. So a call
that the layer gives up after `LATE_SECONDS` or more counts as a failure if the server, or the
expert, has answered nothing at all since the call began; the calls that wait there still longer are
ended as well. Of a backward pass, only answers to backward passes count, if it was given up after
some times as long as the server takes for any call, or is one of several in a row. A server that is
merely slow answers others meanwhile, and is not left alone.

Answers that are not finite, or not of the right shape, do not come past the client. Here an answer
is refused that is more than `LARGEST_GROWTH` times as large as what was sent (of a forward pass, as
1 if that is larger): one such row would ruin the model.

Easy to get wrong: the gate alone decides which experts are best. Latency and load only decide
between hosts of one expert, and which answers come within the grace time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import trio
from torch import Tensor

from auth.bounded_map import BoundedMap
from protocols.blocking import in_thread
from protocols.errors import Busy, HandlerFailed, PotluckError, Unreachable
from protocols.experts.beam import select_experts
from protocols.experts.client import LARGEST_AT_ONCE, ExpertClient
from protocols.experts.directory import Below, ExpertDirectory, Host
from protocols.experts.grid import ExpertGrid, Uid
from protocols.experts.messages import UnknownExpert, WrongTensor
from protocols.identity import PeerId
from protocols.tensors import CodecName, NotFinite

log = logging.getLogger("potluck.experts")

FIRST_REST_SECONDS: Final = 1.0
LONGEST_REST_SECONDS: Final = 60.0
"""A server that was restarted is used again at the latest after this time."""

LATE_SECONDS: Final = 1.0
"""A call that is given up earlier says nothing about its server: the link may just be opening."""

BACKWARD_FACTOR: Final = 4.0
"""A backward pass computes the forward pass again, takes twice as long beside that, and has twice
as much to send. So many times as long as a usual call it may take."""

MOST_UNANSWERED: Final = 3  # of these in a row, given up before that

LARGEST_GROWTH: Final = 1e4
"""Experts have norms inside, and mostly pass on what they get. The gradient through a norm grows by
at most 316 (the norms of torch add 1e-5 to the variance), and by what the weights add."""

REMEMBERED_HOSTS = 4096
REMEMBERED_EXPERTS = 1 << 17  # 64 batches in flight, of 256 examples with 4 experts, name half
MEASURED_CALLS = 15  # of each server, in the median of its latency


class ImplausibleAnswer(PotluckError):
    """An expert's answer is far larger than anything that an expert makes of what was sent."""


# ---- pure


@dataclass(frozen=True)
class Callee:
    """A server, or with a uid one expert of it."""

    peer: PeerId
    uid: Uid | None = None

    def __str__(self) -> str:
        return f"{self.uid} at {self.peer}" if self.uid else str(self.peer)


@dataclass
class _Streak:
    count: int
    last: float
    rests_until: float  # or it has ended, and calls need not be tried one by one

    @property
    def rest_seconds(self) -> float:
        return float(min(FIRST_REST_SECONDS * 2 ** min(self.count - 1, 16), LONGEST_REST_SECONDS))


class HostRecords:
    """What the calls of a trainer have shown about servers and their experts. Pure: the time is an
    argument. All layers of a model should share one, so that each server fails them only once.

    Invariant: only what has failed since its last answer has an entry in `_failures`, and only what
    has failed a backward pass since it last answered one has one in `_lost_gradients`.
    """

    def __init__(self) -> None:
        self._failures = BoundedMap[Callee, _Streak](REMEMBERED_HOSTS)
        self._lost_gradients = BoundedMap[Callee, _Streak](REMEMBERED_HOSTS)
        self._answered_at = BoundedMap[Callee, float](REMEMBERED_EXPERTS)
        self._answered_backward_at = BoundedMap[Callee, float](REMEMBERED_EXPERTS)
        self._unanswered = BoundedMap[PeerId, tuple[int, float]](REMEMBERED_HOSTS)
        self._seconds = BoundedMap[PeerId, deque[float]](REMEMBERED_HOSTS)
        self._rows: Counter[PeerId] = Counter()

    def answered(
        self, peer: PeerId, uid: Uid, began: float, now: float, *, backward: bool = False
    ) -> None:
        for callee in (Callee(peer), Callee(peer, uid)):
            self._failures.pop(callee, None)
            self._answered_at[callee] = now
            lost = self._lost_gradients.get(callee)
            if backward:
                self._lost_gradients.pop(callee, None)
                self._answered_backward_at[callee] = now
            elif lost is not None and began > lost.last:
                lost.rests_until = -math.inf
        if backward:
            self._unanswered.pop(peer, None)
        seconds = self._seconds.get(peer, deque(maxlen=MEASURED_CALLS))
        seconds.append(now - began)
        self._seconds[peer] = seconds

    def failed(self, callee: Callee, began: float, now: float, *, backward: bool = False) -> int:
        """Note the failure of a call that began at this time. Returns how many there were in a row.

        Calls that were under way together fail together, and are one failure: then 0.
        """
        kinds = (self._failures, self._lost_gradients) if backward else (self._failures,)
        return max(_one_more(streaks, callee, began, now) for streaks in kinds)

    def may_be_slow(self, peer: PeerId, began: float, now: float) -> bool:
        """Whether a backward pass that is given up now would perhaps have been answered. Note that
        it was not; those that were under way together count once."""
        count, last = self._unanswered.get(peer, (0, -math.inf))
        if began > last:
            count += 1
            self._unanswered[peer] = count, now
        return count < MOST_UNANSWERED and now - began < BACKWARD_FACTOR * self.usual_seconds(peer)

    def is_silent(self, callee: Callee, since: float, *, backward: bool = False) -> bool:
        """Whether nothing has come from there since this time, or no answer to a backward pass."""
        answered_at = self._answered_backward_at if backward else self._answered_at
        return answered_at.get(callee, since) <= since

    def resting(self, now: float) -> frozenset[Callee]:
        """All that is left alone now."""
        return frozenset(
            callee
            for streaks in (self._failures, self._lost_gradients)
            for callee, streak in streaks.items()
            if streak.rests_until > now
        )

    def takes_call(self, peer: PeerId, uid: Uid, now: float) -> bool:
        """Whether to make a call. If it is the one that tries out what has failed, others are
        refused until it has had time to end."""
        found = [
            streaks[callee]
            for streaks in (self._failures, self._lost_gradients)
            for callee in (Callee(peer), Callee(peer, uid))
            if callee in streaks
        ]
        if any(streak.rests_until > now for streak in found):
            return False
        for streak in found:
            if streak.rests_until > -math.inf:
                streak.rests_until = now + streak.rest_seconds
        return True

    def trained(self, peer: PeerId, rows: int) -> None:
        """An expert there has made a step with these rows of ours."""
        self._rows[peer] += rows

    def take_rows(self) -> dict[PeerId, int]:
        """The rows that each server has trained with since the last call."""
        rows, self._rows = self._rows, Counter()
        return dict(rows)

    def expected_seconds(self, host: Host) -> float:
        """Until an answer comes. A server that was never called seems fast, so it is tried."""
        return host.load + self.usual_seconds(host.peer)

    def usual_seconds(self, peer: PeerId) -> float:
        """The median of its last calls; 0 if there was none."""
        seconds = self._seconds.get(peer)
        return statistics.median(seconds) if seconds else 0.0


def _one_more(
    streaks: MutableMapping[Callee, _Streak], callee: Callee, began: float, now: float
) -> int:
    """Count a failure of a call that began at this time; 0 if it belongs to the last one."""
    streak = streaks.get(callee) or _Streak(0, began, now)
    if streak.count and began <= streak.last:
        return 0
    streak.count += 1
    streak.last = now
    streak.rests_until = now + streak.rest_seconds
    streaks[callee] = streak
    return streak.count


def without(found: Mapping[Uid, Below], resting: frozenset[Callee]) -> dict[Uid, Below]:
    """What was found below these prefixes, without the servers and experts that rest."""
    peers = {callee.peer for callee in resting if callee.uid is None}
    experts = {(callee.uid, callee.peer) for callee in resting if callee.uid is not None}
    parents = {uid.parent for uid, _ in experts}
    left: dict[Uid, Below] = {}
    for prefix, below in found.items():
        some_rest = prefix in parents
        kept = {
            index: tuple(
                host
                for host in hosts
                if host.peer not in peers
                and not (some_rest and (prefix.child(index), host.peer) in experts)
            )
            for index, hosts in below.items()
        }
        left[prefix] = {index: hosts for index, hosts in kept.items() if hosts}
    return left


def check_growth(answer: Tensor, given: Tensor, least: float, callee: Callee) -> None:
    """ImplausibleAnswer if the answer is too large beside what was given, or beside `least`."""
    largest = max(_magnitude(given), least) * LARGEST_GROWTH
    if _magnitude(answer) > largest:
        raise ImplausibleAnswer(
            f"The answer of {callee} has values up to {_magnitude(answer):.2g}.",
            why=f"At most {largest:.2g} is plausible for what was sent. The expert has diverged, "
            "or its server makes up its answers.",
        )


def _magnitude(tensor: Tensor) -> float:
    low, high = torch.aminmax(tensor)  # one pass, and no memory
    return max(-low.item(), high.item())


# ---- calls


@dataclass(frozen=True, eq=False)
class _OpenCall:
    callee: Callee
    backward: bool
    began: float
    scope: trio.CancelScope


class SwarmExperts:
    """The experts of one grid. All methods are for trio's thread.

    - `records`: shared by the layers of a model.
    - `codec`: for the tensors, in both directions.
    """

    def __init__(
        self,
        directory: ExpertDirectory,
        client: ExpertClient,
        grid: ExpertGrid,
        records: HostRecords,
        *,
        codec: CodecName = "none",
    ) -> None:
        self._directory, self._client, self._grid = directory, client, grid
        self._records, self._codec = records, codec
        self._hosts = BoundedMap[Uid, tuple[Host, ...]](REMEMBERED_EXPERTS)
        self._answerers = BoundedMap[Uid, PeerId](REMEMBERED_EXPERTS)
        self._calls: dict[PeerId, set[_OpenCall]] = {}

    async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        """The best live experts, without those that are left alone now."""
        resting = self._records.resting(trio.current_time())

        async def active(prefixes: Sequence[Uid]) -> Mapping[Uid, Below]:
            found = await self._directory.active(prefixes)
            return without(found, resting) if resting else found

        chosen = await select_experts(scores, k, self._grid, active)
        for uid, hosts in {uid: hosts for own in chosen for uid, hosts in own}.items():
            self._hosts[uid] = hosts
        return [[uid for uid, _ in own] for own in chosen]

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        peer = self._host_of(uid, self._hosts.get(uid, ()))
        with self._noting(Callee(peer, uid)) as callee:
            outputs = await self._client.forward(
                peer, uid, inputs, codec=self._codec, timeout=timeout
            )
            await _check_growth(outputs, inputs, 1.0, callee)  # inputs of zero have outputs
        self._answerers[uid] = peer
        return outputs

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        hosts, answerer = self._hosts.get(uid, ()), self._answerers.get(uid)
        if answerer is not None:
            hosts = (Host(answerer),)
        peer = self._host_of(uid, hosts)
        with self._noting(Callee(peer, uid), backward=True) as callee:
            gradients = await self._client.backward(
                peer, uid, inputs, grads, codec=self._codec, timeout=timeout
            )
            await _check_growth(gradients, grads, 0.0, callee)
        self._records.trained(peer, len(inputs))
        return gradients

    def _host_of(self, uid: Uid, hosts: Sequence[Host]) -> PeerId:
        """The host to call. Of equally fast ones the first, which keeps the expert."""
        now = trio.current_time()
        for host in sorted(hosts, key=self._records.expected_seconds):
            if self._records.takes_call(host.peer, uid, now):
                return host.peer
        if not hosts:
            raise Unreachable(f"No host of {uid} is known.", advice="Search for experts first.")
        raise Unreachable(
            f"{uid} is left alone for a while.",
            why=f"Its last call at {', '.join(host.peer for host in hosts)} failed.",
        )

    @contextmanager
    def _noting(self, callee: Callee, *, backward: bool = False) -> Iterator[Callee]:
        """Note how the call of this block ends."""
        call = _OpenCall(callee, backward, trio.current_time(), trio.CancelScope())
        calls = self._calls.setdefault(callee.peer, set())
        calls.add(call)
        try:
            with call.scope:
                yield callee
        except PotluckError as error:
            self._note_failure(call, error)
            raise
        except trio.Cancelled:
            self._note_given_up(call)
            raise
        finally:
            calls.discard(call)
            if not calls and self._calls.get(callee.peer) is calls:
                del self._calls[callee.peer]
        if call.scope.cancelled_caught:
            raise Unreachable(f"{callee} was silent for too long.")
        assert callee.uid is not None
        self._records.answered(
            callee.peer, callee.uid, call.began, trio.current_time(), backward=backward
        )

    def _note_failure(self, call: _OpenCall, error: PotluckError) -> None:
        callee, host = call.callee, Callee(call.callee.peer)
        match error:
            case NotFinite() if error.surely_not_executed:
                return  # our own tensor could not be sent
            case UnknownExpert():
                assert callee.uid is not None
                self._directory.forget_expert(callee.uid)
            case NotFinite() | WrongTensor() | HandlerFailed() | ImplausibleAnswer():
                pass  # other experts of this server may be well
            case Busy():
                callee = host  # what it announces is still true
            case _:
                self._note_host_failure(host, call, error)
                return
        self._note(callee, call, error)

    def _note_given_up(self, call: _OpenCall) -> None:
        """The layer waits no longer, or the node ends."""
        now = trio.current_time()
        if now - call.began < LATE_SECONDS:
            return
        error = Unreachable(f"{call.callee} did not answer in time.")
        host = Callee(call.callee.peer)
        silences = [(host, False), (call.callee, False)]
        if call.backward:
            silences += [(host, True), (call.callee, True)]
        for silent, backward in silences:
            if self._records.is_silent(silent, call.began, backward=backward):
                break
        else:
            return
        if (silent, backward) == (host, False):
            self._note_host_failure(host, call, error)
        elif call.backward and self._records.may_be_slow(host.peer, call.began, now):
            return
        else:  # what it announces is still true
            self._note(silent, call, error)
        for other in self._calls.get(host.peer, ()):
            waits_longer = other.began < call.began and other.backward >= backward
            if waits_longer and silent in (host, other.callee):
                other.scope.cancel()

    def _note_host_failure(self, host: Callee, call: _OpenCall, error: PotluckError) -> None:
        if self._note(host, call, error):
            self._directory.forget(host.peer)

    def _note(self, callee: Callee, call: _OpenCall, error: PotluckError) -> bool:
        """Whether this failure is a new one."""
        now = trio.current_time()
        count = self._records.failed(callee, call.began, now, backward=call.backward)
        if count:
            is_first = count == 1 and isinstance(error, ImplausibleAnswer)  # rpc names the others
            level = logging.WARNING if is_first else logging.INFO
            log.log(level, "%s is left alone for a while (failure %d): %s", callee, count, error)
        return bool(count)


async def _check_growth(answer: Tensor, given: Tensor, least: float, callee: Callee) -> None:
    if answer.nbytes <= LARGEST_AT_ONCE:
        check_growth(answer, given, least, callee)
    else:
        await in_thread(check_growth, answer, given, least, callee)
