"""Python's garbage collector while a command starts, runs and ends.

    collect_seldom()      # in a process of its own, before it imports much
    if freeze_objects(): ...

Libraries make hundreds of thousands of objects that stay. With torch, looking for garbage among
them takes a command a second: several times while they are made, and once more at its end.
"""

from __future__ import annotations

import gc

OBJECTS_AT_START = 50_000  # as many new ones before the collector looks at them
_usual = gc.get_threshold()


def collect_seldom() -> None:
    """Until `freeze_objects`."""
    gc.set_threshold(OBJECTS_AT_START, *_usual[1:])


def freeze_objects() -> bool:
    """End `collect_seldom`, if nobody has set the collector since: all objects that there are stay,
    and later ones are collected as usual. Returns whether it was so."""
    if gc.get_threshold()[0] != OBJECTS_AT_START:
        return False
    gc.freeze()
    gc.set_threshold(*_usual)
    return True
