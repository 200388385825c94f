"""Into a closed run: the pass that `potluck join` needs, and how it comes by one.

    check_home(configuration)
    need = pass_needed(configuration, invite, code)
    if need is Need.CODE: await enrol_with_code(configuration, invite, code)

Where the invite (or POTLUCK_LOGIN_CODE) has an enrolment code nobody is asked anything. Else a
person has to log in, which `potluck login`'s own code does (node/commands/logging_in.py).

Easy to get wrong: a code may be good for one use only. Whoever has a pass already, even one that
has run out, renews it rather than spending another code; and on a full disk none is spent.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from auth.invites import Invite
from node.access.login import enrol
from node.access.membership import open_membership
from node.access.pass_file import LARGEST_PASS_FILE_BYTES, load_pass
from node.access.renewal_schedule import Standing
from node.configuration import Configuration
from node.disk_trouble import kept_in
from node.joining.invited import was_anothers
from node.key_file import load_or_create_identity
from node.private_file import UnusableFile, check_writable
from node.run.invite import RunInvite
from node.wrong_use import WrongUse
from protocols.identity import Identity

ANOTHER_HOME: Final = "For a second run name another home (--home DIRECTORY, or POTLUCK_HOME)."


ROOM_BYTES: Final = LARGEST_PASS_FILE_BYTES  # the largest of the small files that a node keeps


class Need(enum.Enum):
    NOTHING = "nothing"
    """The run is open, or there is a pass that is good."""
    CODE = "code"
    """There is a code, and no pass: nobody has to be asked."""
    PERSON = "person"
    """A person logs in, or the pass that is there has to be renewed."""


def check_home(configuration: Configuration) -> None:
    """HomeUnusable unless what joining keeps can be kept: asked before a code is spent on it."""
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
            why="Two runs may have the same name; the pass that is here counts in one of them.",
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
    is_good = member is not None and member.standing is Standing.VALID and not kept.refused
    return Need.NOTHING if is_good and kept.fingerprint == access.fingerprint else Need.PERSON


def access_of(invite: RunInvite, code: str) -> Invite:
    """What logs in to this run, with the code that was given beside it, if one was."""
    if invite.access is None:
        raise WrongUse(f"{invite.run} is an open run: there is nothing to log in to.")
    access = msgspec.structs.replace(invite.access, bootstrap=invite.bootstrap)
    return msgspec.structs.replace(access, code=code) if code else access


async def enrol_with_code(configuration: Configuration, invite: RunInvite, code: str) -> None:
    """Spend the code, and keep the pass. AccessDenied, Outage, HomeUnusable."""
    identity, pass_file = own_identity(configuration), configuration.places.pass_file
    with kept_in(pass_file.parent):
        await enrol(identity, access_of(invite, code), pass_file)
