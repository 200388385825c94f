"""The examples of docs/moderators.md besides commands: correct settings, a unit that starts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from auth.server.settings import settings_in
from tests.commands.console import CHECKOUT

HANDBOOK = (CHECKOUT / "docs" / "moderators.md").read_text(encoding="utf-8")
NEEDED = 'run = "r"\npublic_url = "https://a.example"\n'


def blocks(mark: str) -> list[str]:
    return re.findall(rf"^```{mark}\n(.*?)^```$", HANDBOOK, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_settings_that_are_shown_are_right(block: str) -> None:
    settings_in((NEEDED + block).encode(), Path("/x/auth.toml"))


def test_the_settings_that_are_shown_go_together() -> None:
    tables_last = sorted(blocks("toml"), key=lambda block: block.startswith("["))
    settings = settings_in((NEEDED + "".join(tables_last)).encode(), Path("/x/auth.toml"))
    assert [provider.kind for provider in settings.providers] == ["github", "oidc"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    (unit,) = blocks("ini")
    file = tmp_path / "potluck-auth.service"
    file.write_text(re.sub(r"ExecStart=.*", "ExecStart=/bin/true", unit))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    mentioned = [line for line in checked.stderr.splitlines() if file.name in line]
    assert not mentioned
