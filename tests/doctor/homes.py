"""Homes for the tests of the doctor, and what it finds in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from node.app.doctor import Finding, FindingLevel, Surroundings, look_around
from node.core.configuration import Configuration, read_configuration
from node.core.settings import Value

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


def configuration_of(home: Path, **settings: Value) -> Configuration:
    """A double underscore is the dot of a setting's name."""
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    return read_configuration(flags, environment={"POTLUCK_HOME": str(home)})


def surroundings_of(home: Path, **settings: Value) -> Surroundings:
    return look_around(configuration_of(home, **settings))


def only(findings: Sequence[Finding], level: FindingLevel) -> Finding:
    """The one finding of this level."""
    (finding,) = [one for one in findings if one.level is level]
    return finding
