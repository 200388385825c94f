"""The organiser's folder of a run, and the organiser's key.

    DIR/run.toml        the definition, as the organiser writes it
    DIR/run.signed      the same with the organiser's signature: what is served to others
    DIR/checkpoints/    what `run start` keeps of the run
    DIR/ports           where `run start` has listened before, so that old invites still lead there

The key is not in the folder but beside the node's own (organiser.key): one organiser may have many
runs, and a folder may be copied or shown: whoever has a copy can keep the run alive (`potluck
backbone`), and whoever has the key can change every run of it.

Easy to get wrong: what others train by is run.signed. When run.toml was changed since, nothing has
changed for anybody until it is signed again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.private_file import UnusableFile, read_private_file, replace_private_file
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from auth.keys import SigningKey
    from node.places import Places
    from node.run.signed import SignedDefinition

LARGEST_PORTS_BYTES = 256  # of two short lines


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def typed(self) -> str:
        """As a shell takes it: for commands in messages."""
        return shlex.quote(str(self.path))

    @property
    def definition_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def signed_file(self) -> Path:
        return self.path / "run.signed"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ports_file(self) -> Path:
        return self.path / "ports"

    def text(self) -> bytes:
        """The bytes of run.toml; WrongUse if there is none."""
        from node.run.mistakes import LARGEST_TEXT_BYTES

        try:
            with self.definition_file.open("rb") as file:
                return file.read(LARGEST_TEXT_BYTES + 1)
        except FileNotFoundError:
            raise WrongUse(
                f"There is no run in {self.path}.",
                why=f"{self.definition_file} is not there.",
                advice=f"`potluck run init {self.typed}` makes one.",
            ) from None
        except OSError as error:
            raise WrongUse(
                f"{self.definition_file} cannot be read.",
                why=f"The system says: {error.strerror}.",
                advice="It has to be a file that you may read: see whose it is.",
            ) from None

    def signed(self, organiser: str | None) -> SignedDefinition | None:
        """What was signed last, by this organiser (None: by whoever it names); None if nothing was.

        NotTheDefinition if the file is another organiser's, or broken; NewerPotluckNeeded.
        """
        from node.run.definition import NewerPotluckNeeded
        from node.run.signed import LIMIT_BYTES, NOT_IT, read_signed
        from protocols.runs.messages import NotTheDefinition, UnusableDefinition

        data = read_private_file(self.signed_file, LIMIT_BYTES)
        try:
            return None if data is None else read_signed(data, run=None, organiser=organiser)
        except NewerPotluckNeeded:
            raise
        except (NotTheDefinition, UnusableDefinition) as error:
            raise NotTheDefinition(
                f"{self.signed_file} cannot be used. {error.what.removeprefix(NOT_IT).strip()}",
                why=error.why,
                advice="Use the home that it was signed in (POTLUCK_HOME or --home); or move the "
                f"file away, and sign anew: `potluck run sign {self.typed}`.",
            ) from None

    def keep_signed(self, data: bytes) -> None:
        replace_private_file(self.signed_file, data)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the peer that keeps the run in this folder; AlreadyRunning if another process is.

        Two would write over each other's checkpoints. What is locked is the folder itself, so that
        nothing is left of it however the process ends.
        """
        from node.running_lock import AlreadyRunning, try_lock

        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor):
                raise AlreadyRunning(
                    f"Another peer keeps the run in {self.path} already.",
                    why="It has another home, and writes its checkpoints there.",
                    advice="Stop it, or keep the run in a folder of its own: a copy of run.toml "
                    "and run.signed is enough.",
                )
            yield
        finally:
            os.close(descriptor)

    def trouble(self) -> str:
        """Why this peer could not start from here again; empty where it could. Asks the disk."""
        for file in (self.definition_file, self.signed_file):
            if not file.is_file():
                return f"{file} is gone: without it this peer cannot be started again"
        checkpoints = self.checkpoints if self.checkpoints.exists() else self.path
        if not os.access(checkpoints, os.W_OK | os.X_OK):
            return f"{checkpoints} cannot be written to: no checkpoint can be kept"
        return ""

    def is_held(self) -> bool:
        """Whether a process keeps the run here just now: it may have written no checkpoint yet."""
        from node.running_lock import AlreadyRunning

        try:
            with self.held():
                return False
        except AlreadyRunning:
            return True

    def ports(self) -> dict[str, int]:
        """Where it has listened before, by ip4 and ip6; what cannot be read is not known."""
        try:
            content = read_private_file(self.ports_file, LARGEST_PORTS_BYTES)
        except UnusableFile:
            return {}
        found = {}
        for line in (content or b"").decode("ascii", "replace").splitlines():
            kind, _, port = line.partition(" ")
            if port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536:
                found[kind] = int(port)
        return found

    def keep_ports(self, addresses: Iterable[str]) -> None:
        """Remember the ports in these addresses of a node: the first of each kind."""
        found: dict[str, str] = {}
        for address in addresses:
            _, kind, _, _, port, *_ = [*address.split("/"), "", "", "", "", ""]
            if kind in ("ip4", "ip6") and port.isdigit():
                found.setdefault(kind, port)
        text = "".join(f"{kind} {port}\n" for kind, port in found.items())
        replace_private_file(self.ports_file, text.encode())


def organiser_key_file(places: Places) -> Path:
    return places.data_folder / "organiser.key"


def organiser_here(places: Places, folder: RunFolder) -> str | None:
    """The fingerprint by which a run in this home is known as its own organiser's. None: the key is
    elsewhere, and the folder a copy of the organiser's, which says whose it is. WrongUse if neither
    is here."""
    from auth.keys import fingerprint

    if organiser_key_file(places).exists() or not folder.signed_file.exists():
        return fingerprint(organiser_key(places).public_key)
    return None


def organiser_key(places: Places, *, make: bool = False) -> SigningKey:
    """The key that signs this organiser's runs; WrongUse if there is none, and none is made."""
    from node.key_file import load_identity, load_or_create_identity

    path = organiser_key_file(places)
    identity = load_or_create_identity(path) if make else load_identity(path)
    if identity is None:
        raise WrongUse(
            "There is no organiser's key here.",
            why=f"{path} is not there: the run was made in another home, or by somebody else.",
            advice="Use the home that it was made in (POTLUCK_HOME or --home), or copy the key.",
        )
    return identity.signing_key
