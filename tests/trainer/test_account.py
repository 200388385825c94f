"""What a session gave: samples that others have accepted, and everything that was not."""

from __future__ import annotations

import pytest

from node.trainer.account import Account
from node.trainer.happenings import LossSeen
from node.trainer.view import LOSSES_KEPT
from protocols.accumulation.events import CaughtUp, GradientsDropped, HeldBack, SeenStep, StepTaken
from protocols.accumulation.share import Share
from protocols.identity import PeerId

ME, OTHER = PeerId("me"), PeerId("other")


def step(epoch: int, own: int, *, members: tuple[PeerId, ...] = (ME, OTHER)) -> StepTaken:
    return StepTaken(epoch, 256.0, own, members, (), bytes(16), 1.0, 1.0, 1.0, 1.0)


def test_the_first_samples_that_others_accept_are_told_once() -> None:
    account = Account()
    assert not account.take(step(0, 256, members=()))  # alone: nobody has accepted anything
    assert not account.take(step(1, 0))
    assert account.take(step(2, 64))
    assert not account.take(step(3, 64))
    given = account.contribution(None)
    assert (given.samples, given.steps, given.of_samples) == (128, 2, 512.0)
    assert given.share == 0.25
    assert account.epoch == 4


def test_what_is_in_no_step_is_counted_too() -> None:
    account = Account()
    account.take(GradientsDropped(3, 40, "late"))
    account.take(HeldBack(3, 8, "The loss is nan."))
    assert account.contribution(None).lost_samples == 48
    assert account.contribution(None).share is None


@pytest.mark.parametrize(("peers", "given", "lost"), [((ME, OTHER), 64, 0), ((ME,), 0, 64)])
def test_what_the_others_made_a_step_of_was_not_lost(
    peers: tuple[PeerId, ...], given: int, lost: int
) -> None:
    account = Account()
    account.take(GradientsDropped(3, 64, "the others made the step"))
    shares = tuple(Share(one, 64.0, 0) for one in peers)
    seen = SeenStep(3, bytes(16), 256.0, 64, shares)
    assert account.take(CaughtUp(4, bytes(16), 0.1, 0, (), {}, seen=(seen,))) == bool(given)
    assert (account.samples, account.lost_samples, account.epoch) == (given, lost, 4)


def test_the_loss_is_smoothed_and_its_history_bounded() -> None:
    account = Account()
    for epoch in range(2 * LOSSES_KEPT):
        account.take(LossSeen(epoch, 2.0 if epoch else 4.0, 64))
    assert len(account.losses) == LOSSES_KEPT
    assert account.loss == pytest.approx(2.0)
    first = Account()
    first.take(LossSeen(0, 4.0, 64))
    first.take(LossSeen(1, 2.0, 64))
    assert first.loss == pytest.approx(3.8)
