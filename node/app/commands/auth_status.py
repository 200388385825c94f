"""`potluck auth status`: how the running auth server is. It asks, and changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from node.app.auth_acts import auth_places_for, check_there_is_one
from node.app.cli.output import Output
from node.app.views.auth_moments import ago, ahead, now_ms, utc
from node.core.control_client import NoRunningNode, ask_once

QUESTION = "auth-status"


def run(arguments: argparse.Namespace) -> int:
    places = auth_places_for(arguments)
    try:
        status: dict[str, Any] = ask_once(places.socket, QUESTION)
    except NoRunningNode:
        check_there_is_one(places)
        raise NoRunningNode(
            "The auth server of this home is not running.",
            why=f"Nothing answers at {places.socket}.",
            advice="`potluck auth serve` starts it. Moderators' commands also work while it is "
            "stopped.",
        ) from None
    Output.of(arguments).data(status, _text(status))
    return 0


def _text(status: Mapping[str, Any]) -> str:
    now = now_ms()
    until = status["certificate_until_ms"]
    certificate = "none: plain HTTP" if until is None else f"{utc(until)} ({ahead(until, now)})"
    started = ago(status["started_ms"], now)
    facts = [
        ("run", status["run"]),
        ("address", status["url"]),
        *(("listening", address) for address in status["listening"]),
        ("fingerprint", status["fingerprint"]),
        ("server", f"potluck {status['version']}, pid {status['pid']}, started {started}"),
        ("tokens", f"{status['live_tokens']} valid"),
        ("revocations", f"number {status['revocation_number']}"),
        ("connections", str(status["connections"])),
        ("certificate", certificate),
        *(
            (f"{provider}", trouble or "answers, or has not been asked yet")
            for provider, trouble in status["provider_troubles"].items()
        ),
    ]
    return "\n".join(f"{name:<13}{' '.join(value.split())}" for name, value in facts)
