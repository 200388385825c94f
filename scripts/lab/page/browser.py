"""A browser without a window, driven over its DevTools protocol through two pipes.

    with Chromium.started() as browser:
        tab = browser.tab(width=1280, height=900, dark=True)
        tab.open(url)
        tab.evaluate("document.title")
        tab.picture(path)
        tab.troubles                       # errors in the console, and what the policy refused

`missing()` says why there is none. Every wait has a deadline. Blocking code: in trio, call it in a
thread.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_SECONDS = 60.0  # on a busy machine a first page takes many
NAVIGATED = "Inspected target navigated or closed"  # the next page is on its way: it may be asked


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing() -> str:
    """Why the tests with a browser cannot run; empty if they can."""
    return "" if found() else f"none of {', '.join(NAMES)} is installed"


class BrowserFailure(Exception):
    """The browser refused something, or did not answer in time."""


class Chromium:
    """One process with its tabs."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._unread = b""
        self.events: deque[dict[str, Any]] = deque(maxlen=10_000)

    @staticmethod
    @contextlib.contextmanager
    def started() -> Iterator[Chromium]:
        program = found()
        assert program is not None
        child_reads, to_browser = os.pipe()
        from_browser, child_writes = os.pipe()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [
                "bash", "-c", 'exec "$@" 3<&"$READS" 4>&"$WRITES"', "bash", program,
                "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}",
                "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
                "--disable-background-networking", "--disable-dev-shm-usage",
                "--hide-scrollbars", "--force-color-profile=srgb", "about:blank",
            ]  # fmt: skip
            process = subprocess.Popen(
                command,
                pass_fds=(child_reads, child_writes),
                env={**os.environ, "READS": str(child_reads), "WRITES": str(child_writes)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.close(child_reads)
            os.close(child_writes)
            browser = Chromium(to_browser, from_browser)
            try:
                yield browser
                with contextlib.suppress(BrowserFailure, OSError):
                    browser.call("Browser.close")
                process.wait(10.0)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
                os.close(to_browser)
                os.close(from_browser)

    def tab(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._next(deadline)
            if answer is None:
                raise BrowserFailure(f"{method} was not answered in {ANSWER_SECONDS:g} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserFailure(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Take what the browser says within this time."""
        deadline = time.monotonic() + seconds
        while (event := self._next(deadline)) is not None:
            self.events.append(event)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                return None
            some = os.read(self._from, 1 << 20)
            if not some:
                raise BrowserFailure("the browser has ended")
            self._unread += some
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class Tab:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Until the page is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserFailure(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = ANSWER_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not self._holds(expression):
            if time.monotonic() > deadline:
                raise BrowserFailure(f"not true within {seconds:g} s: {expression}")
            self._browser.listen(0.05)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except BrowserFailure as error:
            if NAVIGATED not in str(error):
                raise
            return False

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode={"Tab": 9}.get(key, 0))  # fmt: skip

    def picture(self, path: Path, *, whole: bool = True, quality: int = 80) -> None:
        """In the format of the file's name; only webp has a quality."""
        kind = path.suffix.removeprefix(".")
        more = {"quality": quality} if kind == "webp" else {}
        data = self.call("Page.captureScreenshot", format=kind, captureBeyondViewport=whole,
                         **more, **self._clip(whole))["data"]  # fmt: skip
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.call("Page.close")

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "scale": 1, **{k: size[k] for k in ("width", "height")}}}

    @property
    def troubles(self) -> list[str]:
        """Errors and warnings in the console, errors of scripts, and refused loading."""
        told = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            what = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    told.append(str(what["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if what["type"] in ("error", "warning"):
                    told.append(str(what["args"]))
                case "Log.entryAdded" if what["entry"]["level"] in ("error", "warning"):
                    told.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
                case _:
                    pass
        return told

    @property
    def requests(self) -> list[str]:
        """The addresses that the tab has asked for."""
        return [
            str(event["params"]["request"]["url"])
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event.get("method") == "Network.requestWillBeSent"
        ]
