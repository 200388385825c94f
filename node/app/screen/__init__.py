"""How `potluck join` and `potluck run start` show the training: a live screen, or lines.

From the inside out: `cells` measures text, `charts` and `layout` know nothing of training,
`picture` makes lines of a view (pure), `canvas` turns lines into the commands of a terminal (pure),
`terminal` writes those, and `live` decides when. `display` chooses between this screen, lines, and
objects for programs.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.app.screen.display import Display, display_for

__all__ = ["Display", "display_for"]

__getattr__ = lazily(__name__, {"display": ("Display", "display_for")})
