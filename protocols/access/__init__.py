"""Access to a run with an auth server.

`access` judges tokens and acts on the result; `token_guard` signs and checks every message.
"""

from protocols.access.access import Access, end_refused, hang_up_on_strangers
from protocols.access.token_guard import TokenGuard

__all__ = [
    "Access",
    "TokenGuard",
    "end_refused",
    "hang_up_on_strangers",
]
