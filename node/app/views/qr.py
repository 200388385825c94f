"""A QR code of an invite: as rows of modules, or drawn with characters, two rows of it in each line
of the terminal.

On a dark terminal a block in the foreground colour is light. So the colours are set explicitly if
the terminal has colours (dark on light, which every reader knows); otherwise blocks stand for
light.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import lru_cache

QUIET_MODULES = 2  # around the code; the standard asks for 4, but 2 are enough for readers
BLACK_ON_WHITE, PLAIN = "\033[30;107m", "\033[0m"
# by whether the upper and the lower module are dark
DARK_BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


@lru_cache(4)  # the page shows the same one all the time
def qr_rows(text: str) -> tuple[tuple[bool, ...], ...]:
    """The modules of the code, row by row; True is dark. None if the text is too long for a code:
    2,953 characters."""
    import segno

    try:
        code = segno.make(text, error="l", micro=False, boost_error=False)
    except segno.DataOverflowError:
        return ()
    return tuple(
        tuple(bool(module) for module in row) for row in code.matrix_iter(border=QUIET_MODULES)
    )


def qr_lines(text: str, *, colour: bool) -> list[str]:
    """The lines of the drawing."""
    rows = list(qr_rows(text))
    if len(rows) % 2:
        rows.append((False,) * len(rows[0]))
    lines = []
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        pairs = zip(upper, lower, strict=True)
        if colour:
            drawn = "".join(DARK_BLOCKS[pair] for pair in pairs)
            lines.append(f"{BLACK_ON_WHITE}{drawn}{PLAIN}")
        else:
            lines.append("".join(DARK_BLOCKS[not up, not low] for up, low in pairs))
    return lines


def draw_qr(text: str, *, wanted: bool | None) -> None:
    """Draw it on stderr: if it is wanted, or by default if this is a terminal."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for line in lines_that_fit(text, wanted=wanted, colour=colour):
        print(line, file=sys.stderr)
    sys.stderr.flush()


def lines_that_fit(text: str, *, wanted: bool | None, colour: bool) -> list[str]:
    """The lines of `draw_qr`. In a terminal that is too narrow, a line that says so instead,
    because a code with broken lines cannot be read."""
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        return []
    lines = qr_lines(text, colour=False)
    if not lines:
        return [f"(It has {len(text):,} characters, which is too long for a QR code.)"]
    columns = shutil.get_terminal_size().columns
    if sys.stderr.isatty() and len(lines[0]) > columns:
        return [f"(Its QR code is {len(lines[0])} columns wide, and this terminal has {columns}.)"]
    return qr_lines(text, colour=True) if colour else lines
