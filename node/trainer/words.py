"""Everything that happens, in words for a person (`--plain`) and as an object for a program
(`--json`). Logs are a rendering of typed events, never the other way round."""

from __future__ import annotations

from typing import Any

import msgspec

from node.trainer.happenings import Happening


def words_of(happening: Happening) -> str:
    """One line."""
    return type(happening).__name__


def object_of(happening: Happening) -> dict[str, Any]:
    """One object: `event` says its kind, in lower case with dashes."""
    fields: dict[str, Any] = msgspec.to_builtins(happening)
    return fields
