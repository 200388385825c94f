"""`potluck run sign`: the organiser's signature under the very bytes of run.toml."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from node.commands.auth_moments import now_ms, utc
from node.commands.configured import configuration_for
from node.commands.output import Output
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
    key = organiser_key(places, make=not folder.signed_file.exists())
    before = last_signed(folder, key)
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
        + ("" if is_new else " (it had not changed since)"),
    )
    if is_new and before is not None and not output.json:
        output.say(
            "Those who start from now on take it, `potluck run start` included. Who trains goes on "
            "with the old one until then: with another model, optimizer or batch they would not "
            "train together, so have them start again."
        )
    return 0


def last_signed(folder: RunFolder, key: SigningKey) -> SignedDefinition | None:
    """What this key signed last in this folder; NotTheDefinition if that was another key."""
    from auth.keys import fingerprint

    return folder.signed(fingerprint(key.public_key))


def sign(
    folder: RunFolder,
    key: SigningKey,
    before: SignedDefinition | None,
    trusted: Mapping[str, Path],
) -> SignedDefinition:
    """The definition as it is now, signed and kept; `before` where that is the same."""
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
