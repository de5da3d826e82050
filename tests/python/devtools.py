"""Drives a headless Chromium by its DevTools protocol: the least of a WebSocket client, and the calls tests make."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--window-size=1180,900",
)  # fmt: skip


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One page, over a WebSocket (RFC 6455) to its browser."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade",
                 f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13")  # fmt: skip
        self.socket.sendall("\r\n".join((*lines, "", "")).encode())
        self.incoming = self.socket.makefile("rb")
        assert b" 101 " in self.incoming.readline()
        while self.incoming.readline() not in (b"\r\n", b""):
            pass

    def _send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = struct.pack(">BBH", 0x81, 0x80 | 126, len(data))
        if len(data) > 0xFFFF:
            size = struct.pack(">BBQ", 0x81, 0x80 | 127, len(data))
        self.socket.sendall(size + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def _receive(self) -> dict[str, Any]:
        """The next message, which may come in several frames; pings are left alone."""
        message = b""
        while True:
            first, size = self.incoming.read(2)
            if size == 126:
                size = struct.unpack(">H", self.incoming.read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self.incoming.read(8))[0]
            data = self.incoming.read(size)
            if first & 0x0F in (0, 1):
                message += data
                if first & 0x80:
                    return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self._send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """Until it is true; what it is then."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, (
                f"never true: {expression}; the page says {self.value('document.body.innerText')!r}"
            )
            time.sleep(0.02)
        return value

    def close(self) -> None:
        self.incoming.close()
        self.socket.close()


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Page]:
    """A new browser with an empty page; `folder` becomes its profile."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([program, *QUIET, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # fmt: skip
    try:
        page = _connect(process, folder)
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _connect(process: subprocess.Popen[bytes], folder: Path) -> Page:
    told, end = folder / "profile" / "DevToolsActivePort", time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, (folder / "log").read_text(errors="replace")
        lines = told.read_text().split() if told.exists() else []
        if len(lines) == 2:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{lines[0]}/json/list", timeout=30) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            if pages:
                port, path = int(lines[0]), pages[0]["webSocketDebuggerUrl"].split("/", 3)[3]
                return Page(port, f"/{path}")
        time.sleep(0.05)
    raise AssertionError("the browser did not open its port")
