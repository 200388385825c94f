"""What a later definition of a run changes, and whether the two train together. Pure.

    parts_that_part(before, after)          # ["[optimizer]", "batch below [training]"]

Peers count each other where they step alike: with the same model, optimizer, schedule, batch and
codec (protocols/accumulation/training_description.py). Who trains by a definition that differs in
one of these is apart from those who train by the other, until they start again.

Easy to get wrong: data, limits, checkpoints, the precision and the end of a run are not among them:
such a change is taken by whoever starts next, beside the others.
"""

from __future__ import annotations

from node.run.definition import RunDefinition

TABLES = ("model", "optimizer", "schedule")
KEYS = {
    "training": ("batch", "max_norm", "local_steps"),
    "averaging": ("codec", "group_size", "approximate", "parameters_every"),
}


def parts_that_part(before: RunDefinition, after: RunDefinition) -> list[str]:
    """The places in which those who train by the one differ from those who train by the other so
    that they do not train together. Nothing: they do."""
    found = [f"[{name}]" for name in TABLES if getattr(before, name) != getattr(after, name)]
    for section, keys in KEYS.items():
        old, new = getattr(before, section), getattr(after, section)
        found += [
            f"{key} below [{section}]" for key in keys if getattr(old, key) != getattr(new, key)
        ]
    return found


def said(places: list[str]) -> str:
    """The places in a row."""
    return places[0] if len(places) == 1 else f"{', '.join(places[:-1])} and {places[-1]}"
