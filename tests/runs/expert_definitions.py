"""The definition of a run with experts, the smallest one."""

from __future__ import annotations

EXPERTS = b"""
[experts]
grids = ["ffn0", "ffn1"]
sizes = [2, 3]
k = 2
codec = "none"
max_norm = 1.0
[experts.network]
name = "feed-forward"
width = 16
inner = [8]
[experts.optimizer]
name = "adamw"
lr = 0.003
[experts.schedule]
name = "constant"
warmup = 2
"""

TEXT = (
    b"""
[run]
name = "poem"
[model]
name = "dmoe_gpt"
size = "tiny"
context = 16
width = 16
layers = 2
heads = 2
[optimizer]
name = "adamw"
lr = 0.003
[training]
batch = 64
samples_at_once = 4
"""
    + EXPERTS
)


def changed(old: str, new: str) -> bytes:
    assert old.encode() in TEXT
    return TEXT.replace(old.encode(), new.encode(), 1)
