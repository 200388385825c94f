"""Decides which members are not in the next attempt, from their complaints, and finds liars.

A member whose transfer breaks rarely knows the cause. So each kind of report has a weight:

- *weak*: the transfer ended. The other member may have given up because of a third, so this counts
  for nothing at first. If the same two report it again in a later attempt, it counts as one of a
  pair, unless the other gave up because of a third that it has complained of itself.
- *of a pair*: these two could not exchange data, and one of them must go. It is the one with which
  more members could not; then the one with more complaints against it; then the later in the
  roster.
- of a pair and *explained*: a reducer that waits for values has no averages, and a member that
  waits for averages cannot close. So `no_averages` counts for nothing against a member that has
  complained of `no_values` in the same attempt. If that member names the one whose values it was
  waiting for (`awaited`), the complaint counts against that one instead. So it does for one that
  has not closed, and was waiting for another's averages (`lacking`) or closing message
  (`unclosed`); and so it does for a coordinator that was `idle`, if another member says as well
  that this one is `unclosed`, and this one does not say that it waits for the coordinator. A member
  that is only almost late (`overdue`) has a complaint from each that reports so, once one has found
  it late.
- a member that has not reported how its exchange went (`withheld`) is out, unless it shows by now
  that it holds a result, or says for which others it was waiting: then each of these and it are a
  pair. It is no reason that it waits for the coordinator, if that has ended its own exchange, nor
  for the same member as another time.
- anything else breaks the protocol, and counts against the named member. If two report it of each
  other, it counts as of a pair. A member that reports it of several others loses to them by the
  same rule as a pair, so no member can have all others left out.

A member that reports itself (its own data is not finite) is always out.

Lies about results need a proof: `liars` finds two different statements of one reducer for one part
of one attempt, both with valid signatures.

Easy to get wrong: checking a signature costs some 100 µs, and a hostile member can show as many
statements as there are parts. So only those with differing digests are checked, each once however
many members show it, and a member that has shown an invalid signature is ignored from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache, partial

from protocols.moshpit.agreement_messages import Held, Holding
from protocols.moshpit.ballots import LONGEST_SUSPICION, Ballot, Statement, Suspicion

WEAK_CODES = frozenset({"cut", "gave_up", "lost", "stopped"})

NO_VALUES, NO_AVERAGES, NOT_CLOSED = "no_values", "no_averages", "not_closed"  # attempt.py
OVERDUE, AWAITED, LACKING, UNCLOSED = "overdue", "awaited", "lacking", "unclosed"
IDLE = "idle"  # it coordinates, answers, and does nothing
LATE_CODES = frozenset({NO_VALUES, NO_AVERAGES, NOT_CLOSED})
WAIT_CODES = frozenset({OVERDUE, AWAITED, LACKING, UNCLOSED})
EXPLANATIONS: Mapping[str, Set[str]] = {
    NO_AVERAGES: {NO_VALUES, OVERDUE, AWAITED},
    NOT_CLOSED: {NO_VALUES, NO_AVERAGES, *WAIT_CODES},
    IDLE: {UNCLOSED},
}
"""What else a member has to say that is accused of this: a complaint explains it, and if it was
waiting, the one that it was waiting for is accused instead."""

PAIR_CODES = frozenset(
    {"unreachable", "absent", "stalled", "slow", "refused", "busy", IDLE} | LATE_CODES
)

BALLOTS_KEPT = 4
"""Attempts of each pair in which one complained of the other. After two of them, a member that
blames others for its own faults has two complaints against it."""

LIED = "lied"
BAD_STATEMENT = "bad_statement"
DENIED = "denied"
SILENT = "silent"
WITHHELD = "withheld"

Verify = Callable[[Ballot, Statement], bool]
Pair = tuple[int, int]  # from, against
Complaints = Mapping[Pair, Mapping[Ballot, Suspicion]]


def clipped(suspicions: Iterable[Suspicion], most: int) -> tuple[Suspicion, ...]:
    """The first suspicions, with texts that are short enough to send."""
    return tuple(
        Suspicion(each.member, each.code, each.text[:LONGEST_SUSPICION])
        for each in list(suspicions)[:most]
    )


class Blame:
    """The complaints among this round's members. At most a few entries for each pair."""

    def __init__(self) -> None:
        self.guilty: dict[int, Suspicion] = {}
        self._weak: dict[Pair, dict[Ballot, Suspicion]] = {}
        self._pairs: dict[Pair, dict[Ballot, Suspicion]] = {}
        self._waits: dict[Pair, dict[Ballot, Suspicion]] = {}
        self._strong: dict[Pair, Suspicion] = {}
        self._withheld: dict[int, dict[Ballot, list[int]]] = {}

    def convict(self, suspicion: Suspicion) -> None:
        """This member is out for the rest of the round."""
        self.guilty.setdefault(suspicion.member, suspicion)

    def withholds(self, member: int, ballot: Ballot, parts: list[int]) -> None:
        """This member is alive, and has not reported how its exchange went, long after it could. A
        result of that exchange has these parts."""
        self._withheld.setdefault(member, {})[ballot] = parts

    def complain(self, complainer: int, ballot: Ballot, suspicions: Iterable[Suspicion]) -> None:
        """Note a member's complaints about the exchange of this ballot. Idempotent."""
        for suspicion in suspicions:
            pair = (complainer, suspicion.member)
            if suspicion.member == complainer:
                self.convict(suspicion)
            elif suspicion.code in WEAK_CODES:
                _note(self._weak, pair, ballot, suspicion)
            elif suspicion.code in PAIR_CODES:
                _note(self._pairs, pair, ballot, suspicion)
            elif suspicion.code in WAIT_CODES:
                _note(self._waits, pair, ballot, suspicion)
            else:
                self._strong.setdefault(pair, suspicion)

    def judge(self, shown: Mapping[int, Held | Holding], attempt: Ballot, verify: Verify) -> None:
        """Find liars, if members hold different results of this attempt, or were told of others.
        Who shows a result withholds nothing any more."""
        for member, each in shown.items():
            withheld = self._withheld.get(member, {})
            if withheld.get(attempt) == [one.part for one in each.statements]:
                del withheld[attempt]
        statements = {member: each.statements for member, each in shown.items()}
        for suspicion in liars(statements, attempt, verify):
            self.convict(suspicion)
        for member, each in shown.items():
            self.complain(member, attempt, denials(each, shown))

    def ruled_out(self, candidates: Iterable[int]) -> dict[int, Suspicion]:
        """The candidates that cannot be in the next attempt, and why."""
        left, told = set(candidates), _Told(self._pairs, self._waits)
        text = "did not say what it holds, nor for whom it waits"
        out = {
            member: Suspicion(member, WITHHELD, text)
            for member in left & self._withheld.keys()
            if self._withheld[member] and not self._reasons(member, told)
        }
        out |= {member: self.guilty[member] for member in left & self.guilty.keys()}
        left -= out.keys()
        mutual = {pair: why for pair, why in self._strong.items() if pair[::-1] in self._strong}
        one_sided = {pair: why for pair, why in self._strong.items() if pair not in mutual}
        for edges in (one_sided, {**self._between_pairs(told), **mutual}):
            found = _resolved(edges, left)
            out.update(found)
            left -= found.keys()
        return out

    def _between_pairs(self, told: _Told) -> dict[Pair, Suspicion]:
        """The complaints between pairs, without those that others explain."""
        found = self._repeated()
        for pair, by_ballot in self._pairs.items():
            for ballot, why in by_ballot.items():
                explained, instead = _explanation(pair[1], ballot, why.code, told)
                mutual = [one for one in instead if one.member == pair[0]]
                for one in (mutual or instead)[:1]:
                    found.setdefault((pair[1], one.member), one)
                if mutual or not (explained or instead):
                    found.setdefault(pair, why)
        for member in self._withheld:
            for why in self._reasons(member, told):
                found.setdefault((member, why.member), why)
        for pair, by_ballot in self._waits.items():
            for ballot, why in by_ballot.items():
                if why.code == OVERDUE and (pair[1], ballot) in told.late:
                    found.setdefault(pair, why)
        return found

    def _reasons(self, member: int, told: _Told) -> list[Suspicion]:
        """For whom a member that withheld was waiting, by its own words; none if it had no reason,
        or not another one, in some attempt."""
        reasons: dict[int, Suspicion] = {}
        for ballot in self._withheld[member]:
            knows_better = ballot not in self._withheld.get(ballot.coordinator, {})
            said = member, ballot
            new = {
                why.member: why
                for why in (*told.complaints.get(said, ()), *told.waits.get(said, ()))
                if why.member not in reasons
                and not (knows_better and why.member == ballot.coordinator)
            }
            if not new:
                return []
            reasons |= new
        return [*reasons.values()]

    def _repeated(self) -> dict[Pair, Suspicion]:
        """Transfers that merely ended, between pairs for which that happened in two attempts."""
        complained = {(by, ballot) for (by, _), each in self._pairs.items() for ballot in each}
        ended: dict[frozenset[int], dict[Ballot, tuple[Pair, Suspicion]]] = {}
        for pair, by_ballot in self._weak.items():
            for ballot, why in by_ballot.items():
                if why.code != "gave_up" or (pair[1], ballot) not in complained:
                    ended.setdefault(frozenset(pair), {})[ballot] = (pair, why)
        twice = [each for each in ended.values() if len(each) > 1]
        return dict(each[max(each)] for each in twice)


class _Told:
    """What the members say, by who says it in which attempt; and of whom they say some things.
    Made once for all: a hostile member may say 32 things, and each is looked for in all others."""

    def __init__(self, pairs: Complaints, waits: Complaints) -> None:
        self.complaints, self.waits = _by_complainer(pairs), _by_complainer(waits)
        self.late = _accused_of(NO_VALUES, self.complaints)
        self.unclosed = _accused_of(UNCLOSED, self.waits)


Said = Mapping[tuple[int, Ballot], list[Suspicion]]


def _by_complainer(known: Complaints) -> Said:
    found: dict[tuple[int, Ballot], list[Suspicion]] = {}
    for (by, _), by_ballot in known.items():
        for ballot, why in by_ballot.items():
            found.setdefault((by, ballot), []).append(why)
    return found


def _accused_of(code: str, said: Said) -> Counter[tuple[int, Ballot]]:
    """How many members say this of each other one, in each attempt."""
    return Counter(
        (why.member, ballot)
        for (_, ballot), each in said.items()
        for why in each
        if why.code == code
    )


def _explanation(
    accused: int, ballot: Ballot, code: str, told: _Told
) -> tuple[bool, list[Suspicion]]:
    """Whether another member kept it from doing better in this attempt, and which ones, if there is
    no complaint against these."""
    explains = EXPLANATIONS.get(code)
    if explains is None:
        return False, []
    said = accused, ballot
    if any(why.code in explains for why in told.complaints.get(said, ())):
        return True, []
    waits = [why for why in told.waits.get(said, ()) if why.code in explains]
    if code == IDLE:
        waits = [why for why in waits if _is_confirmed(why.member, accused, ballot, told)]
    return False, waits


def _is_confirmed(unclosed: int, by: int, ballot: Ballot, told: _Told) -> bool:
    """Whether another member, too, says that this one is unclosed, and it does not itself wait for
    the one that says so: then it could not close."""
    if told.unclosed[unclosed, ballot] < 2:
        return False
    said = unclosed, ballot
    return all(
        why.member != by for why in (*told.complaints.get(said, ()), *told.waits.get(said, ()))
    )


def _note(
    known: dict[Pair, dict[Ballot, Suspicion]], pair: Pair, ballot: Ballot, why: Suspicion
) -> None:
    by_ballot = known.setdefault(pair, {})
    if len(by_ballot) < BALLOTS_KEPT:
        by_ballot.setdefault(ballot, why)


def _resolved(
    complaints: Mapping[tuple[int, int], Suspicion], candidates: Set[int]
) -> dict[int, Suspicion]:
    """The members to leave out, so that there is no complaint between any two that remain."""
    left, out = set(candidates), dict[int, Suspicion]()
    while edges := {pair: why for pair, why in complaints.items() if left.issuperset(pair)}:
        worst = _worst(edges)
        why = next(why for pair, why in edges.items() if worst in pair)
        if why.member != worst:
            text = f"it and member {why.member}: {why.text}"[:LONGEST_SUSPICION]
            why = Suspicion(worst, why.code, text)
        out[worst] = why
        left.discard(worst)
    return out


def _worst(edges: Iterable[tuple[int, int]]) -> int:
    """The member to leave out first, of members that could not exchange data in pairs."""
    partners = Counter(member for pair in {frozenset(each) for each in edges} for member in pair)
    against = Counter(accused for _, accused in edges)
    return max(partners, key=lambda member: (partners[member], against[member], member))


def denials(mine: Held | Holding, shown: Mapping[int, Held | Holding]) -> list[Suspicion]:
    """A member's complaints about members that told it of another result than they show now, if
    they show its own: one of the two claims is false. If they do hold another result, a third
    member is to blame.
    """
    text = "told this one of another result than it shows"
    return [
        Suspicion(member, DENIED, text)
        for member in mine.contradicted
        if member in shown and shown[member].digest == mine.digest
    ]


def liars(
    shown: Mapping[int, tuple[Statement, ...]], attempt: Ballot, verify: Verify
) -> list[Suspicion]:
    """Find liars among members that hold different results of one attempt, by these statements."""
    by_part: dict[int, dict[bytes, list[tuple[int, Statement]]]] = {}
    for member, statements in sorted(shown.items()):
        for statement in statements:
            digests = by_part.setdefault(statement.part, {})
            digests.setdefault(statement.digest, []).append((member, statement))
    forgers: set[int] = set()
    found: list[Suspicion] = []
    signed = cache(partial(verify, attempt))  # honest members show the very same statements
    for part, digests in sorted(by_part.items()):
        if len(digests) < 2:
            continue
        told = 0
        for _digest, showing in sorted(digests.items()):
            honest = False
            for member, statement in showing:
                if member in forgers:
                    continue
                if signed(statement):
                    honest = True
                    continue
                forgers.add(member)
                found.append(
                    Suspicion(member, BAD_STATEMENT, f"shows what member {part} has never signed")
                )
            told += honest
        if told > 1:
            text = f"has signed {told} different results for its part in one attempt"
            found.append(Suspicion(part, LIED, text))
    return found
