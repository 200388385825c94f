"""Getting `potluck join` admitted: the invite, and the pass of a closed run.

    invited = read_invited(places, text, file, environment)
    check_home(configuration)
    need = pass_needed(configuration, invite, code)
    if need is Need.CODE: await enrol_with_code(configuration, invite, code)

The invite is given as text, in a file or in the environment, or is the one from last time. It may
carry an enrolment code. Everybody on this machine can read a process list, so files, standard input
and POTLUCK_INVITE are accepted. The copy for the next start has no code: by then there is a pass.

If the invite (or POTLUCK_LOGIN_CODE) has an enrolment code, nobody is asked anything. Otherwise a
person has to log in, with the code of `potluck login` (node/app/login_flow.py).

The stored invite is only for a `join` without one; a typed invite wins. A code may be good for one
use only. So a node that has a pass, even an expired one, renews it and does not spend another code,
and no code is spent while the disk is full.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from auth.invites import SCHEME as LOGIN_SCHEME
from auth.invites import Invite
from auth.pasting import LONGEST_TEXT_CHARACTERS, holds
from node.core.access.login import enrol
from node.core.access.membership import open_membership
from node.core.access.pass_file import LARGEST_PASS_FILE_BYTES, load_pass
from node.core.access.renewal import TokenStanding
from node.core.configuration import Configuration
from node.core.disk_trouble import kept_in
from node.core.key_file import load_or_create_identity
from node.core.named_text import text_named
from node.core.places import Places
from node.core.private_file import (
    UnusableFile,
    check_writable,
    read_private_file,
    replace_private_file,
)
from node.core.wrong_use import WrongUse
from node.run.invite import (
    SCHEME,
    NotAnInvite,
    RunInvite,
    check_expiry,
    read_invite,
    write_invite,
)
from protocols.identity import Identity

INVITE_VARIABLE: Final = "POTLUCK_INVITE"
HAND_THEM_OUT: Final = "The run's organiser hands them out (`potluck run invite`)."


def read_invited(
    places: Places, text: str | None, file: str | None, environment: Mapping[str, str]
) -> RunInvite:
    """WrongUse if there is none, or two; NotAnInvite if it cannot be read."""
    if text is not None and file is not None:
        raise WrongUse(
            "There are two invites: one on the command line, one from --invite-file.",
            advice="Leave one of them out.",
        )
    if file is not None:
        return read_invite(_text_of(_not_empty(file, "--invite-file")))
    if text is not None:
        text = _not_empty(text, "INVITE")
        last = last_invite(places)
        if last is not None and text.strip() == last.run and not Path(text).exists():
            return last
        return read_invite(text if _is_invite(text) else _text_of(text))
    if environment.get(INVITE_VARIABLE):
        return read_invite(_not_empty(environment[INVITE_VARIABLE], INVITE_VARIABLE))
    kept = _kept(places)
    if kept is None:
        raise WrongUse(
            "There is no invite to join with.",
            why="This home has not been in a run yet.",
            advice=f"`potluck join INVITE`: a text that begins with {SCHEME}, or a file that "
            f"contains it (--invite-file FILE, or {INVITE_VARIABLE}). {HAND_THEM_OUT}",
        )
    return kept


def check_still_good(places: Places, invite: RunInvite, now_ms: int) -> None:
    """InviteExpired, unless this home is in that run already: a member may type the same line at
    any time."""
    kept = last_invite(places)
    if kept is None or not _same_run(kept, invite):
        check_expiry(invite, now_ms)


def other_run_before(places: Places, invite: RunInvite) -> str:
    """The other run that this home was in until now; empty if there was none."""
    kept = last_invite(places)
    if kept is None or _same_run(kept, invite):
        return ""
    return f"{kept.run} of another organiser" if was_anothers(places, invite) else kept.run


def was_anothers(places: Places, invite: RunInvite) -> bool:
    """Whether this home was in a run of the same name by another organiser."""
    kept = last_invite(places)
    return kept is not None and kept.run == invite.run and kept.organiser != invite.organiser


def _same_run(one: RunInvite, other: RunInvite) -> bool:
    return (one.run, one.organiser) == (other.run, other.organiser)


def shows_a_code(typed: str | None, invite: RunInvite) -> bool:
    """Whether an enrolment code was on the command line, where all users of a machine see it."""
    has_code = invite.access is not None and bool(invite.access.code)
    return has_code and typed is not None and _is_invite(typed)


def keep_invite(places: Places, invite: RunInvite) -> None:
    """Store it without its code, for a later `join` without an invite. HomeUnusable."""
    access = invite.access
    if access is not None:
        access = msgspec.structs.replace(access, code="")
    text = write_invite(msgspec.structs.replace(invite, access=access, expires_ms=0))
    with kept_in(places.data_folder):
        replace_private_file(_file(places), text.encode("ascii"))


def _kept(places: Places) -> RunInvite | None:
    """The invite from last time; NotAnInvite for a file that is damaged, or not ours."""
    file = _file(places)
    try:
        data = read_private_file(file, LONGEST_TEXT_CHARACTERS)
        return None if data is None else read_invite(data.decode("utf-8", "replace"))
    except (NotAnInvite, UnusableFile) as error:
        raise NotAnInvite(
            f"The last invite, in {file}, cannot be used.",
            why=error.why or error.what,
            advice=f"Type it once more: `potluck join INVITE`. {HAND_THEM_OUT}",
        ) from None


def last_invite(places: Places) -> RunInvite | None:
    """The invite from last time, if there is one that can be read."""
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
        why="Perhaps a shell variable is not set.",
        advice=f"An invite begins with {SCHEME}. {HAND_THEM_OUT}",
    )


def _is_invite(text: str) -> bool:
    """Whether this is the text itself, or meant to be: no file has such a name."""
    return holds(SCHEME, text) or holds(LOGIN_SCHEME, text)


def _text_of(file: str) -> str:
    advice = f"An invite begins with {SCHEME}; otherwise give a file that contains one, or -."
    text = text_named(file, "invite", limit=LONGEST_TEXT_CHARACTERS, advice=advice)
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise WrongUse(
            f"{file[:200]} is too long for a file with an invite.",
            why=f"It has more than {LONGEST_TEXT_CHARACTERS:,} characters.",
            advice="Name the file that you received.",
        )
    return text


ANOTHER_HOME: Final = "For a second run use another home (--home DIRECTORY, or POTLUCK_HOME)."


ROOM_BYTES: Final = LARGEST_PASS_FILE_BYTES  # the largest of the small files that a node keeps


class Need(enum.Enum):
    NOTHING = "nothing"
    """The run is open, or there is a pass that is good."""
    CODE = "code"
    """There is a code, and no pass: nobody has to be asked."""
    RENEWAL = "renewal"
    """The pass has expired. The others accept it a while longer, because the server may be away."""
    PERSON = "person"
    """A person has to log in, or the pass has to be renewed."""


def check_home(configuration: Configuration) -> None:
    """HomeUnusable unless files can be stored here. Called before a code is spent."""
    places = configuration.places
    for folder in dict.fromkeys((places.data_folder, places.run_folder)):
        with kept_in(folder):
            check_writable(folder / "room", ROOM_BYTES)


def own_identity(configuration: Configuration) -> Identity:
    """This node's key, made if there is none; KeyFileError says what is wrong with the home."""
    return load_or_create_identity(configuration.key_file)


def pass_needed(configuration: Configuration, invite: RunInvite, code: str) -> Need:
    """WrongUse if this home is in another run."""
    access = invite.access
    try:
        kept = load_pass(configuration.places.pass_file)
    except UnusableFile:
        kept = None
    if kept is not None and kept.run != invite.run:
        raise WrongUse(
            f"This home is in the run {kept.run}; the invite is for {invite.run}.",
            why="One home is one node in one run.",
            advice=ANOTHER_HOME,
        )
    if kept is not None and was_anothers(configuration.places, invite):
        raise WrongUse(
            f"This home is in a run {invite.run} already, and the invite is another organiser's.",
            why="Two runs may have the same name; the present pass is for one of them.",
            advice=ANOTHER_HOME,
        )
    if access is None:
        return Need.NOTHING
    if kept is None:
        return Need.CODE if code or access.code else Need.PERSON
    try:
        member = open_membership(configuration, own_identity(configuration))
    except UnusableFile:
        return Need.PERSON
    if member is None or kept.refused or kept.fingerprint != access.fingerprint:
        return Need.PERSON
    return _NEEDS[member.standing]


_NEEDS: Final = {
    TokenStanding.VALID: Need.NOTHING,
    TokenStanding.GRACE: Need.RENEWAL,
    TokenStanding.OVER: Need.PERSON,
}


def access_of(invite: RunInvite, code: str) -> Invite:
    """The access for logging in to this run, with the separate code, if one was given."""
    if invite.access is None:
        raise WrongUse(f"{invite.run} is an open run: there is nothing to log in to.")
    access = msgspec.structs.replace(invite.access, bootstrap=invite.bootstrap)
    return msgspec.structs.replace(access, code=code) if code else access


async def enrol_with_code(configuration: Configuration, invite: RunInvite, code: str) -> None:
    """Spend the code, and store the pass. AccessDenied, Outage, HomeUnusable."""
    identity, pass_file = own_identity(configuration), configuration.places.pass_file
    with kept_in(pass_file.parent):
        await enrol(identity, access_of(invite, code), pass_file)
