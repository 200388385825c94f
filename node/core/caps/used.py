"""How much of each cap is used at one moment: for `potluck status` and for the screen.

It is a message that a running node answers on its control socket, with its words for a person.
"""

from __future__ import annotations

import msgspec

from node.core.caps.units import in_words


class CapsUsed(msgspec.Struct, frozen=True):
    """The use of each cap; None if there is no such cap, or the use is unknown.

    Rates are of the last ten seconds; `goes_on_at` and `pauses_at` are seconds since 1970.
    """

    upload_bytes_per_second: float = 0.0
    upload_limit: float | None = None
    download_bytes_per_second: float = 0.0
    download_limit: float | None = None
    memory_bytes: int | None = None
    memory_limit: int | None = None
    batch_share: float = 1.0
    month: str = ""
    month_bytes: int = 0
    month_limit: int | None = None
    paused_by: tuple[str, ...] = ()
    goes_on_at: float | None = None
    pauses_at: float | None = None
    device_memory_bytes: int | None = None
    device_memory_limit: int | None = None


def used_rows(used: CapsUsed) -> list[tuple[str, str]]:
    """A name and a text for each cap that a person may want to know."""
    up, down = used.upload_bytes_per_second, used.download_bytes_per_second
    rows = [
        (
            "traffic",
            f"sends {in_words(up)}/s{_of(used.upload_limit, '/s')}, "
            f"receives {in_words(down)}/s{_of(used.download_limit, '/s')}",
        )
    ]
    if used.month_limit is not None:
        share = used.month_bytes / used.month_limit
        words = f"{in_words(used.month_bytes)}{_of(used.month_limit)} in {used.month} ({share:.0%})"
        rows.append(("quota", words))
    if used.memory_limit is not None and used.memory_bytes is not None:
        words = f"{in_words(used.memory_bytes)}{_of(used.memory_limit)}"
        if used.batch_share < 1.0:
            words += f"; batches have {used.batch_share:.0%} of their size"
        rows.append(("cap", words))
    if used.device_memory_limit is not None and used.device_memory_bytes is not None:
        words = f"{in_words(used.device_memory_bytes)}{_of(used.device_memory_limit)}"
        rows.append(("GPU cap", words))
    return rows


def _of(limit: float | None, per: str = "") -> str:
    return "" if limit is None else f" of {in_words(limit)}{per}"
