"""Who reduces which values in an attempt: the plan of a roster, cut into whole values. Pure.

Easy to get wrong: what a coordinator announces need not be the bits that we would compute (it may
run another version that breaks a tie differently); it has to be as good. So a plan is refused
only if it is impossible, or slower than ours by more than `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.moshpit.layout import Layout, cut
from protocols.moshpit.plan import fractions_for, predicted_seconds
from protocols.moshpit.roster import Entry

TOLERANCE = 0.01  # of the predicted time: rounding to whole blocks costs less, a bad plan more


class RoundPlan:
    """The plans of all attempts of one round, from what the members signed."""

    def __init__(self, entries: Sequence[Entry], layout: Layout) -> None:
        self._entries = entries
        self._layout = layout

    def cuts_for(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The boundaries of the parts of these members: the same wherever it is computed.

        Nothing, where there is nothing to average or nobody to do it.
        """
        entries = [self._entries[member] for member in members]
        contribute = any(entry.weight > 0.0 for entry in entries)
        if not contribute or not any(entry.reduces for entry in entries):
            return ()
        fractions = fractions_for(
            [entry.up_bytes_per_second for entry in entries],
            [entry.down_bytes_per_second for entry in entries],
            [entry.weight > 0.0 for entry in entries],
            [entry.reduces for entry in entries],
        )
        return cut(self._layout, fractions)

    def objection_to(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> str:
        """What is wrong with somebody else's cuts; "" if nothing is."""
        ours = self.cuts_for(members)
        if not ours:
            return "Nobody of these members brings data, or nobody can reduce."
        if cuts == ours:
            return ""
        values = self._layout.values
        if len(cuts) != len(ours) or list(cuts) != sorted(cuts):
            return f"{len(cuts)} cuts do not make {len(members)} parts."
        if cuts[0] != 0 or cuts[-1] != values:
            return f"The parts cover {cuts[0]:,} to {cuts[-1]:,} of {values:,} values."
        for place, member in enumerate(members):
            if cuts[place] != cuts[place + 1] and not self._entries[member].reduces:
                return f"{self._entries[member].peer} cannot be dialled, so it cannot reduce."
        theirs, best = self._seconds(members, cuts), self._seconds(members, ours)
        if theirs > best * (1.0 + TOLERANCE):
            return f"The plan takes {theirs:.3g} s where {best:.3g} s are possible."
        return ""

    def _seconds(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> float:
        entries = [self._entries[member] for member in members]
        values = max(1, self._layout.values)
        return predicted_seconds(
            [(cuts[place + 1] - cuts[place]) / values for place in range(len(members))],
            [entry.up_bytes_per_second for entry in entries],
            [entry.down_bytes_per_second for entry in entries],
            [entry.weight > 0.0 for entry in entries],
            values * self._layout.value_bytes,
        )
