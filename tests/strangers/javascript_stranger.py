"""js-libp2p as a stranger: installs it once into a cache, runs it, and speaks to it.

The installation is kept outside the checkout, under a name made from the lock file, so a changed
lock makes a new one and two sessions at once do not disturb each other.

Easy to get wrong: a half-made installation looks like a whole one. It is made under another name
and renamed when npm is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from tests.strangers.stranger import (
    COMMAND_SECONDS,
    Stranger,
    StrangerMissing,
    StrangerRefused,
)

SOURCES: Final = Path(__file__).parent / "javascript"
INSTALL_SECONDS: Final = 300.0  # 127 small packages: five seconds here, minutes on a poor line
LONGEST_ANSWER_BYTES: Final = 65_536


def install(cache: Path, sources: Path = SOURCES, what: str = "js-libp2p") -> Path:
    """The directory where its packages are installed; StrangerMissing without node.js or npm."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise StrangerMissing(f"{what} needs node.js and npm on the PATH; install both.")
    lock = (sources / "package-lock.json").read_bytes()
    place = cache / f"{sources.name}-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(sources / name, made)
            subprocess.run(
                [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"],
                cwd=made,
                check=True,
                stdin=subprocess.DEVNULL,
                timeout=INSTALL_SECONDS,
            )
            try:
                made.rename(place)
            except OSError:
                if not place.exists():  # if it does, another session was faster, with the same
                    raise
    return place


def put_beside(installation: Path, script: Path) -> Path:
    """A copy of the script where it finds its modules: they are looked up from where it lies.

    Under a name of its own, since another session may be running another version of it.
    """
    source = script.read_bytes()
    copy = installation / f"{script.stem}-{hashlib.sha256(source).hexdigest()[:16]}.mjs"
    if not copy.exists():
        draft = copy.with_suffix(f".{os.getpid()}")
        draft.write_bytes(source)
        draft.replace(copy)
    return copy


@dataclass(frozen=True)
class JavascriptLink:
    """One of its connections, and what the relay in between allows it; None is no limit."""

    address: str
    seconds: int | None
    bytes: int | None


class JavascriptStranger(Stranger):
    """A running js-libp2p node. Its arguments are explained in stranger.mjs."""

    answers_after_half_close = True

    def __init__(self, installation: Path, *arguments: str) -> None:
        script = put_beside(installation, SOURCES / "stranger.mjs")
        # Its standard input is its life line: it ends when ours closes, however we end.
        self._process = subprocess.Popen(
            ["node", str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.process_id = self._process.pid
        first_line = self._process.stdout.readline()
        if not first_line:
            self.stop()
            raise RuntimeError("js-libp2p ended before it listened; its error is printed above")
        self._port = int(json.loads(first_line)["control"])
        known = trio.run(self._ask, "describe", {})
        self.peer = known["peer"]
        self.address = next(iter(known["addresses"]), "")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def connect(self, address: str) -> None:
        await self._ask("connect", {"address": address})

    async def disconnect(self, peer: str) -> None:
        await self._ask("disconnect", {"peer": peer})

    async def connected(self) -> tuple[str, ...]:
        return tuple((await self._ask("connected", {}))["peers"])

    async def reserve(self, relay_address: str) -> tuple[str, ...]:
        """Take a place at that relay; all its addresses from then on."""
        return tuple((await self._ask("reserve", {"address": relay_address}))["addresses"])

    async def suppose(self, address: str) -> None:
        """Make it believe that it may have this address."""
        await self._ask("suppose", {"address": address})

    async def links(self, peer: str) -> tuple[JavascriptLink, ...]:
        """Its connections with that peer."""
        found = (await self._ask("links", {"peer": peer}))["links"]
        return tuple(JavascriptLink(**each) for each in found)

    async def stream_count(self, peer: str) -> int:
        """How many streams it counts as open with that peer."""
        return int((await self._ask("streams", {"peer": peer}))["count"])

    async def identify(self, peer: str) -> tuple[str, tuple[str, ...]]:
        """The agent and the protocols that identify told it of that peer."""
        known = await self._ask("identify", {"peer": peer})
        return known["agent"], tuple(known["protocols"])

    async def ping(self, peer: str) -> float:
        return float((await self._ask("ping", {"peer": peer}))["milliseconds"]) / 1000

    async def open(self, peer: str, protocol: str) -> trio.SocketStream:
        stream, _ = await self._command("open", {"peer": peer, "protocol": protocol})
        return stream

    async def begin_serving(self, protocol: str, port: int) -> None:
        await self._ask("serve", {"protocol": protocol, "port": port})

    async def end_serving(self, protocol: str, port: int) -> None:  # noqa: ARG002
        await self._ask("unserve", {"protocol": protocol})

    async def take_header(self, stream: trio.SocketStream) -> None:
        await _read_line(stream)

    async def _ask(self, command: str, given: dict[str, Any]) -> dict[str, Any]:
        stream, answer = await self._command(command, given)
        await trio.aclose_forcefully(stream)
        return answer

    async def _command(
        self, command: str, given: dict[str, Any]
    ) -> tuple[trio.SocketStream, dict[str, Any]]:
        with trio.fail_after(COMMAND_SECONDS):
            stream = await trio.open_tcp_stream("127.0.0.1", self._port)
            try:
                line = json.dumps({"command": command, **given}) + "\n"
                await stream.send_all(line.encode())
                answer = json.loads(await _read_line(stream))
                if "error" in answer:
                    error = answer["error"]
                    raise StrangerRefused(f"{error['name']}: {error['message']}")
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
        return stream, answer["ok"]


async def _read_line(stream: trio.SocketStream) -> bytes:
    # Byte by byte: what follows the line belongs to the stream and must stay in the socket.
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = await stream.receive_some(1)
        if not byte or len(line) > LONGEST_ANSWER_BYTES:
            raise RuntimeError(f"js-libp2p gave no whole answer, but {bytes(line[:100])!r}")
        line += byte
    return bytes(line)
