"""Data opened the way these tests want it: virtual waits, few examples, events kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.data.events import SourceEvent
from models.data.examples import Example
from models.data.opening import Data, open_data
from models.data.position import Position
from models.data.settings import DataSettings, SourceSettings
from tests.models.virtual_clock import VirtualClock


def one_source(kind: str, *paths: str | Path, **more: Any) -> DataSettings:
    """Settings of one source, read once; what `more` names goes where it belongs."""
    of_source = {
        key: more.pop(key) for key in list(more) if key in SourceSettings.__struct_fields__
    }
    source = SourceSettings(kind, tuple(map(str, paths)), **of_source)  # type: ignore[arg-type]
    return DataSettings(**{"source": (source,), "passes": 1, "patience_seconds": 0.2, **more})


def opened(
    settings: DataSettings,
    events: list[SourceEvent] | None = None,
    *,
    clock: VirtualClock | None = None,
    position: Position | None = None,
    **more: Any,
) -> Data:
    heard = [] if events is None else events
    return open_data(
        settings,
        seed=more.pop("seed", 1),
        peer=more.pop("peer", "alice"),
        position=position,
        on_event=heard.append,
        clock=VirtualClock() if clock is None else clock,
        **more,
    )


def contents(examples: Iterable[Example]) -> list[bytes]:
    return sorted(example.content for example in examples)


def everything(settings: DataSettings, events: list[SourceEvent] | None = None) -> list[bytes]:
    """All contents, sorted."""
    with opened(settings, events) as data:
        return contents(data)


def sentences(events: list[SourceEvent]) -> str:
    return "\n".join(event.sentence for event in events)
