"""The errors of a login, each with the HTTP status that tells the volunteer's node what it is.

A refusal means "you, no": it is final for that login, is signed by the server, and is audited. An
outage means "not now": the same login can go on when the provider is back. The two must never be
mixed up, because a node stops on the first and waits on the second.

A provider's words end up in terminals and in the audit log. They pass through
`words_of_a_stranger`, which removes everything that controls a terminal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Final

from auth.errors import AuthError

# A sentence or two: enough to find the cause, too little to fill a log or a screen.
LONGEST_QUOTE_CHARACTERS: Final = 200

# How long a volunteer's node waits before it asks again, if the provider gave no figure.
RETRY_SECONDS: Final = 10


class LoginReason(enum.Enum):
    """Why a person was refused, for the audit log and for programs."""

    DENIED = "denied"  # the person said no at the provider
    ID_TOKEN = "id_token"  # what the provider signed does not prove who this is, to us, now
    USERNAME = "username"  # no claim makes a login name of safe characters
    STATE = "state"  # this browser is not the one that began this login
    CODE = "code"  # the provider does not take the code: used before, or not made for us


class LoginError(AuthError):
    """Root of the errors of a login."""

    code: ClassVar[str] = "login_failed"
    status: ClassVar[int] = 500


@dataclass(slots=True)
class RefusalRecord:
    """Whether a refusal is in the audit log, shared by all copies of it: it is recorded once.

    The first caller may have hung up before it could be written, so answering is not enough.
    """

    is_logged: bool = False


class LoginRefused(LoginError):
    """The answer is no, and asking again does not change it."""

    code = "login_refused"
    status = 403
    exit_code = 3

    def __init__(self, what: str, *, reason: LoginReason, why: str = "", advice: str = "") -> None:
        super().__init__(what, why=why, advice=advice)
        self.reason = reason
        self.provider = ""  # this and the peer are set by the login session
        self.peer: bytes | None = None
        self.record = RefusalRecord()

    def again(self) -> LoginRefused:
        """The same refusal for the next caller."""
        copy = LoginRefused(self.what, reason=self.reason, why=self.why, advice=self.advice)
        copy.provider, copy.peer, copy.record = self.provider, self.peer, self.record
        return copy


class LoginExpired(LoginError):
    """This login is over without an answer, or nobody here knows it."""

    code = "login_expired"
    status = 410


class TooManyLogins(LoginError):
    """The limit of open logins is reached, in all or for this address."""

    code = "too_many_logins"
    status = 429

    def __init__(self, what: str, *, why: str = "", advice: str = "", retry_after: int) -> None:
        super().__init__(what, why=why, advice=advice)
        self.retry_after = retry_after


class ProviderUnavailable(LoginError):
    """The provider did not give a usable answer: an outage, not a refusal."""

    code = "provider_unavailable"
    status = 503
    exit_code = 4

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", retry_after: int = RETRY_SECONDS
    ) -> None:
        super().__init__(what, why=why, advice=advice)
        self.retry_after = retry_after


class ProviderMisconfigured(ProviderUnavailable):
    """The provider's answer shows that a moderator must correct the settings."""

    code = "provider_misconfigured"


class LoginMisuse(LoginError):
    """An impossible request: a bug or an experiment of the caller."""

    code = "login_misuse"
    status = 400
    exit_code = 2


def words_of_a_stranger(text: str) -> str:
    """Text that came over the network, fit for a terminal, a page and a log: short, printable."""
    kept = "".join(c if c.isprintable() else "?" for c in text[:LONGEST_QUOTE_CHARACTERS])
    return kept + ("…" if len(text) > LONGEST_QUOTE_CHARACTERS else "")
