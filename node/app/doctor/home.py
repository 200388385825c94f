"""Checks of this node's home: the running node, the settings, the modes of its files, the disk.

Nothing is created: a home that does not exist yet is examined where it would be made.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.app.auth_places import SETTINGS_NAME
from node.app.cli.output import counted
from node.app.doctor.finding import Finding, FindingLevel, finding_of
from node.app.doctor.surroundings import Surroundings, measured
from node.core.caps.units import in_words
from node.core.disk_trouble import disk_trouble
from node.core.duration import span
from node.core.private_file import check_writable
from node.core.status import NodeStatus
from node.core.training_view import TrainerPhase
from node.net import VERSION
from node.run.folder import organiser_key_file

# -- the running node


async def check_node(surroundings: Surroundings) -> Sequence[Finding]:
    if surroundings.node_trouble is not None:
        return [finding_of("node", surroundings.node_trouble)]
    if surroundings.node is None:
        return [Finding("node", FindingLevel.NOTE, "No node is running in this home.")]
    return list(_findings_of(surroundings.node))


def _findings_of(node: NodeStatus) -> Iterator[Finding]:
    up = f"potluck {node.version} with pid {node.pid} has run for {span(node.uptime_seconds)}"
    yield Finding("node", FindingLevel.OK, f"{up}, and has {counted(len(node.links), 'link')}.")
    if node.version != VERSION:
        yield Finding(
            "node",
            FindingLevel.WARNING,
            f"The running node is potluck {node.version}; this command is {VERSION}.",
            "Start the node again.",
        )
    if node.directory.joined == "trying":
        reasons = "; ".join(f"{at}: {why}" for at, why in node.directory.cannot_join.items())
        yield Finding(
            "node",
            FindingLevel.ERROR,
            "The node has not joined the swarm." + (f" {reasons}." if reasons else ""),
            "Give it the address of a running node with --bootstrap; `potluck status` prints it "
            "there.",
        )
    training = node.training
    if training is not None and training.phase is TrainerPhase.NETWORK_LOST:
        yield Finding(
            "node",
            FindingLevel.ERROR,
            f"The node has lost the run {training.run}: {training.doing}.",
            training.advice or "Check this machine's connection.",
        )


# -- settings


async def check_settings(surroundings: Surroundings) -> Sequence[Finding]:
    configuration = surroundings.configuration
    found = [
        Finding("settings", FindingLevel.WARNING, f"{warning}.", "Correct its name, or unset it.")
        for warning in configuration.warnings
    ]
    file = configuration.config_file
    where = f"from {file}" if file else "the defaults: there is no settings file"
    return [*found, Finding("settings", FindingLevel.OK, f"The settings are {where}.")]


# -- modes of files


# The mode bits that a secret file must not have, and any other file or folder of the home.
SECRET_BITS, OWN_BITS = 0o077, 0o022
ROOT = 0  # may own a settings file for all users of the machine


@dataclass(frozen=True)
class ModeFacts:
    """`is_secret`: others must not even read it."""

    path: Path
    mode: int
    owner: int
    is_secret: bool
    is_folder: bool = False
    is_link: bool = False


async def check_files(surroundings: Surroundings) -> Sequence[Finding]:
    if os.name != "posix":
        return [Finding("files", FindingLevel.NOTE, "The modes of files are not examined here.")]
    facts = await measured(_mode_facts, surroundings)
    found = [one for fact in facts if (one := judge_mode(fact, os.geteuid())) is not None]
    unreadable = surroundings.identity_trouble
    if unreadable is not None and not found:
        found.append(finding_of("files", unreadable))
    if found:
        return found
    if not facts:
        return [Finding("files", FindingLevel.NOTE, "This home has no files yet.")]
    count = counted(len(facts), "file or folder", "files and folders")
    says = f"Only this user can change the {count} of this home, or read its secrets."
    return [Finding("files", FindingLevel.OK, says)]


def judge_mode(facts: ModeFacts, user: int) -> Finding | None:
    """The finding for one file; None if all is well."""
    path, typed = facts.path, shlex.quote(str(facts.path))
    if facts.is_link and facts.is_secret:
        says = f"{path} is a symbolic link, and is not used."
        return Finding("files", FindingLevel.ERROR, says, "Put the file itself in its place.")
    if facts.owner != user and (facts.is_secret or facts.owner != ROOT):
        says = f"{path} belongs to another user (uid {facts.owner})."
        return Finding("files", FindingLevel.ERROR, says, f"Run `sudo chown {user} {typed}`.")
    is_sticky = facts.is_folder and bool(facts.mode & stat.S_ISVTX)
    bad = facts.mode & (SECRET_BITS if facts.is_secret else OWN_BITS)
    if not bad or (is_sticky and not facts.is_secret):
        return None
    verb = "may change" if bad & OWN_BITS else "may read"
    says = f"Other users {verb} {path}: its mode is {facts.mode & 0o777:04o}."
    return Finding("files", FindingLevel.ERROR, says, f"Run `chmod {_right_mode(facts)} {typed}`.")


def _right_mode(facts: ModeFacts) -> str:
    if facts.is_secret or facts.is_folder:
        return "700" if facts.is_folder else "600"
    return "go-w"


def _mode_facts(surroundings: Surroundings) -> list[ModeFacts]:
    places = surroundings.configuration.places
    auth_folder = places.data_folder / "auth"  # of an auth server in this home
    secret = [
        surroundings.configuration.key_file,
        organiser_key_file(places),
        places.pass_file,
        places.config_file.with_name(SETTINGS_NAME),
        auth_folder,
        *sorted(auth_folder.rglob("*")),
    ]
    own = [
        places.config_file,
        places.data_folder,
        places.run_folder,
        places.revocations_file,
        places.peers_file,
        places.dht_file,
        places.traffic_file,
        places.pause_file,
        places.runs_folder,
        places.credit_folder,
    ]
    facts = [_facts_of(path, is_secret=True) for path in secret]
    facts += [_facts_of(path, is_secret=False) for path in own]
    return [fact for fact in facts if fact is not None]


def _facts_of(path: Path, *, is_secret: bool) -> ModeFacts | None:
    try:
        found = path.lstat()
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link and not is_secret:
            found = path.stat()
    except OSError:
        return None
    is_folder = stat.S_ISDIR(found.st_mode)
    return ModeFacts(path, found.st_mode, found.st_uid, is_secret, is_folder, is_link)


# -- the disk

# Less than this, and the small files of a node are not safe: the pass, the records, the loss curve.
TOO_LITTLE_DISK_BYTES = 64_000_000
# A small run's state takes some megabytes, that of a model of 124 million parameters 1.5 GB.
LITTLE_DISK_BYTES = 2_000_000_000
ROOM_BYTES = 4096  # written and removed: any usable disk has this much room


@dataclass(frozen=True)
class DiskFacts:
    """`trouble`: the error when the disk was measured, or written to. `device`: its number."""

    folder: Path
    free_bytes: int
    trouble: OSError | None = None
    device: int = 0


async def check_disk(surroundings: Surroundings) -> Sequence[Finding]:
    places = surroundings.configuration.places
    home = await measured(disk_facts, places.data_folder)
    if home.trouble is not None:
        return [judge_disk(home)]
    # The lock and the socket may be on another disk.
    run = await measured(disk_facts, places.run_folder)
    is_one_disk = run.trouble is None and run.device == home.device
    return [judge_disk(facts) for facts in ((home,) if is_one_disk else (home, run))]


def disk_facts(folder: Path) -> DiskFacts:
    """Measure the disk of this folder, or of the one in which it would be made. Blocks."""
    try:
        there = next(at for at in (folder, *folder.parents) if at.exists())
        free = shutil.disk_usage(there).free
        if there == folder:
            check_writable(folder / "room", ROOM_BYTES)
        elif not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        return DiskFacts(folder, 0, error)
    return DiskFacts(folder, free, device=there.stat().st_dev)


def judge_disk(facts: DiskFacts) -> Finding:
    folder = facts.folder
    if facts.trouble is not None:
        why, advice = disk_trouble(facts.trouble, folder)
        says = f"{folder} cannot be written to. {why}"
        return Finding("disk", FindingLevel.ERROR, says, advice)
    says = f"{in_words(facts.free_bytes)} are free for {folder}."
    advice = f"Free some space on the disk of {folder}."
    if facts.free_bytes < TOO_LITTLE_DISK_BYTES:
        return Finding("disk", FindingLevel.ERROR, says, advice)
    if facts.free_bytes < LITTLE_DISK_BYTES:
        says += " The state of a larger run may not fit."
        return Finding("disk", FindingLevel.WARNING, says, advice)
    return Finding("disk", FindingLevel.OK, says)
