"""The file that an invite of either kind is written into (`auth invite`, `run invite`), or a code.

Only its owner may read it, since it may hold an enrolment code. An existing file is never
overwritten, not even if it appeared after the check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.app.views.auth_moments import utc
from node.core.disk_trouble import disk_trouble
from node.core.private_file import (
    FILE_MODE,
    UnusableFile,
    check_writable,
    replace_private_file,
)
from node.core.wrong_use import WrongUse


def check_flags(name: str | None, *, new_code: bool, file: Path | None) -> None:
    """WrongUse for a name without a code, and for a file that exists."""
    if name and not new_code:
        raise WrongUse(
            "--name belongs to a new code, but no code was asked for.",
            advice="Add --new-code, or leave --name out: an invite is the same for everybody.",
        )
    if file is not None:
        check_new(file)


def check_new(file: Path) -> None:
    """WrongUse if it exists, or could not be made."""
    if os.path.lexists(file):
        raise WrongUse(
            f"{file} is there already.",
            why="It may contain a code that is nowhere else.",
            advice="Remove it, or choose another name.",
        )
    if not file.absolute().parent.is_dir():
        raise WrongUse(
            f"There is no folder {file.absolute().parent} for {file.name}.",
            advice="Make it, or choose another place.",
        )
    if not os.access(file.absolute().parent, os.W_OK):  # before a code is made for it
        raise WrongUse(
            f"{file} cannot be written.",
            why="Its folder is not writable for you, or its disk is read-only.",
            advice="Choose another place.",
        )
    try:
        check_writable(file, 0)  # under a longer name, as it is written later
    except OSError as error:
        raise WrongUse(
            f"{file} cannot be written.",
            why=f"The system says: {error.strerror}.",
            advice="Choose a shorter name, or another place.",
        ) from None


def with_words(words: Sequence[str], text: str, code: Mapping[str, Any] | None) -> str:
    """The invite under these comment lines, and under one more if a code is in it."""
    lines = list(words)
    if code:
        lines.append(
            f"# It contains a code for one use, valid until {utc(code['view']['expires_ms'])}."
        )
    return "\n".join([*lines, text, ""])


def write_new(file: Path, content: str) -> None:
    """The whole file, or UnusableFile and none. An empty one keeps its name until it is written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(file, flags, FILE_MODE))
        try:
            replace_private_file(file, content.encode("utf-8"))
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    except OSError as error:
        why, advice = disk_trouble(error, file.absolute().parent)
        raise UnusableFile(f"{file} could not be written.", why=why, advice=advice) from None
