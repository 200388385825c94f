"""`potluck run init DIR`: make a first run.toml, and the organiser's key."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from node.app.cli.output import Output
from node.core.disk_trouble import disk_trouble
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder, organiser_key, organiser_key_file
from protocols.errors import PotluckError

FILE_MODE = 0o644  # it is no secret: every volunteer reads it


def run(arguments: argparse.Namespace) -> int:
    from auth.keys import fingerprint
    from node.app.cli.configured import configuration_for
    from node.run.template import RECIPES, name_for, new_definition

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    name = name_for(folder.path) if arguments.name is None else arguments.name
    _check_name(name)
    if folder.definition_file.exists():
        raise WrongUse(
            f"There is a run in {folder.path} already.",
            why=f"{folder.definition_file} exists, and is never overwritten.",
            advice="Change that file, or choose another folder.",
        )
    key_file = organiser_key_file(configuration.places)
    is_new = not key_file.exists()
    key = organiser_key(configuration.places, make=True)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        _write(folder.definition_file, new_definition(name, arguments.recipe))
    except OSError as error:
        why, advice = disk_trouble(error, folder.path)
        raise PotluckError(
            f"No run can be made in {folder.path}.", why=why, advice=advice
        ) from None
    organiser, typed = fingerprint(key.public_key), shlex.quote(arguments.folder)
    output.data(
        {
            "run": name,
            "recipe": arguments.recipe,
            "file": str(folder.definition_file),
            "organiser": organiser,
            "key_file": str(key_file),
            "key_made": is_new,
        },
        "\n".join(
            [
                f"{'run':<12}{name}, in {folder.definition_file} (made)",
                f"{'key':<12}{key_file} ({'made' if is_new else 'was there'})",
                f"{'organiser':<12}{organiser}",
                "",
                "next:",
                f"  1. change run.toml: unchanged, it trains {RECIPES[arguments.recipe].trains}",
                f"  2. `potluck run check {typed}` shows what it costs a volunteer",
                f"  3. `potluck run start {typed}` signs it and starts the run's first peer",
                f"  4. `potluck run invite {typed}` prints the invite for volunteers",
                f"  keep a copy of {key_file.name}: anyone who has it can change the run",
            ]
        ),
    )
    return 0


def _check_name(name: str) -> None:
    import msgspec

    from auth.fields import RunName

    try:
        msgspec.convert(name, RunName)
    except msgspec.ValidationError:
        raise WrongUse(
            f"A run cannot be called {name[:80]!r}.",
            why="A name has up to 64 letters, digits, dots, dashes and underscores, without "
            "spaces.",
            advice="Choose another one with --name.",
        ) from None


def _write(file: Path, content: bytes) -> None:
    """Write the whole file or none, and only if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(file, flags, FILE_MODE), "wb") as opened:
            opened.write(content)
    except FileExistsError:
        raise
    except OSError:  # the disk is full: leave nothing for the next try
        file.unlink(missing_ok=True)
        raise
