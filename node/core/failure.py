"""Failures as a person and a script see them: what, why, what next, and an exit code.

Errors that potluck raises on purpose have these fields. All others (errors of the operating system,
and bugs) get the same form here.

trio wraps the errors of a nursery into groups, even a single one. A group is unpacked, and its most
telling member is shown; the others appear with `--debug`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from auth.errors import AuthError
from models.errors import ModelsError
from protocols.errors import PotluckError

WRONG_USE = 2
NO_HOME = "home directory"  # part of Python's message for `~` and `~name` without a home
REPORT_IT = "Run it again with --debug for the traceback, and report it: this is a bug in potluck."


@dataclass(frozen=True)
class CommandFailure:
    what: str
    why: str = ""
    advice: str = ""
    exit_code: int = PotluckError.exit_code

    def as_mapping(self) -> dict[str, object]:
        return asdict(self)


def failure_of(error: BaseException) -> CommandFailure:
    """The most telling cause of an error, in the form that is shown."""
    causes = list(_leaves(error))
    for cause in causes:
        if isinstance(cause, PotluckError | AuthError | ModelsError):
            return CommandFailure(cause.what, cause.why, cause.advice, cause.exit_code)
    for cause in causes:
        if isinstance(cause, OSError):
            return _failure_of_system(cause)
    for cause in causes:
        if isinstance(cause, RuntimeError) and NO_HOME in str(cause).lower():
            return CommandFailure(
                "There is no home directory.",
                why=f"{str(cause).rstrip('.')}.",
                advice="Set HOME, or name another folder: --home DIRECTORY, or POTLUCK_HOME.",
                exit_code=WRONG_USE,
            )
    cause = causes[0] if causes else error
    name = type(cause).__name__
    return CommandFailure(f"An unexpected error: {name}: {cause}", advice=REPORT_IT)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


_ADVICE = {
    errno.EACCES: "Check its owner and mode (ls -l).",
    errno.EPERM: "Check its owner and mode (ls -l).",
    errno.ENOSPC: "The disk is full: free some space.",
    errno.EROFS: "That file system is read-only: point POTLUCK_HOME at a writable one.",
    errno.EADDRINUSE: "Another program uses that port: choose another one, or 0 for any free one.",
    errno.EADDRNOTAVAIL: "That address is not one of this machine: listen on /ip4/0.0.0.0/tcp/0.",
    errno.EMFILE: "Too many open files: raise the limit (ulimit -n).",
    errno.ENOTDIR: "A part of that path is a file, not a directory.",
    errno.EISDIR: "That is a directory; a file was expected.",
}


def _failure_of_system(error: OSError) -> CommandFailure:
    what = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        what = f"{what}: {error.filename}"
    return CommandFailure(
        f"The operating system refused: {what}.",
        advice=_ADVICE.get(error.errno or 0, "Run it again with --debug to see where."),
    )
