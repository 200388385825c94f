"""Who is not in the next attempt, by what members have against each other, and who is a liar.

What breaks a transfer is rarely known to whom it broke for. So what a member reports has a weight:

- *weak*: the transfer ended. The other may have given up because of a third. Counts for nothing
  at first; when the same two report it in a later attempt again, it counts as the next.
- *of a pair*: these two could not do business, and one of them has to go. It is the one with
  whom more members could not; then the one that was complained about more; then the later in the
  roster.
- anything else breaks the protocol, and is held against whom it names, except where two say it of
  each other: then it counts as of a pair. A member that says it of several others loses to them, by
  the same rule as a pair: nobody can have everybody else left out.

Who says something of itself (its own data is not finite) is always out.

Lies about results are proven, not believed: `liars` finds two statements with valid signatures of
one reducer for one part of one attempt that differ.

Easy to get wrong: a signature costs some 100 µs, and a hostile member can show as many statements
as there are parts. They are checked only where digests differ, each once however many members show
it, and a member that has shown one without a valid signature is not listened to any further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache, partial

from protocols.moshpit.agreement_messages import Held, Holding
from protocols.moshpit.ballots import LONGEST_SUSPICION, Ballot, Statement, Suspicion

WEAK_CODES = frozenset({"cut", "gave_up", "lost", "stopped"})
PAIR_CODES = frozenset({"unreachable", "absent", "stalled", "slow", "refused", "busy"})

LIED = "lied"
BAD_STATEMENT = "bad_statement"
DENIED = "denied"
SILENT = "silent"

Verify = Callable[[Ballot, Statement], bool]


def clipped(suspicions: Iterable[Suspicion], most: int) -> tuple[Suspicion, ...]:
    """The first few, with words that are not too long to send."""
    return tuple(
        Suspicion(each.member, each.code, each.text[:LONGEST_SUSPICION])
        for each in list(suspicions)[:most]
    )


class Blame:
    """What is known of this round's members. Grows by at most one entry for each pair of them."""

    def __init__(self) -> None:
        self.guilty: dict[int, Suspicion] = {}
        self._weak: dict[frozenset[int], Ballot] = {}
        self._pairs: dict[tuple[int, int], Suspicion] = {}  # from, against
        self._strong: dict[tuple[int, int], Suspicion] = {}

    def convict(self, suspicion: Suspicion) -> None:
        """This member is out for the rest of the round."""
        self.guilty.setdefault(suspicion.member, suspicion)

    def complain(self, complainer: int, ballot: Ballot, suspicions: Iterable[Suspicion]) -> None:
        """Take down what a member reports of the exchange of this ballot. Idempotent."""
        for suspicion in suspicions:
            accused = suspicion.member
            pair = frozenset((complainer, accused))
            if accused == complainer:
                self.convict(suspicion)
            elif suspicion.code in WEAK_CODES:
                if self._weak.setdefault(pair, ballot) < ballot:
                    self._pairs.setdefault((complainer, accused), suspicion)
            elif suspicion.code in PAIR_CODES:
                self._pairs.setdefault((complainer, accused), suspicion)
            else:
                self._strong.setdefault((complainer, accused), suspicion)

    def judge(self, shown: Mapping[int, Held | Holding], attempt: Ballot, verify: Verify) -> None:
        """Who lied, if members hold different results of this attempt, or were told of others."""
        statements = {member: each.statements for member, each in shown.items()}
        for suspicion in liars(statements, attempt, verify):
            self.convict(suspicion)
        for member, each in shown.items():
            self.complain(member, attempt, denials(each, shown))

    def ruled_out(self, candidates: Iterable[int]) -> dict[int, Suspicion]:
        """Who of these cannot be in the next attempt, and why."""
        left = set(candidates)
        out = {member: self.guilty[member] for member in left & self.guilty.keys()}
        left -= out.keys()
        mutual = {pair: why for pair, why in self._strong.items() if pair[::-1] in self._strong}
        one_sided = {pair: why for pair, why in self._strong.items() if pair not in mutual}
        for edges in (one_sided, {**self._pairs, **mutual}):
            found = _resolved(edges, left)
            out.update(found)
            left -= found.keys()
        return out


def _resolved(
    complaints: Mapping[tuple[int, int], Suspicion], candidates: Set[int]
) -> dict[int, Suspicion]:
    """Who has to go until no two of the candidates are left that have a complaint."""
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
    """Of members that could not do business in pairs, the one to leave out first."""
    partners = Counter(member for pair in {frozenset(each) for each in edges} for member in pair)
    against = Counter(accused for _, accused in edges)
    return max(partners, key=lambda member: (partners[member], against[member], member))


def denials(mine: Held | Holding, shown: Mapping[int, Held | Holding]) -> list[Suspicion]:
    """What a member has against those who told it that they hold another result, and now show the
    same: they deny it here, or did there. Of those who do hold another, somebody else is to blame.
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
    """Who lied, if members that show these statements hold different results of one attempt."""
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
