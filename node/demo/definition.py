"""The demo's run: what `potluck run init` writes, made small enough for a minute. Pure.

It is changed as a person would change it: a value here and there, everything else as it was.

Easy to get wrong: the steps have to last longer than a volunteer who comes late needs to start, on
slow machines and on fast ones; and the loss has to fall far enough in them.
"""

from __future__ import annotations

import re

RUN = "demo"
STEPS = 36
BATCH = 96
LATE_AT_STEP = 3  # when the late one is started; it takes some fifteen steps to be there
KILL_AT_STEP = STEPS // 3

CHANGES: dict[tuple[str, str], str] = {
    ("run", "description"): '"a small GPT that learns Python, to see potluck at work"',
    ("optimizer", "lr"): "0.004",
    ("schedule", "warmup"): "4",
    ("schedule", "steps"): str(STEPS),
    ("training", "batch"): str(BATCH),
    ("training", "steps"): str(STEPS),
    ("averaging", "grace_seconds"): "3.0",
    ("averaging", "round_seconds"): "60.0",
    ("checkpoints", "every_seconds"): "5.0",
}

_SECTION = re.compile(r"\[([a-z]+)\]\s*$")
_KEY = re.compile(r"#?([a-z_]+) = ")


def demo_sized(text: str) -> str:
    """The text of a new run.toml with `CHANGES` in it. KeyError if one has no place in it."""
    left, section, lines = dict(CHANGES), "", []
    for line in text.splitlines():
        header, key = _SECTION.match(line), _KEY.match(line)
        if header is not None:
            section = header[1]
        elif key is not None and (section, key[1]) in left:
            line = f"{key[1]} = {left.pop((section, key[1]))}"
        lines.append(line)
    if left:
        raise KeyError(f"run.toml has no place for {', '.join('.'.join(one) for one in left)}")
    return "\n".join([*lines, ""])
