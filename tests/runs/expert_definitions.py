"""The definition of a run with experts, the smallest one."""

from __future__ import annotations

from node.run.template import small_with_experts

TEXT = small_with_experts(
    "poem",
    batch=64,
    sizes=(2, 3),
    width=16,
    experts='codec = "none"\nmax_norm = 1.0',
    **{"experts.schedule": 'name = "constant"\nwarmup = 2'},
).encode()


def changed(old: str, new: str) -> bytes:
    assert old.encode() in TEXT
    return TEXT.replace(old.encode(), new.encode(), 1)
