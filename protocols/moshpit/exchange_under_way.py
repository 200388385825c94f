"""The exchange of one ballot, as its coordinator sees it: who has begun, who holds, who is gone.

Easy to get wrong: as long as somebody who is there still exchanges, nobody is given up. What is
missing may have been sent before its sender went away; and whoever has reported its result is
needed no more.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from protocols.moshpit.agreement_messages import Holding
from protocols.moshpit.ballots import digest_of_result


class ExchangeUnderWay:
    """Who of the members has got how far."""

    def __init__(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> None:
        self.members = members
        self.cuts = cuts
        self.joined: set[int] = set()  # have said that they have begun
        self._holdings: dict[int, Holding] = {}
        self._probed: set[int] = set()  # were asked whether they live, and have not answered

    def take(self, member: int, holding: Holding) -> str:
        """What is wrong with this report; "" if nothing is."""
        self.joined.add(member)
        parts = [each.part for each in holding.statements]
        expected = [
            reducer
            for place, reducer in enumerate(self.members)
            if self.cuts[place + 1] > self.cuts[place]
        ]
        if parts != expected:
            return "has not one statement for each part, in order"
        if holding.digest != digest_of_result(holding.statements):
            return "has a digest that is not that of its statements"
        self._holdings[member] = holding
        return ""

    def is_live(self, member: int) -> None:
        self._probed.discard(member)

    def to_probe(self, heard: AbstractSet[int]) -> tuple[set[int], set[int]]:
        """Of those who are still to report, and were not heard: who is to be asked whether it
        lives, and who was asked before and is taken for gone."""
        silent = set(self.members) - self._holdings.keys() - heard
        gone = silent & self._probed
        self._probed |= silent
        return silent - gone, gone

    @property
    def missing(self) -> set[int]:
        return set(self.members) - self._holdings.keys()

    @property
    def is_agreed(self) -> bool:
        """Whether those who have reported hold one result, and nobody told any of them another."""
        shown = self._holdings.values()
        return len({each.digest for each in shown}) == 1 and not any(e.contradicted for e in shown)

    @property
    def shown(self) -> dict[int, Holding]:
        return dict(self._holdings)
