# SPDX-License-Identifier: Apache-2.0
"""A real Chromium without a window, driven over a pipe (Chrome DevTools Protocol): no network, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 30.0


class Browser:
    """One page of a Chromium.

    Attributes:
        errors: what the page wrote to the console as warnings and errors, and exceptions.
        requests: addresses that the page asked for.
    """

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._number, self._rest = 0, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; AssertionError where it fails or takes too long."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        until = time.monotonic() + DEADLINE_S
        while True:
            message = self._next(until, method)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def _next(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium did not answer {method} within {DEADLINE_S} s"
            data = os.read(self._read, 1 << 16)
            assert data, f"Chromium ended during {method}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(told["request"]["url"]))

    def screen(self, width: int, height: int = 900, *, dark: bool = False, paper: bool = False) -> None:
        """The size of the window in CSS pixels, whether the reader prefers a dark page, and whether it is printed."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])

    def open(self, address: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.send("Page.navigate", url=address)
        self.wait_for(f"location.href.startsWith({json.dumps(address[:20])}) && document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, code: str, deadline_s: float = DEADLINE_S) -> None:
        """Until an expression is true."""
        until = time.monotonic() + deadline_s
        while not self.run(f"Boolean({code})"):
            assert time.monotonic() < until, f"not true within {deadline_s} s: {code}"
            select.select([], [], [], 0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, whole: bool = True) -> bytes:
        """The whole page as PNG, or what the window shows of it."""
        box = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}} if whole else {}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        return base64.b64decode(found["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    assert CHROMIUM is not None
    ours, theirs = os.pipe(), os.pipe()  # to the browser, from the browser
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
        ]
        plumbing = f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$@"'  # the protocol's own descriptors
        process = subprocess.Popen(
            ["bash", "-c", plumbing, "bash", CHROMIUM, *options, "about:blank"],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        os.close(ours[0])
        os.close(theirs[1])
        try:
            yield Browser(process, ours[1], theirs[0])
        finally:
            os.close(ours[1])  # with its pipe the browser ends
            os.close(theirs[0])
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
