"""Definitions for tests: one that is right, and how to change it."""

from __future__ import annotations

from auth.keys import SigningKey, fingerprint

NAME = "poem"
BEGINNING = b"""
[run]
name = "poem"
[model]
name = "gpt"
size = "tiny"
context = 16
width = 16
layers = 1
heads = 2
[optimizer]
name = "adamw"
lr = 0.003
"""
"""The run, its smallest model and its optimizer."""
TEXT = (
    BEGINNING
    + b"""[training]
batch = 64
samples_at_once = 4
"""
)

ORGANISER, MALLORY = SigningKey(bytes([7]) * 32), SigningKey(bytes([8]) * 32)
FINGERPRINT = fingerprint(ORGANISER.public_key)
NOW_MS = 1_700_000_000_000


def with_line(line: str, section: str = "training") -> bytes:
    """The same definition, with one more line in a section that it has."""
    before, found, after = TEXT.partition(f"[{section}]\n".encode())
    assert found
    return before + found + line.encode() + b"\n" + after


def changed(old: str, new: str) -> bytes:
    assert old.encode() in TEXT
    return TEXT.replace(old.encode(), new.encode(), 1)
