"""A page in headless Chromium, driven through its debugging pipe: no driver, no port, no network."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--window-size=1300,900",
)  # fmt: skip


def find_browser() -> str | None:
    """Return the path of an installed Chromium."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


SECONDS = 60  # without a word of the browser


class Page:
    """A page in a browser, and what happened in it: `events` by their names in the DevTools protocol."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.number, self.session, self.kept = 0, None, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.kept:
            if not select.select([self.from_browser], [], [], SECONDS)[0]:
                raise RuntimeError(f"the browser has said nothing for {SECONDS} s")
            got = os.read(self.from_browser, 1 << 16)
            if not got:
                raise RuntimeError("the browser has ended")
            self.kept += got
        line, _, self.kept = self.kept.partition(b"\0")
        return json.loads(line)

    def open(self, file: Path) -> None:
        """Open a file, and wait until it is loaded and drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=file.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


@contextlib.contextmanager
def opened(file: Path, browser: str) -> Iterator[Page]:
    """Open a file in a browser of its own, which ends with the block."""
    browser_reads, we_write = os.pipe()
    we_read, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads its file 3 and writes its file 4.
        shell = f'exec "$0" "$@" 3<&{browser_reads} 4>&{browser_writes}'
        command = ["bash", "-c", shell, browser, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = subprocess.Popen(command, pass_fds=(browser_reads, browser_writes), stderr=subprocess.DEVNULL)
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            page = Page(we_write, we_read)
            page.open(file)
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(we_write)
            os.close(we_read)
