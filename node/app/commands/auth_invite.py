"""`potluck auth invite`: the text that volunteers paste to find the run and its auth server.

The invite is made of the settings (run, endpoints, address), the fingerprint of an auth key and, if
no authority has signed the certificate, the certificate's hash.

The newest key must not be pinned right after a rotation: a volunteer with that invite would not
know the previous key, whose tokens most nodes still hold. So the invite pins the newest key from
which the endorsements lead to every token that may still be valid.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.app.auth_acts import asked, auth_places_for, perform_act
from node.app.auth_places import AuthPlaces
from node.app.cli.output import Output
from node.app.invite_file import check_flags, with_words, write_new
from node.app.views.auth_moments import life, now_ms, utc
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from auth.server.settings import Settings

CODE_LIFE_MS = life("7d")


def run(arguments: argparse.Namespace) -> int:
    from auth.invites import Invite, write_invite
    from auth.server.settings import read_settings

    output = Output.of(arguments)
    places = auth_places_for(arguments)
    file = Path(arguments.file).expanduser() if arguments.file else None
    check_flags(arguments.name, new_code=arguments.new_code, file=file)
    settings = read_settings(places.settings_file)
    keys = perform_act(places, "keys-list", {})[0]["keys"]
    fingerprint = fingerprint_to_pin(keys, settings, now_ms())
    pin = certificate_pin(settings)
    code = new_code(places, arguments.name) if arguments.new_code else None
    invite = Invite(
        run=settings.run,
        bootstrap=settings.endpoints,
        auth_url=settings.public_url,
        fingerprint=fingerprint,
        code=code["code"] if code else "",
        pin=pin,
    )
    text = write_invite(invite)
    if file is not None:
        write_new(file, _for_a_file(invite.run, text, code))
    _warn(settings, output)
    data = {
        "invite": text,
        "run": invite.run,
        "auth_url": invite.auth_url,
        "bootstrap": list(invite.bootstrap),
        "fingerprint": fingerprint,
        "certificate_pin": pin.hex() or None,
        "code_id": code["view"]["code_id"] if code else None,
        "code_expires_ms": code["view"]["expires_ms"] if code else None,
        "file": str(file.absolute()) if file else None,
    }
    output.data(data, str(file) if file else text)
    _say_what_it_is_worth(code, output)
    return 0


def certificate_pin(settings: Settings) -> bytes:
    """The hash of the server's certificate if no authority has signed it; else empty."""
    import hashlib

    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    if settings.certificate is None:
        return b""
    try:
        leaf = x509.load_pem_x509_certificates(settings.certificate.read_bytes())[0]
    except (OSError, ValueError):
        return b""  # a proxy has the certificate, or `auth serve` will report the error
    if leaf.issuer != leaf.subject:
        return b""
    return hashlib.sha256(leaf.public_bytes(Encoding.DER)).digest()


def fingerprint_to_pin(keys: Sequence[Mapping[str, Any]], settings: Settings, now: int) -> str:
    """The newest key from which the endorsements lead to every token that may still be valid."""
    lives_ms = 1000 * (settings.token_life_seconds + settings.grace_seconds)
    usable = [key for key in keys if key["withdrawn_ms"] is None and key["from_ms"] <= now]
    if not usable:
        raise PotluckError(
            "No auth key can sign now.",
            why="Each was withdrawn, or signs only later: has this machine's clock gone back?",
            advice="`potluck auth keys list` shows them.",
        )
    pinned = usable.pop()
    while usable and now - pinned["from_ms"] < lives_ms:
        pinned = usable.pop()
    fingerprint: str = pinned["fingerprint"]
    return fingerprint


def new_code(places: AuthPlaces, name: str | None) -> dict[str, Any]:
    """A fresh enrolment code for one use: `code`, and how moderators see it."""
    question = asked("codes-new", {"name": name, "uses": 1, "life": CODE_LIFE_MS})
    return perform_act(places, "codes-new", {**question, "reason": "for an invite"})[0]


def _for_a_file(run: str, text: str, code: Mapping[str, Any] | None) -> str:
    words = [f"# An invite to the run {run}. Keep this file, and type:", "#   potluck login FILE"]
    return with_words(words, text, code)


def _warn(settings: Settings, output: Output) -> None:
    if not settings.endpoints:
        output.say(
            "It names no node to join through, so it is only for `potluck login`; to train, people "
            "also need the run's invite (`potluck run invite`). To put nodes into it, name some in "
            "auth.toml (`endpoints`), and restart the server."
        )


def _say_what_it_is_worth(code: Mapping[str, Any] | None, output: Output) -> None:
    if output.json:
        return
    if code is None:
        output.say("It is no secret. To log in: `potluck login INVITE`.")
        return
    view = code["view"]
    output.say(
        f"It contains a code ({view['code_id']}) for one use, valid until "
        f"{utc(view['expires_ms'])}: send it privately. To log in: `potluck login INVITE`."
    )
