"""Progress slots as peers write them, for the tests of estimates."""

from __future__ import annotations

from protocols.accumulation.known import Seen
from protocols.accumulation.progress_slot import ProgressSlot, Role
from protocols.identity import PeerId

MODEL = b"m" * 16
OTHER_MODEL = b"o" * 16


def history(name: int = 0) -> bytes:
    return bytes([name]) * 16


def slot(
    samples: int = 0,
    rate: float = 0.0,
    *,
    epoch: int = 5,
    at: int = 0,
    role: Role = "trains",
    averaging: bool = False,
    signature: bytes = MODEL,
    follows: bool = False,
) -> ProgressSlot:
    """`at` names the history."""
    return ProgressSlot(
        epoch,
        history(at),
        samples,
        rate,
        signature,
        role=role,
        averaging=averaging,
        follows=follows,
    )


def seen(*slots: ProgressSlot, at: float = 0.0) -> dict[PeerId, Seen]:
    return {PeerId(f"peer-{number}"): Seen(one, at) for number, one in enumerate(slots)}


def peers(*numbers: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"peer-{number}") for number in numbers)
