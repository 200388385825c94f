"""The invite that `potluck join` was given: as text, from a file, the environment, or last time.

    invited = read_invited(places, text, file, environment)

An invite may carry an enrolment code. In a process list everybody on this machine can read it, so
it may come from a file, from standard input or from POTLUCK_INVITE; and what is kept for the next
start has no code in it any more: by then there is a pass.

Easy to get wrong: what was kept is only for a `join` without an invite. Whoever types one means it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from auth.invites import SCHEME as LOGIN_SCHEME
from auth.pasting import LONGEST_TEXT_CHARACTERS, holds
from node.disk_trouble import kept_in
from node.named_text import text_named
from node.places import Places
from node.private_file import UnusableFile, read_private_file, replace_private_file
from node.run.invite import (
    SCHEME,
    NotAnInvite,
    RunInvite,
    check_expiry,
    read_invite,
    write_invite,
)
from node.wrong_use import WrongUse

INVITE_VARIABLE: Final = "POTLUCK_INVITE"
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
        return read_invite(_text_of(_not_empty(file, "--invite-file")))
    if text is not None:
        text = _not_empty(text, "INVITE")
        return read_invite(text if _is_invite(text) else _text_of(text))
    if environment.get(INVITE_VARIABLE):
        return read_invite(_not_empty(environment[INVITE_VARIABLE], INVITE_VARIABLE))
    kept = _kept(places)
    if kept is None:
        raise WrongUse(
            "There is no invite to join with.",
            why="This home has not been in a run yet.",
            advice=f"`potluck join INVITE`: a text that begins with {SCHEME}, or a file with it "
            f"(--invite-file FILE, or {INVITE_VARIABLE}). {HAND_THEM_OUT}",
        )
    return kept


def check_still_good(places: Places, invite: RunInvite, now_ms: int) -> None:
    """InviteExpired, unless this home is in that run already: an invite lets somebody in, and
    whoever is in may type the same line for ever."""
    kept = _kept_if_readable(places)
    if kept is None or not _same_run(kept, invite):
        check_expiry(invite, now_ms)


def other_run_before(places: Places, invite: RunInvite) -> str:
    """The run that this home was in until now, if that is another one; else empty."""
    kept = _kept_if_readable(places)
    if kept is None or _same_run(kept, invite):
        return ""
    return f"{kept.run} of another organiser" if was_anothers(places, invite) else kept.run


def was_anothers(places: Places, invite: RunInvite) -> bool:
    """Whether this home was in a run of the same name, which another organiser has signed."""
    kept = _kept_if_readable(places)
    return kept is not None and kept.run == invite.run and kept.organiser != invite.organiser


def _same_run(one: RunInvite, other: RunInvite) -> bool:
    return (one.run, one.organiser) == (other.run, other.organiser)


def shows_a_code(typed: str | None, invite: RunInvite) -> bool:
    """Whether an enrolment code stood on the command line, where all users of a machine see it."""
    has_code = invite.access is not None and bool(invite.access.code)
    return has_code and typed is not None and _is_invite(typed)


def keep_invite(places: Places, invite: RunInvite) -> None:
    """For a `join` without an invite, later; without its code. HomeUnusable."""
    access = invite.access
    if access is not None:
        access = msgspec.structs.replace(access, code="")
    text = write_invite(msgspec.structs.replace(invite, access=access, expires_ms=0))
    with kept_in(places.data_folder):
        replace_private_file(_file(places), text.encode("ascii"))


def _kept(places: Places) -> RunInvite | None:
    """That of last time; NotAnInvite for a file that was damaged, or is not ours."""
    file = _file(places)
    try:
        data = read_private_file(file, LONGEST_TEXT_CHARACTERS)
        return None if data is None else read_invite(data.decode("utf-8", "replace"))
    except (NotAnInvite, UnusableFile) as error:
        raise NotAnInvite(
            f"The invite of last time, in {file}, cannot be used.",
            why=error.why or error.what,
            advice=f"Type it once more: `potluck join INVITE`. {HAND_THEM_OUT}",
        ) from None


def _kept_if_readable(places: Places) -> RunInvite | None:
    with contextlib.suppress(NotAnInvite):
        return _kept(places)
    return None


def _file(places: Places) -> Path:
    return places.data_folder / "run.invite"


def _not_empty(text: str, where: str) -> str:
    if text.strip():
        return text
    raise WrongUse(
        f"There is no invite in {where}: it is empty.",
        why="It may be a variable of the shell that is not set.",
        advice=f"An invite begins with {SCHEME}. {HAND_THEM_OUT}",
    )


def _is_invite(text: str) -> bool:
    """Whether it is the text itself, or meant to be: there is no file whose name has this in it."""
    return holds(SCHEME, text) or holds(LOGIN_SCHEME, text)


def _text_of(file: str) -> str:
    advice = f"An invite begins with {SCHEME}; otherwise it has to be a file with one, or -."
    text = text_named(file, "invite", limit=LONGEST_TEXT_CHARACTERS, advice=advice)
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise WrongUse(
            f"{file[:200]} is too long to be a file with an invite.",
            why=f"It has more than {LONGEST_TEXT_CHARACTERS:,} characters.",
            advice="Name the file that you were sent.",
        )
    return text
