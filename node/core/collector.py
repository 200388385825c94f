"""Python's garbage collector while a command starts, runs and ends.

Libraries make hundreds of thousands of objects that stay. With torch, looking for garbage among
them takes a command a second: several times while they are made, and once more at its end.
"""

from __future__ import annotations

import gc

OBJECTS_AT_START = 50_000  # new ones, until they are looked at; with so many, older ones are not

_usual = gc.get_threshold()


def collect_seldom() -> None:
    """Until `freeze_objects`."""
    gc.set_threshold(OBJECTS_AT_START, *_usual[1:])


def freeze_objects() -> None:
    """All objects that there are stay. Later ones are collected as usual."""
    gc.freeze()
    gc.set_threshold(*_usual)
