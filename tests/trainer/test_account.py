"""A session's contribution: samples that others have accepted, and those that they have not."""

from __future__ import annotations

import pytest

from node.training.account import SessionAccount
from protocols.accumulation.events import (
    CaughtUp,
    GradientsDropped,
    HeldBack,
    SeenStep,
    Share,
    StepLoss,
    StepTaken,
)
from protocols.identity import PeerId

ME, OTHER = PeerId("me"), PeerId("other")


def step(
    epoch: int,
    own: int,
    *,
    members: tuple[PeerId, ...] = (ME, OTHER),
    loss: float | None = None,
) -> StepTaken:
    return StepTaken(epoch, 256.0, own, members, (), bytes(16), 1.0, 1.0, 1.0, 1.0, loss=loss)


def test_the_first_samples_that_others_accept_are_told_once() -> None:
    account = SessionAccount()
    assert not account.take(step(0, 256, members=()))  # alone: nobody has accepted anything
    assert not account.take(step(1, 0))
    assert account.take(step(2, 64))
    assert not account.take(step(3, 64))
    given = account.contribution(None)
    assert (given.samples, given.steps, given.of_samples) == (128, 2, 512.0)
    assert given.share == 0.25
    assert account.epoch == 4


def test_samples_in_no_step_are_counted() -> None:
    account = SessionAccount()
    account.take(GradientsDropped(3, 40, "late"))
    account.take(HeldBack(3, 8, "The loss is nan."))
    assert account.contribution(None).lost_samples == 48
    assert account.contribution(None).share is None


@pytest.mark.parametrize(("peers", "given", "lost"), [((ME, OTHER), 64, 0), ((ME,), 0, 64)])
def test_samples_in_a_step_that_the_others_made_were_not_lost(
    peers: tuple[PeerId, ...], given: int, lost: int
) -> None:
    account = SessionAccount()
    account.take(GradientsDropped(3, 64, "the others made the step"))
    shares = tuple(Share(one, 64.0, 0) for one in peers)
    seen = SeenStep(3, bytes(16), 256.0, 64, shares)
    assert account.take(CaughtUp(4, bytes(16), 0.1, 0, (), {}, seen=(seen,))) == bool(given)
    assert (account.samples, account.lost_samples, account.epoch) == (given, lost, 4)


def test_samples_trained_alone_are_counted_apart() -> None:
    account = SessionAccount()
    for epoch in range(580):
        account.take(step(epoch, 1024, members=()))
    given = account.contribution(None)
    assert (given.samples, given.steps) == (0, 0)
    assert (given.alone_samples, given.alone_steps) == (580 * 1024, 580)


def test_samples_trained_alone_and_given_up_for_the_others_state_are_in_no_step() -> None:
    account = SessionAccount()
    account.take(step(0, 64, members=()))
    account.take(step(1, 32))
    account.take(step(2, 64, members=()))
    account.take(CaughtUp(9, bytes(16), 0.1, 0, (), {}))
    given = account.contribution(None)
    assert (given.alone_samples, given.alone_steps, given.lost_samples) == (64, 1, 64)
    account.take(step(9, 64, members=()))
    account.take(CaughtUp(11, bytes(16), 0.1, 0, (), {}, leads_on=True))
    assert account.contribution(None).alone_steps == 2


def test_the_loss_is_that_of_the_newest_step_and_not_smoothed() -> None:
    account = SessionAccount()
    account.take(step(0, 64, loss=4.0))
    account.take(step(1, 64, members=(), loss=2.0))
    assert (account.loss, account.loss_step) == (2.0, 2)
    losses = (StepLoss(2, 1.5), StepLoss(3, 1.0))
    account.take(CaughtUp(4, bytes(16), 0.1, 0, (), {}, losses=losses))
    assert (account.loss, account.loss_step) == (1.0, 4)
    assert account.curve.points == ((1, 4.0), (2, 2.0), (3, 1.5), (4, 1.0))


def test_no_loss_is_shown_of_steps_that_the_run_has_not_made() -> None:
    """A run that is begun anew in an old home was shown with the former one's curve."""
    account = SessionAccount()
    for made in range(1, 9):  # as they were read from the disk
        account.curve.note(made, 1.0 / made)
    assert account.losses == ()
    account.take(CaughtUp(2, bytes(16), 0.1, 0, (), {}))
    assert account.losses == ((1, 1.0), (2, 0.5))
    account.take(step(2, 64, loss=0.25))
    assert account.losses == account.curve.points == ((1, 1.0), (2, 0.5), (3, 0.25))


def test_the_end_of_the_run_is_told_by_the_pace_of_its_last_steps() -> None:
    account = SessionAccount()
    assert account.seconds_left(2000, 0.0) is None
    account.epoch = 0
    account.note_moment(-9.0)
    account.take(CaughtUp(7, bytes(16), 0.1, 0, (), {}))  # in a moment, and no pace of the run
    account.note_moment(-8.0)
    assert account.seconds_left(2000, -8.0) is None
    account.epoch = 0
    for epoch in range(10):
        account.take(step(epoch, 64))
        account.note_moment(3.0 * epoch)
    assert account.seconds_left(2000, 27.0) == 3.0 * 1990
    assert account.seconds_left(2000, 29.0) == 3.0 * 1990 - 2.0
    assert account.seconds_left(0, 27.0) is None  # it has no end
    assert account.seconds_left(10, 27.0) is None  # it is over
