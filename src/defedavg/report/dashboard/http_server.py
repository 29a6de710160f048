"""The server of the live view.

The law of this file: it answers to this machine, by the names of this machine, with what was found below one folder. No
path is ever made from a request: runs are looked up by name among those that were found. It reads and never writes.
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
from .run_index import Views

OWN: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)
WHOLE: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
FILES: Final = {
    "/": ("view.html", "text/html"),
    "/look.css": ("look.css", "text/css"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/view.js": ("view.js", "text/javascript"),
    "/plotly.js": (PLOTLY, "text/javascript"),
}


class DashboardServer(ThreadingHTTPServer):
    """Listens, and knows which names it goes by."""

    daemon_threads = True

    def __init__(self, views: Views, host: str, port: int) -> None:
        self.views = views
        self.host = host
        super().__init__((host, port), Handler)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """What to open."""
        shown = socket.gethostname() if self.host in ("0.0.0.0", "") else self.host
        return f"http://{shown}:{self.port}/"

    def knows(self, header: str | None) -> bool:
        """Whether a Host header names this server: a page of another site that points its name here is turned away."""
        name, colon, port = (header or "").rpartition(":")
        if not colon:
            name, port = header or "", "80"
        if port != str(self.port):
            return False
        if name in ("localhost", "127.0.0.1", self.host):
            return True
        if _loopback(self.host):
            return False
        return name == socket.gethostname() or _is_address(name)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is nothing to speak of."""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Handler(BaseHTTPRequestHandler):
    """One request; only GET and HEAD are answered."""

    server: DashboardServer
    server_version = f"defedavg/{__version__}"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer."""
        if not self.server.knows(self.headers.get("Host")):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "this server goes by another name", "text/plain")
            return
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=10)
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "the address cannot be read", "text/plain")
            return
        self._answer(parts.path, (query.get("id") or [""])[0])

    do_HEAD = do_GET

    def _answer(self, path: str, name: str) -> None:
        views = self.server.views
        if path in FILES:
            file, kind = FILES[path]
            self._say(HTTPStatus.OK, asset(file), kind)
        elif path == "/api/runs":
            self._json({"root": str(views.root), "runs": views.list()})
        elif path == "/api/run":
            found = views.curves(name)
            self._json(found) if found is not None else self._gone()
        elif path == "/report":
            try:
                page = views.page(name)
            except UserError as error:
                self._say(HTTPStatus.CONFLICT, first_line(error), "text/plain")
                return
            self._say(HTTPStatus.OK, page, "text/html", WHOLE) if page is not None else self._gone()
        else:
            self._gone()

    def _gone(self) -> None:
        self._say(HTTPStatus.NOT_FOUND, "there is no such run", "text/plain")

    def _json(self, value: Any) -> None:
        self._say(HTTPStatus.OK, json.dumps(finite(value), allow_nan=False), "application/json")

    def _say(self, status: HTTPStatus, text: str, kind: str, policy: str = OWN) -> None:
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
        for word, value in headers.items():
            self.send_header(word, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests every second are not worth a line each."""


@contextmanager
def serve(views: Views, host: str, port: int) -> Iterator[DashboardServer]:
    """A server that listens; it answers in ``serve_forever``."""
    try:
        server = DashboardServer(views, host, port)
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be listened on: {error.strerror or error}; try --port 0") from None
    with server:
        yield server
