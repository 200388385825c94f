"""Measuring: the figures of `potluck bench`, and the link proxy that makes loopback a far place."""
