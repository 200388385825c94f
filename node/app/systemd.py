"""Units of systemd: the user's own, which runs `potluck join` or `potluck experts serve`, and the
system's, which runs `potluck backbone`; and `systemctl`, which runs the user's.

Both units are pure text. systemd starts them again when they fail, but not when they were told to
leave, used wrongly (exit code 2) or refused (3): a retry would not help then. The user's starts
with the session (or with the machine, if the user lingers) and continues the last run. The system's
starts with the machine.

Promises: no secret is in a unit, because everybody on the machine may be able to read it. It never
contains an invite or a code: when it is written there is a key and, in a closed run, a pass.

A user's own manager cannot do everything that the system's can. Options that need a mount namespace
fail on many machines there, so the hardening of `ServiceUnit` is limited to the process itself, and
`BackboneUnit` has more. There may be a systemd and no manager for this user, as after `su` or in a
container, so the manager is asked before anything is written.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.core.caps.settings import caps_of
from node.core.configuration import Configuration
from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

STOP_SECONDS: Final = 10
"""Leaving takes up to five; a machine that swaps may take longer. Then it is killed."""

RESTART_SECONDS: Final = 15  # a machine that just woke up has a network by then

UNIT: Final = """\
# Written by `potluck service install`; `potluck service uninstall` removes it.
[Unit]
Description=potluck: {does}
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
{hardening}
[Install]
WantedBy=default.target
"""

WRITTEN_HERE: Final = UNIT.partition(";")[0]  # a unit that begins otherwise is somebody's own

HARDENING: Final = """\
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
"""

BACKBONE_UNIT: Final = """\
# Written by `potluck backbone --systemd`.
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
ExecStart={command}
{environment}{places}Restart=on-failure
RestartSec={restart_seconds}
RestartPreventExitStatus=2 3
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop_seconds}
LimitNOFILE={descriptors}
{memory}
{hardening}ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
PrivateDevices={private_devices}
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
ProtectProc=invisible
CapabilityBoundingSet={capabilities}

[Install]
WantedBy=multi-user.target
"""

STATE_FOLDER: Final = Path("/var/lib/potluck")  # what StateDirectory=potluck makes, for its user
HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))  # what ProtectHome= hides
SERVICE_USER: Final = "potluck"  # if root writes the unit
BACKBONE_STOP_SECONDS: Final = 30  # it writes a last checkpoint
OTHER_DESCRIPTORS: Final = 3072  # outgoing connections, files, libraries
LOWEST_PORT_OF_ALL: Final = 1024  # those below are for root, or need a capability
RELAY_BASE_BYTES: Final = 256 * 1024 * 1024  # Python with its libraries has about 100 MiB
CIRCUIT_BYTES: Final = 1024 * 1024  # two copies, and the windows of two streams both ways

NOT_IN_PROGRAMS: Final = "\"'\\$"  # systemd refuses the unit, however it is quoted

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN = re.compile(r"[A-Za-z0-9%@+=:,./_-]+")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ServiceUnit:
    """- `name`: without `.service`. - `does`: in words.
    - `command`: the program's absolute path, and its arguments.
    - `variables`: the places of the node's home and settings, if not the platform's."""

    name: str
    does: str
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """WrongUse for a word that cannot be written in a unit."""
        return UNIT.format(
            does=_escaped(self.does),
            command=_command(self.command),
            environment=environment_lines(self.variables),
            restart_seconds=RESTART_SECONDS,
            stop_seconds=STOP_SECONDS,
            hardening=HARDENING,
        )


@dataclass(frozen=True)
class BackboneUnit:
    """The system's unit of a backbone.

    - `command`: the program's absolute path, and its arguments, with absolute paths.
    - `folder`: the run's; None without a run.
    - `home`: the one that was chosen; None is `STATE_FOLDER`, which systemd makes.
    - `http_port`: where it answers over HTTP.
    """

    command: Sequence[str]
    folder: Path | None
    home: Path | None
    config_file: Path | None
    configuration: Configuration
    http_port: int = 0

    def text(self) -> str:
        """WrongUse for a word that cannot be written in a unit."""
        what = "relays for others" if self.folder is None else f"keeps the run in {self.folder}"
        return BACKBONE_UNIT.format(
            description=_escaped(f"potluck backbone: {what}"),
            user=_service_user(),
            command=_command(self.command),
            environment=environment_lines(self._variables()),
            places="".join(f"{line}\n" for line in self._places()),
            restart_seconds=RESTART_SECONDS,
            stop_seconds=BACKBONE_STOP_SECONDS,
            descriptors=self.configuration.inbound_connections + OTHER_DESCRIPTORS,
            memory=self._memory(),
            hardening=HARDENING,
            protect_home="read-only" if self._is_in_homes() else "yes",
            private_devices="yes" if self.folder is None else "no",  # a run may use a GPU
            capabilities="CAP_NET_BIND_SERVICE" if self._has_low_port() else "",
        )

    def _variables(self) -> dict[str, str]:
        found = {"POTLUCK_HOME": str(self.home or STATE_FOLDER)}
        if self.config_file is not None:
            found["POTLUCK_CONFIG"] = str(self.config_file)
        return found

    def _places(self) -> Iterator[str]:
        """What the service may write to, in a file system that it may only read."""
        home = self.home or STATE_FOLDER
        if home == STATE_FOLDER:
            yield "StateDirectory=potluck"
            yield "StateDirectoryMode=0700"
        written = [home, *([] if self.folder is None else [self.folder])]
        for path in dict.fromkeys(written):
            if not (home == STATE_FOLDER and path.is_relative_to(STATE_FOLDER)):
                yield f"ReadWritePaths={_quoted(str(path))}"
        if self._has_low_port():
            yield "AmbientCapabilities=CAP_NET_BIND_SERVICE"

    def _is_in_homes(self) -> bool:
        """Whether anything that it needs would be hidden."""
        used = [Path(word) for word in self.command if word.startswith("/")]
        used += [path for path in (self.folder, self.home, self.config_file) if path is not None]
        return any(path.is_relative_to(home) for path in used for home in HOMES)

    def _has_low_port(self) -> bool:
        ports = [int(one.split("/")[4]) for one in self.configuration.listen_addresses]
        return any(0 < port < LOWEST_PORT_OF_ALL for port in (*ports, self.http_port))

    def _memory(self) -> str:
        allowed = caps_of(self.configuration).memory_bytes
        limits = self.configuration.relay_limits
        if allowed is not None:
            return f"MemoryMax={allowed + allowed // 4}"
        if self.folder is None and limits is not None:
            return f"MemoryMax={RELAY_BASE_BYTES + limits.circuits * CIRCUIT_BYTES}"
        return "# MemoryMax=, once you know: about twice the memory that `potluck run check` shows."


def this_program() -> tuple[str, ...]:
    """This installation of potluck, by its absolute path."""
    python = Path(sys.executable).absolute()
    script = python.parent / "potluck"
    return (str(script),) if script.is_file() else (str(python), "-m", "node")


def _service_user() -> str:
    """The user who writes the unit; root's services get one of their own."""
    return SERVICE_USER if os.geteuid() == 0 else getpass.getuser()


def _command(words: Sequence[str]) -> str:
    if not set(words[0]).isdisjoint(NOT_IN_PROGRAMS):
        raise WrongUse(
            f"systemd cannot start {words[0]}.",
            why=f"Its path contains one of {' '.join(NOT_IN_PROGRAMS)}.",
            advice="Rename the folder of potluck.",
        )
    return " ".join(_quoted(one).replace("$", "$$") for one in words)


def environment_lines(variables: Mapping[str, str]) -> str:
    return "".join(f"Environment={_quoted(f'{name}={one}')}\n" for name, one in variables.items())


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
    "are the whole path of potluck, `join` (or `experts`, `serve`) and `--plain`; or keep it in "
    "tmux."
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
