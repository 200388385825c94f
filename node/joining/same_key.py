"""One key, one node: whoever comes second with a key that is in use already refuses to take part.

    await refuse_if_in_use(node, session, run)       # early, and last before the run is entered

On one machine locks see to that (node/running_lock.py). A copied home has a copy of the key, and on
another machine only the run's directory tells: what this key says there of its progress was said by
somebody else since this node began. Two with one key would overwrite each other's word, and the
others would see one peer that brings now this and now that.

Easy to get wrong: what a life before this one said is still there for a while after `kill -9`. It
is nobody's any more, and older than this life. Then it is waited for as long as a live one would
take to speak again; where nothing is found, or after a clean end, nobody waits.

And two copies that are started within seconds have both said nothing when they look. So each looks
once more when it has measured its machine; those that still get in together within that moment both
say so in their logs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from node.node import Node
from node.trainer.happenings import Preparing
from node.trainer.session import Session
from node.trainer.stages import MAKING_SURE
from protocols.accumulation.progress_slot import SAY_AGAIN_SECONDS, progress_key
from protocols.dht.reading import Entry
from protocols.errors import PotluckError, Refused

SPEAKS_AGAIN_SECONDS: Final = SAY_AGAIN_SECONDS + 1.0  # and a second for the way
LOOK_SECONDS: Final = 0.5
ROUNDING_MS: Final = 2.0  # slots count whole ones; no life before spoke so shortly before this one
ANSWER_SECONDS: Final = 3.0
"""For the directory's answer. Without one nobody is kept from training: should there be another
after all, both say so in their logs later."""


class KeyInUse(Refused):
    """Another node takes part in the run with this node's key."""


async def refuse_if_in_use(
    node: Node, session: Session, run: str, *, patience_seconds: float = SPEAKS_AGAIN_SECONDS
) -> None:
    """KeyInUse if another node says how far it is, with this node's key."""
    is_told = False
    while True:
        said_ms = await _said_last(node, run)
        if said_ms is None:
            return
        now_ms = 1000.0 * node.network.wall_time() + node.dht.statistics().clock_offset_ms
        if said_ms > now_ms - 1000.0 * node.uptime_seconds - ROUNDING_MS:
            raise KeyInUse(
                "Another node takes part in this run with this node's key.",
                why=f"Its peer id is {node.network.peer_id}, as this one's is: one of the two has "
                f"a copy of {node.configuration.key_file}.",
                advice="Leave it to the other one, or give this one a key of its own: a new home "
                "(POTLUCK_HOME or --home) makes one. Copy invites between machines, never homes.",
            )
        if node.uptime_seconds > patience_seconds:
            return
        if not is_told:
            is_told = True
            session.happened(Preparing(MAKING_SURE))
        await trio.sleep(LOOK_SECONDS)


async def _said_last(node: Node, run: str) -> float | None:
    """When this key has spoken last in the run, by the swarm's time."""
    entry: Entry | None = None
    with trio.move_on_after(ANSWER_SECONDS), suppress(PotluckError):
        entry = (await node.dht.get(progress_key(run))).get(node.network.peer_id)
    return None if entry is None else float(entry.sequence)
