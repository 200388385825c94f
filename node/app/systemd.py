"""The user's own systemd: the unit that runs `potluck join`, and `systemctl`, which runs the unit.

The unit (its text, its name, its place: pure) starts with the user's session (or with the machine,
if the user lingers), continues the last run, and is started again when it fails, but not when it
was told to leave, used wrongly (exit code 2) or refused (3): a retry would not help then.
`systemctl --user` does the rest.

Promises: no secret is in it, because everybody on the machine may be able to read it. It never
contains an invite or a code: when it is written there is a key and, in a closed run, a pass.

A user's own manager cannot do everything that the system's can. Options that need a mount namespace
fail on many machines there, so the hardening here is limited to the process itself. There may be a
systemd and no manager for this user, as after `su` or in a container, so the manager is asked
before anything is written.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

STOP_SECONDS: Final = 10
"""Leaving takes up to five; a machine that swaps may take longer. Then it is killed."""

RESTART_SECONDS: Final = 15  # a machine that just woke up has a network by then

UNIT: Final = """\
# Written by `potluck service install`; `potluck service uninstall` removes it.
[Unit]
Description=potluck: trains in the run {run}
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
{environment}Restart=on-failure
RestartSec={restart_seconds}
RestartPreventExitStatus=2 3
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop_seconds}
Nice=10
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""

NOT_IN_PROGRAMS: Final = "\"'\\$"  # systemd refuses the unit, however it is quoted

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN = re.compile(r"[A-Za-z0-9%@+=:,./_-]+")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ServiceUnit:
    """- `name`: without `.service`. - `command`: the program's absolute path, and its arguments.
    - `variables`: the places of the node's home and settings, if not the platform's."""

    name: str
    run: str
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """WrongUse for a word that cannot be written in a unit."""
        if not set(self.command[0]).isdisjoint(NOT_IN_PROGRAMS):
            raise WrongUse(
                f"systemd cannot start {self.command[0]}.",
                why=f"Its path contains one of {' '.join(NOT_IN_PROGRAMS)}.",
                advice="Rename the folder of potluck.",
            )
        environment = "".join(
            f"Environment={_quoted(f'{name}={value}')}\n" for name, value in self.variables.items()
        )
        return UNIT.format(
            run=_escaped(self.run),
            command=" ".join(_quoted(one).replace("$", "$$") for one in self.command),
            environment=environment,
            restart_seconds=RESTART_SECONDS,
            stop_seconds=STOP_SECONDS,
        )


def unit_folder(environment: Mapping[str, str]) -> Path:
    """The folder for a user's own units."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base) / "systemd" / "user"
    return Path(environment.get("HOME") or "~").expanduser() / ".config" / "systemd" / "user"


def unit_name(wanted: str | None, home: str | None) -> str:
    """The requested name, or one after the home: `potluck` for the usual place."""
    if wanted is not None:
        name = wanted.removesuffix(".service")
        if not _NAME.fullmatch(name):
            raise WrongUse(
                f"{wanted!r} is no name for a unit.",
                why="A name has only letters, digits, dots, dashes and underscores.",
                advice="Use for example --name potluck-poem.",
            )
        return name
    if home is None:
        return "potluck"
    return f"potluck-{_UNSAFE.sub('-', Path(home).name).strip('-._') or 'home'}"[:64]


def _quoted(word: str) -> str:
    """In systemd's quoting: one word, whatever is in it."""
    if any(not one.isprintable() for one in word):
        raise WrongUse(
            f"{word!r} cannot be written into a unit.",
            why="It contains a character that no line of a file can contain.",
            advice="Rename the folder.",
        )
    word = _escaped(word)
    if _PLAIN.fullmatch(word):
        return word
    word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'


def _escaped(text: str) -> str:
    """`%` begins a specifier."""
    return text.replace("%", "%%")


SYSTEMCTL_SECONDS: Final = 60.0  # `disable --now` waits until the node has left
ON_MACOS: Final = (
    "On macOS launchd does this: a LaunchAgent in ~/Library/LaunchAgents whose ProgramArguments "
    "are the whole path of potluck, `join` and `--plain`; or keep `potluck join` in tmux."
)
ELSEWHERE: Final = (
    "Let this machine's service manager start `potluck join --plain`, or keep it in tmux."
)


class NoServices(PotluckError):
    """This machine has no systemd, or this user no manager of their own."""


def require_systemd() -> None:
    """NoServices if there is none, or none that this user can ask, with advice."""
    if shutil.which("systemctl") is None:
        raise NoServices(
            "There is no systemd on this machine.",
            why="`potluck service` writes a unit for systemd, but finds no `systemctl`.",
            advice=ON_MACOS if sys.platform == "darwin" else ELSEWHERE,
        )
    ask_manager("show-environment")  # needs a running manager, and little else


def ask_manager(*words: str) -> str:
    """The output of `systemctl --user WORDS`. NoServices, with its message, if it fails."""
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
    """Whether this user's services run when nobody is logged in; False if that is unknown."""
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
