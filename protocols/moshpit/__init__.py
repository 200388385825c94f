"""Averaging without a centre: groups, the butterfly, and one decision per round.

A round ends the same for all its survivors: they hold bit-identical results, or keep what they
had. What decides is pure (grid, gathering, agreement, plan); what talks is a thin shell around it.
"""
