"""The reasons for refusing somebody: those of DeDLOC I.5, and those that operation adds.

Each reason is distinct and typed, because different people act on them: a volunteer renews a token
or sets the clock, a moderator looks at a revocation, a developer at a malformed message. The value
of a reason is its code on the wire; codes are never reused for something else.

A refusal is a deliberate answer of somebody with the right to refuse. An unreachable server is
never a refusal.
"""

from __future__ import annotations

import enum

from auth.errors import AuthError


class Reason(enum.Enum):
    """The reason, as a code."""

    TOKEN_MISSING = "token-missing"
    MALFORMED = "malformed"
    TOKEN_SIGNATURE = "token-signature"
    TOKEN_EXPIRED = "token-expired"
    TOKEN_NOT_YET_VALID = "token-not-yet-valid"
    UNKNOWN_AUTH_KEY = "unknown-auth-key"
    WRONG_RUN = "wrong-run"
    REVOKED = "revoked"
    NOT_THE_PEER = "not-the-peer"  # the token names another key than the channel proved
    SIGNATURE = "signature"
    CLOCK = "clock"  # timed more than N seconds off
    REPLAY = "replay"
    TOO_MANY_REQUESTS = "too-many-requests"
    WRONG_RECIPIENT = "wrong-recipient"
    WRONG_NONCE = "wrong-nonce"  # a response to some other request
    ROLE = "role"
    CHALLENGE = "challenge"  # not made by this server, for another peer, too old, or used


_UPDATE = "It may run another version of potluck: update the older of the two."
_RENEW = "Renew the token; `potluck login INVITE` gets a new one."

# the default sentences for each reason: what, why, advice
_SENTENCES: dict[Reason, tuple[str, str, str]] = {
    Reason.TOKEN_MISSING: (
        "The message came without an access token.",
        "Only those with a token from the auth server take part in this run.",
        "Get one with `potluck login INVITE`; the run's moderators hand out invites.",
    ),
    Reason.MALFORMED: (
        "The proof of the right to take part cannot be read.",
        "It is not in the one form that the protocol allows.",
        _UPDATE,
    ),
    Reason.TOKEN_SIGNATURE: (
        "The access token is not signed by the run's auth server.",
        "It was changed, or made by somebody else.",
        _RENEW,
    ),
    Reason.TOKEN_EXPIRED: (
        "The access token has expired.",
        "Tokens live for about an hour, and a node renews its own while it can reach the server.",
        "See whether the auth server can be reached; `potluck login INVITE` gets a new token.",
    ),
    Reason.TOKEN_NOT_YET_VALID: (
        "The access token was issued in the future.",
        "The clock here, or that of the auth server, is wrong.",
        "Set the clocks; most systems do it by themselves when time synchronisation is on.",
    ),
    Reason.UNKNOWN_AUTH_KEY: (
        "The access token is signed with a key that is not trusted here.",
        "The key is newer than what is known here, was withdrawn, or is another run's.",
        _RENEW,
    ),
    Reason.WRONG_RUN: (
        "The access token is for another run.",
        "A token lets into one run only.",
        "Use the invite of this run.",
    ),
    Reason.REVOKED: (
        "Access was revoked.",
        "A moderator of the run decided so.",
        "Ask the run's moderators.",
    ),
    Reason.NOT_THE_PEER: (
        "The access token belongs to another peer.",
        "A token counts only together with the key that it names.",
        "Every node needs a token of its own: run `potluck login INVITE` on this one.",
    ),
    Reason.SIGNATURE: (
        "The signature of the message does not match its sender and contents.",
        "The message was changed on its way, or made by somebody else.",
        _UPDATE,
    ),
    Reason.CLOCK: (
        "The message was sent at another time than it says.",
        "One of the two clocks is wrong, or the message was delayed.",
        "Set the clock; most systems do it by themselves when time synchronisation is on.",
    ),
    Reason.REPLAY: (
        "The message was received before.",
        "Somebody sent it again, or its sender does not choose new nonces.",
        "If it was you, send a new request in place of the old one.",
    ),
    Reason.TOO_MANY_REQUESTS: (
        "Too many requests in a short time.",
        "A peer keeps only so many recent requests in mind for each sender.",
        "Send fewer; the room comes back within a minute.",
    ),
    Reason.WRONG_RECIPIENT: (
        "The message was meant for another peer.",
        "Somebody passed it on.",
        "Nothing was done; send requests to the peer that they name.",
    ),
    Reason.WRONG_NONCE: (
        "The answer is not to the request that was asked.",
        "Somebody sent an older answer again, or mixed two of them up.",
        "Ask again.",
    ),
    Reason.ROLE: (
        "The role in the access token does not allow this.",
        "Monitors read and do not train; moderators' acts are for moderators.",
        "Ask the run's moderators for another role.",
    ),
    Reason.CHALLENGE: (
        "The challenge does not hold.",
        "It was made by another server or for another peer, has expired, or was used before.",
        "Ask the auth server for a new challenge and sign that.",
    ),
}


class AccessRefused(AuthError):
    """Somebody may not do this; `reason` says why. Sentences not given come from the reason."""

    exit_code = 3

    def __init__(self, reason: Reason, what: str = "", *, why: str = "", advice: str = "") -> None:
        usual_what, usual_why, usual_advice = _SENTENCES[reason]
        super().__init__(what or usual_what, why=why or usual_why, advice=advice or usual_advice)
        self.reason = reason
