"""Figures of a running deployment for Prometheus: text at ``/metrics``, read from the event log on request."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...runstore.deployment_status import DeploymentMonitor, DeploymentStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("idle", "working", "away", "quarantined")


def metrics_text(status: DeploymentStatus) -> str:
    """Return the figures in Prometheus' text format."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, values: Mapping[str, float | None]) -> None:
        known = {labels: value for labels, value in values.items() if value is not None and math.isfinite(value)}
        if known:
            lines.append(f"# HELP defedavg_{name} {text}")
            lines.append(f"# TYPE defedavg_{name} {kind}")
            lines.extend(f"defedavg_{name}{labels} {value:.10g}" for labels, value in known.items())

    counted = {f'{{state="{state}"}}': 0.0 for state in STATES}
    for found in status.clients.values():
        counted[f'{{state="{found.state}"}}'] += 1
    add("clients", "gauge", "Clients by what they do.", counted)
    add("round", "gauge", "The newest version of the model.", {"": status.round})
    add("run_seconds", "gauge", "Seconds since version 0 was sent.", {"": status.seconds})
    add("updates_total", "counter", "Updates that passed all checks.", {"": status.updates})
    add("updates_per_second", "gauge", "The rate of the newest updates.", {"": status.updates_per_second})
    add("staleness_mean", "gauge", "Mean staleness of the merged updates.", {"": status.staleness_mean})
    add("refused_total", "counter", "Replies that were refused.", {"": status.refused})
    add("failed_total", "counter", "Jobs that clients report as failed.", {"": status.failed})
    reasons = {f'{{reason="{_escaped(why)}"}}': float(count) for why, count in status.reasons.items()}
    add("refused_by_reason_total", "counter", "Replies that were refused, by reason.", reasons)
    if status.evaluations:
        _, _, metric, loss = status.evaluations[-1]
        add("metric", "gauge", "The metric of the last evaluation.", {f'{{name="{_escaped(status.metric)}"}}': metric})
        add("loss", "gauge", "The loss of the last evaluation.", {"": loss})
    left = status.seconds_left()
    add("seconds_left", "gauge", "Forecast of the seconds until the run ends.", {"": None if left is None else left[0]})
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        super().__init__(address, _MetricsHandler)
        self._monitor, self._lock = DeploymentMonitor(folder), threading.Lock()

    def text(self) -> str:
        with self._lock:
            return metrics_text(self._monitor.refresh())


class _MetricsHandler(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = 10

    def do_GET(self) -> None:
        """Answer a request."""
        found = self.path.split("?")[0] == "/metrics"
        data = self.server.text().encode() if found else b"the figures are at /metrics\n"
        self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus sends a request every few seconds."""


@contextmanager
def metrics_endpoint(folder: Path, host: str, port: int) -> Iterator[int | None]:
    """Answer requests for the figures of the run in a folder inside this block; yield the port. Port 0: do nothing."""
    if not port:
        yield None
        return
    try:
        server = _MetricsServer((host, port), folder)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} for /metrics: {error.strerror or error}; change deploy.metrics_port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
