"""What the promises of a quorum say: what may be decided already, and what is at hand.

This is the one choice on which safety rests (Paxos, phase 2a), so it is by itself.

Easy to get wrong: what a member has accepted counts by the ballot in which it did, not by the
attempt whose result it is; and it counts no more once anybody reports a later attempt as open.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from protocols.moshpit.agreement_messages import Acceptance, Attempt, Held, Promise
from protocols.moshpit.ballots import digest_of_result

Promises = Mapping[int, Promise]


def newest_attempt(promises: Promises) -> Attempt:
    return max((each.attempt for each in promises.values()), key=lambda each: each.ballot)


def newest_acceptance(promises: Promises) -> Acceptance | None:
    """What must be proposed again, because a quorum may have accepted it; None: nothing."""
    found = [each.accepted for each in promises.values() if each.accepted is not None]
    newest = max(found, key=lambda each: each.ballot, default=None)
    if newest is None or newest.ballot < newest_attempt(promises).ballot:
        return None
    return newest


def free_members(promises: Promises) -> set[int]:
    """Those who have promised, and may still accept."""
    return {member for member, each in promises.items() if not each.vowed}


def holders(promises: Promises, attempt: Attempt) -> dict[int, Held]:
    """Who of the free holds a result of this attempt, with a digest that is that of its parts."""
    found = {}
    for member in free_members(promises) & set(attempt.members):
        held = promises[member].held
        if (
            held is not None
            and held.attempt == attempt.ballot
            and held.digest == digest_of_result(held.statements)
        ):
            found[member] = held
    return found


def is_at_hand(held: Mapping[int, Held], wanted: AbstractSet[int]) -> bool:
    """Whether all who would be in a new attempt hold one result of the last, and would commit it:
    a new one could only lose the data of who is not there any more."""
    one = len({each.digest for each in held.values()}) == 1
    return one and wanted <= held.keys() and not any(held[each].contradicted for each in wanted)
