"""Why an entry or a list of members is refused: one type for each reason, so that it has a name.

All of them can cross the wire (`CODES`), so that a peer that is refused learns the reason, and its
owner what to do. Nobody is punished for them: a peer with an old layout is behind, not hostile.
"""

from __future__ import annotations

from protocols.errors import PotluckError, Refused


class RosterRefused(Refused):
    """An entry or a roster is not acceptable. The root of the reasons below."""


class OtherKey(RosterRefused):
    """It is for another run, round or group."""


class StaleEpoch(RosterRefused):
    """It is for an epoch that is not ours: an old one, or one that we have not reached."""


class OtherLayout(RosterRefused):
    """It is for a vector of another layout: other tensors, lengths, order or codecs."""


class NotSigned(RosterRefused):
    """A signature is not that of the peer in whose name it stands."""


class NotAMember(RosterRefused):
    """Whoever it comes from, or whoever reads it, is not in the list."""


class ChangedEntry(RosterRefused):
    """Our own entry is not in the list as we sent it."""


class WrongLeader(RosterRefused):
    """It was not made by the first in the order that can be dialled."""


class WrongOrder(RosterRefused):
    """The members are not in the order of their hashes."""


class TwiceTheSame(RosterRefused):
    """One peer stands in the list twice."""


class TooMany(RosterRefused):
    """The list has more members, or fewer, than a group may have."""


class ImpossibleNumber(RosterRefused):
    """A weight or a bandwidth that is negative, not finite, or beyond all bounds."""


CODES: dict[str, type[PotluckError]] = {
    "other-key": OtherKey,
    "stale-epoch": StaleEpoch,
    "other-layout": OtherLayout,
    "not-signed": NotSigned,
    "not-a-member": NotAMember,
    "changed-entry": ChangedEntry,
    "wrong-leader": WrongLeader,
    "wrong-order": WrongOrder,
    "twice-the-same": TwiceTheSame,
    "too-many": TooMany,
    "impossible-number": ImpossibleNumber,
}
