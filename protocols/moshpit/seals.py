"""Seals: how the members of a round prove to others what they have decided.

    seal = make_seal(identity, me, round_id, ballot, result, holds=True)    # at each member
    proof = proof_of(seals, ballot, size)                                   # at the coordinator
    if is_proof(proof, roster, round_id, result) and most_hold(proof): ...  # anybody with the list

A member that accepts a result in a ballot signs both, and whether it holds that result. If a quorum
has signed the same, it is decided, and no other can be (coordinator.py). The coordinator collects
the seals, and sends them to all with its decision.

Only the rounds of heads are sealed, because their results are handed down to peers that are not in
them. What the reducers sign is no proof: that only says what an attempt has brought, which may have
been given up, and a reducer may sign other values as well.

Easy to get wrong: a member also accepts what it does not hold, if a coordinator says that it was
proposed before. So a liar can have anything accepted. Only those that hold a result say what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protocols.identity import Identity, PeerId, verify
from protocols.moshpit.agreement_messages import Acceptance, Proof, Result
from protocols.moshpit.ballots import Ballot, Seal
from protocols.moshpit.member_state import quorum_of
from protocols.moshpit.roster import Roster
from protocols.rpc import encode

SEAL_DOMAIN: Final = b"potluck moshpit accepted 1"


def _sealed_bytes(round_id: bytes, ballot: Ballot, result: Result, *, holds: bool) -> bytes:
    return round_id + bytes([holds]) + encode(Acceptance(ballot, result))


def make_seal(
    identity: Identity, me: int, round_id: bytes, ballot: Ballot, result: Result, *, holds: bool
) -> Seal:
    """The seal of this member for a result that it has accepted in this ballot."""
    signed = _sealed_bytes(round_id, ballot, result, holds=holds)
    return Seal(me, identity.sign(SEAL_DOMAIN, signed), holds)


def is_valid(seal: Seal, member: PeerId, round_id: bytes, ballot: Ballot, result: Result) -> bool:
    """Whether this member has signed it."""
    signed = _sealed_bytes(round_id, ballot, result, holds=seal.holds)
    return verify(SEAL_DOMAIN, member, seal.signature, signed)


def proof_of(seals: Iterable[Seal], ballot: Ballot, size: int) -> Proof:
    """A proof of as few seals as decide a round of this size, of those that hold the result
    first."""
    chosen = sorted(seals, key=lambda one: (not one.holds, one.member))[: quorum_of(size)]
    return Proof(ballot, tuple(sorted(chosen, key=lambda one: one.member)))


def is_proof(proof: Proof, roster: Roster, round_id: bytes, result: Result) -> bool:
    """Whether a quorum of this list has accepted this result."""
    entries = roster.entries
    places = [one.member for one in proof.seals]
    if sorted(set(places)) != places or places[-1] >= len(entries):
        return False
    return len(places) >= quorum_of(len(entries)) and all(
        is_valid(one, entries[one.member].peer, round_id, proof.ballot, result)
        for one in proof.seals
    )


def most_hold(proof: Proof) -> bool:
    """Whether most of those who have signed it hold the result: enough for peers that were not in
    the round."""
    return 2 * sum(one.holds for one in proof.seals) > len(proof.seals)
