"""The file of `potluck doctor --bundle`: what a bug report needs, and nothing that is secret.

    README.txt        what this is
    findings.json     the findings, as `potluck doctor --json` prints them
    versions.json     of potluck, Python, the platform, and the packages that matter
    settings.json     each setting and where it comes from
    status.json       the state of the running node, if there is one
    log.txt           the last lines of its log, if it trains

Only these are written: no file of the home is copied. Each text passes through `redaction`, which
has the details. The file is a ZIP, whose entries name no user, and only its owner can read it.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import platform
import re
import socket
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from node.app.auth_places import SETTINGS_NAME
from node.app.doctor.redaction import Redaction
from node.app.doctor.surroundings import Surroundings
from node.core.access.pass_file import load_pass
from node.core.control_client import ask
from node.core.private_file import FILE_MODE
from node.core.settings import BY_KEY, SETTINGS, plain
from node.core.status import NodeStatus
from node.core.wrong_use import WrongUse
from node.net import VERSION
from node.run.folder import organiser_key_file
from node.training.questions import LINES
from protocols.errors import PotluckError

LOG_LINES = 500  # some ten minutes of a busy run, and half of a megabyte at most
LOG_SECONDS = 3.0
PACKAGES = ("torch", "trio", "libp2p", "cryptography", "msgspec", "httpx2", "numpy", "h11")
# Values that may tell who somebody is. Their length, or that they are set, is enough.
PERSONAL_SETTINGS = ("identity.name",)

README = """\
A report of `potluck doctor --bundle`, for a bug report.

It has no key, pass, token, invite or code, no e-mail address and no name of a person: such words
were replaced by (secret) and (person). ~ is the home directory. Of public IP addresses only the
beginning is left; the number behind it tells two addresses apart. Peer ids, private addresses and
the names of the run's servers are here. Look through the files before you send them.
"""


def new_report_file(typed: str) -> Path:
    """The file to write; WrongUse if it exists already, or its folder does not."""
    usual = time.strftime("potluck-report-%Y%m%d-%H%M%S.zip", time.gmtime())
    path = Path(typed or usual).expanduser().absolute()
    if path.exists():
        raise WrongUse(f"{path} exists already.", advice="Name a new file.")
    if not path.parent.is_dir():
        raise WrongUse(f"There is no folder {path.parent}.", advice="Name a file in another one.")
    return path


def write_report(path: Path, findings: Mapping[str, Any], surroundings: Surroundings) -> None:
    """Write the whole file, or none. Blocks; OSError from the system."""
    redaction = redaction_for(surroundings, os.environ)
    contents = {"README.txt": README}
    parts = {
        "findings.json": findings,
        "versions.json": _versions(),
        "settings.json": _settings(surroundings),
        "status.json": _status(surroundings.node),
    }
    for name, part in parts.items():
        if part is not None:
            contents[name] = json.dumps(redaction.value(part), indent=2, ensure_ascii=False) + "\n"
    lines = [f"{clock} {redaction.text(words)}" for clock, words in _log(surroundings)]
    if lines:
        contents["log.txt"] = "\n".join(lines) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        with (
            open(descriptor, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, text in contents.items():
                archive.writestr(name, text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def redaction_for(surroundings: Surroundings, environment: Mapping[str, str]) -> Redaction:
    """What has to be taken out of a report about these surroundings."""
    user = ""
    with suppress(KeyError, OSError):  # a container's user may have no name
        user = getpass.getuser()
    homes = [Path(environment["HOME"])] if environment.get("HOME") else []
    with suppress(KeyError, RuntimeError):
        homes.append(Path("~").expanduser())
    names = [home.name for home in homes]
    return Redaction(
        secrets=(*_secrets_of(surroundings), *_secrets_in(environment)),
        people=tuple(_people(surroundings)),
        homes=homes,
        users=(user, *names, socket.gethostname().partition(".")[0]),
    )


def _secrets_of(surroundings: Surroundings) -> Iterator[str]:
    """The words of the secret files that could be a secret by themselves."""
    places = surroundings.configuration.places
    with suppress(PotluckError):
        kept = load_pass(places.pass_file)
        if kept is not None:
            for secret in (kept.access_pass, kept.pin):
                yield base64.b64encode(secret).decode("ascii")
    files = (
        surroundings.configuration.key_file,
        organiser_key_file(places),
        places.data_folder / "run.invite",
        places.config_file.with_name(SETTINGS_NAME),
    )
    for file in files:
        with suppress(OSError), open(file, "rb") as opened:
            yield from _WORD.findall(opened.read(MOST_READ_BYTES).decode("utf-8", "replace"))


MOST_READ_BYTES = 128 * 1024  # of a file with secrets, which have some hundred bytes
_WORD = re.compile(r"[A-Za-z0-9+/_=-]{16,}")  # a shorter word of these files is no secret


def _secrets_in(environment: Mapping[str, str]) -> Iterator[str]:
    """The values of potluck's variables that are no settings: invites and codes."""
    settings = {setting.variable for setting in SETTINGS}
    public = {"POTLUCK_HOME", "POTLUCK_CONFIG", "POTLUCK_DEBUG", *settings}
    for name, value in environment.items():
        if name.startswith("POTLUCK_") and name not in public:
            yield value
            yield from value.split()


def _people(surroundings: Surroundings) -> Iterator[str]:
    """The names of people that this home knows, and the names of this machine in the DNS."""
    yield surroundings.configuration.display_name
    member, node = surroundings.membership, surroundings.node
    if member is not None:
        yield from _names_of(member.token.username)
    if node is not None:
        yield from _names_of(node.membership.username)
    if node is not None and node.training is not None:
        yield node.training.name
        yield from _names_of(node.training.person)
        for peer in node.training.peers:
            yield peer.said_name
            yield from _names_of(peer.name)
    for address in surroundings.configuration.announce_addresses:
        kind, host = address.split("/")[1:3]
        if kind.startswith("dns"):
            yield host


def _names_of(account: str) -> Iterator[str]:
    """`github:alice`, and `alice` alone."""
    yield account
    yield account.partition(":")[2]


def _versions() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "potluck": VERSION,
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": packages,
    }


def _settings(surroundings: Surroundings) -> dict[str, Any]:
    configuration = surroundings.configuration
    found = {}
    for key in BY_KEY:
        value = plain(configuration.values[key])
        if key in PERSONAL_SETTINGS and value:
            value = "(set)"
        found[key] = {"value": value, "origin": str(configuration.origins[key])}
    return found


def _status(node: NodeStatus | None) -> Any:
    return None if node is None else msgspec.to_builtins(node)


def _log(surroundings: Surroundings) -> Iterator[tuple[str, str]]:
    """The last lines of the node that trains here; none if it does not train, or not answer."""
    if surroundings.node is None:
        return
    socket_file = surroundings.configuration.places.control_socket
    details = {"follow": False, "last": LOG_LINES}
    with (
        suppress(PotluckError),
        ask(socket_file, LINES, details, silence_seconds=LOG_SECONDS) as answers,
    ):
        for lines in answers:
            for line in lines:
                clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(line["time"]))
                yield clock, line["words"]
