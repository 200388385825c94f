"""The user's own systemd, by its program `systemctl --user`: what `potluck service` asks of it.

Easy to get wrong: there may be a systemd and no manager for this user, as after `su` or in a
container. So it is asked for before anything is written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

from protocols.errors import PotluckError

SYSTEMCTL_SECONDS: Final = 60.0  # `disable --now` waits until the node has left
ON_MACOS: Final = (
    "On macOS launchd does this: a LaunchAgent in ~/Library/LaunchAgents whose ProgramArguments "
    "are the whole path of potluck, `join` and `--plain`; or keep `potluck join` in tmux."
)
ELSEWHERE: Final = (
    "Have what starts programs on this machine start `potluck join --plain`, or keep it in tmux."
)


class NoServices(PotluckError):
    """This machine has no systemd, or this user no manager of their own."""


def require_systemd() -> None:
    """NoServices where there is none, or none that this user can ask, with what to do instead."""
    if shutil.which("systemctl") is None:
        raise NoServices(
            "There is no systemd on this machine.",
            why="`potluck service` writes a unit for it, and finds no `systemctl`.",
            advice=ON_MACOS if sys.platform == "darwin" else ELSEWHERE,
        )
    ask_manager("show-environment")  # the least that only a running manager answers


def ask_manager(*words: str) -> str:
    """`systemctl --user WORDS`: what it printed. NoServices, with what it said, if it fails."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *words],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoServices(
            f"`systemctl --user {' '.join(words)}` did not answer.", why=str(error)
        ) from None
    if done.returncode:
        raise NoServices(
            f"`systemctl --user {' '.join(words)}` failed.",
            why=(done.stderr or done.stdout).strip()[:500] or f"exit code {done.returncode}",
            advice="This user may have no session of their own here (`su` and `sudo` make none): "
            "log in as the user, or `loginctl enable-linger` for them, and try again.",
        )
    return done.stdout


def lingers() -> bool:
    """Whether this user's services go on when nobody is logged in; False where nobody knows."""
    if shutil.which("loginctl") is None:
        return False
    try:
        done = subprocess.run(
            ["loginctl", "show-user", str(os.getuid()), "--property=Linger"],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Linger=yes" in done.stdout
