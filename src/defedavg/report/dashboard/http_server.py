"""The web server of the live view.

It answers requests that name this machine, with runs found below one folder. It never builds a path from a request:
runs are looked up by name among those found. It reads files and never writes.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from ... import __version__
from ...errors import UserError, first_line
from ...jsonio import finite
from ..page import PLOTLY, asset
from .run_index import RunIndex

VIEW_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)
REPORT_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
FILES: Final = {
    "/": ("view.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/view.js": ("view.js", "text/javascript"),
    "/plotly.js": (PLOTLY, "text/javascript"),
}


class DashboardServer(ThreadingHTTPServer):
    """An HTTP server that answers only to its own host names."""

    daemon_threads = True

    def __init__(self, index: RunIndex, host: str, port: int) -> None:
        self.index, self.host = index, host
        super().__init__((host, port), DashboardHandler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        shown = socket.gethostname() if self.host in ("0.0.0.0", "") else self.host  # noqa: S104 -- compared, not bound
        return f"http://{shown}:{self.port}/"

    def is_own_name(self, header: str | None) -> bool:
        """Return whether a Host header names this server, to refuse pages of other sites (DNS rebinding)."""
        name, colon, port = (header or "").rpartition(":")
        if not colon:
            name, port = header or "", "80"
        if port != str(self.port):
            return False
        if name in ("localhost", "127.0.0.1", self.host):
            return True
        return not _is_loopback(self.host) and (name == socket.gethostname() or _is_address(name))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection early."""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class DashboardHandler(BaseHTTPRequestHandler):
    """Answers one request, GET or HEAD."""

    server: DashboardServer
    server_version = f"defedavg/{__version__}"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        if not self.server.is_own_name(self.headers.get("Host")):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name", "text/plain")
            return
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=10)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "the address is malformed", "text/plain")
            return
        try:
            self._answer(parts.path, (query.get("id") or [""])[0])
        except UserError as error:
            self._send(HTTPStatus.CONFLICT, first_line(error), "text/plain")

    do_HEAD = do_GET  # noqa: N815 -- http.server prescribes the name

    def _answer(self, path: str, name: str) -> None:
        index = self.server.index
        if path in FILES:
            file, kind = FILES[path]
            self._send(HTTPStatus.OK, asset(file), kind)
        elif path == "/api/runs":
            self._send_json({"root": str(index.root), "runs": index.list()})
        elif path == "/api/run" and (curves := index.curves(name)) is not None:
            self._send_json(curves)
        elif path == "/report" and (page := index.page(name)) is not None:
            self._send(HTTPStatus.OK, page, "text/html", REPORT_POLICY)
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is no such run", "text/plain")

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(finite(value), allow_nan=False), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str, policy: str = VIEW_POLICY) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page sends a request every second."""


@contextmanager
def serve(index: RunIndex, host: str, port: int) -> Iterator[DashboardServer]:
    """Yield a listening server; call its ``serve_forever`` to answer requests."""
    try:
        server = DashboardServer(index, host, port)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; try --port 0") from None
    with server:
        yield server
