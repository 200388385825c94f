"""The reasons why the auth server refuses a pass, each with sentences for a person.

A refusal is a deliberate answer. It is in the audit log before it is given, it is signed, and a
node that gets one stops asking (except for `CHALLENGE`, which only means to ask for a new
challenge). A full disk or a provider that is down is never a refusal. `UNKNOWN_KEY` is not signed,
so a node asks again: this server was put back from a backup, and gets the key again.

The value of a reason is its code on the wire and in the log: never reused for something else.
"""

from __future__ import annotations

import enum

from auth.errors import AuthError


class JoinReason(enum.StrEnum):
    CHALLENGE = "challenge"
    SIGNATURE = "signature"
    TOKEN = "token"
    UNKNOWN_KEY = "unknown-key"
    NOT_ON_THE_LIST = "not-on-the-list"
    DENIED = "denied"
    REVOKED = "revoked"
    PEER_REVOKED = "peer-revoked"
    NAME_OF_ANOTHER = "name-of-another"
    PEER_OF_ANOTHER = "peer-of-another"
    TOO_MANY_KEYS = "too-many-keys"
    CODE_UNKNOWN = "code-unknown"
    CODE_USED_UP = "code-used-up"
    CODE_EXPIRED = "code-expired"
    CODE_CANCELLED = "code-cancelled"
    LOGIN_OVER = "login-over"
    CLOCK = "clock"
    LOGIN = "login"  # the identity provider, or the person there, said no


_ASK = "Ask the run's moderators."

_SENTENCES: dict[JoinReason, tuple[str, str, str]] = {
    JoinReason.CHALLENGE: (
        "The challenge does not hold.",
        "It was made by another server or for another peer, has expired, or was used before.",
        "Ask for a new challenge and sign that.",
    ),
    JoinReason.SIGNATURE: (
        "The peer did not prove that it holds its key.",
        "The signature of the challenge does not match the key, this run and this server.",
        "Use the invite of this run; if it is, update potluck.",
    ),
    JoinReason.TOKEN: (
        "The token is not one of this peer in this run.",
        "It belongs to another peer or run, or was changed.",
        "Run `potluck login INVITE` again.",
    ),
    JoinReason.UNKNOWN_KEY: (
        "This auth server does not know the auth key of the token.",
        "It was put back from a backup that is older than that key.",
        "Its moderators give it the key (`potluck auth keys rotate --key FILE`; of several, the "
        "newest last), or new invites to everybody if the key is lost.",
    ),
    JoinReason.NOT_ON_THE_LIST: (
        "You are not on the list of those who may take part.",
        "The login worked, and the run's moderators have not allowed this name.",
        "Tell them your name as it stands here, and log in again when they have.",
    ),
    JoinReason.DENIED: (
        "You may not take part in this run.",
        "A moderator has taken this name off the list.",
        _ASK,
    ),
    JoinReason.REVOKED: (
        "Your access was revoked.",
        "A moderator of the run decided so.",
        _ASK,
    ),
    JoinReason.PEER_REVOKED: (
        "The key of this node was revoked.",
        "A moderator of the run decided so, perhaps because the computer was lost.",
        "Ask them; a node with a new key (another POTLUCK_HOME) has to be allowed as well.",
    ),
    JoinReason.NAME_OF_ANOTHER: (
        "This name belongs to somebody else here.",
        "Another person logged in under it first; the login may have changed hands since.",
        _ASK,
    ),
    JoinReason.PEER_OF_ANOTHER: (
        "This node belongs to somebody who may not take part.",
        "Its key was used by an account that was denied or revoked.",
        _ASK,
    ),
    JoinReason.TOO_MANY_KEYS: (
        "This account has as many nodes as one account may have.",
        "Each node has a key of its own, and those of the last hours all count.",
        "Stop one and wait until its token is over, or ask the run's moderators.",
    ),
    JoinReason.CODE_UNKNOWN: (
        "This is not an enrolment code of this run.",
        "It is mistyped, or of another run.",
        "Copy it again, all four groups; or ask for a new one.",
    ),
    JoinReason.CODE_USED_UP: (
        "The enrolment code is used up.",
        "It was good for a number of nodes, and that many have used it.",
        "Ask the run's moderators for a new one.",
    ),
    JoinReason.CODE_EXPIRED: (
        "The enrolment code has expired.",
        "Codes are good until a time that the moderators chose.",
        "Ask the run's moderators for a new one.",
    ),
    JoinReason.CODE_CANCELLED: (
        "The enrolment code was cancelled.",
        "A moderator of the run decided so.",
        "Ask the run's moderators for a new one.",
    ),
    JoinReason.LOGIN_OVER: (
        "This node has to log in again.",
        "It has not logged in here, or was away for too long.",
        "Run `potluck login INVITE`.",
    ),
    JoinReason.CLOCK: (
        "The auth server cannot issue a token now.",
        "Its clock went back to before this name was last revoked.",
        "The server's operator has to set its clock. If that was far ahead then and is right now, "
        "a moderator allows the name once more (`potluck auth allow NAME`); then ask again.",
    ),
    JoinReason.LOGIN: (
        "The login did not succeed.",
        "The identity provider, or you on its page, said no.",
        "Run `potluck login INVITE` to try again.",
    ),
}


class JoinRefused(AuthError):
    """No pass for this peer. Sentences not given come from the reason."""

    exit_code = 3

    def __init__(
        self, reason: JoinReason, what: str = "", *, why: str = "", advice: str = ""
    ) -> None:
        usual_what, usual_why, usual_advice = _SENTENCES[reason]
        super().__init__(what or usual_what, why=why or usual_why, advice=advice or usual_advice)
        self.reason = reason

    def again(self) -> JoinRefused:
        """A fresh copy, to be kept or raised again: a raised one keeps all of its frames alive, and
        so the connection that it was answered on."""
        return JoinRefused(self.reason, self.what, why=self.why, advice=self.advice)

    @property
    def code(self) -> str:
        return self.reason.value
