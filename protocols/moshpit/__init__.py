"""Averaging without a centre: groups, the butterfly, and one decision per round.

A round ends the same for all its survivors: they hold bit-identical results, or keep what they had.
The decisions are pure (grid, gathering, agreement, plan), with a thin shell around them that talks.
"""
