"""Reads settings of a run's file into a typed struct, and refuses wrong ones.

An unknown key is reported with the nearest known one, a missing or wrong value with its key and the
values that it may have. `1` is accepted for 1.0, but `"1"` and `true` are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from models.errors import WrongSettings, nearest

Read = TypeVar("Read", bound=msgspec.Struct)

PLACE = re.compile(r" - at `\$\.?(.*?)`$")


def read_settings(given: Mapping[str, Any], kind: type[Read], of: str) -> Read:
    """The struct; `of` names its subject in messages: `the model gpt`."""
    for key in given:
        if key not in kind.__struct_fields__:
            raise WrongSettings(
                f"There is no setting {key!r} for {of}.",
                advice=nearest(str(key), kind.__struct_fields__),
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, WrongSettings):
            raise error.__cause__ from None
        message = str(error)
        place = PLACE.search(message)
        which = f"setting {place[1]!r}" if place else "settings"
        reason = PLACE.sub("", message)
        raise WrongSettings(f"The {which} of {of} cannot be right: {reason}.") from None


def checked(settings: Read, of: str) -> Read:
    """The same settings, if valid: settings that were made in Python have not been checked."""
    return read_settings(msgspec.to_builtins(settings), type(settings), of)


def take_name(given: Mapping[str, Any], known: Mapping[str, Any], of: str) -> str:
    """The value of `name`, which must be one of the known ones."""
    name = given.get("name")
    if not isinstance(name, str) or name not in known:
        what = "has no name" if name is None else f"is called {name!r:.60}, and there is none"
        raise WrongSettings(f"The {of} {what}.", advice=nearest(str(name), known))
    return name
