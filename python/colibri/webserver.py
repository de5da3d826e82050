"""Serves web/: a page in which the browser itself runs a model, by the library compiled to WebAssembly.

Only this machine can connect, and only the files named in FILES and the model are served.
"""

from __future__ import annotations

import errno
import http.server
import os
import shutil
from pathlib import Path

from .errors import ColibriError, InvalidArgumentError, NotFoundError

FOLDER = Path(__file__).with_name("web")
FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "worker.js": "text/javascript; charset=utf-8",
    "colibri.wasm": "application/wasm",
}
_MODEL = "model.colibri"
_LARGEST = 3 << 30  # bytes of a model: WebAssembly has 4 GiB in all
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Handler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of a fixed list of names: no path of a request ever becomes a path of a file."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "colibri"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if self.headers.get("Host") not in self.server.hosts:  # a name of somebody else's that leads here
            self.send_error(403)
            return
        name = self.path.partition("?")[0].removeprefix("/") or "index.html"
        path, kind = self.server.files.get(name, (None, ""))
        if path is None:
            self.send_error(404)
            return
        if not path.is_file():
            self.send_error(404)
            return
        with path.open("rb") as file:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            if body:
                shutil.copyfileobj(file, self.wfile, 1 << 18)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


class Server(http.server.ThreadingHTTPServer):
    """Of 127.0.0.1; `port` 0 takes any. `wasm` is the module if it is not the package's own."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on Windows it would let two servers share a port

    def __init__(
        self, model: str | os.PathLike[str], port: int = 0, wasm: str | os.PathLike[str] | None = None
    ) -> None:
        self.files = {name: (FOLDER / name, kind) for name, kind in FILES.items()}
        self.files[_MODEL] = (Path(model), "application/octet-stream")
        if wasm is not None:
            self.files["colibri.wasm"] = (Path(wasm), FILES["colibri.wasm"])
        module = self.files["colibri.wasm"][0]
        if not module.is_file():
            raise NotFoundError(
                f"there is no {module}; in the source folder 'python -m ziglang build web --prefix python/colibri' "
                "makes it"
            )
        size = os.path.getsize(model)
        if size > _LARGEST:
            raise InvalidArgumentError(f"{os.fspath(model)} has {size} bytes; a browser can hold a model of {_LARGEST}")
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise ColibriError(
                    f"port {port} is in use; choose another one with --port, or any by --port 0"
                ) from None
            raise ColibriError(f"cannot listen on port {port}: {exc.strerror}") from None
        self.hosts = {f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"}
        if self.server_port == 80:
            self.hosts |= {"127.0.0.1", "localhost"}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that HTTPServer does."""
        http.server.socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that hangs up is no news."""
