"""Amounts as a person writes them: "2MB/s", "16 Mbit/s", "8GB", "200GB/month".

    bytes_per_second("16 Mbit/s")     # 2_000_000.0
    as_written("16  Mbit/s", RATE)    # "16Mbit/s", or WrongUse with the nearest right form

kB, MB, GB and TB are powers of a thousand; KiB, MiB, GiB and TiB of 1,024; bits are always written
out. "none" is no limit.

A plain b is ambiguous. Links are sold in megabits, programs show megabytes, and people write
"2Mb/s" for either; a guess could be wrong by a factor of eight. So an ambiguous amount is refused,
with both meanings in the error.
"""

from __future__ import annotations

import enum
import re

from node.core.wrong_use import WrongUse

NONE = "none"

_STEPS = {"k": 1, "M": 2, "G": 3, "T": 4}
_SIZES = {
    "B": 1.0,
    **{f"{letter}B": 1000.0**power for letter, power in _STEPS.items()},
    **{f"{letter.upper()}iB": 1024.0**power for letter, power in _STEPS.items()},
}
_BITS = {
    "bit": 1 / 8,
    **{f"{letter}bit": 1000.0**power / 8 for letter, power in _STEPS.items()},
}
_RATES = {f"{unit}/s": value for unit, value in {**_SIZES, **_BITS}.items()}
_QUOTAS = {f"{unit}/month": value for unit, value in _SIZES.items()}

LEAST_RATE = 32_000.0
"""Bytes a second. Keep-alives and the directory need a few thousand.

With less than this a link has no room for training.
"""

LEAST_MEMORY = 256_000_000
"""Bytes. Python and torch use that much before there is a model."""

LEAST_QUOTA = 100_000_000
"""Bytes. Staying in a swarm for a month takes some tens of megabytes."""

MOST = 1e15
"""Bytes, or bytes a second: more than any machine has, and still exact as a number."""

_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ \t]*([A-Za-z/]*)")


class Measure(enum.Enum):
    """The kinds of amounts. The value is the name of the kind in an error."""

    RATE = 'a rate such as "2MB/s" or "16Mbit/s", or "none"'
    SIZE = 'an amount of memory such as "8GB", or "none"'
    QUOTA = 'an amount for each month such as "200GB/month", or "none"'


_UNITS = {Measure.RATE: _RATES, Measure.SIZE: _SIZES, Measure.QUOTA: _QUOTAS}
_LEAST = {
    Measure.RATE: LEAST_RATE,
    Measure.SIZE: LEAST_MEMORY,
    Measure.QUOTA: LEAST_QUOTA,
}


def as_written(text: str, measure: Measure) -> str:
    """The amount as in the settings file; WrongUse if it is invalid."""
    if text.strip().lower() in ("", NONE):
        return NONE
    number, unit = _parsed(text, measure)
    amount = number * _UNITS[measure][unit]
    if amount < _LEAST[measure]:
        raise _too_little(text, measure)
    if amount > MOST:
        raise WrongUse(
            f"{text.strip()} is more than any machine has.", advice=f'"{NONE}" is no limit.'
        )
    return f"{number:.9f}".rstrip("0").rstrip(".") + unit


def amount(text: str, measure: Measure) -> float | None:
    """The amount in bytes, or bytes a second; None for no limit. WrongUse if it is invalid."""
    written = as_written(text, measure)
    if written == NONE:
        return None
    number, unit = _parsed(written, measure)
    return number * _UNITS[measure][unit]


def in_words(amount_bytes: float) -> str:
    """An amount for a person: 1.5 GB."""
    for letter, power in reversed(_STEPS.items()):
        if amount_bytes >= 1000.0**power:
            return f"{float(f'{amount_bytes / 1000.0**power:.3g}'):g} {letter}B"
    return f"{amount_bytes:.0f} B"


def _parsed(text: str, measure: Measure) -> tuple[float, str]:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise _refused(text, measure, ())
    number, unit = found.groups()
    if not float(number):
        raise _too_little(text, measure)
    units = _UNITS[measure]
    if unit not in units:
        # "8gb" has one meaning; "2mb/s" has two
        meant = _meant(unit, measure)
        if measure is Measure.RATE or not unit or len(meant) != 1 or unit != unit.lower():
            raise _refused(text, measure, tuple(f"{number}{one}" for one in meant))
        (unit,) = meant
    return float(number), unit


def _meant(unit: str, measure: Measure) -> tuple[str, ...]:
    """The units that may have been meant, the likelier first."""
    suffix = {Measure.RATE: "/s", Measure.SIZE: "", Measure.QUOTA: "/month"}[measure]
    word = unit.lower().removesuffix("/s").removesuffix("/month").removesuffix("/mo")
    word = word.removesuffix("ps")
    if word.endswith("bs"):  # "MBs"
        word = word.removesuffix("s")
    letter = next((one for one in _STEPS if word[:1] == one.lower()), "")
    if word in ("", "b", "bytes", "byte"):
        if measure is Measure.RATE:
            return ("MB/s", "Mbit/s")
        return (f"GB{suffix}",) if word == "" else (f"B{suffix}",)
    if word.endswith(("bit", "bits")):
        return (f"{letter}bit/s",) if measure is Measure.RATE else (f"{letter}B{suffix}",)
    if word in (f"{letter.lower()}i", f"{letter.lower()}ib"):
        return (f"{letter.upper()}iB{suffix}",)
    if not letter or word not in (letter.lower(), f"{letter.lower()}b"):
        return ()
    if measure is Measure.RATE and unit.removesuffix("s") != f"{letter}B":
        return (f"{letter}B/s", f"{letter}bit/s")
    return (f"{letter}B{suffix}",)


def _refused(text: str, measure: Measure, meant: tuple[str, ...]) -> WrongUse:
    if len(meant) > 1:
        first, second = meant[:2]
        advice = f"Did you mean {first} (bytes) or {second} (bits)?"
    else:
        advice = f"Did you mean {meant[0]}?" if meant else ""
    return WrongUse(
        f"{text.strip()!r} is not an amount.", why=f"It has to be {measure.value}.", advice=advice
    )


def _too_little(text: str, measure: Measure) -> WrongUse:
    return WrongUse(
        f"{text.strip()} is too little.",
        why=f"Below {in_words(_LEAST[measure])}{_per(measure)} a node cannot take part.",
        advice=f'Give at least that, or "{NONE}" for no limit.',
    )


def _per(measure: Measure) -> str:
    return {Measure.RATE: " a second", Measure.SIZE: "", Measure.QUOTA: " a month"}[measure]
