"""The page in the browser: what its server gives and refuses, and in a headless Chromium the story, which must be the
very text that the native library writes. Skipped where colibri.wasm cannot be built, and without Chromium."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import colibri
import pytest
from colibri import webserver
from devtools import Page, chromium, find_chromium

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 96


@pytest.fixture(scope="module")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built here, or the package's own where there is no zig."""
    if not (ROOT / "build.zig").is_file() or importlib.util.find_spec("ziglang") is None:
        installed = webserver.FOLDER / "colibri.wasm"
        if not installed.is_file():
            pytest.skip("no colibri.wasm, and ziglang is not installed to build it: pip install ziglang==0.16.0")
        return installed
    folder = tmp_path_factory.mktemp("web")
    command = [sys.executable, "-m", "ziglang", "build", "web", "--prefix", str(folder)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(folder / "cache")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / "web" / "colibri.wasm"


@pytest.fixture
def server(wasm: Path) -> Iterator[webserver.Server]:
    with webserver.Server(colibri.demo_path(), 0, wasm) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: webserver.Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


# ---- The server


def test_files_and_their_types(server: webserver.Server, wasm: Path) -> None:
    page = (webserver.FOLDER / "index.html").read_bytes()
    expected = {
        "/": ("text/html; charset=utf-8", page),
        "/?prompt=a&autorun=1": ("text/html; charset=utf-8", page),
        "/index.html": ("text/html; charset=utf-8", page),
        "/app.js": ("text/javascript; charset=utf-8", (webserver.FOLDER / "app.js").read_bytes()),
        "/worker.js": ("text/javascript; charset=utf-8", (webserver.FOLDER / "worker.js").read_bytes()),
        "/colibri.wasm": ("application/wasm", wasm.read_bytes()),
        "/model.colibri": ("application/octet-stream", Path(colibri.demo_path()).read_bytes()),
    }
    for path, (kind, data) in expected.items():
        status, headers, body = ask(server, path)
        assert (status, headers["Content-Type"], headers["Content-Length"]) == (200, kind, str(len(data))), path
        assert body == data, path
        assert (
            headers["X-Content-Type-Options"] == "nosniff"
            and "default-src 'none'" in headers["Content-Security-Policy"]
        )
        status, headers, body = ask(server, path, "HEAD")
        assert (status, headers["Content-Length"], body) == (200, str(len(data)), b"")


@pytest.mark.parametrize(
    "path",
    [
        "/webserver.py", "/../webserver.py", "/..%2fwebserver.py", "/%2e%2e/webserver.py", "//etc/passwd", "/./app.js",
        "/..\\webserver.py", "/web/../app.js", "/app.js/", "/app.js%00", "/demo.colibri", "/demo/demo.colibri",
        "/favicon.ico", "http://127.0.0.1/app.js", "*",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server: webserver.Server, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_other_hosts_and_methods_are_refused(server: webserver.Server) -> None:
    port = server.server_port
    assert ask(server, "/", host=f"localhost:{port}")[0] == 200
    assert ask(server, "/model.colibri", host=f"example.org:{port}")[0] == 403
    assert ask(server, "/", "POST")[0] == 501
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_module_needs_a_clock_and_nothing_else(wasm: Path) -> None:
    data = wasm.read_bytes()
    assert data[:4] == b"\0asm" and len(data) < 400_000
    assert set(re.findall(rb"wasi_snapshot_preview1.([a-z_]+)", data)) == {b"clock_time_get"}


def test_errors_are_one_line(wasm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(colibri.ColibriError, match=f"^port {port} is in use; [^\n]*--port"):
            webserver.Server(colibri.demo_path(), port, wasm)
    monkeypatch.setattr(webserver, "FOLDER", tmp_path)
    with pytest.raises(colibri.NotFoundError, match=r"^there is no [^\n]*colibri\.wasm; [^\n]*build web"):
        webserver.Server(colibri.demo_path())
    monkeypatch.setattr(webserver, "_LARGEST", 1000)
    with pytest.raises(colibri.InvalidArgumentError, match="a browser can hold a model of 1000"):
        webserver.Server(colibri.demo_path(), 0, wasm)


COMMAND = """
import sys
from colibri import cli, webserver
begin = webserver.Server.__init__
webserver.Server.__init__ = lambda self, model, port: begin(self, model, port, sys.argv[1])
cli.main(["web", "--port", sys.argv[2]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_command(wasm: Path, interruptible: None) -> None:
    """Says where it is, serves, ends by Ctrl-C; a second one on its port fails with a line."""
    command = [sys.executable, "-c", COMMAND, str(wasm)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "0"], **streams) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", line)
            assert found, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request("GET", "/colibri.wasm")
            assert connection.getresponse().read() == wasm.read_bytes()
            second = subprocess.run([*command, found[1]], capture_output=True, text=True)
            assert (second.returncode, second.stdout) == (1, "")
            assert re.fullmatch(r"colibri: error: port \d+ is in use; [^\n]*\n", second.stderr)
            connection.close()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err.strip()) == (130, "", "")


# ---- The page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine")
    with chromium(program, tmp_path_factory.mktemp("chromium")) as page:
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Network.enable")
        page.call("Log.enable")
        yield page


def native(prompt: str, length: int) -> str:
    with colibri.Model(colibri.demo_path()) as model, colibri.Session(model) as session:
        return session.generate(prompt, max_new_tokens=length)


def set_range(page: Page, name: str, value: float) -> None:
    page.value(
        f"(e => {{ e.value = {value}; e.dispatchEvent(new Event('input')); }})(document.getElementById('{name}'))"
    )


def open_page(
    page: Page, address: str, until: str = "document.getElementById('status')?.textContent === 'Ready.'"
) -> None:
    page.events.clear()
    page.call("Page.navigate", url=address)
    page.wait(until)


def test_story_is_the_native_one(server: webserver.Server, browser: Page) -> None:
    """A prompt is typed, the text grows, the figures and the heat map live, and the end is the native greedy text."""
    prompt = 'Lily said, "Où est 🐦?" and'
    open_page(browser, server.address)
    set_range(browser, "temperature", 0)
    set_range(browser, "length", LENGTH)
    browser.value("document.getElementById('prompt').focus(), document.getElementById('prompt').select()")
    browser.call("Input.insertText", text=prompt)
    browser.value(
        "window.sizes = new Set(), new MutationObserver(() => sizes.add(written.textContent.length))"
        ".observe(written, {childList: true}), window.blank = canvas.toDataURL(), 0"
    )
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    browser.wait("document.body.dataset.ended")
    expected = native(prompt, LENGTH)
    assert browser.value("document.getElementById('given').textContent") == prompt
    assert browser.value("written.textContent") == expected
    assert len(browser.value("[...sizes]")) > 3, "the text came at once"
    with colibri.Model(colibri.demo_path()) as model:
        assert int(browser.value("document.getElementById('prompt-tokens').textContent")) == len(model.tokenize(prompt))
    assert 0 < int(browser.value("document.getElementById('tokens').textContent")) <= LENGTH
    assert float(browser.value("document.getElementById('speed').textContent")) > 0
    assert browser.value("canvas.toDataURL() !== blank")
    assert "Used most: expert" in browser.value("canvas.getAttribute('aria-label')")


def test_heat_map_has_the_session_s_counts(server: webserver.Server, browser: Page) -> None:
    open_page(browser, f"{server.address}?prompt=A%20dog")
    for _ in range(2):  # the second text does not count the first one's tokens
        set_range(browser, "temperature", 0)
        set_range(browser, "length", 32)
        browser.value("delete document.body.dataset.ended, document.getElementById('go').click()")
        browser.wait("document.body.dataset.ended")
    with colibri.Model(colibri.demo_path()) as model, colibri.Session(model) as session:
        session.generate("A dog", max_new_tokens=32)
        expected = session.stats()["expert_tokens"].ravel().tolist()
    assert browser.value("Array.from(counts)") == expected


def test_stop_and_errors(server: webserver.Server, browser: Page) -> None:
    """The page answers while the model computes; a failure is a sentence, and the next text works."""
    open_page(browser, server.address)
    set_range(browser, "temperature", 0)
    set_range(browser, "length", 400)
    browser.value("delete document.body.dataset.ended, document.getElementById('go').click()")
    browser.wait("written.textContent.length > 20")
    browser.value("document.getElementById('go').click()")
    assert browser.wait("document.body.dataset.ended") == "stopped"
    assert native("Once upon a time", 400).startswith(browser.value("written.textContent"))
    browser.value("document.getElementById('prompt').value = 'dog '.repeat(600), document.getElementById('go').click()")
    browser.wait("document.getElementById('status').classList.contains('wrong')")
    assert "512" in browser.value("document.getElementById('status').textContent")
    assert browser.value("document.getElementById('go').textContent") == "Write"
    browser.value("delete document.body.dataset.ended, document.getElementById('prompt').value = 'A cat'")
    set_range(browser, "length", 16)
    browser.value("document.getElementById('go').click()")
    browser.wait("document.body.dataset.ended")
    assert browser.value("written.textContent") == native("A cat", 16)


def test_page_asks_no_other_server(server: webserver.Server, browser: Page) -> None:
    open_page(browser, f"{server.address}?prompt=The%20end&autorun=1", "document.body?.dataset.ended")
    sent = [
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert sent and all(url.startswith((server.address, "data:")) for url in sent)
    bad = [event for event in browser.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert bad == []
