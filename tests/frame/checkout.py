"""A checkout with the real scripts and a Python that only pretends to install.

So the decisions of the scripts (when to install, what to ask pip for) and the state after an
interruption can be tested in milliseconds and without a network. The pretended Python makes a venv
that is a copy of itself, writes down pip's arguments, and runs everything else for real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent

# $JOURNAL and $FAILING come from the environment; a line of $FAILING is a word that makes pip fail.
PRETENDING_PYTHON = """#!/bin/sh
case "$1 ${2-}" in
    '-m venv')
        echo venv >>"$JOURNAL"
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        echo "#!$3/bin/python" >"$3/bin/pip"
        printf '#!/bin/sh\\necho "potluck ran: $*"\\n' >"$3/bin/potluck"
        chmod +x "$3/bin/potluck"
        exit 0 ;;
    '-m pip')
        echo "$*" >>"$JOURNAL"
        if [ -s "$FAILING" ]; then
            while read -r word; do
                case "$*" in *"$word"*) echo "pretended failure of $word" >&2; exit 1 ;; esac
            done <"$FAILING"
        fi
        exit 0 ;;
esac
case "$*" in
    *importlib.metadata*) exit 1 ;; # no torch is installed yet
    *walk_packages*) exit 0 ;;
esac
exec "$REAL_PYTHON" "$@"
"""


@dataclass
class Checkout:
    folder: Path
    python: Path
    journal: Path
    failing: Path

    @staticmethod
    def make(parent: Path) -> Checkout:
        folder = parent / "a checkout"  # with a blank in its name: people have such folders
        folder.mkdir()
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        tools = parent / "tools"
        tools.mkdir()
        python = tools / "python"
        python.write_text(PRETENDING_PYTHON, encoding="utf-8")
        python.chmod(0o755)
        checkout = Checkout(folder, python, parent / "journal", parent / "failing")
        checkout.failing.touch()
        return checkout

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    def environment(self, **more: str) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if "POTLUCK" not in name}
        return {
            **ours,
            "POTLUCK_PYTHON": str(self.python),
            "JOURNAL": str(self.journal),
            "FAILING": str(self.failing),
            "REAL_PYTHON": sys.executable,
            **more,
        }

    def run(
        self, script: str, *words: str, cwd: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / script), *words],
            env=self.environment(**more),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def asked_of_pip(self) -> list[str]:
        """The requests to pip since the last call, and `venv` if one was made."""
        text = self.journal.read_text(encoding="utf-8") if self.journal.exists() else ""
        self.journal.unlink(missing_ok=True)
        return text.splitlines()
