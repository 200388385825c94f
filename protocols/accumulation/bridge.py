"""The one narrow place where the training thread meets the network.

    bridge.contributed(...)                 # never waits
    if bridge.estimate.is_due: ...          # a plain attribute, kept fresh by the trio side
    averaging = bridge.start_averaging(vector, weight=96, epoch=7, topic=..., expected=4)
    outcome = averaging.wait()              # waits, and is woken at once when the node ends

Promises: nothing in here makes trio wait for the training thread. The training thread waits only
in `Averaging.wait`, `wait_for_news` and `fetch_state`, and `CollaborationEnded` comes out of each
as soon as the collaboration ends, and out of every other call from then on. All that passes is
flat values and small plain messages, so that the same class can stand in front of a process.

Easy to get wrong: while an averaging runs its vector is being read; change it only when done.
"""

from __future__ import annotations


class Bridge:
    """Made by `open_collaboration`; `Collaboration.bridge`. Its methods are for one thread, the
    training thread (and the one that a delayed step runs in)."""

    run: str
    target_batch: int

    @property
    def ended(self) -> bool:
        """Whether the collaboration has ended: every call that needs it raises."""
        raise NotImplementedError

    def statistics(self) -> object:
        """Seconds of waiting, of computing between steps, and in all; samples; steps."""
        raise NotImplementedError
