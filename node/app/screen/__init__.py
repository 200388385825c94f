"""How `potluck join` and `potluck run start` show the training: a live screen, or lines.

From the inside out: `cells` measures text, `charts` and `layout` know nothing of training,
`panels` has what each panel says, `picture` puts them together and `summary` is what stays (all
pure); `canvas` turns lines into the commands of a terminal (pure), `terminal` writes those, and
`live` decides when. `display` chooses between this screen, lines, and objects for programs.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.app.screen.canvas import Look
    from node.app.screen.display import Display, display_for, happening_of, show_to_the_end
    from node.app.screen.panels import Scene, SceneEvent
    from node.app.screen.picture import drawn, frame

__all__ = [
    "Display",
    "Look",
    "Scene",
    "SceneEvent",
    "display_for",
    "drawn",
    "frame",
    "happening_of",
    "show_to_the_end",
]

__getattr__ = lazily(
    __name__,
    {
        "canvas": ("Look",),
        "display": ("Display", "display_for", "happening_of", "show_to_the_end"),
        "picture": ("drawn", "frame"),
        "panels": ("Scene", "SceneEvent"),
    },
)
