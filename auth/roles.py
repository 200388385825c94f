"""A person's permissions in a run: the roles inside a token.

A volunteer trains. A backbone serves the others (bootstrap, relay, checkpoints) and may train. A
moderator decides who takes part. A monitor reads and does not train. A person may have several.

A set of roles could be written in many ways. Only one is valid (`in_order`): sorted, each once.
Tokens with any other are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Role(enum.Enum):
    VOLUNTEER = "volunteer"
    BACKBONE = "backbone"
    MODERATOR = "moderator"
    MONITOR = "monitor"


MOST_ROLES = len(Role)

MAY_TRAIN = frozenset({Role.VOLUNTEER, Role.BACKBONE})


def in_order(roles: Iterable[Role]) -> tuple[Role, ...]:
    """The roles sorted, each once."""
    return tuple(sorted(set(roles), key=lambda role: role.value))


def may_train(roles: Iterable[Role]) -> bool:
    """Whether somebody with these roles changes the model, rather than only watching."""
    return not MAY_TRAIN.isdisjoint(roles)
