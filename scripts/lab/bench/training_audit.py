"""The audit of a run: whose samples are in which step, by each peer's own log.

    audit = audit_run([AuditedLife("12D3…", read_log(path)), ...])
    assert not audit.failures

The audit follows every life of every peer. Computed batches wait in a row: a step takes its samples
from the head of it, dropped samples leave it there too, and a batch that is held back leaves its
tail. Steps are joined by their history, which names a committed round. Then:

- no peer is in two committed rounds with the same sample, and no two peers have the same sample;
- all reports of a round agree on its members and on its samples;
- the samples that its members say they brought are the round's samples. If a member was killed
  before it could say so, the rest is all or a part of the samples that it had waiting at its death;
- gradients in a step were computed with the parameters of its epoch, or delayed of the one before;
- all peers that reached an epoch hold the same state there.

A peer that is killed may have sent its samples into a round and never heard how that ended. Another
may have refused the result, and given up samples that are in it. Only the others' reports say
whether they count.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MOST_TOLD = 20


@dataclass
class AuditedLife:
    """One process's life, and what it wrote down."""

    peer: str
    lines: Iterable[Mapping[str, Any]]
    name: str = ""


@dataclass
class Stretch:
    """Samples with successive numbers, of one life. `model_epoch`: of the parameters that their
    gradients were computed with."""

    first: int
    count: int
    model_epoch: int


@dataclass
class AuditedRound:
    """A committed round, as reported by the peers that know its end. `by_heads`: its members are
    the heads of cohorts, and others may have brought samples as well."""

    epoch: int
    samples: float
    members: frozenset[str]
    at: float
    by_heads: bool = False
    stretches: list[Stretch] = field(default_factory=list)
    brought: dict[str, int] = field(default_factory=dict)


@dataclass
class RunAudit:
    """The findings. `samples`: in committed rounds; `dropped`: computed, and in none."""

    rounds: dict[str, AuditedRound] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    samples: float = 0.0
    computed: int = 0
    dropped: int = 0
    held_back: int = 0
    taken_for_dead: int = 0
    """Samples of peers that were killed after they had sent them."""
    taken_for_refused: int = 0
    """Samples of peers that gave them up after they had sent them."""
    given_up: dict[str, deque[Stretch]] = field(default_factory=lambda: defaultdict(deque))
    digests: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    """By epoch and history, those of every life that told one."""
    states_compared: int = 0
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def fail(self, failure: str) -> None:
        if len(self.failures) < MOST_TOLD:
            self.failures.append(failure)

    def step_moments(self) -> list[float]:
        """When each epoch was first seen to end."""
        first: dict[int, float] = {}
        for one in self.rounds.values():
            first[one.epoch] = min(one.at, first.get(one.epoch, one.at))
        return sorted(first.values())

    def loss_curve(self) -> list[tuple[float, float]]:
        """(samples in all steps so far, loss on held-out samples), by the epochs."""
        so_far: dict[int, float] = {}
        for one in self.rounds.values():
            so_far[one.epoch] = one.samples
        curve, total, epoch = [], 0.0, 0
        for reached, loss in sorted(self.held_out):
            for done in range(epoch, reached):
                total += so_far.get(done, 0.0)
            epoch = max(epoch, reached)
            curve.append((total, loss))
        return curve


def audit_run(lives: Iterable[AuditedLife]) -> RunAudit:
    audit = RunAudit()
    waiting: dict[str, deque[Stretch]] = defaultdict(deque)
    for life in lives:
        # a peer that came back under its name starts anew: what its last life had waits no more
        left = _follow(life, audit)
        waiting[life.peer].extend(left)
    for history, one in sorted(audit.rounds.items(), key=lambda item: item[1].epoch):
        _account(one, waiting, audit, history)
    lost = (*waiting.values(), *audit.given_up.values())
    audit.dropped = sum(stretch.count for row in lost for stretch in row)
    _check_stretches(audit)
    _check_digests(audit)
    audit.samples = sum(one.samples for one in audit.rounds.values())
    return audit


def _follow(life: AuditedLife, audit: RunAudit) -> deque[Stretch]:
    """Go through one life. Returns the samples that it had waiting at its end."""
    name = life.name or life.peer
    row: deque[Stretch] = deque()
    stalest = 0
    for line in life.lines:
        match line["what"]:
            case "began":
                stalest = 1 if line["delayed"] else 0
            case "batch":
                row.append(Stretch(line["first"], line["count"], line["model_epoch"]))
                audit.computed += line["count"]
            case "StepTaken":
                _check_staleness(line, name, row, stalest, audit)
                _report(line, life.peer, name, row, audit)
            case "GradientsDropped":
                if line["samples"] > (had := _size(row)):
                    audit.fail(f"{name} dropped {line['samples']} samples and had {had}")
                audit.given_up[life.peer].extend(_take(row, line["samples"]))
            case "HeldBack":
                held = _take(row, line["samples"], from_tail=True)
                audit.held_back += _size(held)
            case "digest":
                epoch = audit.digests.setdefault(line["epoch"], {})
                epoch.setdefault(line["history"], []).append(line["digest"])
                if "held_out" in line:
                    audit.held_out.append((line["model_epoch"], line["held_out"]))
    return row


def _check_staleness(
    line: Mapping[str, Any], name: str, row: Iterable[Stretch], stalest: int, audit: RunAudit
) -> None:
    """Whether a peer's own part of a step was computed with the parameters that it should be."""
    epoch, own = line["epoch"], line["own_samples"]
    for stretch in row:
        if own <= 0:
            return
        if not epoch - stalest <= stretch.model_epoch <= epoch:
            audit.fail(
                f"epoch {epoch}: {name} has samples in it that were computed with the parameters "
                f"of epoch {stretch.model_epoch}"
            )
            return
        own -= stretch.count


def _report(
    line: Mapping[str, Any], peer: str, name: str, row: deque[Stretch], audit: RunAudit
) -> None:
    """One peer says that a round was committed."""
    members = frozenset(line["members"]) or {peer}  # a peer that steps alone has no group
    by_heads = line.get("over_a_grid", False)
    told = AuditedRound(line["epoch"], line["samples"], frozenset(members), line["at"], by_heads)
    one = audit.rounds.setdefault(line["history"], told)
    if (told.epoch, told.samples, told.members) != (one.epoch, one.samples, one.members):
        audit.fail(f"epoch {told.epoch}: {name} tells another round than the others")
    one.at = min(one.at, told.at)
    own = line["own_samples"]
    if own and peer not in one.members and not by_heads:
        audit.fail(f"epoch {one.epoch}: {name} counts {own} samples and is no member")
    if peer in one.brought:
        audit.fail(f"epoch {one.epoch}: {name} counts twice")
    if own > _size(row):
        audit.fail(f"epoch {one.epoch}: {name} counts {own} samples and had {_size(row)}")
    one.brought[peer] = own
    one.stretches += _take(row, own)


def _account(
    one: AuditedRound, waiting: Mapping[str, deque[Stretch]], audit: RunAudit, history: str
) -> None:
    """Whether the samples of a round are those that its members brought."""
    rest = one.samples - sum(one.brought.values())
    may_have_brought = set(one.members)
    if one.by_heads:  # whoever died or gave up in this epoch may have been in a cohort's average
        may_have_brought |= {
            peer for peer, row in waiting.items() if row and row[0].model_epoch == one.epoch
        }
        may_have_brought |= {
            peer
            for peer, row in audit.given_up.items()
            if any(stretch.model_epoch == one.epoch for stretch in row)
        }
    silent = sorted(may_have_brought - set(one.brought))
    if rest < -0.5 or (rest > 0.5 and not silent):
        audit.fail(
            f"epoch {one.epoch} ({history[:8]}): {one.samples:g} samples, of which its members "
            f"brought {sum(one.brought.values())}"
        )
        return
    left = round(rest)
    for peer in silent:
        of_dead = _take(waiting[peer], left)
        left -= _size(of_dead)
        of_living = _take_of_epoch(audit.given_up[peer], one.epoch, left)
        left -= _size(of_living)
        audit.taken_for_dead += _size(of_dead)
        audit.taken_for_refused += _size(of_living)
        one.stretches += [*of_dead, *of_living]
    if left:
        audit.fail(f"epoch {one.epoch}: {left} samples belong to no peer, dead or alive")


def _take(row: deque[Stretch], count: int, *, from_tail: bool = False) -> list[Stretch]:
    """So many samples from one end of the row, or all that there are."""
    taken = []
    while count > 0 and row:
        one = row.pop() if from_tail else row.popleft()
        if one.count > count:
            if from_tail:
                row.append(replace(one, count=one.count - count))
                one = replace(one, first=one.first + one.count - count, count=count)
            else:
                row.appendleft(replace(one, first=one.first + count, count=one.count - count))
                one = replace(one, count=count)
        taken.append(one)
        count -= one.count
    return taken


def _take_of_epoch(row: deque[Stretch], epoch: int, count: int) -> list[Stretch]:
    """The same of those that were computed with the parameters of this epoch."""
    there = deque(one for one in row if one.model_epoch == epoch)
    others = [one for one in row if one.model_epoch != epoch]
    taken = _take(there, count)
    row.clear()
    row.extend([*others, *there])
    return taken


def _size(row: Iterable[Stretch]) -> int:
    return sum(stretch.count for stretch in row)


def _check_stretches(audit: RunAudit) -> None:
    """Whether a sample is in two rounds, or twice in one."""
    end, before = -1, 0
    for first, count, epoch in sorted(_all_stretches(audit)):
        if first < end:
            audit.fail(f"sample {first} is in epoch {before} and counts again in epoch {epoch}")
        end, before = max(end, first + count), epoch


def _all_stretches(audit: RunAudit) -> Iterator[tuple[int, int, int]]:
    for one in audit.rounds.values():
        for stretch in one.stretches:
            yield stretch.first, stretch.count, one.epoch


def _check_digests(audit: RunAudit) -> None:
    for epoch, histories in sorted(audit.digests.items()):
        if len(histories) > 1:
            audit.fail(f"epoch {epoch} has {len(histories)} histories: the run has forked")
        for digests in histories.values():
            if len(digests) > 1:
                audit.states_compared += len(digests)
            if (different := len(set(digests))) > 1:
                audit.fail(f"epoch {epoch}: peers hold {different} different states")
