"""The organiser's folder of a run, and the organiser's key.

    DIR/run.toml        the definition, as the organiser writes it
    DIR/run.signed      the same with the organiser's signature: this is served to others
    DIR/checkpoints/    the checkpoints that `run start` keeps
    DIR/ports           the last ports of `run start`, so that old invites still lead there

The key is next to the node's own key (organiser.key) and not in the folder. One organiser may have
many runs, and a folder may be copied or shown. A copy of the folder is enough to keep the run alive
(`potluck backbone`); the key is needed to change the run.

The other peers train by run.signed. A change to run.toml has no effect until it is signed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from auth.keys import SigningKey
    from node.core.places import Places
    from node.run.signed import SignedDefinition

LARGEST_PORTS_BYTES = 256  # of two short lines


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def typed(self) -> str:
        """The folder's path, quoted for a shell: for commands in messages."""
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
                advice=f"`potluck run init {self.typed}` makes one. To keep an existing run, copy "
                "its run.toml and run.signed there.",
            ) from None
        except OSError as error:
            raise WrongUse(
                f"{self.definition_file} cannot be read.",
                why=f"The system says: {error.strerror}.",
                advice="It has to be a file that you may read: check its owner.",
            ) from None

    def signed(self, organiser: str | None) -> SignedDefinition | None:
        """The last signed definition, by this organiser (None: by any); None if nothing is signed.

        NotTheDefinition if the file is another organiser's, or broken; NewerPotluckNeeded.
        """
        from node.run.definition import NewerPotluckNeeded
        from node.run.signed import LIMIT_BYTES, NOT_IT, read_signed
        from protocols.runs.messages import NotTheDefinition, UnusableDefinition

        data = read_private_file(self.signed_file, LIMIT_BYTES)
        if data is None:
            return None
        try:
            signed = read_signed(data, run=None, organiser=None)
        except NewerPotluckNeeded:
            raise
        except (NotTheDefinition, UnusableDefinition) as error:
            raise NotTheDefinition(
                f"{self.signed_file} cannot be used. {error.what.removeprefix(NOT_IT).strip()}",
                why=error.why,
                advice="Copy it again from where the run was signed. If that was here, move the "
                f"file away, and sign again: `potluck run sign {self.typed}`.",
            ) from None
        if organiser not in (None, signed.organiser):
            raise NotTheDefinition(
                f"{self.signed_file} is signed by somebody else.",
                why=f"Its key is {signed.organiser}, and the one in this home is {organiser}.",
                advice="Only the home that it was signed in can change the run (POTLUCK_HOME or "
                f"--home). `potluck backbone {self.typed}` keeps it without that key.",
            )
        return signed

    def keep_signed(self, data: bytes) -> None:
        replace_private_file(self.signed_file, data)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only peer that keeps the run in this folder; AlreadyRunning if another process is.

        Two would overwrite each other's checkpoints. The folder itself is locked, so nothing is
        left behind however the process ends.
        """
        from auth.file_lock import try_lock
        from node.core.running_lock import AlreadyRunning

        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor):
                raise AlreadyRunning(
                    f"Another peer keeps the run in {self.path} already.",
                    why="It has another home, and writes its checkpoints there.",
                    advice="Stop it, or use another folder: a copy of run.toml and run.signed is "
                    "enough.",
                )
            yield
        finally:
            os.close(descriptor)

    def trouble(self) -> str:
        """Why this peer could not start from here again; empty if it could. Reads the disk."""
        try:
            for file in (self.definition_file, self.signed_file):
                if not file.is_file():
                    return f"{file} is gone: without it this peer cannot be started again"
            checkpoints = self.checkpoints if self.checkpoints.exists() else self.path
            if not os.access(checkpoints, os.W_OK | os.X_OK):
                return f"{checkpoints} cannot be written to: no checkpoint can be kept"
        except OSError as error:  # of a network's disk that does not answer, or a card that broke
            return f"{self.path} cannot be read: {error.strerror}"
        return ""

    def is_held(self) -> bool:
        """Whether a process keeps the run here now; it may not have written a checkpoint yet."""
        from node.core.running_lock import AlreadyRunning

        try:
            with self.held():
                return False
        except AlreadyRunning:
            return True

    def ports(self) -> dict[str, int]:
        """The last ports by ip4 and ip6; an unreadable file gives none."""
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
    """The fingerprint of this home's organiser key. None if the folder was signed with another:
    then it is a copy, and its signed definition names the organiser. WrongUse if there is neither a
    key nor a signed definition; NotTheDefinition."""
    from auth.keys import fingerprint

    signed = folder.signed(None)
    if signed is None:
        return fingerprint(organiser_key(places).public_key)
    return signed.organiser if signed.organiser == own_organiser(places) else None


def own_organiser(places: Places) -> str | None:
    """The fingerprint of this home's organiser key, whatever it signed; None if there is none."""
    from auth.keys import fingerprint
    from node.core.key_file import load_identity

    identity = load_identity(organiser_key_file(places))
    return None if identity is None else fingerprint(identity.public_key)


def organiser_key(places: Places, *, make: bool = False) -> SigningKey:
    """The key that signs this organiser's runs. WrongUse if there is none and `make` is not set."""
    from node.core.key_file import load_identity, load_or_create_identity

    path = organiser_key_file(places)
    identity = load_or_create_identity(path) if make else load_identity(path)
    if identity is None:
        raise WrongUse(
            "There is no organiser's key here.",
            why=f"{path} does not exist: the run was made in another home, or by somebody else.",
            advice="Use the home that it was made in (POTLUCK_HOME or --home), or copy the key.",
        )
    return identity.signing_key
