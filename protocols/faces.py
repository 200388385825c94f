"""The face of a package whose modules are loaded only when a name of theirs is asked for.

    __getattr__ = lazily(__name__, {"clocks": ("Clocks", "machine_clocks")})

`potluck version` takes a fraction of a second because no command imports more than it uses. A face
that imported all of its package would end that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

TYPE_CHECKING = False  # `typing` itself would cost 5 ms of every command
if TYPE_CHECKING:
    from typing import Any


def lazily(package: str, shown: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The package's `__getattr__`. `shown`: its modules, with the names that it shows of each."""
    homes = {name: module for module, names in shown.items() for name in names}

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return look_up
