"""constraints.txt is the whole truth about what is installed."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
DEVELOPMENT, LIBRARIES = "# --- development", "# --- libraries"

# The departures that constraints.txt states itself: see its head.
KNOWN_DEPARTURES = {("libp2p", "fastecdsa")}
# torch installs these itself, at versions that it pins, where there is a GPU.
LEFT_TO_TORCH = re.compile(r"^(nvidia-.*|cuda-.*|triton)$")


def pins(section: str) -> dict[str, str]:
    """The packages that a section of constraints.txt pins on this platform."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    run, found, further = text.partition(DEVELOPMENT)
    development, found_too, libraries = further.partition(LIBRARIES)
    assert found
    assert found_too
    sections = {"run": run, "development": development, "libraries": libraries}
    pinned = {}
    for line in sections[section].splitlines():
        if not line.startswith("#") and "==" in line:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate():
                pinned[canonicalize_name(wanted.name)] = str(wanted.specifier).removeprefix("==")
    return pinned


def requirements_of(package: Distribution, extras: set[str]) -> list[Requirement]:
    wanted = [Requirement(text) for text in package.requires or []]
    return [
        one
        for one in wanted
        if one.marker is None
        or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""})
    ]


def closure(extras: set[str]) -> set[str]:
    """Every package that potluck needs on this platform, however indirectly."""
    needed: set[str] = set()
    waiting = [("potluck", frozenset(extras))]
    seen = set()
    while waiting:
        name, wanted_extras = waiting.pop()
        if (name, wanted_extras) in seen:
            continue
        seen.add((name, wanted_extras))
        for one in requirements_of(distribution(name), set(wanted_extras)):
            child = canonicalize_name(one.name)
            if not LEFT_TO_TORCH.match(child):
                needed.add(child)
                waiting.append((child, frozenset(one.extras)))
    return needed


BUILD_BACKEND = {"setuptools"}


def test_exactly_the_packages_that_potluck_needs_are_pinned() -> None:
    assert set(pins("run")) == closure(set()) | BUILD_BACKEND


@pytest.mark.slow
def test_exactly_the_further_packages_that_the_tests_need_are_pinned() -> None:
    assert set(pins("development")) == closure({"development"}) - closure(set()) - BUILD_BACKEND


@pytest.mark.slow
def test_exactly_the_further_packages_of_the_large_libraries_are_pinned() -> None:
    """Their metadata is only there where they are installed."""
    installed = {canonicalize_name(one.metadata["Name"]) for one in distributions()}
    if not set(pins("libraries")) <= installed:
        pytest.skip("not installed: scripts/environment libraries")
    smaller = closure({"development"}) | closure(set()) | BUILD_BACKEND
    assert set(pins("libraries")) == closure({"libraries"}) - smaller


def test_installed_versions_are_the_pinned_ones() -> None:
    pinned = pins("run") | pins("development")
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in distributions()}
    different = {
        name: (version, installed.get(name))
        for name, version in pinned.items()
        # 2.13.0+cpu is 2.13.0, built otherwise
        if Version(installed.get(name, "0")).public != version
    }
    assert not different


def test_the_pins_satisfy_what_every_package_asks_for() -> None:
    pinned = pins("run") | pins("development")
    broken = {
        (name, canonicalize_name(one.name))
        for name in pinned
        for one in requirements_of(distribution(name), set())
        if canonicalize_name(one.name) in pinned
        and not one.specifier.contains(pinned[canonicalize_name(one.name)])
    }
    assert broken == KNOWN_DEPARTURES, "a package that is needed elsewhere may be used, too"


def test_the_build_backend_is_the_pinned_one() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires = ["setuptools=={pins("run")["setuptools"]}"]' in project


def test_the_pinned_torch_is_the_one_whose_cpu_build_is_fetched() -> None:
    script = (ROOT / "scripts" / "environment").read_text(encoding="utf-8")
    assert f"torch_version={pins('run')['torch']}\n" in script


@pytest.mark.parametrize("forbidden", ["--", "://", " @ ", "+cpu\n", ">=", "<", "~="])
def test_every_line_is_one_exact_version_from_wherever_pip_looks(forbidden: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if not line.startswith("#") and forbidden in line + "\n"]
    assert not wrong
