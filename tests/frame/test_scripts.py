"""The two scripts: what they install, when they repeat it, and the state after an interruption."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.frame.checkout import ROOT, Checkout
from tests.waiting import PATIENCE_SECONDS

OVERHEAD_SECONDS = 0.5


def processor_seconds_of_children() -> float:
    """Of all that have ended; how long they took depends on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path)


@pytest.fixture
def made(checkout: Checkout) -> Checkout:
    """A checkout whose environment has been made."""
    assert checkout.run("scripts/environment", "run").returncode == 0
    checkout.asked_of_pip()
    return checkout


@pytest.mark.slow
def test_the_first_call_makes_the_environment_and_runs_the_command(checkout: Checkout) -> None:
    done = checkout.run("scripts/potluck", "ping", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "potluck ran: ping two words\n", "only the command writes to stdout"
    asked = checkout.asked_of_pip()
    assert asked[0] == "venv"
    assert asked[-1].endswith(f"--no-deps --editable {checkout.folder}")


@pytest.mark.slow
def test_a_second_call_asks_pip_for_nothing_and_costs_little(made: Checkout) -> None:
    before = processor_seconds_of_children()
    done = made.run("scripts/potluck", "version")
    assert processor_seconds_of_children() - before < OVERHEAD_SECONDS
    assert (done.stdout, done.stderr) == ("potluck ran: version\n", "")
    assert made.asked_of_pip() == []


@pytest.mark.slow
def test_it_works_from_anywhere_and_through_links(made: Checkout, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    absolute, relative = tmp_path / "bin" / "absolute", tmp_path / "bin" / "relative"
    absolute.symlink_to(made.folder / "scripts" / "potluck")
    relative.symlink_to("absolute")
    for command in (absolute, relative):
        done = subprocess.run(
            [command, "id"], cwd="/", env=made.environment(), capture_output=True, check=True
        )
        assert done.stdout == b"potluck ran: id\n"
    assert made.asked_of_pip() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_it_is_brought_up_to_date_when_what_it_is_made_from_changes(
    made: Checkout, name: str
) -> None:
    with (made.folder / name).open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    assert made.run("scripts/environment", "run").returncode == 0
    asked = made.asked_of_pip()
    assert asked, "it was taken for up to date"
    assert "venv" not in asked, "it was made anew without need"
    made.run("scripts/environment", "run")
    assert made.asked_of_pip() == []


@pytest.mark.slow
def test_a_larger_environment_serves_for_the_smaller_and_not_the_other_way(made: Checkout) -> None:
    made.run("scripts/environment", "development")
    assert made.asked_of_pip()
    made.run("scripts/environment", "run")
    made.run("scripts/environment", "development")
    assert made.asked_of_pip() == []
    made.run("scripts/environment", "libraries")
    assert made.asked_of_pip()
    made.run("scripts/environment", "development")
    assert made.asked_of_pip() == []


@pytest.mark.slow
def test_an_environment_for_running_has_no_development_packages(checkout: Checkout) -> None:
    kept = checkout.folder / "kept"
    spy = checkout.python.read_text().replace(
        "'-m pip')", f"'-m pip')\n cp \"$(dirname \"$0\")\"/../potluck-req* '{kept}' 2>/dev/null"
    )
    checkout.python.write_text(spy)
    checkout.run("scripts/environment", "run")
    assert "trio==" in kept.read_text()
    assert "pytest==" not in kept.read_text()
    checkout.run("scripts/environment", "development")
    assert "pytest==" in kept.read_text()
    assert "wandb==" not in kept.read_text()
    checkout.run("scripts/environment", "libraries")
    assert "wandb==" in kept.read_text()


@pytest.mark.slow
def test_a_failed_install_is_not_taken_for_complete(checkout: Checkout) -> None:
    checkout.failing.write_text("--editable\n")
    done = checkout.run("scripts/potluck", "version")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "the same command tries again" in done.stderr
    checkout.asked_of_pip()
    checkout.failing.write_text("")
    assert checkout.run("scripts/potluck", "version").stdout == "potluck ran: version\n"
    assert checkout.asked_of_pip()[0] == "venv", "what was half made was used"


@pytest.mark.slow
def test_a_killed_update_is_made_anew(made: Checkout) -> None:
    (made.folder / "constraints.txt").write_text("trio==0\n# --- development\n")
    made.failing.write_text("--requirement\n")  # as good as a kill: nothing is cleaned up after it
    assert made.run("scripts/environment", "run").returncode != 0
    shutil.copy(ROOT / "constraints.txt", made.folder / "constraints.txt")  # as it was installed
    made.failing.write_text("")
    made.asked_of_pip()
    assert made.run("scripts/environment", "run").returncode == 0
    assert made.asked_of_pip()[0] == "venv"


@pytest.mark.slow
def test_a_checkout_that_was_moved_makes_its_environment_anew(
    made: Checkout, tmp_path: Path
) -> None:
    made.folder = made.folder.rename(tmp_path / "elsewhere")
    assert made.run("scripts/environment", "run").returncode == 0
    assert made.asked_of_pip()[0] == "venv"


@pytest.mark.slow
def test_a_python_that_went_away_makes_it_anew(made: Checkout) -> None:
    (made.venv / "bin" / "python").unlink()
    assert made.run("scripts/environment", "run").returncode == 0
    assert made.asked_of_pip()[0] == "venv"


@pytest.mark.slow
def test_an_activated_environment_is_made_anew_with_the_python_outside_it(made: Checkout) -> None:
    for folder in (made.python.parent, made.venv / "bin"):
        shutil.copy(made.python, folder / "python3.13")
    (made.venv / "bin" / "python").unlink()
    path = os.pathsep.join([f"{made.venv}/bin", str(made.python.parent), os.environ["PATH"]])
    done = made.run("scripts/environment", "run", PATH=path, POTLUCK_PYTHON="")
    assert (done.returncode, made.asked_of_pip()[0]) == (0, "venv"), done.stderr


@pytest.mark.slow
def test_several_first_calls_at_once_make_it_once(checkout: Checkout) -> None:
    slow = checkout.python.read_text().replace("echo venv", "sleep 0.3; echo venv")
    checkout.python.write_text(slow)
    calls = [
        subprocess.Popen(
            [checkout.folder / "scripts" / "potluck", "id"],
            env=checkout.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for call in calls:
        out, _ = call.communicate(timeout=PATIENCE_SECONDS)
        assert (call.returncode, out) == (0, "potluck ran: id\n")
    assert checkout.asked_of_pip().count("venv") == 1


@pytest.mark.slow
def test_the_lock_of_a_killed_call_holds_nobody_up(checkout: Checkout) -> None:
    stuck = checkout.python.read_text().replace("echo venv", "echo $$; exec sleep 60; echo venv")
    usual = checkout.python.read_text()
    checkout.python.write_text(stuck)
    call = subprocess.Popen(
        [checkout.folder / "scripts" / "environment", "run"],
        env=checkout.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert call.stderr is not None
    assert "making" in call.stderr.readline()
    pretended = int(call.stderr.readline())  # the sleeping one: it holds the lock as well
    subprocess.run(["kill", "-9", str(call.pid), str(pretended)], check=True)
    call.communicate(timeout=PATIENCE_SECONDS)
    checkout.python.write_text(usual)
    began = time.perf_counter()
    assert checkout.run("scripts/environment", "run").returncode == 0
    assert time.perf_counter() - began < 30


NO_GPU_ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() != "x86_64"
    or Path("/proc/driver/nvidia/version").exists()
    or Path("/dev/nvidiactl").exists()
    or shutil.which("nvidia-smi") is not None,
    reason="says what happens on Linux on x86-64 without an NVIDIA GPU",
)


def torch_asked_for(checkout: Checkout) -> list[str]:
    return [line for line in checkout.asked_of_pip() if "torch" in line.rpartition(" ")[2]]


@pytest.mark.slow
@NO_GPU_ON_LINUX
def test_without_a_gpu_the_cpu_build_is_asked_for_where_pip_looks(checkout: Checkout) -> None:
    done = checkout.run("scripts/environment", "run")
    assert "CPU build" in done.stderr
    (asked,) = torch_asked_for(checkout)
    assert asked.endswith(" torch==2.13.0+cpu")
    assert "--index-url" not in asked


@pytest.mark.slow
@NO_GPU_ON_LINUX
def test_an_index_without_the_cpu_build_is_followed_by_the_named_one(checkout: Checkout) -> None:
    real = checkout.python.read_text()
    checkout.python.write_text(
        real.replace(
            "'-m pip')", "'-m pip')\n case $* in *index-url*) echo $* >>$JOURNAL; exit;; esac"
        )
    )
    checkout.failing.write_text("+cpu\n")
    done = checkout.run("scripts/environment", "run", POTLUCK_TORCH_INDEX="https://mirror.example/")
    assert done.returncode == 0, done.stderr
    assert "asking https://mirror.example/" in done.stderr
    first, second = torch_asked_for(checkout)
    assert "--index-url" not in first
    assert second.endswith("--no-deps --index-url https://mirror.example/ torch==2.13.0+cpu")


@NO_GPU_ON_LINUX
def test_without_any_cpu_build_it_fails_rather_than_fetch_cuda(checkout: Checkout) -> None:
    checkout.failing.write_text("+cpu\n")
    done = checkout.run("scripts/environment", "run")
    assert done.returncode != 0
    assert "POTLUCK_TORCH=" in done.stderr
    assert all(line.endswith("+cpu") for line in torch_asked_for(checkout))


@pytest.mark.slow
@NO_GPU_ON_LINUX
def test_with_a_gpu_the_usual_torch_is_installed(checkout: Checkout) -> None:
    tool = checkout.python.parent / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: pretended'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:/usr/bin:/bin"
    assert checkout.run("scripts/environment", "run", PATH=path).returncode == 0
    (asked,) = torch_asked_for(checkout)
    assert asked.endswith("constraints.txt torch")
    assert "--no-deps" not in asked, "its CUDA libraries come with it"


def test_the_torch_that_is_asked_for_is_installed(checkout: Checkout) -> None:
    checkout.run("scripts/environment", "run", POTLUCK_TORCH="torch==2.13.0+rocm")
    (asked,) = torch_asked_for(checkout)
    assert asked.endswith(" torch==2.13.0+rocm")


def test_an_unsuitable_python_is_refused_with_advice(checkout: Checkout) -> None:
    old = checkout.python.with_name("old-python")
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = checkout.run("scripts/potluck", "id", POTLUCK_PYTHON=str(old))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Python 3.11 or newer" in done.stderr
    assert not checkout.venv.exists(), "a failure left something behind"


def test_a_machine_without_a_suitable_python_is_told_what_to_install(checkout: Checkout) -> None:
    only = checkout.python.parent / "only"
    only.mkdir()
    for tool in ("sh", "dirname", "cat", "cmp", "readlink", "sed"):
        (only / tool).symlink_to(shutil.which(tool) or "")
    for name in ("python3", "python3.12"):  # an old one, and a name with nothing behind it
        (only / name).write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 || exit 1\n')
        (only / name).chmod(0o755)
    done = checkout.run("scripts/potluck", "id", POTLUCK_PYTHON="", PATH=str(only))
    assert done.returncode == 1
    assert "found: Python 3.9.2" in done.stderr
    assert "apt install" in done.stderr
    assert not checkout.venv.exists()


WORKERS, TWO_WORKERS = (f"--numprocesses={number} --dist=loadgroup" for number in (3, 2))


@pytest.fixture
def tools(made: Checkout) -> Checkout:
    """A checkout whose tools only write down how they were called."""
    made.run("scripts/environment", "libraries")
    for name in ("ruff", "mypy"):
        tool = made.venv / "bin" / name
        tool.write_text(f'#!/bin/sh\necho {name} "$*" >>"$JOURNAL"\n[ "$FAILS" != "{name} $1" ]\n')
        tool.chmod(0o755)
    python = made.venv / "bin" / "python"
    spy = '#!/bin/sh\n[ "$2" = pytest ] && { echo "$*" >>"$JOURNAL"; echo 3 passed; exit; }\n'
    python.write_text(spy + python.read_text())
    made.asked_of_pip()
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "pytest_words"),
    [
        ([], f"-m not soak --hypothesis-profile=default {WORKERS}"),
        (["--fast"], f"-m not slow and not soak --hypothesis-profile=fast {TWO_WORKERS}"),
        (["--soak"], f"-m  --hypothesis-profile=soak {WORKERS}"),
        (
            ["--fast", "tests/frame", "-k", "link"],
            "-m not slow and not soak --hypothesis-profile=fast tests/frame -k link",
        ),
        (["-x"], "-m not soak --hypothesis-profile=default -x"),
    ],
)
def test_each_size_runs_every_check_and_its_tests(
    tools: Checkout, words: list[str], pytest_words: str
) -> None:
    done = tools.run("scripts/test", *words, FAILS="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("3 passed\n"), "the last words are pytest's"
    asked = tools.asked_of_pip()
    compiles = [one for one in asked if "--collect-only" in one]
    assert len(compiles) == ("--numprocesses" in pytest_words), "a part of them is soon compiled"
    assert [one for one in asked if one not in compiles] == [
        "ruff format --check --quiet .",
        "ruff check --quiet .",
        "mypy --no-error-summary",
        f"-m pytest {pytest_words}",
    ]


@pytest.mark.parametrize(("profile", "same"), [("default", True), ("fast", True), ("soak", False)])
def test_no_property_fails_because_the_machine_is_busy(profile: str, same: bool) -> None:
    chosen = settings.get_profile(profile)
    assert chosen.deadline is None
    assert chosen.suppress_health_check == (HealthCheck.too_slow,)
    assert chosen.derandomize is same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "step"),
    [("ruff format", "format"), ("ruff check", "lint"), ("mypy --no-error-summary", "types")],
)
def test_a_failing_check_is_named_and_ends_it(tools: Checkout, fails: str, step: str) -> None:
    done = tools.run("scripts/test", FAILS=fails)
    assert done.returncode == 1
    assert f"failed at: {step}." in done.stderr
    assert "passed" not in done.stdout


def test_ci_runs_the_same_commands_as_people() -> None:
    """Before that it installs shells and the environment, and tests nothing."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.splitlines()[-1] == 'exec "$(dirname -- "$0")/../scripts/test"'
    assert re.findall(r"/scripts/(\w+)", text) == ["environment", "test"]
    assert not {"pytest", "python"} & set(text.split())
