"""How links end by themselves: lost for no reason, or given up because nothing gets through.

A real node notices a silent link by its keep-alive. Here nobody pings: when something may have
changed (a cut, a stop, a silent crash, and the end of each) every link is looked at once, and one
that has become impeded is given up `silence_seconds` later unless it was freed in between. Idle
links therefore cost nothing.

Easy to get wrong: a stopped node cannot notice anything. It keeps its end, and learns of the
loss from the goodbye that waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from node.simulation.link import Link, LinkEnd
from node.simulation.timeline import Timeline

SECONDS_PER_HOUR = 3600.0


class LinkLife:
    """Watches the links of one world."""

    def __init__(self, timeline: Timeline, chance: random.Random, silence_seconds: float) -> None:
        self._timeline = timeline
        self._chance = chance
        self._silence_seconds = silence_seconds

    def begins(self, link: Link) -> None:
        """A link came up: decide when it will be lost for no reason, if ever."""
        rate = max(end.path.breaks_per_hour for end in link.ends)
        if rate > 0:
            lasts = self._chance.expovariate(rate / SECONDS_PER_HOUR)
            self._timeline.at(self._timeline.now() + lasts, self._lose, link)

    def look_at(self, links: Iterable[Link]) -> None:
        """Something may have changed for these links."""
        now = self._timeline.now()
        for link in links:
            impeded = any(_gets_nothing_through(end) for end in link.ends)
            if not impeded:
                link.impeded_since = None
            elif link.impeded_since is None:
                link.impeded_since = now
                self._timeline.at(now + self._silence_seconds, self._give_up, link, now)

    def _give_up(self, link: Link, since: float) -> None:
        if link.impeded_since == since:
            for end in link.ends:
                if end.node.stopped_at is None:
                    end.close("nothing came through any more")

    def _lose(self, link: Link) -> None:
        for end in link.ends:
            end.break_now("the connection was lost")


def _gets_nothing_through(end: LinkEnd) -> bool:
    source, target = end.node, end.other.node
    return source.stopped_at is not None or source.silent or end.node.world.is_cut(source, target)
