"""scripts/compose.yaml: there is no Docker here, so it is read, and its backbone is started with a
folder in place of the volume."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.app.cli.catalogue import build_parser
from tests.commands.console import LOOPBACK, potluck, running
from tests.ports import held_port

ROOT = Path(__file__).resolve().parent.parent.parent
VOLUME = "/potluck"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    yaml = importlib.import_module("yaml")
    text = (ROOT / "scripts" / "compose.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text)
    assert set(read["volumes"]) == set(read["services"])
    found: dict[str, Any] = read["services"]
    return found


def test_every_service_runs_potluck_without_rights_and_keeps_its_home(
    services: dict[str, Any],
) -> None:
    dockerfile = (ROOT / "scripts" / "Dockerfile").read_text(encoding="utf-8")
    assert "\nUSER potluck\n" in dockerfile
    assert f"\nVOLUME {VOLUME}\n" in dockerfile
    for name, service in services.items():
        build_parser().parse_args(service["command"])
        assert service["volumes"] == [f"{name}:{VOLUME}"]
        assert service["environment"]["POTLUCK_HOME"] == VOLUME
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_no_secret_is_in_the_image_or_in_the_file(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "scripts" / "Dockerfile").read_text(encoding="utf-8")
    for line in dockerfile.splitlines():
        assert not (line.startswith("COPY ") and "." in line.split()), "only what is named"
    for service in services.values():
        assert set(service["environment"]) <= {"POTLUCK_HOME", "POTLUCK_NETWORK_ANNOUNCE"}


def test_only_the_ports_for_others_are_published(services: dict[str, Any]) -> None:
    assert services["auth"]["ports"] == ["8480:8480"]
    assert services["backbone"]["ports"] == ["4001:4001"]


@pytest.mark.slow
def test_the_backbone_starts_and_its_health_check_passes(
    services: dict[str, Any], tmp_path: Path
) -> None:
    """In the run that the page's `run init` makes."""
    home = str(tmp_path / "volume")
    assert potluck("run", "init", f"{home}/poem", home=Path(home)).returncode == 0
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        words = [one.replace(VOLUME, home) for one in services["backbone"]["command"]]
        words[words.index("--listen") + 1] = LOOPBACK
        check = services["backbone"]["healthcheck"]["test"]
        assert check[:2] == ["CMD", "python"]
        check = [sys.executable, *(one.replace("127.0.0.1:8481", address) for one in check[2:])]
        assert subprocess.run(check, capture_output=True, check=False).returncode != 0
        with running(*words, "--http", address, home=Path(home)) as backbone:
            while "keeping poem" not in backbone.next_line():
                pass
            subprocess.run(check, check=True)
