"""The live screen of `potluck join` and `potluck run start`.

From the inside out: `cells` measures text, `charts` and `layout` know nothing of training,
`picture` makes lines of a view (pure), `canvas` turns lines into the commands of a terminal (pure),
`terminal` writes those, and `live` decides when.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.app.screen.live import Screen
    from node.app.screen.terminal import Terminal, can_show, look_of

__all__ = [
    "Screen",
    "Terminal",
    "can_show",
    "look_of",
]

__getattr__ = lazily(
    __name__,
    {
        "live": ("Screen",),
        "terminal": ("Terminal", "can_show", "look_of"),
    },
)
