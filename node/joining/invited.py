"""The invite that `potluck join` was given: as text, from a file, the environment, or last time.

    invited = read_invited(places, text, file, environment)

An invite may carry an enrolment code. In a process list everybody on this machine can read it, so
it may come from a file, from standard input or from POTLUCK_INVITE; and what is kept for the next
start has no code in it any more: by then there is a pass.

Easy to get wrong: what was kept is only for a `join` without an invite. Whoever types one means it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from node.places import Places
from node.private_file import read_private_file, replace_private_file
from node.run.invite import SCHEME, RunInvite, read_invite, write_invite
from node.wrong_use import WrongUse

INVITE_VARIABLE: Final = "POTLUCK_INVITE"
LONGEST_TEXT_BYTES: Final = 64 << 10  # of a file, with what it says to people
HAND_THEM_OUT: Final = "The run's organiser hands them out (`potluck run invite`)."


def read_invited(
    places: Places, text: str | None, file: str | None, environment: Mapping[str, str]
) -> RunInvite:
    """WrongUse if there is none, or two; NotAnInvite, by name, for what cannot be read as one."""
    if text is not None and file is not None:
        raise WrongUse(
            "There are two invites: one on the command line, one from --invite-file.",
            advice="Leave one of them out.",
        )
    if file is not None:
        return read_invite(_text_of(file))
    if text is not None:
        return read_invite(text if _is_invite(text) else _text_of(text))
    if environment.get(INVITE_VARIABLE):
        return read_invite(environment[INVITE_VARIABLE])
    kept = _kept(places)
    if kept is None:
        raise WrongUse(
            "There is no invite to join with.",
            why="This home has not been in a run yet.",
            advice=f"`potluck join INVITE`: a text that begins with {SCHEME}, or a file with it "
            f"(--invite-file FILE, or {INVITE_VARIABLE}). {HAND_THEM_OUT}",
        )
    return kept


def keep_invite(places: Places, invite: RunInvite) -> None:
    """For a `join` without an invite, later; without its code. OSError as the system says it."""
    access = invite.access
    if access is not None:
        access = msgspec.structs.replace(access, code="")
    text = write_invite(msgspec.structs.replace(invite, access=access, expires_ms=0))
    replace_private_file(_file(places), text.encode("ascii"))


def _kept(places: Places) -> RunInvite | None:
    data = read_private_file(_file(places), LONGEST_TEXT_BYTES)
    return None if data is None else read_invite(data.decode("utf-8", "replace"))


def _file(places: Places) -> Path:
    return places.data_folder / "run.invite"


def _is_invite(text: str) -> bool:
    """Whether it is the text itself: there is no file whose name begins like this."""
    return text.strip().partition(":")[0] in ("potluck", SCHEME.rstrip(":")) and ":" in text


def _text_of(file: str) -> str:
    if file == "-":
        return sys.stdin.read(LONGEST_TEXT_BYTES)
    try:
        with Path(file).expanduser().open("rb") as opened:
            content = opened.read(LONGEST_TEXT_BYTES + 1)
    except OSError as error:
        raise WrongUse(
            f"There is no invite in {file[:200]}.",
            why=f"It cannot be read: {error.strerror or error}.",
            advice=f"An invite begins with {SCHEME}; otherwise it has to be a file with one, or -.",
        ) from None
    if len(content) > LONGEST_TEXT_BYTES:
        raise WrongUse(f"{file[:200]} is too long to be a file with an invite.")
    return content.decode("utf-8", "replace")
