"""The unit with which systemd runs `potluck join` for a user: its text, its name, its place. Pure.

It begins with the user's session (or with the machine, where the user lingers), goes on in the run
of last time, and is started again when it fails, but not when it was told to leave, used wrongly
(exit code 2) or refused (3): there, trying again changes nothing.

Promises: no secret is in it. Everybody on the machine may be able to read it, so an invite or a
code never is; by the time that it is written there is a key and, in a closed run, a pass.

Easy to get wrong: a user's own manager cannot do all that the system's can. What needs a mount
namespace fails on many machines there, so the hardening here is what a process may do to itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.wrong_use import WrongUse

STOP_SECONDS: Final = 10
"""Five are promised for leaving; a machine that swaps may take longer. Then it is killed."""

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
    """- `name`: without `.service`. - `command`: the program by its whole path, and its words.
    - `variables`: where the node's home and settings are, if not in the platform's places."""

    name: str
    run: str
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """WrongUse for what systemd takes in no spelling."""
        if not set(self.command[0]).isdisjoint(NOT_IN_PROGRAMS):
            raise WrongUse(
                f"systemd does not start {self.command[0]}.",
                why=f"There is one of {' '.join(NOT_IN_PROGRAMS)} in its path.",
                advice="Give the folder that potluck is in another name.",
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
    """Where a user's own units are."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base) / "systemd" / "user"
    return Path(environment.get("HOME") or "~").expanduser() / ".config" / "systemd" / "user"


def unit_name(wanted: str | None, home: str | None) -> str:
    """The name that was asked for, or one after the home: `potluck` for the usual place."""
    if wanted is not None:
        name = wanted.removesuffix(".service")
        if not _NAME.fullmatch(name):
            raise WrongUse(
                f"{wanted!r} is no name for a unit.",
                why="It has letters, digits, dots, dashes and underlines only.",
                advice="Such as --name potluck-poem.",
            )
        return name
    if home is None:
        return "potluck"
    return f"potluck-{_UNSAFE.sub('-', Path(home).name).strip('-._') or 'home'}"[:64]


def _quoted(word: str) -> str:
    """As systemd reads it back: one word, whatever is in it."""
    if any(not one.isprintable() for one in word):
        raise WrongUse(
            f"{word!r} cannot stand in a unit.",
            why="It has a character in it that no line of a file can have.",
            advice="Give the folder another name.",
        )
    word = _escaped(word)
    if _PLAIN.fullmatch(word):
        return word
    word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'


def _escaped(text: str) -> str:
    """`%` begins a specifier."""
    return text.replace("%", "%%")
