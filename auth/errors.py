"""The root of every error that auth raises on purpose, and the two about documents.

The package auth does not import the layers above it, so this is a root of its own. It has the same
three sentences (what happened, why probably, what to do) and the same exit code as the errors of
those layers, and is shown in the same way.

`auth.refusals.AccessRefused` is the third kind: somebody may not do something.
"""

from __future__ import annotations


class AuthError(Exception):
    """Root of the hierarchy of auth. `exit_code` is the exit code of the command."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.advice = advice

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.advice) if part)


class NotAKey(AuthError, ValueError):
    """Bytes or a text that cannot be an Ed25519 key or the peer id of one."""


class MalformedDocument(AuthError):
    """Bytes that are not the expected document: cut short, garbage, not canonical."""


class UntrustedDocument(AuthError):
    """A well-formed document that is not signed by a trusted key, or is about something else."""
