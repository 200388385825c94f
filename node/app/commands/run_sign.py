"""`potluck run sign`: sign the exact bytes of run.toml with the organiser's key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from node.app.cli.configured import configuration_for
from node.app.cli.output import Output
from node.app.views.auth_moments import now_ms, utc
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder, organiser_key
from node.run.mistakes import WrongDefinition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from auth.keys import SigningKey
    from node.run.signed import SignedDefinition


def run(arguments: argparse.Namespace) -> int:
    from node.run.trusted import trusted_modules

    output = Output.of(arguments)
    places = configuration_for(arguments).places
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    folder.text()  # raises if it is not a run's folder: no key is made for that
    key = organiser_key(places, make=not folder.signed_file.exists())
    before = last_signed(folder, key)
    if before is not None and not arguments.apart:
        refuse_to_part(folder, before)
    signed = sign(folder, key, before, trusted_modules(arguments.trust_module))
    is_new = before is None or before.data != signed.data
    output.data(
        {
            "run": signed.definition.name,
            "organiser": signed.organiser,
            "signed_ms": signed.signed_ms,
            "signed_anew": is_new,
            "file": str(folder.signed_file),
        },
        f"{signed.definition.name}: signed by {signed.organiser}, {utc(signed.signed_ms)}"
        + ("" if is_new else " (unchanged since then)"),
    )
    if is_new and before is not None and not output.json:
        output.say(
            "Peers that start from now on take it, also with `potluck run start`. Peers that are "
            "training are told within a few minutes, and keep the earlier one until they start "
            "again."
        )
    return 0


def refuse_to_part(folder: RunFolder, before: SignedDefinition) -> None:
    """WrongUse for a change that would split present and new peers into two runs."""
    from node.run.definition import incompatible_parts, places_in_words, read_definition

    trained = any(folder.checkpoints.glob("epoch-*"))
    if not trained and not folder.is_held():
        return  # nobody has trained in it
    changed = incompatible_parts(before.definition, read_definition(folder.text()))
    if changed:
        raise WrongUse(
            f"This would be another run: {places_in_words(changed)} changed, and "
            f"{before.definition.name} "
            f"{'has been trained already' if trained else 'is being trained'}.",
            why="Peers with the earlier definition and peers with this one would not train "
            "together: each would refuse the other.",
            advice="Begin another run in a folder of its own (`potluck run init FOLDER`); or, when "
            "everybody has left, sign this one with --apart and start again.",
        )


def last_signed(folder: RunFolder, key: SigningKey) -> SignedDefinition | None:
    """The definition last signed in this folder; NotTheDefinition if by another key."""
    from auth.keys import fingerprint

    return folder.signed(fingerprint(key.public_key))


def sign(
    folder: RunFolder,
    key: SigningKey,
    before: SignedDefinition | None,
    trusted: Mapping[str, Path],
) -> SignedDefinition:
    """The present definition, signed and stored; `before` if it is unchanged."""
    from auth.keys import fingerprint
    from node.run.checking import check
    from node.run.signed import read_signed, sign_definition

    text = folder.text()
    if before is not None and before.text == text:
        return before
    _, mistakes = check(text, trusted)
    if mistakes:
        raise WrongDefinition.of(mistakes)
    after_ms = 0 if before is None else before.signed_ms
    data = sign_definition(text, key, now_ms=now_ms(), after_ms=after_ms)
    folder.keep_signed(data)
    return read_signed(data, run=None, organiser=fingerprint(key.public_key))
