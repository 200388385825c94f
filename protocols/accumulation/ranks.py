"""The optimizer of a machine whose GPUs have a process each, as `torchrun` starts them.

    dist.init_process_group()
    parallel = DistributedDataParallel(model)            # reduces gradients inside the machine
    with collaborate(...) if dist.get_rank() == 0 else nullcontext() as bridge:
        with RankedOptimizer(model.named_parameters(), factory, bridge) as optimizer:
            for batch in batches:                        # each rank reads its own
                optimizer.zero_grad()
                loss = loss_of(parallel, batch)
                optimizer.scaled(loss).backward()
                optimizer.step(samples=len(batch), loss=loss)
    dist.destroy_process_group()                         # or torch may crash at the end

All ranks together are one peer. Rank 0 has the node and the collaborative optimizer, with its
statistics; the others have a copy of the parameters. Torch has reduced the gradients when a
backward pass ends, so rank 0 counts its own, for the samples of all ranks. Whenever its parameters
have changed, by a step or a fetched state, it broadcasts them.

Promises: after each call all ranks hold the same parameters to the bit, and the same `epoch`.
(Buffers are DistributedDataParallel's, which broadcasts them before each pass. What is done to
`first` alone, such as to restore a checkpoint, reaches the others with its next step.) Rank 0 may
wait for the network as long as it has to (for a round, a state, a place): meanwhile it sends the
others a word every `WORD_SECONDS`, so that no timeout of torch's ends them. If a process ends, the
calls of all others raise `RankLost`, also when they wait; if rank 0's node ends,
CollaborationEnded.

Easy to get wrong: the methods are for all ranks, in the same order. DistributedDataParallel takes
the mean over ranks, so each must bring equally many samples; `step` checks that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.optimizer import CollaborativeOptimizer, Factory
from protocols.accumulation.options import autocast_to
from protocols.errors import PotluckError, ProtocolMisuse

FIRST: Final = 0
"""The rank that has the node."""

WORD_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 60.0
"""The longest that a rank is silent while others expect something: it may be behind the others by
what it does between a backward pass and its `step`."""

# What rank 0 says to the others: it waits; they go on with their parameters, or with its; it ends.
WAITS, SAME, CHANGED, ENDED = range(4)


class RankLost(PotluckError):
    """Another process of this machine has ended, or does not answer."""


class RankedOptimizer:
    """One on each rank, all made at the same time and with the same options, which are those of
    CollaborativeOptimizer. `bridge`: rank 0's; None on the others. `first`: rank 0's optimizer, for
    what only it can do, such as checkpoints; None on the others."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        factory: Factory,
        bridge: Bridge | None,
        *,
        silence_seconds: float = SILENCE_SECONDS,
        **options: Any,
    ) -> None:
        self._is_first = dist.get_rank() == FIRST
        if self._is_first != (bridge is not None):
            raise ProtocolMisuse(
                f"Rank {dist.get_rank()} has {'no' if bridge is None else 'a'} bridge.",
                why="All ranks of a machine are one peer: rank 0 has its node, and no other.",
                advice="Open `collaborate` on rank 0, and give the others None.",
            )
        named = list(named_parameters)
        self._tensors = [one for _name, one in named]
        self._bridge, self._options = bridge, options
        silence = timedelta(seconds=silence_seconds)
        with self._named():
            dist.barrier()  # rank 0 comes when its node has met others, which may take longer
            self._words = dist.new_group(backend="gloo", timeout=silence)
        self._lost: RuntimeError | None = None
        self._at: tuple[object, ...] = ()
        self._epoch, self._factor = 0, 1.0
        self.first: CollaborativeOptimizer | None = None

        def enter() -> bool:
            assert bridge is not None
            self.first = CollaborativeOptimizer(named, factory, bridge, **options)
            return True

        self._together(enter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """Say in plain words that a rank has ended, if torch has found that out in a pass."""
        if isinstance(error, RuntimeError) and _is_of_ranks(error):
            raise self._rank_lost() from error

    @property
    def epoch(self) -> int:
        """As of the last call: the same on all ranks."""
        return self._epoch

    def autocast(self) -> AbstractContextManager[Any]:
        """As CollaborativeOptimizer's."""
        precision = self._options.get("precision", "float32")
        return autocast_to(precision, self._tensors[0].device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """As CollaborativeOptimizer's."""
        return loss if self._factor == 1.0 else loss * self._factor

    def zero_grad(self) -> None:
        for one in self._tensors:
            one.grad = None

    def step(self, *, samples: int, loss: Tensor | float | None = None) -> bool:
        """Count the gradients, which torch has reduced, for all ranks. `samples`: of this rank's
        batch, and `loss` its mean. Otherwise as CollaborativeOptimizer's."""
        value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
        mine = torch.tensor([samples, loss is not None, value], dtype=torch.float64)
        each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with self._named():
            dist.all_gather(each, mine, group=self._words)
        all_samples = [int(one[0]) for one in each]
        if len(set(all_samples)) > 1:
            raise ProtocolMisuse(
                f"The ranks of this machine bring {', '.join(map(str, all_samples))} samples.",
                why="Torch takes the mean over the ranks, in which each counts the same.",
                advice="Give all of them batches of the same size.",
            )
        known = all(bool(one[1]) for one in each)
        mean = sum(float(one[2]) for one in each) / len(each) if known else None

        def count() -> bool:
            assert self.first is not None
            return self.first.step(samples=sum(all_samples), loss=mean)

        return self._together(count)

    def finish(self) -> None:
        """As CollaborativeOptimizer's."""

        def wait() -> bool:
            assert self.first is not None
            self.first.finish()
            return False

        self._together(wait)

    def _together(self, work: Callable[[], bool]) -> bool:
        """Do this on rank 0 while the others wait, and give all ranks its parameters and what it
        has returned."""
        if self._is_first:
            word, has_moved = self._while_telling(work)
            with self._named():
                self._say(word, has_moved)
        else:
            word, has_moved = self._heard()
        if word == CHANGED:
            with self._named(), torch.no_grad():
                for one in self._tensors:
                    dist.broadcast(one.detach(), FIRST)
        return has_moved

    def _while_telling(self, work: Callable[[], bool]) -> tuple[int, bool]:
        """Rank 0 works. The word for the others, and what the work has returned."""
        is_over = threading.Event()

        def tell() -> None:
            while not is_over.wait(WORD_SECONDS):
                try:
                    self._say(WAITS, False)
                except RuntimeError as error:
                    self._lost = error
                    self._wake()
                    return

        telling = threading.Thread(target=tell, name="potluck ranks", daemon=True)
        telling.start()
        try:
            has_moved = work()
        except BaseException:
            is_over.set()
            telling.join()
            if self._lost is not None:
                raise self._rank_lost() from self._lost
            with contextlib.suppress(RuntimeError):  # they may have ended as well
                self._say(ENDED, False)
            raise
        is_over.set()
        telling.join()
        first = self.first
        assert first is not None
        self._epoch, self._factor = first.epoch_returned, float(first.scaled(torch.ones(())))
        at = (first.epoch, first.history, first.model_epoch)
        is_changed = at != self._at or self._options.get("local_steps", 1) > 1
        self._at = at
        return CHANGED if is_changed else SAME, has_moved

    def _say(self, word: int, has_moved: bool) -> None:
        said = torch.tensor([word, has_moved, self._epoch, self._factor], dtype=torch.float64)
        dist.broadcast(said, FIRST, group=self._words)

    def _heard(self) -> tuple[int, bool]:
        """What rank 0 says when it no longer waits."""
        said = torch.tensor([WAITS, 0.0, 0.0, 0.0], dtype=torch.float64)
        while int(said[0]) == WAITS:
            with self._named():
                dist.broadcast(said, FIRST, group=self._words)
        if int(said[0]) == ENDED:
            raise CollaborationEnded(
                "The first rank of this machine has left the run.", why="Its own message says why."
            )
        self._epoch, self._factor = int(said[2]), float(said[3])
        return int(said[0]), bool(said[1])

    def _wake(self) -> None:
        """End what rank 0 waits for in the network."""
        assert self._bridge is not None
        portal = self._bridge.portal
        with contextlib.suppress(CollaborationEnded):
            portal.post(portal.end)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_of_ranks(error):
                raise
            raise self._rank_lost() from error

    def _rank_lost(self) -> RankLost:
        return RankLost(
            f"Another rank of this machine has ended: rank {dist.get_rank()} ends, too.",
            why="All ranks of a machine are one peer, and none can go on without the others.",
            advice="The message of the rank that ended first says why. Start all of them again.",
        )


def _is_of_ranks(error: RuntimeError) -> bool:
    """Whether torch could not reach another rank. Gloo raises a plain RuntimeError, which only its
    text tells apart."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
