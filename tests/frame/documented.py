"""Runs what the documents tell people to type.

In README.md and docs/*.md every fenced block marked `sh` is run, top to bottom, line by line, as
one person would in one sitting: with a home of its own, and with what runs until Ctrl-C (a
listening node, an auth server, a peer that trains, a watch) left running in the background until
the document ends. ADDRESS stands for what the listening node printed, INVITE for the last invite
that was printed, $POTLUCK_HOME and ~ for the sitting's own home whatever the document sets it to,
and auth.example.org for this machine, where a port is free. Blocks with another mark, or none, are
not run.

A peer that trains has to train, and a volunteer's samples to be accepted by the others, before the
next line is typed. So that this does not take long where all peers share one machine, a run that
`run init` has written gets a smaller batch; its file is not changed in any other way.

`./scripts/potluck`, the laboratory and the scripts in docs/examples run from this checkout, in the
environment of the tests; `./scripts/test` is what runs us, and is left out. `potluck demo` is
played once for all tests (tests/demonstrated.py), and here it is asked whether that went well. Of
other programs only OTHER_PROGRAMS are run. POTLUCK_HOME=FOLDER before a command is another home of
this sitting, whatever FOLDER is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import held_port
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent


_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAM = r"(?:\./)?(?:scripts/)?((?:potluck|(?<=scripts/)(?:bench|simulate|reproduce)) [a-z]"
_TYPED = re.compile(rf"^(?:[$#] )?(?:\w+=\S+ )?(?:sudo )?{_PROGRAM}.*)$", re.MULTILINE)
_BETWEEN_WORDS = re.compile(rf"`(?:sudo )?{_PROGRAM}[^`]*)`")
_ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
_INVITE = re.compile(r"^potluck(?:-run)?:\S+$", re.MULTILINE)
_TAKES_PART = re.compile(r"(training in|keeping) \S+, from step")
_ACCEPTED = re.compile(r"the others have accepted your first [\d,]+ samples")
_RELAYS = re.compile(r"readyz show the state")
_ANYTHING = re.compile("")

# Other programs that a document may tell people to run; they write into the sitting's home only.
OTHER_PROGRAMS = ("openssl", "cp")

USUAL_BATCH, SMALLER_BATCH = "\nbatch = 1024\n", "\nbatch = 128\n"

# Of this machine, as documents name them: any that are free take their place.
PORTS = ("8480", "8481")

Demonstration = Callable[[], int]
"""Its exit code; it is played when it is asked for first."""


class DocumentedCommandFailed(AssertionError):
    """A command that a document tells people to type does not work as it says."""


def commands_in(text: str) -> list[str]:
    """Every command line in the `sh` blocks of a document, without comments."""
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if shlex.split(line, comments=True)]


def commands_named_in(text: str) -> list[str]:
    """Every `potluck …`, `scripts/bench …` and the like of a document, without the folder: in
    blocks of any mark but another language's, then between words. A text that ends in … is no
    whole command."""
    blocks = [block for mark, block in _ANY_BLOCK.findall(text) if mark in ("", "sh", "console")]
    typed = [line for block in blocks for line in _TYPED.findall(block)]
    between = _ANY_BLOCK.sub("", text).replace("\n", " ")
    found = [re.split(" [|<>] ", command)[0] for command in typed]
    return [one for one in [*found, *_BETWEEN_WORDS.findall(between)] if "…" not in one]


def is_example(words: list[str]) -> bool:
    return words[0] == ".venv/bin/python" and words[1].startswith("docs/examples/")


def runs_until_stopped(words: list[str]) -> bool:
    """Whether a command goes on until Ctrl-C."""
    if is_example(words) or takes_part(words) or "--watch" in words:
        return True
    return "listen" in words[1:2] or words[1:3] == ["auth", "serve"]


def takes_part(words: list[str]) -> bool:
    return words[1:2] in (["join"], ["backbone"]) or words[1:3] == ["run", "start"]


def tells_that_it_runs(words: list[str]) -> re.Pattern[str]:
    """The line of a command that keeps running after which the reader types the next one."""
    if "listen" in words:
        return _ADDRESS
    if words[1:2] == ["join"]:
        return _ACCEPTED
    if "--relay-only" in words:
        return _RELAYS
    return _TAKES_PART if takes_part(words) else _ANYTHING


def _make_steps_shorter(definition: Path) -> None:
    text = definition.read_text(encoding="utf-8")
    assert text.count(USUAL_BATCH) == 1
    definition.write_text(text.replace(USUAL_BATCH, SMALLER_BATCH), encoding="utf-8")


@dataclass
class Sitting:
    """One person following one document. Leaving it stops what still runs."""

    home: Path
    demonstration: Demonstration | None = None
    address: str | None = None
    invite: str | None = None
    ports: dict[str, int] = field(default_factory=dict)
    _running: list[tuple[str, subprocess.Popen[str]]] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)
    _heard: list[str] = field(default_factory=list)  # what the background printed
    _held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Sitting:
        self.ports.update({port: self._held.enter_context(held_port()) for port in PORTS})
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        for _, process in self._running:
            process.send_signal(signal.SIGINT)  # all at once: each may take its five seconds
        failures = [self._ended(line, process) for line, process in self._running]
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        failed = [failure for failure in failures if failure]
        if failed:
            raise DocumentedCommandFailed("\n".join([*failed, *self._heard]))

    def type(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if words[0] == "./scripts/test" or words[0] == "export":
            return
        if words[1:2] == ["demo"]:
            if self.demonstration is None or self.demonstration() != 0:
                raise DocumentedCommandFailed(f"it did not go well: {line}")
            return
        home = self.home
        if words[0].startswith("POTLUCK_HOME="):
            home = self.home / "another" / Path(words.pop(0)).name
        words = [self._here(word, line) for word in words]
        if words[0] in OTHER_PROGRAMS:
            self.home.mkdir(exist_ok=True)
            self._run(line, words, home, expect_json=False)
            return
        if words[0] in ("./scripts/potluck", "potluck"):
            command = [sys.executable, "-m", "node", *words[1:]]
        elif words[0] in ("./scripts/bench", "./scripts/simulate", "./scripts/reproduce"):
            command = [sys.executable, "-m", "lab", Path(words[0]).name, *words[1:]]
        elif is_example(words):
            command = [sys.executable, *words[1:]]
        else:
            raise DocumentedCommandFailed(f"the tests do not know how to run: {line}")
        if runs_until_stopped(words):
            self._start(line, command, home, tells_that_it_runs(words))
        else:
            self._run(line, command, home, expect_json="--json" in words)
        if words[1:3] == ["run", "init"]:
            _make_steps_shorter(Path(words[3]) / "run.toml")

    def _here(self, word: str, line: str) -> str:
        """The meaning of a word in this session."""
        stands_for = {"ADDRESS": self.address, "INVITE": self.invite}
        if word in stands_for:
            meant = stands_for[word]
            if meant is None:
                raise DocumentedCommandFailed(f"nothing has printed {word} before this: {line}")
            return meant
        word = word.replace("$POTLUCK_HOME", str(self.home))
        if word.startswith("~/"):
            word = str(self.home / word[2:])
        for port, free in self.ports.items():
            word = word.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        word = word.replace("auth.example.org:8443", f"localhost:{self.ports['8480']}")
        return word.replace("auth.example.org", "localhost")

    def _run(self, line: str, command: list[str], home: Path, *, expect_json: bool) -> None:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment(home),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != 0:
            raise DocumentedCommandFailed(
                f"exit code {done.returncode}: {line}\n{done.stderr}{done.stdout}"
            )
        self.invite = next(iter(_INVITE.findall(done.stdout)), self.invite)
        if expect_json:
            for printed in done.stdout.splitlines():
                json.loads(printed)

    def _start(self, line: str, command: list[str], home: Path, ready: re.Pattern[str]) -> None:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._running.append((line, process))
        spoke = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as printed:
                for text in printed:
                    self._heard.append(text.rstrip())
                    found = _ADDRESS.search(text)
                    if found and self.address is None:
                        self.address = found.group()
                    self.invite = next(iter(_INVITE.findall(text)), self.invite)
                    if ready.search(text):
                        spoke.set()
            spoke.set()

        reader = threading.Thread(target=read)
        reader.start()
        self._readers.append(reader)
        if not spoke.wait(PATIENCE_SECONDS) or process.poll() is not None:
            raise DocumentedCommandFailed(f"it does not keep running: {line}")

    def _ended(self, line: str, process: subprocess.Popen[str]) -> str | None:
        """The mistake in how it ended after Ctrl-C, if any."""
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"Ctrl-C does not end it: {line}"
        # a script ends as Python does: of the signal itself, which a shell shows as 130
        ends = (-signal.SIGINT,) if "docs/examples/" in line else (0, 130)
        return None if code in ends else f"exit code {code} after Ctrl-C: {line}"

    def _environment(self, home: Path) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if "POTLUCK" not in name}
        return {
            **ours,
            "POTLUCK_HOME": str(home),
            "POTLUCK_NETWORK_LISTEN": "/ip4/127.0.0.1/tcp/0",
        }
