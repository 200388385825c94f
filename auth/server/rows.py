"""Rows of the database as typed structs, and what is said of a row that cannot be one.

SQLite checks neither types nor values; a disk that fails, or a person with an editor, leaves rows
that no code of ours wrote. Whoever reads one gets StoreDamaged, and never a ValueError.

Easy to get wrong: roles stand in one column as words with commas, in the order of `in_order`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from auth.roles import Role, in_order
from auth.server.store_errors import StoreDamaged

T = TypeVar("T", bound=msgspec.Struct)


def struct_of(type_: type[T], row: Sequence[object]) -> T:
    """The columns in the order of the struct's fields. StoreDamaged if they do not fit."""
    fields = dict(zip(type_.__struct_fields__, row, strict=True))
    roles = fields.get("roles")
    if isinstance(roles, str):
        fields["roles"] = roles.split(",")
    try:
        return msgspec.convert(fields, type_)
    except msgspec.ValidationError as error:
        raise StoreDamaged(
            f"The auth server's database has a row that makes no sense: {error}.",
            why="The disk failed, or something else wrote into the file.",
            advice="Run `potluck auth audit --verify`, and consider going back to a backup.",
        ) from None


def spell_roles(roles: Iterable[Role]) -> str:
    return ",".join(role.value for role in in_order(roles))
