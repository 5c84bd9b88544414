"""A real, headless Chromium, driven over WebDriver: plain JSON over HTTP, no client library."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "hide-scrollbars",
)  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._address = address
        options = {"args": [f"--{flag}" for flag in FLAGS]}
        always = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
        self._session = f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = Request(self._address + path, data, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        """Open a file from disk."""
        self._ask("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Send a command of the browser's own protocol."""
        body = {"cmd": command, "params": parameters}
        return self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Look through a screen of this size."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """Be a screen or a printer, in light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", media=kind, features=features)

    def click(self, selector: str) -> None:
        """Click on the first element that matches."""
        found = self._ask(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        element = next(iter(found.values()))
        self._ask("POST", f"{self._session}/element/{element}/click")

    def log(self, kind: str) -> list[Any]:
        """Return the "browser" (console) or "performance" (network) log since it was last read."""
        found: list[Any] = self._ask("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def requests(self) -> list[str]:
        """Return the addresses of everything asked for since the log was last read."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def picture(self) -> bytes:
        """Return what the screen shows, as PNG."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def pdf(self) -> bytes:
        """Return the page as printed."""
        return base64.b64decode(self._ask("POST", f"{self._session}/print"))

    def close(self) -> None:
        """End the browser."""
        self._ask("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start chromedriver and a browser, and end both."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert driver.stdout is not None
        ports = (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout)
        port = next(match[1] for match in ports if match)
        tab = Browser(f"http://127.0.0.1:{port}")
        try:
            yield tab
        finally:
            tab.close()
    finally:
        driver.terminate()
        driver.communicate()
