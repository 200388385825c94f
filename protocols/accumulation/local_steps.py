"""Local steps: each peer makes steps by itself, and a round averages how far they went (DiLoCo).

In this file: `OuterStep`; `LostValues`, what a coarse codec has lost of pseudo-gradients;
`SparseTurns`, what a sparse codec sends of them; and `LocalSteps`, all at once or in fragments.

The promises and warnings of steps.py hold here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.accumulator import (
    LOSS,
    LOSS_VALUES,
    Averageable,
    Contribution,
    FoundWrong,
    dense_gradients,
    loss_of,
    loss_values,
)
from protocols.accumulation.fragments import fragments_of
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.steps import (
    Factory,
    InnerStep,
    LossScale,
    Scheduler,
    StepBuffers,
    StepOutcome,
    as_parameters,
)
from protocols.accumulation.training_state import LiveState, TrainingState, look, restore
from protocols.errors import PotluckError
from protocols.moshpit.layout import LARGEST_CARRIED, Layout, Segment, SentParts
from protocols.tensors import CODECS, ONE_IN, decode_into, encode_into

# ---- the outer step of local steps (DiLoCo, Douillard et al. 2023, algorithm 1)

OUTER_LEARNING_RATE = 0.7  # both are the paper's best: no run in its table did better
OUTER_MOMENTUM = 0.9
ALL = slice(None)


class OuterStep:
    """theta_start and the momentum, flat and in the parameters' precision.

        outer = OuterStep(start)                       # theta at the beginning of the epoch
        pseudo_gradient = outer.pseudo_gradient(local, out)    # line 12: theta_start - theta_local
        outer.step(averaged)                           # line 14: Nesterov's step from theta_start

    Between two rounds each peer makes steps with its own inner optimizer, whose statistics it never
    sends. The peers average how far the parameters went, and the outer optimizer takes the average
    as a gradient. With lr = 1 and momentum 0, that is plain averaging of parameters.

    Easy to get wrong: the outer step starts from theta_start, which is equal to the bit at all
    peers, and not from the peer's own parameters. So all peers have equal parameters after it.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.momentum = torch.zeros_like(start)

    def pseudo_gradient(self, local: Tensor, out: Tensor, place: slice = ALL) -> Tensor:
        """Write theta_start - theta_local into `out`: how far the local steps went. `place`: of
        these values in the flat tensors."""
        return torch.sub(self.start[place], local, out=out)

    def step(self, averaged: Tensor, place: slice = ALL) -> None:
        """Make Nesterov's step with the averaged pseudo-gradient."""
        # v <- 0.9 v + g;  theta <- theta - 0.7 (g + 0.9 v), as torch.optim.SGD(nesterov=True)
        start, momentum = self.start[place], self.momentum[place]
        momentum.mul_(OUTER_MOMENTUM).add_(averaged)
        start.add_(averaged, alpha=-OUTER_LEARNING_RATE)
        self.drift(start, momentum)

    @staticmethod
    def drift(parameters: Tensor, momentum: Tensor) -> None:
        """Change parameters as the step changes theta_start where the average is 0."""
        parameters.add_(momentum, alpha=-OUTER_LEARNING_RATE * OUTER_MOMENTUM)


# ---- what a codec has not sent


class LostValues:
    """What encoding has lost of this peer's pseudo-gradients: error feedback (Seide et al. 2014).

        lost.add_to(values)                    # g <- g + e, before a round
        lost.keep(values, sent)                # e <- g - decoded(encoded(g)), when g is in a step

    A codec of few bits rounds small values of a block away, in each round again. With this they
    add up until they are sent. Only coarse codecs lose enough to be worth a copy of the parameters,
    which is made when there is something to keep.

    What a peer lost is its own: it is no part of the state, and the step is made from the bits that
    all have. It is forgotten together with the local steps: when they are dropped, when a state was
    fetched, and when nobody knows whether, or how, they came into a step. One round's rounding is
    lost then, as without feedback. If a round fails, it is kept, and the next one takes it again.

    Reducers encode the averages once more, and what is lost there is not fed back. Who reduces a
    part changes from round to round, with the members and their links: a peer would keep what it
    lost for a part that it may not reduce again for hours, or ever.

    Easy to get wrong: a member's values of the part that it reduces itself are not encoded.
    """

    def __init__(self, layout: Layout, values: int) -> None:
        self._layout, self._values = layout, values
        self._is_coarse = any(CODECS[one.codec].is_coarse for one in layout.segments)
        self._lost: Tensor | None = None

    def add_to(self, values: Tensor) -> None:
        """Add what was lost to the values that are sent next."""
        if self._lost is not None:
            values.add_(self._lost)

    def keep(self, contribution: Tensor, sent: SentParts) -> None:
        """Keep what was lost of these values, in place of what was kept before."""
        if not self._is_coarse:
            return
        lost = self._lost = torch.zeros(self._values) if self._lost is None else self._lost.zero_()
        for chunk in sent.chunks(self._layout):
            if CODECS[chunk.codec].is_coarse:
                of_chunk = slice(chunk.start, chunk.stop)
                encoded = bytearray(chunk.encoded_bytes)
                encode_into(contribution[of_chunk], chunk.codec, encoded, name="what was sent")
                decode_into(lost[of_chunk], chunk.codec, encoded, "float32")
                torch.sub(contribution[of_chunk], lost[of_chunk], out=lost[of_chunk])

    def forget(self) -> None:
        if self._lost is not None:
            self._lost.zero_()


class SparseTurns:
    """What a sparse codec sends of pseudo-gradients: one value in `ONE_IN`, by turns.

        turns.keep_only_due(values, turn)             # g <- those whose turn it is, else 0
        turns.keep_lost(values, sent)                 # r <- g - decoded(encoded(g))
        turns.mix(own, theirs, r, momentum, turn, keeps=0.5)

    In each round all peers send the same places of each tensor, so that a sum has no more places
    than what each of them sent, and the reducer sends it back in as few bytes. Nothing else would
    fit an exchange in which reducers sum: the largest values of several peers are in different
    places, and their sum would be cut once more. `turn` counts the rounds of these tensors. With F
    fragments, it is not the epoch but the epoch divided by F: if F is 4, a fragment would send the
    same places for ever.

    What was not sent stays in the peer's own parameters, where it goes on being trained, and is in
    its next pseudo-gradients. That is error feedback as well, for the rounding to one bit, and it
    needs no memory. It is no part of the state: a peer that leaves, drops its local steps or
    fetches the state loses up to ONE_IN - 1 rounds of it.

    Easy to get wrong: a member's values of the part that it reduces itself are not encoded.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.is_sparse = [CODECS[one.codec].is_sparse for one in layout.segments]
        ends = accumulate(one.values for one in layout.segments)
        self._sparse = [
            slice(end - one.values, end)
            for one, end, is_sparse in zip(layout.segments, ends, self.is_sparse, strict=True)
            if is_sparse
        ]

    def __bool__(self) -> bool:
        return bool(self._sparse)

    def keep_only_due(self, values: Tensor, turn: int) -> None:
        """Set the values of sparse tensors to zero, except those that go in this round."""
        for tensor in self._sparse:
            for place in range(ONE_IN):
                if place != turn % ONE_IN:
                    values[tensor][place::ONE_IN].zero_()

    def keep_lost(self, values: Tensor, sent: SentParts | None) -> None:
        """Replace the values that were brought to a round by what encoding has lost of them.
        Without `sent`, nothing. The other tensors' values mean nothing afterwards."""
        if sent is None:
            values.zero_()
            return
        for part in sent.cut.parts:
            if part.reducer == sent.own:
                values[part.start : part.stop].zero_()
        for chunk in sent.chunks(self._layout):
            if CODECS[chunk.codec].is_sparse:
                brought = values[chunk.start : chunk.stop]
                encoded, arrived = bytearray(chunk.encoded_bytes), torch.empty_like(brought)
                encode_into(brought, chunk.codec, encoded, name="what was sent")
                decode_into(arrived, chunk.codec, encoded, "float32")
                brought.sub_(arrived)

    @staticmethod
    @torch.no_grad()
    def mix(
        own: Tensor, theirs: Tensor, lost: Tensor, momentum: Tensor, turn: int, keeps: float
    ) -> None:
        """Take a step over into this peer's own values of one tensor.

        own: of any shape and device; theirs (theta_start), lost, momentum: [values]

        Where it was their turn, they are mixed with theta_start: `keeps` of the own ones, without
        what was lost of them, which is put back afterwards. The others are not in the average, and
        move as far as theta_start does.
        """
        due = slice(turn % ONE_IN, None, ONE_IN)
        flat = own.flatten()  # a view of it, unless its memory is in another order
        mixed = flat[due].lerp((theirs[due] - lost[due]).to(own.device), 1.0 - keeps)
        OuterStep.drift(flat, momentum.to(own.device))
        flat[due] = mixed
        own.copy_(flat.view(own.shape))

    @staticmethod
    @torch.no_grad()
    def follow(own: Tensor, averaged: Tensor, momentum: Tensor) -> None:
        """Move this peer's own values of one tensor as far as theta_start went, because it has
        brought none of them to the round.

        own: of any shape and device; averaged, momentum: [values]
        """
        own.add_(averaged.view(own.shape).to(own.device), alpha=-OUTER_LEARNING_RATE)
        OuterStep.drift(own, momentum.view(own.shape).to(own.device))


# ---- the steps


class Diverged(PotluckError):
    """A parameter is infinite or NaN after local steps: this peer's model is broken."""


MIXING = 0.5
"""The share of its own parameters that a peer keeps when it takes over an exchanged fragment. The
Streaming DiLoCo paper takes 0.5: 1 would take over nothing, and 0 would lose the steps that were
made beside the exchange."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """What one round averages: some of the model's parameters.

    - `layout`: of the round.
    - `place`: in the flat tensors of the outer step.
    - `lost`: what a coarse codec has lost of them.
    - `turns`: which of them a sparse codec sends.
    """

    parameters: Parameters
    layout: Layout
    place: slice
    lost: LostValues
    turns: SparseTurns


class LocalSteps:
    """Many local steps, then one round that averages how far they went.

        each batch:  theta <- inner step of this peer alone, with its own gradients
        each epoch:  theta <- outer step from theta_start with the average of (theta_start - theta)

    A round is due when all peers together have computed H times the target batch: if they are
    alike, each has made some H steps. A peer's weight is its samples.

    With F > 1 fragments (fragments.py), the round of epoch e averages only fragment p = e mod F,
    and is due F times as often. It goes on beside the next local steps (`delayed`). When its step
    is made, the peer mixes the fragment with its own, at the end of the batch that it computes
    (Streaming DiLoCo, algorithm 2):

        theta_m,p <- alpha theta_m,p + (1 - alpha) theta_p

    theta_m is this peer's own, theta_p is theta_start of the fragment after its outer step, and
    alpha is MIXING. The paper's tau, how many local steps go on beside an exchange, is not set: a
    fragment is mixed in as soon as it is there, and before the next round begins, so after H/F
    target batches at most.

    The state is theta_start with the outer momentum and the schedule: equal to the bit at all
    peers. The inner optimizer's statistics belong to each peer; a newcomer begins with fresh ones,
    as in the paper.

    A pseudo-gradient that travels in a coarse codec goes with what was lost of the ones before
    (`LostValues`). With a sparse codec, peers keep what was not sent in their own parameters, which
    then differ also after a step without fragments, and mix in only what was exchanged
    (`SparseTurns`).

    Invariant: `_epoch` is the state's.

    Easy to get wrong: after a failed round the local steps stay in the parameters, and the next
    round takes them all together. Nothing is lost. A delayed round makes its step in a thread of
    its own, which may not touch the model; and the schedule is stepped there, while the training
    thread may use the learning rates.
    """

    kind = "pseudo-gradients"
    launches = False

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        *,
        max_norm: float | None,
        codec: Codecs,
        scales_loss: bool,
        buffers: dict[str, Tensor],
        fragments: int = 1,
        delayed: bool = False,
    ) -> None:
        """`delayed`: rounds go on beside the next local steps."""
        self._own = parameters
        self.inner = InnerStep(parameters, factory, scheduler, max_norm)
        self.scale = LossScale()
        self.scales_loss = scales_loss
        self._fragments = _fragments(parameters, codec, fragments)
        self.layouts: Sequence[Layout] = tuple(one.layout for one in self._fragments)
        placed = parameters if fragments == 1 else _in_order(parameters, self._fragments)
        self._outer = OuterStep(placed.copy_into(placed.buffer(on_host=True)))
        self.shared = as_parameters(placed, self._outer.start)
        largest = [LARGEST_CARRIED["none"]] * len(parameters.names)
        self._averageable = Averageable(parameters, largest)
        longest = max((one.parameters for one in self._fragments), key=lambda one: one.values)
        self._difference = longest.buffer(LOSS_VALUES, on_host=True)
        self._epoch = 0
        self._taken, self._has_brought = self._fragments[0], False
        self._delayed = delayed
        self._keeps = MIXING if delayed else 0.0
        self._stepped: int | None = None
        self._to_mix: list[int] = []
        self._is_given_up = False
        self._scheduling = threading.Lock()
        self._samples = 0
        self._loss_sums = torch.zeros(LOSS_VALUES, dtype=self._difference.dtype)
        self._buffers = StepBuffers(buffers)

    @property
    def loss_factor(self) -> float:
        return self.scale.scale if self.scales_loss else 1.0

    def add(self, samples: int, loss: float | Tensor | None = None) -> str | None:
        loss = None if loss is None else float(loss)
        if self._is_given_up:
            self.reset()  # or what this batch adds would be given up with the batches before it
        gradients = dense_gradients(self._own)
        wrong = self._averageable.first_wrong(gradients)
        if wrong is not None and (not self.scales_loss or self.scale.is_smallest):
            return wrong
        if self.scales_loss:
            # Local steps are not shared, so neither is their scale: it adapts at each of them.
            if wrong is None:
                self._divide(self.scale.scale)
            self.scale = self.scale.after(0.0 if wrong is None else 1.0)
        if wrong is None:
            self._step_locally()
        self._count(samples, loss)
        return None

    def found_wrong(self) -> FoundWrong | None:
        return None

    def take(self) -> Contribution:
        self._taken, turn = self._at(self._epoch)
        fragment = self._taken
        difference = self._difference[: fragment.layout.values]
        values, losses = _parts(difference)
        fragment.parameters.copy_into(values)
        self._outer.pseudo_gradient(values, out=values, place=fragment.place)
        fragment.lost.add_to(values)
        _check_finite(fragment.parameters, values)
        fragment.turns.keep_only_due(values, turn)
        samples = self._samples
        self._has_brought = samples > 0
        torch.div(self._loss_sums, max(samples, 1), out=losses)
        self._forget_samples()
        return Contribution(difference, samples)

    def put_back(self, contribution: Contribution) -> None:
        self._samples += contribution.samples
        self._loss_sums.add_(_parts(contribution.values)[1], alpha=contribution.samples)

    def done_with(self, contribution: Contribution, sent: SentParts | None = None, /) -> None:
        if sent is None:
            self._taken.lost.forget()
        elif contribution.samples:  # without samples nothing was sent
            self._taken.lost.keep(contribution.values, sent)
        if self._taken.turns and contribution.samples:
            self._taken.turns.keep_lost(contribution.values, sent)
        if self._stepped is not None:
            self._to_mix.append(self._stepped)
            self._stepped = None
            if not self._delayed:
                self.take_over()

    def drop(self) -> None:
        self._forget()
        if self._delayed:
            self._is_given_up = True  # until the training thread takes over
        else:
            self.reset()

    def apply(self, averaged: Tensor) -> StepOutcome:
        fragment, _ = self._at(self._epoch)
        values, losses = _parts(averaged)
        self._outer.step(values, fragment.place)
        if fragment.turns and not self._has_brought:
            self._difference[: len(values)].copy_(values)  # for `_mix`; nobody got what was there
        with self._scheduling:
            rate = self.inner.epoch_ended()
        self._buffers.keep()
        self._stepped = self._epoch  # `done_with` says what was lost of what this peer brought
        self._epoch += 1
        if not (self._delayed or fragment.turns):
            self.reset()
        return StepOutcome(0.0, norm=None, loss=loss_of(*losses.tolist()), learning_rate=rate)

    def take_over(self) -> None:
        if self._is_given_up:
            self.reset()
        while self._to_mix:
            self._mix(*self._at(self._to_mix.pop()))

    def _at(self, epoch: int) -> tuple[Fragment, int]:
        """What the round of an epoch averages, and how many rounds have averaged it before."""
        turn, place = divmod(epoch, len(self._fragments))
        return self._fragments[place], turn

    @torch.no_grad()
    def _mix(self, fragment: Fragment, turn: int) -> None:
        """theta_m,p <- alpha theta_m,p + (1 - alpha) theta_p, for what was exchanged."""
        own, outer, place = fragment.parameters, self._outer, fragment.place
        flat = (outer.start[place], self._difference[: own.values], outer.momentum[place])
        views = zip(*map(own.views, flat), strict=True)
        for one, is_sparse, (theirs, kept, momentum) in zip(
            own.tensors, fragment.turns.is_sparse, views, strict=False
        ):
            if is_sparse and not self._has_brought:
                SparseTurns.follow(one, kept, momentum)
            elif is_sparse:
                rows = theirs.view(-1), kept.view(-1), momentum.view(-1)
                SparseTurns.mix(one, *rows, turn, self._keeps)
            else:
                one.lerp_(theirs.to(one.device), 1.0 - self._keeps)

    def reset(self) -> None:
        self._is_given_up, self._stepped = False, None
        self._to_mix.clear()
        for one in self._fragments:
            one.parameters.copy_from(self._outer.start[one.place])

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        return look(
            self.shared.everything,
            self._buffers.kept.items(),
            None,
            self.inner.scheduler,
            self.extra(),
            run=run,
            epoch=epoch,
            history=history,
        )

    def restore(self, state: TrainingState) -> None:
        own, momentum = self._outer.momentum, state.extra.get("outer_momentum")
        if (
            not isinstance(momentum, Tensor)
            or momentum.shape != own.shape
            or momentum.dtype is not own.dtype
        ):
            raise StateRefused("The state has no momentum of outer steps for this model.")
        restore(
            state, self.shared.everything, self._buffers.kept.items(), None, self.inner.scheduler
        )
        own.copy_(momentum)
        self._epoch = state.epoch
        self._buffers.give_back()
        self._forget()
        self.reset()
        self._set_learning_rates()

    def extra(self) -> dict[str, Any]:
        return {"outer_momentum": self._outer.momentum}

    def _set_learning_rates(self) -> None:
        """Set the rates by hand: the inner optimizer was not restored, and most schedules set its
        rates only when they step."""
        if self.inner.scheduler is not None:
            rates = self.inner.scheduler.get_last_lr()
            for group, rate in zip(self.inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _step_locally(self) -> None:
        """An inner step; then take over a fragment that came meanwhile."""
        with self._scheduling:
            self.inner.step_locally()
        self.take_over()

    def _count(self, samples: int, loss: float | None) -> None:
        self._samples += samples
        self._loss_sums.add_(
            torch.tensor(loss_values(loss), dtype=self._loss_sums.dtype), alpha=samples
        )

    def _forget_samples(self) -> None:
        self._samples = 0
        self._loss_sums.zero_()

    def _forget(self) -> None:
        self._forget_samples()
        for one in self._fragments:
            one.lost.forget()

    @torch.no_grad()
    def _divide(self, scale: float) -> None:
        torch._foreach_div_([one.grad for one in self._own.tensors if one.grad is not None], scale)


def _fragments(parameters: Parameters, codec: Codecs, count: int) -> list[Fragment]:
    sizes = [(name, one.numel()) for name, one in parameters.trained]
    tensors, segments = dict(parameters.trained), {}
    for one in parameters.segments(codec):
        segments[one.name] = one
    losses = Segment(LOSS, LOSS_VALUES, parameters.codec_of("none"))
    found: list[Fragment] = []
    for names in fragments_of(sizes, count):
        own = Parameters((name, tensors[name]) for name in names)
        layout = Layout((*(segments[name] for name in names), losses))
        start = found[-1].place.stop if found else 0
        place = slice(start, start + own.values)
        lost, turns = LostValues(layout, own.values), SparseTurns(layout)
        found.append(Fragment(own, layout, place, lost, turns))
    return found


def _in_order(parameters: Parameters, fragments: Sequence[Fragment]) -> Parameters:
    """The same parameters, fragment by fragment, and the frozen ones."""
    trained = [pair for one in fragments for pair in one.parameters.trained]
    frozen = [(name, one) for name, one in parameters.everything if not one.requires_grad]
    return Parameters([*trained, *frozen])


def _parts(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The parameters' values of a round, and the loss values behind them."""
    return flat[:-LOSS_VALUES], flat[-LOSS_VALUES:]


def _check_finite(parameters: Parameters, values: Tensor) -> None:
    for name, view in zip(parameters.names, parameters.views(values), strict=True):
        if not bool(torch.isfinite(view).all()):
            raise Diverged(
                f"{name} is not finite any more.",
                why="The local steps have diverged: the learning rate is too large, or a batch "
                "was broken.",
                advice="Clip (max_norm), or lower the inner learning rate, and start again: "
                "the run's state is fetched from the others.",
            )
