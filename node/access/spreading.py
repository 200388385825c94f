"""Which revocation lists the directory holds, and who brings one. Pure: seen in, decision out.

Every node watches one key of the directory. Under it a few nodes, whichever were first to know,
keep the newest list; everybody who finds too few copies of it waits a random while, looks again,
and then brings one. So a list spreads while the auth server is down, as soon as any one node
knows it, and a thousand nodes do not keep a thousand copies.

Easy to get wrong: what somebody keeps there is a claim. Only what is, byte for byte, the newest
list that this node has verified counts as a copy, so nobody keeps others quiet with a forged one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

ENOUGH_COPIES = 3  # publishers that would all have to be lost at once

# The longest wait before bringing a copy. In it, the first few of a thousand nodes that heard of a
# list from the server in the same poll have brought it for all others.
LONGEST_WAIT_SECONDS = 6.0


class Copies:
    """Who keeps which list in the directory. `own` is this node."""

    def __init__(self, own: Hashable) -> None:
        self._own = own
        self._held: dict[Hashable, bytes] = {}

    def saw(self, publisher: Hashable, signed_list: bytes | None) -> None:
        """What a publisher's slot holds now; None when there is no slot any more."""
        if signed_list is None:
            self._held.pop(publisher, None)
        else:
            self._held[publisher] = _digest(signed_list)

    def of(self, newest: bytes) -> int:
        """How many publishers keep this very list."""
        digest = _digest(newest)
        return sum(1 for held in self._held.values() if held == digest)

    def should_publish(self, newest: bytes) -> bool:
        """Whether this node should put the newest list that it knows into its slot."""
        if not newest:
            return False
        mine = self._held.get(self._own)
        if mine is not None:
            return mine != _digest(newest)  # ours is old, and stands there under our name
        return self.of(newest) < ENOUGH_COPIES


def _digest(signed_list: bytes) -> bytes:
    return hashlib.sha256(signed_list).digest()
