"""What a person may do in a run: the roles inside a token.

A volunteer trains. A backbone serves the others (bootstrap, relay, checkpoints) and may train. A
moderator decides who takes part. A monitor reads and does not train. A person may have several.

Easy to get wrong: the roles in a token are a set, and a set has many spellings. There is one that
counts (`in_order`): sorted, each once. Tokens in any other spelling are refused.
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
    """The one spelling of a set of roles."""
    return tuple(sorted(set(roles), key=lambda role: role.value))


def may_train(roles: Iterable[Role]) -> bool:
    """Whether somebody with these roles changes what is trained, rather than only looks on."""
    return not MAY_TRAIN.isdisjoint(roles)
