"""Torch without its compiler, until somebody asks for it.

    keep_the_compiler_out()      # once, before the first optimizer is made

Torch's optimizers import its compiler (torch._dynamo) only to tell it that they are not to be
compiled: two seconds and 74 MB of every start (torch 2.13), in which the training thread cannot be
told to leave, and a folder that stays among the temporary ones. Nothing here compiles. So a
stand-in takes those two sentences, and gives way to the compiler itself as soon as it is asked for
anything else, by a model of the organiser's own, say.

Easy to get wrong: Python and its libraries look through all modules for names with underscores
(`__file__`, `__wrapped__`). Those are answered with what is there, or everybody who looks would
load the compiler.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final, TypeVar

COMPILER: Final = "torch._dynamo"
_PACKAGE_PATH: Final = "__path__"  # asked for by who imports one of its parts

Function = TypeVar("Function")


class StandIn(ModuleType):
    """For the module of this name."""

    def disable(self, function: Function, *_arguments: Any, **_options: Any) -> Function:
        """This is never compiled."""
        return function

    def graph_break(self, *_arguments: Any, **_options: Any) -> None:
        """What is compiled ends here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != _PACKAGE_PATH:
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def keep_the_compiler_out() -> None:
    """Nothing is changed where the compiler has been loaded already."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = StandIn(COMPILER)
