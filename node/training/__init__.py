"""Taking part in a run: as a volunteer does it, and as the guest of a script.

    from node.training import collaborate

A script of one's own uses these three names. For `potluck join` read in this order: `join` (the way
to the first sample), `trainer` and `loop` (training), `session` (what its owner sees and asks for),
`happenings` and `words` (what is told), `caps_watch` and `gate` (what the owner allows),
`credit`.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.training.guest import collaborate, open_training, train_in_thread

__all__ = ["collaborate", "open_training", "train_in_thread"]

__getattr__ = lazily(__name__, {"guest": ("collaborate", "open_training", "train_in_thread")})
