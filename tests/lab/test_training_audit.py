"""The audit of a run: it finds nothing in a clean one, and each wrong that a run could do."""

from __future__ import annotations

from typing import Any

from lab.bench.training_audit import AuditedLife, RunAudit, audit_run

FIRST = {"a": 0, "b": 1 << 32}


def batch(peer: str, number: int, count: int = 8, model_epoch: int = 0) -> dict[str, Any]:
    first = FIRST[peer] + number
    return {"what": "batch", "first": first, "count": count, "model_epoch": model_epoch}


def began(*, delayed: bool) -> dict[str, Any]:
    return {"what": "began", "delayed": delayed}


def step(epoch: int, own: int, **other: Any) -> dict[str, Any]:
    told = {
        "what": "StepTaken",
        "at": float(epoch),
        "epoch": epoch,
        "samples": 16.0,
        "own_samples": own,
        "members": ["a", "b"],
        "history": f"h{epoch}",
    }
    return told | other


def digest(epoch: int, bits: str = "same", **other: Any) -> dict[str, Any]:
    told = {"epoch": epoch, "model_epoch": epoch, "history": f"h{epoch}", "digest": bits}
    return {"what": "digest"} | told | other


def audit_of(**lines: list[dict[str, Any]]) -> RunAudit:
    return audit_run([AuditedLife(peer, told) for peer, told in lines.items()])


def test_a_clean_run_has_nothing_to_find() -> None:
    audit = audit_of(
        a=[batch("a", 0), step(0, 8), digest(1), batch("a", 8, 8, 1), step(1, 8), batch("a", 16)],
        b=[batch("b", 0), step(0, 8), digest(1), batch("b", 8, 8, 1), step(1, 8)],
    )
    assert audit.failures == []
    assert (audit.samples, audit.computed, audit.dropped) == (32.0, 40, 8)
    assert audit.step_moments() == [0.0, 1.0]
    assert audit.states_compared == 2


def test_by_cohorts_the_members_are_the_heads() -> None:
    told = {"members": ["b"], "over_a_grid": True}
    audit = audit_of(a=[batch("a", 0), step(0, 8, **told)], b=[batch("b", 0), step(0, 8, **told)])
    assert audit.failures == []


def test_by_cohorts_any_peer_that_was_killed_in_that_epoch_may_have_brought_samples() -> None:
    told = {"members": ["b"], "over_a_grid": True, "samples": 16.0}
    head = [batch("b", 0), step(0, 8, **told)]
    audit = audit_of(a=[batch("a", 0), batch("a", 8)], b=head)
    assert audit.failures == []
    assert (audit.taken_for_dead, audit.dropped) == (8, 8)
    audit = audit_of(a=[batch("a", 0, 4)], b=head)
    assert "4 samples belong to no peer" in audit.failures[0]
    audit = audit_of(a=[batch("a", 0, model_epoch=1)], b=head)
    assert "its members brought 8" in audit.failures[0]


def test_samples_that_a_peer_gave_up_count_if_the_others_made_the_step_with_them() -> None:
    gave_up = {"what": "GradientsDropped", "samples": 16}
    told = {"members": ["b"], "over_a_grid": True}
    audit = audit_of(
        a=[batch("a", 0), batch("a", 8), gave_up],
        b=[batch("b", 0), step(0, 8, **told)],
    )
    assert audit.failures == []
    assert (audit.taken_for_refused, audit.taken_for_dead, audit.dropped) == (8, 0, 8)


def test_samples_that_were_given_up_in_another_epoch_are_in_no_step() -> None:
    gave_up = {"what": "GradientsDropped", "samples": 8}
    told = {"members": ["b"], "over_a_grid": True}
    audit = audit_of(
        a=[batch("a", 0, 8, 3), gave_up],
        b=[batch("b", 0), step(0, 8, **told)],
    )
    assert audit.failures == ["epoch 0 (h0): 16 samples, of which its members brought 8"]


def test_the_samples_of_a_killed_member_count_from_those_that_it_had_waiting() -> None:
    audit = audit_of(a=[batch("a", 0), step(0, 8)], b=[batch("b", 0), batch("b", 8)])
    assert audit.failures == []
    assert audit.taken_for_dead == 8
    assert audit.dropped == 8


def test_a_killed_member_cannot_have_sent_more_than_it_had() -> None:
    audit = audit_of(a=[batch("a", 0), step(0, 8, samples=40.0)], b=[batch("b", 0)])
    assert "24 samples belong to no peer" in audit.failures[0]


def test_samples_that_count_in_a_round_do_not_count_again() -> None:
    twice = [batch("a", 0), step(0, 8), step(1, 8)]
    audit = audit_of(a=twice, b=[batch("b", 0), step(0, 8), batch("b", 8), step(1, 8)])
    assert "a counts 8 samples and had 0" in audit.failures[0]
    again = [batch("a", 0), step(0, 8), batch("a", 0), step(1, 8)]
    audit = audit_of(a=again, b=[batch("b", 0), step(0, 8), batch("b", 8), step(1, 8)])
    assert "sample 0 is in epoch 0 and counts again in epoch 1" in audit.failures


def test_a_round_has_the_samples_that_its_members_brought() -> None:
    audit = audit_of(a=[batch("a", 0), step(0, 8)], b=[batch("b", 0, 4), step(0, 4)])
    assert "16 samples, of which its members brought 12" in audit.failures[0]


def test_a_peer_that_steps_alone_is_the_only_member() -> None:
    audit = audit_of(a=[batch("a", 0), step(0, 8, samples=8.0, members=[])], b=[])
    assert audit.failures == []


def test_all_reports_of_a_round_agree() -> None:
    audit = audit_of(a=[batch("a", 0), step(0, 8)], b=[batch("b", 0), step(0, 8, members=["b"])])
    assert "b tells another round than the others" in audit.failures[0]


def test_only_members_have_samples_in_a_round() -> None:
    audit = audit_of(a=[batch("a", 0, 16), step(0, 16, members=["b"])], b=[])
    assert "a counts 16 samples and is no member" in audit.failures[0]


def test_dropped_samples_are_no_longer_waiting() -> None:
    dropped = {"what": "GradientsDropped", "epoch": 0, "samples": 8}
    audit = audit_of(a=[batch("a", 0), dropped, batch("a", 8)], b=[])
    assert audit.failures == []
    assert audit.dropped == 16
    audit = audit_of(a=[batch("a", 0), dropped | {"samples": 16}], b=[])
    assert audit.failures == ["a dropped 16 samples and had 8"]


def test_the_last_batch_is_the_one_held_back() -> None:
    held = {"what": "HeldBack", "epoch": 0, "samples": 8}
    audit = audit_of(
        a=[batch("a", 0), batch("a", 8), held, step(0, 8)], b=[batch("b", 0), step(0, 8)]
    )
    assert audit.failures == []
    assert audit.held_back == 8


def test_different_bits_and_forks_are_found() -> None:
    audit = audit_of(a=[digest(1)], b=[digest(1, "other")])
    assert audit.failures == ["epoch 1: peers hold 2 different states"]
    audit = audit_of(a=[digest(1)], b=[digest(1, history="else")])
    assert audit.failures == ["epoch 1 has 2 histories: the run has forked"]


def test_stale_gradients_are_found() -> None:
    lines = [batch("a", 0), step(1, 8, samples=8.0, members=[])]
    assert "parameters of epoch 0" in audit_of(a=[began(delayed=False), *lines]).failures[0]
    assert audit_of(a=[began(delayed=True), *lines]).failures == []
    too_stale = [began(delayed=True), batch("a", 0), step(2, 8, samples=8.0, members=[])]
    assert "parameters of epoch 0" in audit_of(a=too_stale).failures[0]


def test_the_loss_of_a_delayed_model_is_told_by_the_samples_that_are_in_it() -> None:
    lines = [batch("a", 0), step(0, 8, samples=8.0, members=[])]
    audit = audit_of(a=[*lines, digest(1, model_epoch=0, held_out=3.0)])
    assert audit.loss_curve() == [(0.0, 3.0)]


def test_the_loss_is_told_by_the_samples_of_all_steps_so_far() -> None:
    audit = audit_of(
        a=[batch("a", 0), step(0, 8), digest(1, held_out=3.0)],
        b=[batch("b", 0), step(0, 8), batch("b", 8, 16, 1), step(1, 16, members=["b"])],
    )
    audit.held_out.append((2, 2.5))
    assert audit.loss_curve() == [(16.0, 3.0), (32.0, 2.5)]
