"""Hypothesis without a deadline for each example: the machine may be busy with other things."""

from hypothesis import settings

settings.register_profile("dht", deadline=None)
settings.load_profile("dht")
