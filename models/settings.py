"""Settings as they stand in a run's file, read into a typed struct; what cannot be is refused.

A key that the struct does not have is told with the nearest one that it has, a missing or wrong
value with its key and what it must be. The one thing easy to get wrong: `1` is fine where 1.0 is
meant, and `"1"` or `true` are not.
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
    """The struct; `of` says in messages what it describes: `the model gpt`."""
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
    """The same settings, if they can be: those that were made in Python nobody has looked at."""
    return read_settings(msgspec.to_builtins(settings), type(settings), of)


def take_name(given: Mapping[str, Any], known: Mapping[str, Any], of: str) -> str:
    """The value of `name`, which must be one of the known ones."""
    name = given.get("name")
    if not isinstance(name, str) or name not in known:
        what = "has no name" if name is None else f"is called {name!r:.60}, and there is none"
        raise WrongSettings(f"The {of} {what}.", advice=nearest(str(name), known))
    return name
