"""The relay of a node, by its owner's settings.

    relay.serve = true
    relay.limits = "circuits=64, rate=20MB/s, month=500GB/month"

What is not written in `relay.limits` has the default of nat/relay_limits.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from nat.relay_limits import RelayLimits
from node.core.caps.units import NONE, Measure, amount
from node.core.wrong_use import WrongUse

MEMBERS: Final = "members"
EVERYBODY: Final = "everybody"

EXAMPLE: Final = "circuits=64, rate=20MB/s, month=500GB/month"

MOST_PLACES: Final = 4096  # each may need a file descriptor and a task


def _places(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 0 < int(text) <= MOST_PLACES:
        raise WrongUse(
            f"{text!r} is no number from 1 to {MOST_PLACES}.",
            advice=f'Write for example "{EXAMPLE}".',
        )
    return int(text)


def _seconds(text: str) -> int:
    if text == NONE:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise WrongUse(
            f"{text!r} is no number of seconds above zero, and not none.",
            advice="Write for example circuit-seconds=3600.",
        )
    return int(text)


def _bytes(measure: Measure, text: str) -> int:
    return round(amount(text, measure) or 0)


_READ: Final[Mapping[str, tuple[str, Callable[[str], int]]]] = {
    "reservations": ("reservations", _places),
    "reservations-per-site": ("reservations_per_site", _places),
    "circuits": ("circuits", _places),
    "circuits-per-peer": ("circuits_per_peer", _places),
    "circuit-seconds": ("circuit_seconds", _seconds),
    "circuit-bytes": ("circuit_bytes", partial(_bytes, Measure.SIZE)),
    "circuit-rate": ("circuit_bytes_per_second", partial(_bytes, Measure.RATE)),
    "rate": ("bytes_per_second", partial(_bytes, Measure.RATE)),
    "month": ("month_bytes", partial(_bytes, Measure.QUOTA)),
}


def relay_limits(text: str) -> RelayLimits:
    """The limits as written; WrongUse names what is wrong and what is possible."""
    limits = RelayLimits()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = (piece.strip() for piece in part.partition("="))
        if not found or name not in _READ:
            raise WrongUse(
                f"{part!r} is no limit of a relay.",
                why=f"The limits are {', '.join(_READ)}.",
                advice=f'Write for example "{EXAMPLE}".',
            )
        field, read = _READ[name]
        try:
            limits = replace(limits, **{field: read(value)})
        except WrongUse as error:
            raise WrongUse(f"{name}: {error.what}", why=error.why, advice=error.advice) from None
    return limits


def as_written(text: str) -> str:
    """The limits in one form, for the settings."""
    relay_limits(text)
    return ", ".join(part.strip() for part in text.split(",") if part.strip())


def as_admitted(text: str) -> str:
    """Whom a relay is for; WrongUse if it is neither."""
    if text not in (MEMBERS, EVERYBODY):
        raise WrongUse(
            f"A relay is for {MEMBERS} or for {EVERYBODY}.",
            advice=f"{MEMBERS}: of the run that this node is in. {EVERYBODY}: strangers, too.",
        )
    return text
