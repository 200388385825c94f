"""An invite to a run: the short text that `potluck join` takes.

    text = write_invite(RunInvite(run="poem", bootstrap=(…,), fingerprint=…, expires_ms=…))
    invite = read_invite(text)          # NotAnInvite says what is wrong with it

    potluck-run:<base64url of MessagePack, and the first four bytes of its SHA-256>

Addresses travel in their binary form with each peer id once, so that it stays short. `organiser`
pins the key that signed the definition; `access` is there for a closed run, and is what
auth/invites.py has in its own: the auth server, its key, its certificate, and perhaps a code.

An invite may come as a file: lines that begin with # are for people, white space means nothing.

Easy to get wrong: the four bytes find a typing mistake, not a forger; and a code is a secret, so an
invite with one belongs into a file or POTLUCK_INVITE and never into a command's arguments.
"""

from __future__ import annotations

import msgspec

from auth.invites import Invite
from protocols.errors import PotluckError

SCHEME = "potluck-run:"


class NotAnInvite(PotluckError):
    """A text that is no invite to a run: cut short, mistyped, another thing."""

    exit_code = 2


class InviteExpired(PotluckError):
    exit_code = 3


class RunInvite(msgspec.Struct, frozen=True):
    run: str
    bootstrap: tuple[str, ...]
    """Addresses with peer ids: any peers of the run; they serve the definition."""
    organiser: str
    """The fingerprint of the organiser's key (auth.keys.fingerprint)."""
    expires_ms: int = 0
    """Unix milliseconds; 0: never."""
    access: Invite | None = None
    """What `potluck login` needs, for a closed run; None: anybody may take part."""

    def __repr__(self) -> str:  # a code is a secret
        return f"RunInvite(run={self.run!r}, organiser={self.organiser!r})"


def write_invite(invite: RunInvite) -> str:
    """ValueError for one that nobody could read."""
    raise NotImplementedError


def read_invite(text: str) -> RunInvite:
    """From its text or a file's contents; NotAnInvite. Whether it has expired is not looked at."""
    raise NotImplementedError


def check_expiry(invite: RunInvite, now_ms: int) -> None:
    """InviteExpired, which says when, and whom to ask."""
    raise NotImplementedError
