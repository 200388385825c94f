"""Reads the invite and the code for `potluck login`, before anybody is asked.

Both may come from a file or standard input, because other users of a machine can see its command
lines. A code is never printed, not even in an error.
"""

from __future__ import annotations

import os

from auth.errors import MalformedDocument
from auth.invites import LONGEST_TEXT_CHARACTERS, SCHEME, Invite
from auth.invites import read_invite as parse_invite
from auth.pasting import holds
from node.core.named_text import text_named
from node.core.wrong_use import WrongUse

CODE_VARIABLE = "POTLUCK_LOGIN_CODE"
RUN_SCHEME = "potluck-run:"
LONGEST_CODE = 128  # characters; the server's own codes are shorter
INVITE_ADVICE = f"An invite begins with {SCHEME}; otherwise give a file that contains one, or -."
CODE_ADVICE = "Name a file that contains only the code."


def read_invite(words: str) -> Invite:
    """The invite: the text itself, - for standard input, or a file. Of an invite to a run
    (`potluck run invite`), the part for logging in."""
    if holds(SCHEME, words) or holds(RUN_SCHEME, words):
        text = words
    else:
        text = text_named(words, "invite", limit=LONGEST_TEXT_CHARACTERS, advice=INVITE_ADVICE)
    if holds(RUN_SCHEME, text):
        return _of_a_run(text)
    try:
        return parse_invite(text)
    except MalformedDocument as error:
        raise WrongUse(error.what, why=error.why, advice=error.advice) from None


def _of_a_run(text: str) -> Invite:
    from node.run.invite import read_invite as read_run_invite

    invite = read_run_invite(text)
    if invite.access is None:
        raise WrongUse(
            f"{invite.run} is an open run: there is nothing to log in to.",
            why="The invite names no auth server: everybody with a key may take part.",
            advice="Take part with `potluck join INVITE`.",
        )
    return Invite(
        invite.run,
        invite.bootstrap,
        invite.access.auth_url,
        invite.access.fingerprint,
        invite.access.code,
        invite.access.pin,
    )


def read_code(file: str | None) -> str:
    """The enrolment code, from the file if one is named, else from the environment; or empty."""
    if file is not None:
        text = text_named(file, "code", limit=LONGEST_CODE, advice=CODE_ADVICE)
    else:
        text = os.environ.get(CODE_VARIABLE, "")
    # in a file of `potluck auth codes new` the first line is the code
    code = "".join(text.strip().partition("\n")[0].split())
    if len(code) > LONGEST_CODE or not code.isascii() or not code.isprintable():
        raise WrongUse(
            "That is not an enrolment code.",
            why=f"It has up to {LONGEST_CODE} plain characters.",
            advice=CODE_ADVICE,
        )
    if file is not None and not code:
        raise WrongUse("There is no enrolment code in the file of --code-file.", advice=CODE_ADVICE)
    return code


def ask_for_code() -> str:
    """Have the person at the terminal type a code, without showing it. WrongUse if none comes."""
    import getpass

    try:
        code = "".join(getpass.getpass("Enrolment code: ").split())[:LONGEST_CODE]
    except EOFError:  # Ctrl-D
        code = ""
    if not code:
        raise WrongUse(
            "No enrolment code was typed.",
            advice="The run's moderators hand them out (`potluck auth codes new`).",
        )
    return code
