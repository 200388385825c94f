"""`potluck demo`: a whole run on this machine, told while it happens.

`driver` plays it, `processes` has the children and their folder, `story` the claims at the end, and
`judging` the losses that decide them. `experts` is the demo of a run with experts.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.app.demo.driver import Demo
    from node.app.demo.experts import ExpertsDemo, experts_page_of
    from node.app.demo.processes import Child, Event, demo_folder, free_port, remove
    from node.app.demo.story import page_of

__all__ = [
    "Child",
    "Demo",
    "Event",
    "ExpertsDemo",
    "demo_folder",
    "experts_page_of",
    "free_port",
    "page_of",
    "remove",
]

__getattr__ = lazily(
    __name__,
    {
        "driver": ("Demo",),
        "experts": ("ExpertsDemo", "experts_page_of"),
        "processes": ("Child", "Event", "demo_folder", "free_port", "remove"),
        "story": ("page_of",),
    },
)
