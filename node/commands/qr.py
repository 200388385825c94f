"""A QR code of an invite, drawn with characters: two rows of it in each line of the terminal.

Easy to get wrong: on a dark terminal a block of the foreground is light. So colours are said where
a terminal takes them (dark on light, which every reader knows), and blocks stand for light where
it does not.
"""

from __future__ import annotations

import os
import shutil
import sys

QUIET_MODULES = 2  # around the code; the standard asks for 4, readers are content with 2
BLACK_ON_WHITE, PLAIN = "\033[30;107m", "\033[0m"
# by whether the upper and the lower module are dark
DARK_BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def qr_lines(text: str, *, colour: bool) -> list[str]:
    """The lines that draw it."""
    import segno

    code = segno.make(text, error="l", micro=False, boost_error=False)
    rows = [[bool(module) for module in row] for row in code.matrix_iter(border=QUIET_MODULES)]
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
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
    """Draw it on stderr: if it is wanted, or nothing was said and a terminal has the room."""
    is_terminal = sys.stderr.isatty()
    if wanted is False or (wanted is None and not is_terminal):
        return
    lines = qr_lines(text, colour=is_terminal and not os.environ.get("NO_COLOR"))
    width = len(lines[0]) - (len(BLACK_ON_WHITE) + len(PLAIN)) * lines[0].startswith("\033")
    if wanted is None and width > shutil.get_terminal_size().columns:
        return
    print("\n".join(lines), file=sys.stderr, flush=True)
