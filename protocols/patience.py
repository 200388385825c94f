"""How fast a peer is refused: whoever may not ask costs little, however often it asks. Pure.

To refuse a request costs this node a signature, for the error is proven like any answer, and
mostly a verification. A stranger could ask for thousands of those a second on a stream that it
may have. So after `REFUSED_AT_ONCE` refusals what a peer sends is read only as fast as
`REFUSED_PER_SECOND` allows, on all of its streams together: the rest waits on its side, in its
own memory.

Nobody who may take part is slowed down: only refusals count, and a node whose token has run out in
the middle of its calls has fewer of those under way than are free.

Promise: bounded memory. Of more than `LARGEST_COUNT` peers the one that was refused longest ago is
forgotten; with its allowance anew, it still has to make a link for it.

Easy to get wrong: a refusal that is told later is still a refusal, and never an outage: the error
is sent at once, and only the reading of what comes next waits.
"""

from __future__ import annotations

from collections import OrderedDict

from protocols.identity import PeerId

REFUSED_AT_ONCE = 256  # twice the calls that a node has under way on one stream
REFUSED_PER_SECOND = 20.0  # 100 microseconds each: a five-hundredth of a core for each stranger
LONGEST_PAUSE_SECONDS = 10.0  # a stream is not held for longer than this by one refusal
LARGEST_COUNT = 4096  # peers: more than have links; well under 1 MiB


class Patience:
    """What each peer that was refused has used up. Invariant: the one refused last is the last.

    Kept for each peer is the time at which all of its refusals would have been told, if they were
    told at the steady rate (a leaky bucket).
    """

    def __init__(self) -> None:
        self._paid_until: OrderedDict[PeerId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paid_until)

    def refused(self, peer: PeerId, now: float) -> float:
        """Note a refusal; for how many seconds nothing more is read of where it came from."""
        each = 1.0 / REFUSED_PER_SECOND
        allowance = REFUSED_AT_ONCE * each
        paid_until = max(self._paid_until.pop(peer, now), now) + each
        self._paid_until[peer] = min(paid_until, now + allowance + LONGEST_PAUSE_SECONDS)
        if len(self._paid_until) > LARGEST_COUNT:
            self._paid_until.popitem(last=False)
        return max(0.0, self._paid_until[peer] - now - allowance)
