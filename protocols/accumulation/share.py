"""Who brought what to a committed round: what all members of its group know of one another."""

from __future__ import annotations

import msgspec

from protocols.identity import PeerId


class Share(msgspec.Struct, frozen=True):
    """`samples`: what the peer has signed that it brings. `averaged_bytes`: how much of the others'
    data it has averaged, as it travelled. Over a grid both are of the first group."""

    peer: PeerId
    samples: float
    averaged_bytes: int = 0
