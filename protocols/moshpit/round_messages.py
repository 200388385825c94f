"""What members of a round say to each other beside the data: the methods `agree` and `show`.

Every message of the agreement travels as the request of a unary call, with the round that it is
for; the empty answer says that it arrived. What may be said is in agreement_messages.py, what it
means in agreement.py. `show` brings the signed list of a round to a member that has not got it
from its leader, and that waits for it: the list needs no other proof than its signatures.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from protocols.errors import PotluckError
from protocols.messages import Empty, Message
from protocols.method import Method
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.part_messages import ALLREDUCE_PROTOCOL
from protocols.moshpit.roster import Roster
from protocols.moshpit.roster_refusals import CODES
from protocols.moshpit.statements import ROUND_ID_BYTES

AGREE_LIMIT_BYTES = 1 << 20  # the statements of 1,024 reducers have less than 200 KiB


class UnknownRound(PotluckError):
    """The message is for a round that this peer takes no part in, or has long forgotten."""


class NotInThisRound(PotluckError):
    """The message is from a peer that is not in the round's signed roster."""


class Agree(Message, frozen=True):
    """One message of the agreement of one round."""

    round_id: Annotated[bytes, Meta(min_length=ROUND_ID_BYTES, max_length=ROUND_ID_BYTES)]
    message: AgreementMessage


class Show(Message, frozen=True):
    """The list of a round that you are in; you have not got it, or do not know the round."""

    roster: Roster


AGREE: Final = Method(
    ALLREDUCE_PROTOCOL,
    "agree",
    Agree,
    Empty,
    request_limit_bytes=AGREE_LIMIT_BYTES,
    errors={"unknown-round": UnknownRound, "not-in-this-round": NotInThisRound},
    training=True,
)

SHOW: Final = Method(
    ALLREDUCE_PROTOCOL,
    "show",
    Show,
    Empty,
    request_limit_bytes=AGREE_LIMIT_BYTES,
    errors={"unknown-round": UnknownRound, **CODES},
    training=True,
)
