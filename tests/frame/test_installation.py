"""Potluck without a checkout: uv and pipx install what scripts/package makes, as README.md says,
and the steps of scripts/Dockerfile work.

There is no Docker where the tests run. `built` reads the Dockerfile and follows it: each stage is
an overlay over this machine's own files, with a failing compiler, in a mount namespace that is gone
with its last process. It knows the instructions that our file has, and fails at any other.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = ROOT / "scripts" / "Dockerfile"
MINUTES = 60.0
PATIENCE_SECONDS = 8 * MINUTES  # a first installation downloads hundreds of megabytes

pytestmark = pytest.mark.slow

NEEDS_OVERLAYS = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root and Linux, to mount overlays"
)

# In the namespace, as `sh -eu`. $1 is an empty folder to mount things on.
PRELUDE = """
base=$1
mount -t tmpfs scratch "$base"
stage() { # NAME: a new root
    mkdir -p "$base/$1/upper" "$base/$1/work" "$base/$1/tree"
    mount -t overlay -o "lowerdir=/,upperdir=$base/$1/upper,workdir=$base/$1/work" \\
        overlay "$base/$1/tree"
    mount -t tmpfs tmp "$base/$1/tree/tmp"
    mount -t proc proc "$base/$1/tree/proc"
    mount --rbind /dev "$base/$1/tree/dev"
    for compiler in cc gcc c++ g++ clang; do
        rm -f "$base/$1/tree/usr/bin/$compiler"
        printf '#!/bin/sh\\nexit 1\\n' >"$base/$1/tree/usr/bin/$compiler"
        chmod +x "$base/$1/tree/usr/bin/$compiler"
    done
}
"""


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in whole]


def outside_of_the_tests() -> dict[str, str]:
    """This machine's environment with the Python that the tests' own environment was made from."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("POTLUCK")}
    ours = Path(sys.prefix) / "bin"
    path = [one for one in os.environ["PATH"].split(os.pathsep) if Path(one) != ours]
    return kept | {
        "PATH": os.pathsep.join([f"{sys.base_prefix}/bin", *path]),
        "HOME": str(Path.home()),
    }


def as_script(dockerfile: str, last: str) -> str:
    """The Dockerfile as a shell script, with the command `last` run in the finished image.

    Each machine gets torch from its own source, so the argument for it is left out.
    """
    names: list[str] = []
    script = [PRELUDE]
    folder, user, variables = "/", "root", outside_of_the_tests()

    def run(command: str) -> str:
        settings = " ".join(f"{name}={shlex.quote(text)}" for name, text in variables.items())
        inside = f"cd {folder} && {command}"
        called = f"sh -euc {shlex.quote(inside)}"
        if user != "root":
            called = f"setpriv --reuid={user} --regid={user} --init-groups {called}"
        return f'env -i {settings} chroot "$base/{names[-1]}/tree" {called}'

    def below(path: str) -> str:
        whole = os.path.normpath(os.path.join(folder, path))
        return f'"$base/{names[-1]}/tree{whole}"'

    for instruction, rest in instructions(dockerfile):
        match instruction:
            case "FROM":
                image, _, name = rest.partition(" AS ")
                assert image.startswith("python:3."), "an image with Python and pip in it"
                names.append(name or "final")
                folder, user = "/", "root"
                script.append(f"stage {names[-1]}")
            case "WORKDIR":
                folder = rest
                script.append(f"mkdir -p {below('')}")
            case "COPY" if rest.startswith("--from="):
                stage, source, target = rest.removeprefix("--from=").split()
                script.append(f'cp -R "$base/{stage}/tree{source}" {below(target)}')
            case "COPY":
                *sources, target = rest.split()
                if target.endswith("/"):
                    script.append(f"mkdir -p {below(target)}")
                else:
                    script.append(f'mkdir -p "$(dirname {below(target)})"')
                for source in sources:
                    script.append(f"cp -R {shlex.quote(str(ROOT / source))} {below(target)}")
            case "ARG":
                assert rest.startswith("UV_TORCH_BACKEND="), rest
                if "PIP_FIND_LINKS" in os.environ:
                    variables["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
            case "ENV":
                variables |= dict(one.split("=", 1) for one in shlex.split(rest))
            case "RUN":
                script.append(run(rest))
            case "USER":
                user = rest
                variables["HOME"] = f"/{user}"  # as the file says
                # this machine's Python may lie where only root can go; an image's does not
                script.append(f'chmod o+x "$base/{names[-1]}/tree{Path.home()}"')
            case "VOLUME" | "ENTRYPOINT" | "CMD":
                pass  # how a container is started, and no step of its making
            case _:
                raise AssertionError(f"nothing here follows {instruction}")
    return "\n".join([*script, run(last)])


def version() -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


@NEEDS_OVERLAYS
def test_the_steps_of_the_dockerfile_install_potluck_without_a_compiler(tmp_path: Path) -> None:
    script = as_script(DOCKERFILE.read_text(encoding="utf-8"), "potluck version && potluck id")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-eu", "-c", script, "build", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"potluck {version()}\n" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.soak
@pytest.mark.parametrize("tool", ["uv tool", "pipx"])
def test_the_readmes_line_installs_the_package(tool: str, tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "package", tmp_path],
        env={**os.environ, "POTLUCK_PYTHON": sys.executable},
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    requirements = (tmp_path / "potluck-requirements.txt").read_text(encoding="utf-8")
    assert "\npytest==" not in requirements
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^{tool} install .*$", readme, re.MULTILINE)
    # where torch comes from is this machine's affair
    line = re.sub(r"--torch-backend auto |--extra-index-url \S+ ", "", line)
    folders = ("PIPX_HOME", "PIPX_BIN_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR")
    subprocess.run(
        ["sh", "-euc", line],
        cwd=tmp_path,
        env={
            **os.environ,
            **{name: str(tmp_path / name) for name in folders},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        },
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    (command,) = tmp_path.glob("*BIN_DIR/potluck")
    done = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"potluck {version()}\n"
