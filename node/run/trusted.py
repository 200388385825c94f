"""Code for a run that is not potluck's own: only from the volunteer's disk, and only on request.

    [model]                         potluck join INVITE --trust-module ./poem_model.py
    module = "poem_model"
    sha256 = "9f86d081884c7d65…"    (optional: then it must be this exact file)

A definition can only name a module. The file comes from the volunteer, who has read it or trusts
its author. One file is one module; it may define

    def build_model(settings, *, seed): ...                     # a models.trainable.Trainable
    def open_batches(settings, *, seed, peer, samples): ...     # an iterable of batches
    def build_expert(settings, *, seed): ...                    # node/run/experts.py

where `settings` are the other keys of the table. docs/organisers.md has the contract in full.

Promises: no code of a file is executed before its bytes have the hash that the definition asks for,
and those same bytes are executed. A failure while the file's code runs is reported as the file's,
with the line, and never as potluck's (`blamed_on`).

The owner trusts a name and a path. A name in the definition never becomes a path.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from models.errors import ModelsError
from node.core.wrong_use import WrongUse
from node.run.mistakes import WrongDefinition
from protocols.errors import PotluckError, Refused

if TYPE_CHECKING:
    from node.run.definition import RunDefinition

LARGEST_MODULE_BYTES = 4 << 20
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
OWN_KEYS = ("module", "sha256")
LONGEST_REASON = 300  # characters of somebody else's error
NOT_OURS = (
    "This is the organiser's code, not potluck's: correct it there, or tell the organiser. "
    "docs/organisers.md describes what a module must do."
)


class UntrustedModule(Refused):
    """The run needs code that this machine's owner has not trusted."""


class BrokenModule(PotluckError):
    """A trusted module does not do what it should. Starting it again would not help."""

    exit_code = 2


def trusted_modules(arguments: Sequence[str]) -> dict[str, Path]:
    """`--trust-module PATH/poem_model.py` (several) as {"poem_model": path}; WrongUse."""
    found: dict[str, Path] = {}
    for argument in arguments:
        path = Path(argument).expanduser().absolute()
        if path.suffix != ".py" or not NAME.match(path.stem) or not path.is_file():
            raise WrongUse(
                f"There is no Python file at --trust-module {argument[:200]}.",
                advice="Give the path of a file that ends in .py and that you have read.",
            )
        if found.get(path.stem, path) != path:
            raise WrongUse(
                f"--trust-module names two files called {path.name}.",
                advice="The run asks for a module by its name: give only the right one.",
            )
        found[path.stem] = path
    return found


def mistakes_in_module_table(table: Mapping[str, Any], where: str) -> list[str]:
    """The mistakes in the keys that name a module."""
    name, digest = table.get("module"), table.get("sha256")
    mistakes = []
    if not isinstance(name, str) or not NAME.match(name):
        mistakes.append(f'module below [{where}] must be a name, such as "poem_model".')
    if digest is not None and not (isinstance(digest, str) and DIGEST.match(digest)):
        mistakes.append(f"sha256 below [{where}] must be 64 hexadecimal digits, in lower case.")
    return mistakes


def tables_of_modules(definition: RunDefinition) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables of a definition that name a module, each with its name."""
    tables = [("model", definition.model), ("data", definition.data)]
    if definition.experts is not None:
        tables.append(("experts.network", definition.experts.network))
    return [(where, table) for where, table in tables if "module" in table]


def own_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for the module: all of the table except the keys about the module itself."""
    return {key: value for key, value in table.items() if key not in OWN_KEYS}


def load_trusted(table: Mapping[str, Any], trusted: Mapping[str, Path], where: str) -> ModuleType:
    """The module that the table names, from the file that was trusted for it.

    UntrustedModule if none was, or it is another file; BrokenModule if it cannot be loaded;
    WrongDefinition for an impossible name.
    """
    mistakes = mistakes_in_module_table(table, where)
    if mistakes:
        raise WrongDefinition.of(mistakes)
    name = table["module"]
    path = trusted.get(name)
    if path is None:
        raise UntrustedModule(
            f"The run's {where} is the module {name}, which is not part of potluck.",
            why="Code never comes over the network: only you can trust it, and name its place on "
            "your disk.",
            advice=f"Get {name}.py from the organiser, read it, and add --trust-module "
            f"PATH/{name}.py.",
        )
    source = _read(path)
    digest = hashlib.sha256(source).hexdigest()
    wanted = table.get("sha256")
    if wanted is not None and digest != wanted:
        raise UntrustedModule(
            f"{path} is not the module {name} of this run.",
            why=f"The run's has the SHA-256 {wanted[:16]}…, this file has {digest[:16]}….",
            advice="Get the organiser's current version of it, and read it again.",
        )
    return _execute(name, path, source)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            source = file.read(LARGEST_MODULE_BYTES + 1)
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}.") from None
    if mode & stat.S_IWOTH and os.name == "posix":
        raise UntrustedModule(
            f"Everybody on this machine may write to {path}.",
            why="It may have changed since you read it.",
            advice=f"Read it again, and run `chmod o-w {path}`.",
        )
    if len(source) > LARGEST_MODULE_BYTES:
        raise WrongUse(
            f"{path} has more than {LARGEST_MODULE_BYTES:,} bytes, too many for a module."
        )
    return source


class _FromBytes(importlib.abc.SourceLoader):
    """Loads exactly the bytes that were hashed, and no other file or cached code."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - the interface
        return str(self._path)

    def get_data(self, path: bytes | str) -> bytes:
        if str(path) != str(self._path):
            raise OSError("there is no other file")  # Python asks for cached bytecode here
        return self._source


def _execute(name: str, path: Path, source: bytes) -> ModuleType:
    spec = importlib.util.spec_from_loader(f"trusted_{name}", _FromBytes(path, source))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up there
    try:
        with blamed_on(str(path), "loading it"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module


def file_of(module: ModuleType) -> str:
    """The file of a loaded module's code."""
    assert module.__spec__ is not None
    return str(module.__spec__.origin)


def function_in(module: ModuleType, name: str) -> Any:
    """The function of this name; BrokenModule if it has none."""
    found = getattr(module, name, None)
    if not callable(found):
        raise BrokenModule(
            f"{file_of(module)} has no function {name}.",
            advice="docs/organisers.md describes what a module must have.",
        )
    return found


@contextmanager
def blamed_on(file: str, doing: str) -> Iterator[None]:
    """BrokenModule, with the line, for any failure of the module's code in the block.

    Errors that potluck or its models raise on purpose pass through (a stop, a wrong setting), and
    so do out-of-memory errors: smaller batches may help against them.
    """
    from node.run.out_of_memory import is_out_of_memory

    try:
        yield
    except (PotluckError, ModelsError):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {str(error)[:LONGEST_REASON]}"
        raise BrokenModule(
            f"{_place_of(error, file)}: {doing} failed.", why=reason, advice=NOT_OURS
        ) from error


def wrong_result(file: str, function: Callable[..., object], must: str, given: str) -> BrokenModule:
    """The error for a wrong result of the module's `function`."""
    code = getattr(function, "__code__", None)
    line = code.co_firstlineno if code is not None and code.co_filename == file else None
    return BrokenModule(
        f"{_place(file, line)}: {function.__name__} {must}, and gave {given}.", advice=NOT_OURS
    )


def _place_of(error: BaseException, file: str) -> str:
    """The last executed line of the file; only the file if there was none."""
    lines = [
        one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == file
    ]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return _place(file, lines[-1] if lines else None)


def _place(file: str, line: int | None) -> str:
    return file if line is None else f"{file}, line {line}"
