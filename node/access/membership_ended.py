"""The end of a membership: the one thing about access that ends a node."""

from __future__ import annotations

from protocols.errors import Refused


class MembershipEnded(Refused):
    """The auth server has said no, under its signature: this node takes part no longer."""
