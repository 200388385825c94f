"""Keeps torch's compiler from being loaded until something needs it.

    keep_the_compiler_out()      # once, before the first optimizer is made

Torch's optimizers import its compiler (torch._dynamo) only to say that they must not be compiled.
This costs two seconds and 74 MB at every start (torch 2.13), during which the training thread
cannot be told to leave, and leaves a folder among the temporary ones. Nothing here compiles. So a
stand-in takes those two calls, and loads the real compiler as soon as anything else is asked of it,
for example by an organiser's own model.

Python and its libraries look for names with underscores (`__file__`, `__wrapped__`) in all modules.
The stand-in answers those itself; otherwise each look would load the compiler.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final, TypeVar

COMPILER: Final = "torch._dynamo"
_PACKAGE_PATH: Final = "__path__"  # read when one of its submodules is imported

Function = TypeVar("Function")


class StandIn(ModuleType):
    """A stand-in for the module of this name."""

    def disable(self, function: Function, *_arguments: Any, **_options: Any) -> Function:
        """Mark a function as never compiled."""
        return function

    def graph_break(self, *_arguments: Any, **_options: Any) -> None:
        """Mark the end of a compiled graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != _PACKAGE_PATH:
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def keep_the_compiler_out() -> None:
    """Does nothing if the compiler has been loaded already."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = StandIn(COMPILER)
