"""Every import runs downwards, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rules import FACES, INSIDE, PACKAGES, Import, imports_of, wrong_imports

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.xdist_group("architecture")  # one worker reads the modules, and once


def test_one_worker_has_all_tests_of_a_group(request: pytest.FixtureRequest) -> None:
    """With pytest 9.2.0 they were parted, and nothing but the time that the tests took told it."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("only where workers share the tests in groups")
    assert request.node.nodeid.endswith("@architecture")


def product_modules() -> list[tuple[str, Path]]:
    found = []
    for package in sorted(PACKAGES):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def imports_in(module: str, path: Path) -> tuple[Import, ...]:
    source = path.read_text(encoding="utf-8")
    return imports_of(module, source, is_package=path.name == "__init__.py")


def test_no_module_imports_against_the_arrows() -> None:
    modules = product_modules()
    assert len(modules) > 15, "the modules were not found where they should be"
    wrong = []
    for module, path in modules:
        source = path.read_text(encoding="utf-8")
        wrong += wrong_imports(module, source, is_package=path.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


def test_protocols_use_threads_only_where_a_simulation_can_do_without() -> None:
    """A virtual clock does not see a thread that works, and jumps past every deadline."""
    wrong = []
    for module, path in product_modules():
        if not module.startswith("protocols.") or module == "protocols.blocking":
            continue
        source = path.read_text(encoding="utf-8")
        if "to_thread" not in source:  # which is quicker to see than to parse
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr == "to_thread":
                wrong.append(f"{module}, line {node.lineno}: use protocols.blocking")
    assert not wrong, "\n".join(wrong)


def names_shown_by(package: str) -> set[str]:
    """The names that a package lists in `__all__`."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return set(ast.literal_eval(statement.value))
    raise AssertionError(f"{package} shows nothing")


def test_nobody_reaches_past_the_face_of_a_package() -> None:
    faces = {package: names_shown_by(package) for package in FACES}
    wrong = []
    for module, path in product_modules():
        for found in imports_in(module, path):
            for package, names in faces.items():
                name = found.target.removeprefix(f"{package}.")
                is_inside = module == package or module.startswith(f"{package}.")
                if name not in (found.target, *names) and not is_inside:
                    wrong.append(f"{module}, line {found.line}: {found.target}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_module_from_the_inside_of_another_package() -> None:
    inside = {f"{package}.{name}": package for package, names in INSIDE.items() for name in names}
    modules = product_modules()
    assert inside.keys() <= {module for module, _ in modules}
    wrong = []
    for module, path in modules:
        for found in imports_in(module, path):
            for hidden, package in inside.items():
                is_it = found.target == hidden or found.target.startswith(f"{hidden}.")
                if is_it and not module.startswith(f"{package}."):
                    wrong.append(f"{module}, line {found.line}: {found.target}")
    assert not wrong, "\n".join(wrong)


FORBIDDEN = {
    "ground imports a sibling": ("auth.tokens", "import nat.punch"),
    "ground imports protocols": ("models.tiny", "from protocols import errors"),
    "nat imports more than the contract": ("nat.relaying", "from protocols.rpc import Rpc"),
    "auth imports the contract": ("auth.keys", "from protocols.network import Network"),
    "ground imports node": ("nat.relay", "from node.net.network import Libp2pNetwork"),
    "auth imports models": ("auth.keys", "import models"),
    "protocols imports node": ("protocols.rpc.rpc", "import node.core.configuration as c"),
    "protocols imports libp2p": ("protocols.rpc.rpc", "from libp2p.peer.id import ID"),
    "auth imports libp2p": ("auth.keys", "import libp2p"),
    "inside a function": ("protocols.guard", "def f():\n    import node"),
    "inside a method": ("protocols.guard", "class A:\n    async def f(self):\n        import node"),
    "under TYPE_CHECKING": ("protocols.guard", "if TYPE_CHECKING:\n    from node import core"),
    "under typing.TYPE_CHECKING": ("auth.a", "if typing.TYPE_CHECKING:\n    import protocols"),
    "in the else of TYPE_CHECKING": ("auth.a", "if TYPE_CHECKING:\n    1\nelse:\n    import nat"),
    "in try": ("auth.a", "try:\n    import nat\nexcept ImportError:\n    raise"),
    "by importlib": ("protocols.guard", "import importlib\nimportlib.import_module('node.core')"),
    "by import_module": ("protocols.guard", "import_module('libp2p')"),
    "by __import__": ("models.tiny", "__import__('auth.tokens')"),
    "relative upwards": ("protocols.dht.table", "from ..moshpit import grid"),
    "relative by name": ("protocols.guard", "from .dht import table"),
    "relative by importlib": ("protocols.guard", "import_module('.dht', 'protocols')"),
    "from the package": ("protocols.guard", "from protocols import dht"),
    "rpc imports dht": ("protocols.rpc.rpc", "from protocols.dht.slots import Slot"),
    "the base imports rpc": ("protocols.guard", "from protocols.rpc import Rpc"),
    "dht imports moshpit": ("protocols.dht.slots", "import protocols.moshpit.grid"),
    "moshpit imports accumulation": ("protocols.moshpit.plan", "import protocols.accumulation.x"),
    "experts import moshpit": ("protocols.experts.layer", "from protocols.moshpit import grid"),
    "accumulation imports experts": ("protocols.accumulation.steps", "import protocols.experts"),
    "core imports what is above": ("node.core.node", "from node.run import folder"),
    "a screen from below": ("node.training.trainer", "def f():\n    import node.app.screen.live"),
    "libp2p above the network": ("node.core.node", "import libp2p"),
    "the product imports tests": ("node.app.main", "from tests import import_rules"),
    "the product imports the laboratory": ("node.app.commands.plan", "import lab.bench.transport"),
    "a light module loads torch": ("node.core.node", "import torch"),
    "a light module loads a piece of torch": ("protocols.rpc.transfers", "import torch.nn"),
    "torch in a class body": ("protocols.rpc.rpc", "class A:\n    import torch"),
}  # fmt: skip

ALLOWED = {
    "node on everything": ("node.app.main", "import auth, nat, models, protocols.dht"),
    "protocols on the ground": ("protocols.guard", "import auth.tokens"),
    "app on everything below": ("node.app.main", "import node.net.network, node.training"),
    "a layer on the lowest": ("node.core.node", "from node.net import open_libp2p_network"),
    "the door on app": ("node.__main__", "from node.app.main import main"),
    "the network on libp2p": ("node.net.libp2p.host", "import libp2p"),
    "nat on the contract": ("nat.relaying", "from protocols.network import Network"),
    "nat on libp2p": ("nat.relay", "from libp2p.relay import circuit_v2"),
    "a room on itself": ("protocols.dht.table", "from . import slots\nfrom .slots import Slot"),
    "a room on the base": ("protocols.runs.serving", "from protocols import errors, rpc"),
    "moshpit on dht": ("protocols.moshpit.averager", "from ..dht import slots"),
    "accumulation on moshpit": (
        "protocols.accumulation.training_state",
        "import protocols.moshpit.plan",
    ),
    "torch where it is needed": ("node.core.node", "def train():\n    import torch"),
    "torch for type checkers": ("node.core.node", "if TYPE_CHECKING:\n    import torch"),
    "torch among tensors": ("protocols.tensors.messages", "import torch"),
    "a package beside ours in name": (
        "protocols.rpc.frames",
        "import node_tools, torchvision_names",
    ),
    "other libraries": ("auth.tokens", "import cryptography, json"),
}


@pytest.mark.parametrize(("module", "source"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_an_arrow_that_is_forbidden_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


def test_a_package_without_a_row_is_told_where_to_add_one() -> None:
    (wrong,) = wrong_imports("protocols.gossip.rumours", "from protocols.rpc import Rpc")
    assert "gossip has no row in ROOMS; add one here, in tests/import_rules.py" in wrong


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_an_arrow_that_is_allowed_is_not_complained_about(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


def test_relative_imports_are_read_as_python_reads_them() -> None:
    source = "from . import a\nfrom .. import b\nfrom ..c.d import e\nfrom .f import *\n"
    in_module = [found.target for found in imports_of("protocols.dht.slots", source)]
    assert in_module == ["protocols.dht.a", "protocols.b", "protocols.c.d.e", "protocols.dht.f.*"]
    in_package = imports_of("protocols.dht", "from . import a", is_package=True)
    assert in_package[0].target == "protocols.dht.a"


def loaded_by(statement: str) -> set[str]:
    """The names of the packages that a fresh interpreter has loaded after this statement."""
    script = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return {name.partition(".")[0] for name in json.loads(answer.stdout)}


PATHS_NAMED = re.compile(r"`((?:auth|models|nat|node|protocols|scripts|tests)/[\w/.-]*)`")
MODULES_NAMED = re.compile(r"(?<![\w./-])[A-Za-z_][\w/]*\.py\b")
NOT_OURS = {
    *("my_model.py", "PATH/poem_model.py"),  # what an organiser writes
    *("bench_averaging.py", "bench_gloo.py"),  # what is written to measure others
}
ABOUT_LIBP2P = "node/net/"  # says where in py-libp2p something is


def test_a_path_that_a_page_names_is_there() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        named = PATHS_NAMED.findall(page.read_text(encoding="utf-8"))
        assert len(named) > 40 or page.name != "architecture.md"
        assert [path for path in named if not (ROOT / path).exists()] == [], page.name


def test_a_module_that_a_comment_names_is_there() -> None:
    modules = [str(path.relative_to(ROOT)) for _, path in product_modules()]
    modules += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "scripts").rglob("*.py"))]
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    paths = [path.split("/") for path in (*modules, *tests)]
    known = {"/".join(path[at:]) for path in paths for at in range(len(path))}
    for one in modules:
        if not one.startswith(ABOUT_LIBP2P):
            named = set(MODULES_NAMED.findall((ROOT / one).read_text(encoding="utf-8")))
            assert named - NOT_OURS <= known, one


@pytest.mark.parametrize("package", FACES)
def test_a_name_that_a_face_shows_is_there(package: str) -> None:
    face = importlib.import_module(package)
    assert [name for name in sorted(names_shown_by(package)) if not hasattr(face, name)] == []


def test_the_command_line_loads_nothing_heavy_before_it_knows_the_command() -> None:
    heavy = {"torch", "numpy", "scipy", "libp2p", "trio", "rich", "msgspec", "cryptography"}
    assert not heavy & loaded_by("import node.app.main, node.app.cli.catalogue")


def test_showing_what_a_running_process_answered_loads_no_network() -> None:
    views = "import node.app.views.auth_view, node.app.views.status_view"
    assert not {"torch", "libp2p", "trio"} & loaded_by(views)


def test_a_node_without_training_loads_no_torch() -> None:
    assert not {"torch", "scipy"} & loaded_by("import node.core.node, node.net.network")


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in files if path.is_file()]


BROAD = re.compile(r"\bException\b|\bBaseException\b|\bexcept\s*(\\\s*)?:")


def swallowed_errors(source: str) -> list[int]:
    """The lines of broad `except` clauses that do nothing."""
    if not BROAD.search(source):  # which is quicker to see than to parse
        return []

    def is_broad(handler: ast.ExceptHandler) -> bool:
        kind = handler.type
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return kind is None or any(
            isinstance(one, ast.Name) and one.id in ("Exception", "BaseException") for one in kinds
        )

    def does_nothing(handler: ast.ExceptHandler) -> bool:
        return all(
            isinstance(step, ast.Pass | ast.Continue)
            or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
            for step in handler.body
        )

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and does_nothing(node)
    ]


def test_no_error_vanishes() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := swallowed_errors(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "clause",
    ["except Exception:\n    pass", "except:\n    pass", "except BaseException as e:\n    ...",
     "except (ValueError, Exception):\n    pass"],
)  # fmt: skip
def test_a_vanishing_error_is_found(clause: str) -> None:
    assert swallowed_errors(f"try:\n    f()\n{clause}") == [3]
    assert (
        swallowed_errors(f"try:\n    f()\n{clause.replace('pass', 'log()').replace('...', 'g()')}")
        == []
    )


# Writes what torch itself reads, which is a zipped pickle, because somebody asked for that.
EXPORTS = {"node/run/exporting.py": ["torch.save"]}

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


def pickling(source: str) -> list[str]:
    if not re.search("|".join((*PICKLES, r"\.load\b", r"\.save\b")), source):
        return []
    imported = {found.target.split(".")[0] for found in imports_of("tests.x", source)}
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("load", "save")
        and not any(ast.unparse(one) == "weights_only=True" for one in node.keywords)
    }
    return sorted(imported & PICKLES) + sorted(calls & {"torch.load", "torch.save"})


def test_nothing_is_pickled() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in python_files()
        if (names := pickling(path.read_text(encoding="utf-8")))
    }
    assert found == EXPORTS


@pytest.mark.parametrize("source", ["import pickle", "from dill import loads", "torch.load(f)"])
def test_pickling_is_found(source: str) -> None:
    assert pickling(source)


# Spelled in pieces, so that this file does not find itself.
REGISTRY_HOSTS = [
    "pypi" + ".org", "python" + "hosted.org", "npmjs" + ".org", "npmjs" + ".com",
    "deb.debian" + ".org", "crates" + ".io", "proxy.golang" + ".org",
]  # fmt: skip
THIS_MACHINE = ["/work" + "/", "/opt" + "/", "/root" + "/", "/home" + "/"]

# The one address that may stand somewhere: where a CPU build is fetched that PyPI does not carry.
EXPECTED = {(one, "download.pytorch" + ".org") for one in ("README.md", "scripts/environment")}


def named_places(text: str) -> set[str]:
    wanted = [*REGISTRY_HOSTS, *THIS_MACHINE, "download.pytorch" + ".org", "file" + "://"]
    return {place for place in wanted if place in text}


def test_no_file_names_a_registry_or_a_folder_of_somebodys_machine() -> None:
    found = set()
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found |= {(str(path.relative_to(ROOT)), place) for place in named_places(text)}
    assert found == EXPECTED


def test_a_named_place_is_found() -> None:
    assert named_places("see https://" + REGISTRY_HOSTS[0] + "/simple") == {REGISTRY_HOSTS[0]}
    assert named_places("open('" + THIS_MACHINE[0] + "x')") == {THIS_MACHINE[0]}
