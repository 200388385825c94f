"""Measuring: the figures of `scripts/bench`, and the link proxy that makes loopback a far place."""
