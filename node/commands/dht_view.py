"""How the answers about the directory are shown: a few lines for a person, as they are for JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from node.commands.output import Output


def show(action: str, answer: Mapping[str, Any], output: Output) -> None:
    """Print the answer to `potluck dht ACTION`."""
    text = {"get": _found, "put": _stored, "stats": _statistics}[action](answer)
    output.data(answer, text)


def _found(answer: Mapping[str, Any]) -> str:
    slots = answer["slots"]
    if not slots and not answer["peers_known"]:
        return (
            f"This node knows no other, so nobody could be asked for {answer['key']}; it keeps "
            "nothing under it itself. `potluck dht stats` shows whom it has tried to reach."
        )
    if not slots:
        return f"Nothing is stored under {answer['key']}."
    lines = []
    for slot in slots:
        value = slot["value"]
        lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        lines.append(f"  by {slot['publisher']}, {_life(slot['expires_in_seconds'])}")
    return "\n".join(lines)


def _stored(answer: Mapping[str, Any]) -> str:
    count = answer["replicas"]
    return (
        f"Stored under {answer['key']} at {count} {'node' if count == 1 else 'nodes'}, "
        f"{_life(answer['expires_in_seconds'])}, as {answer['publisher']}."
    )


def _life(seconds: float) -> str:
    from node.commands.status_view import duration

    return f"for another {duration(seconds)}"


def _statistics(answer: Mapping[str, Any]) -> str:
    width = max(len(name) for name in answer)
    return "\n".join(f"{name.replace('_', ' '):{width}}  {answer[name]}" for name in answer)
