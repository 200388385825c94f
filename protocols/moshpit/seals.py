"""Seals: how the members of a round prove to others what they have decided.

    seal = make_seal(identity, round_id, ballot, result)      # a member, as it accepts the result
    if is_proof(proof, roster, round_id, result): ...         # anybody who has the list

A member that accepts a result in a ballot signs both. If a quorum has signed the same, that result
is decided, and no other can be (coordinator.py). The coordinator collects the seals, and sends
them to all with its decision.

Only the rounds of heads are sealed, because their results are handed down to peers that are not in
them. What the reducers sign is no proof: that only says what an attempt has brought, which may have
been given up, and a reducer may sign other values as well.
"""

from __future__ import annotations

from typing import Final

from protocols.identity import Identity, PeerId, verify
from protocols.moshpit.agreement_messages import Acceptance, Proof, Result
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.member_state import quorum_of
from protocols.moshpit.roster import Roster
from protocols.rpc import encode

SEAL_DOMAIN: Final = b"potluck moshpit accepted 1"


def _sealed_bytes(round_id: bytes, ballot: Ballot, result: Result) -> bytes:
    return round_id + encode(Acceptance(ballot, result))


def make_seal(identity: Identity, round_id: bytes, ballot: Ballot, result: Result) -> bytes:
    """Our own seal for this result, which we have accepted in this ballot."""
    return identity.sign(SEAL_DOMAIN, _sealed_bytes(round_id, ballot, result))


def is_seal(seal: bytes, member: PeerId, round_id: bytes, ballot: Ballot, result: Result) -> bool:
    """Whether this member has signed it."""
    return verify(SEAL_DOMAIN, member, seal, _sealed_bytes(round_id, ballot, result))


def is_proof(proof: Proof | None, roster: Roster, round_id: bytes, result: Result) -> bool:
    """Whether a quorum of this list has accepted this result."""
    if proof is None:
        return False
    entries = roster.entries
    places = [one.member for one in proof.seals]
    if sorted(set(places)) != places or places[-1] >= len(entries):
        return False
    return len(places) >= quorum_of(len(entries)) and all(
        is_seal(one.signature, entries[one.member].peer, round_id, proof.ballot, result)
        for one in proof.seals
    )
