"""Simulations of many nodes, in virtual time: `scripts/simulate KIND`."""
