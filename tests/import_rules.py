"""Which imports docs/architecture.md allows: a function from a module's source to what is wrong.

Reads the syntax tree, so it sees imports inside functions, under TYPE_CHECKING, relative ones, and
`importlib.import_module` or `__import__` with a constant name; nothing is executed. The one thing
it cannot see is a name put together at run time (node/app/cli/catalogue.py does that, for
modules of its own package).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

GROUND = frozenset({"auth", "nat", "models"})
PACKAGES = GROUND | {"protocols", "node"}

# Inside protocols: the rooms that a room may import. All other modules are the shared base.
ROOMS = {
    "base": frozenset[str](),
    "rpc": frozenset({"base"}),
    "access": frozenset({"base", "rpc"}),
    "tensors": frozenset({"base", "rpc"}),
    "testing": frozenset({"base"}),
    "dht": frozenset({"base", "rpc"}),
    "moshpit": frozenset({"base", "rpc", "tensors", "dht"}),
    "accumulation": frozenset({"base", "rpc", "tensors", "dht", "moshpit"}),
    "runs": frozenset({"base", "rpc"}),
    "credit": frozenset({"base", "rpc"}),
    "experts": frozenset({"base", "rpc", "tensors", "dht"}),
}

# Packages that others of the product use by what their `__init__` shows, and not by their modules.
FACES = (
    "nat.mapping",
    "protocols.rpc",
    "protocols.tensors",
    "protocols.access",
    "protocols.dht",
    "protocols.experts",
    "node.net",
    "node.training.join",
    "node.training.credit",
    "node.app.screen",
    "node.app.demo",
    "node.app.doctor",
    "node.app.page",
)

# Packages without such a face, because it would load more than a light command needs: others use
# their modules, all but these.
INSIDE = {
    "node.core": ("control_frames", "dht_store", "machine_changes", "peer_cache"),
    "node.core.access": ("auth_http",),
    "node.run": ("safetensors_file",),
    "node.training": (
        "account",
        "departure",
        "excerpt",
        "loop",
        "loss_curve",
        "network_watch",
        "owners_pause",
        "phases",
        "thinned",
        "trainer",
        "watched",
    ),
}

# Inside node: each layer leans on those before it. `node` itself only starts what is in `app`.
LAYERS = ("net", "core", "run", "training", "app")

# The contract is the ground that everybody stands on; of the ground rooms nat may know it.
CONTRACT = ("protocols.network", "protocols.identity", "protocols.errors")

MAY_IMPORT_LIBP2P = ("node.net", "nat")

# torch costs 1.4 s: only where tensors are the point may loading a module import it.
HEAVY_ROOMS = (
    "models",
    "protocols.tensors",
    "protocols.moshpit",
    "protocols.accumulation",
    "protocols.experts",
    "node.training",
    "node.app.demo.judging",
    "node.run.building",
    "node.run.batches",
    "node.run.compiled_loss",
    "node.run.mixtures",
    "node.run.out_of_memory",
)
LIGHT_ROOMS = ("node.training.credit", "node.training.join")  # of those


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    while_loading: bool  # not inside a function, not under TYPE_CHECKING


def wrong_imports(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """The forbidden imports of this module, each as a sentence; empty when all is well."""
    wrong = []
    for found in imports_of(module, source, is_package=is_package):
        reason = _forbidden(module, found)
        if reason:
            wrong.append(f"{module}, line {found.line}: imports {found.target}: {reason}")
    return wrong


@functools.cache  # several tests ask for the imports of each module, and parsing takes seconds
def imports_of(module: str, source: str, *, is_package: bool = False) -> tuple[Import, ...]:
    """Every import in the source. `from a import b` counts as a.b: b may be a module."""
    package = module if is_package else module.rpartition(".")[0]
    by_function = "import_module" in source or "__import__" in source
    kinds = (ast.AST,) if by_function else (ast.stmt, ast.ExceptHandler, ast.match_case)
    return tuple(_walk(ast.parse(source), package, kinds, while_loading=True))


def _walk(
    node: ast.AST, package: str, kinds: tuple[type[ast.AST], ...], *, while_loading: bool
) -> Iterator[Import]:
    """The imports in this node and in its children of these kinds: without expressions it takes a
    fifth of the time."""
    for target in _targets(node, package):
        yield Import(target, getattr(node, "lineno", 0), while_loading)
    if isinstance(node, ast.If) and _tests_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, package, kinds, while_loading=False)
        for child in node.orelse:
            yield from _walk(child, package, kinds, while_loading=while_loading)
        return
    inside = while_loading and not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    )
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kinds):
            yield from _walk(child, package, kinds, while_loading=inside)


def _targets(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=name, names=names, level=level):
            base = _absolute(name or "", level, package)
            return [f"{base}.{alias.name}" if base else alias.name for alias in names]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *rest],
        ):
            level = len(name) - len(name.lstrip("."))
            if level and rest and isinstance(rest[0], ast.Constant):
                return [_absolute(name.lstrip("."), level, str(rest[0].value))]
            return [_absolute(name.lstrip("."), level, package)]
        case _:
            return []


def _absolute(name: str, level: int, package: str) -> str:
    if not level:
        return name
    parents = package.split(".")
    kept = parents[: len(parents) - (level - 1)]
    return ".".join([*kept, name] if name else kept)


def _tests_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case _:
            return False


def _forbidden(module: str, found: Import) -> str | None:
    own, theirs = module.split(".")[0], found.target.split(".")[0]
    if theirs == "torch" and found.while_loading and not _is_heavy(module):
        return "this module is light; import torch inside the function that needs it"
    if theirs == "libp2p":
        return None if _is_within(module, MAY_IMPORT_LIBP2P) else "it stays in node/net/ and nat/"
    if theirs in ("tests", "lab"):
        return "the product does not lean on its tests, nor on its laboratory"
    if theirs == own == "node":
        mine, other = _layer(module), _layer(found.target)
        if mine < other:
            return f"{LAYERS[mine]} is below {LAYERS[other]}"
    if theirs not in PACKAGES or theirs == own == "node":
        return None
    if own == "nat" and _is_within(found.target, CONTRACT):
        return None
    if own in GROUND:
        return None if theirs == own else "the ground knows nothing of what stands beside or above"
    if own == "protocols" and theirs == "node":
        return "arrows run downwards: node stands on protocols"
    if own == theirs == "protocols":
        mine, other = _room(module), _room(found.target)
        if mine != other and other not in ROOMS[mine]:
            if mine == "base" and len(module.split(".")) > 2:
                package = module.split(".")[1]
                return f"{package} has no row in ROOMS; add one here, in tests/import_rules.py"
            return f"inside protocols, {mine} does not lean on {other}"
    return None


def _is_heavy(module: str) -> bool:
    return _is_within(module, HEAVY_ROOMS) and not _is_within(module, LIGHT_ROOMS)


def _is_within(module: str, rooms: Iterable[str]) -> bool:
    return any(module == one or module.startswith((f"{one}.", f"{one}_")) for one in rooms)


def _layer(module: str) -> int:
    """Of what is in none, the highest: it may import anything of ours, and nobody imports it."""
    part = module.split(".")[1:2]
    return LAYERS.index(part[0]) if part and part[0] in LAYERS else len(LAYERS) - 1


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "base"
