"""The live view over a real socket: it lists runs as they appear and disappear, and serves nothing else."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from defedavg.errors import UserError
from defedavg.report.dashboard.http_server import DashboardServer, serve
from defedavg.report.dashboard.run_index import RunIndex
from helpers.run_folders import HOSTILE, make_folder, make_hostile, metrics_line, write_summary


def ask(
    server: DashboardServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Send a request exactly as written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.port}" if host is None else host)
    connection.endheaders()
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return result


def runs(server: DashboardServer) -> dict[str, dict[str, Any]]:
    """Return the listed runs by name."""
    status, _, body = ask(server, "/api/runs")
    assert status == 200
    return {run["id"]: run for run in json.loads(body)["runs"]}


def test_runs_appear_grow_finish_fail_and_disappear(server: DashboardServer, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert runs(server) == {}
    folder = make_folder(root, "one", finished=False)
    one = runs(server)["one"]
    assert (one["status"], one["algorithms"], one["done"], one["expected"]) == (
        "running",
        ["fedavg", "defedavg-niid"],
        0,
        4,
    )
    before = json.loads(ask(server, "/api/run?id=one")[2])
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(metrics_line("fedavg", "fedavg", 0, 13, 99.0, 0.97) + '{"half a line')
    after = json.loads(ask(server, "/api/run?id=one")[2])
    assert after["revision"] != before["revision"]
    assert after["series"][0]["runs"][0]["accuracy"][-1] == 0.97
    other = max(after["series"][0]["runs"][1]["accuracy"])  # of the second seed
    mean, deviation = 50 * (0.97 + other), 100 * (0.97 - other) / 2**0.5
    assert runs(server)["one"]["best_accuracy"] == f"{mean:.1f} ± {deviation:.1f} %"
    write_summary(folder, "one", True, [])
    assert runs(server)["one"]["status"] == "finished"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_summary(folder, "one", False, [], host=socket.gethostname(), pid=ended.pid)
    assert runs(server)["one"]["status"] == "aborted"
    write_summary(folder, "one", False, [], host=socket.gethostname(), pid=os.getpid())
    assert runs(server)["one"]["status"] == "running"
    (folder / "summary.json").write_text("{damaged")
    assert "not valid JSON" in runs(server)["one"]["notes"][0]
    shutil.rmtree(folder)
    assert runs(server) == {}
    assert ask(server, "/api/run?id=one")[0] == ask(server, "/report?id=one")[0] == 404


def test_a_report_is_served_and_rebuilt_when_the_run_grows(server: DashboardServer, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "runs" / "deep er", "one")
    status, headers, body = ask(server, f"/report?id={quote('deep er/one')}")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert b'id="payload"' in body
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(metrics_line("fedavg", "another", 0, 13, 99.0, 0.97))
    assert b'"another"' in ask(server, f"/report?id={quote('deep er/one')}")[2]
    (folder / "metrics.jsonl").unlink()
    write_summary(folder, "one", False, [])
    status, _, body = ask(server, f"/report?id={quote('deep er/one')}")
    assert (status, b"No run reached" in body) == (200, True)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/runs/../../secret.txt",
        "//secret.txt",
        "/secret.txt",
        "/one/config.toml",
        "/vendor/README.md",
        "/api/run?id=../outside",
        "/api/run?id=..%2Foutside",
        "/api/run?id=%2E%2E/outside",
        "/report?id=../outside",
        "/report?id=/etc",
        "/report?id=one/../../outside",
        "/report?id=linked",
        "/report?id=one%00",
        "/report?id=",
        "/report",
    ],
)
def test_nothing_outside_the_folder_is_served(server: DashboardServer, tmp_path: Path, path: str) -> None:
    make_folder(tmp_path / "runs", "one")
    outside = make_folder(tmp_path, "outside")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "runs" / "linked").symlink_to(outside)
    status, _, body = ask(server, path)
    assert status == 404
    assert body == b"there is no such run"
    assert list(runs(server)) == ["one"]


def test_foreign_names_and_other_methods_are_refused(server: DashboardServer, tmp_path: Path) -> None:
    make_folder(tmp_path / "runs", "one")
    port = server.port
    foreign = ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "127.0.0.1", "")
    sly = (f"127.0.0.1.evil:{port}", f"192.0.2.1:{port}", f"localhost:{port}.evil", f"@127.0.0.1:{port}")
    for name in (*foreign, *sly):
        for path in ("/", "/api/runs", "/report?id=one", "/plotly.js"):
            assert ask(server, path, host=name)[0] == 421, name
    for name in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, "/api/runs", host=name)[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT"):
        assert ask(server, "/api/runs", method=method)[0] == 501
    status, headers, body = ask(server, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
    assert "Access-Control-Allow-Origin" not in headers


def test_hostile_text_is_sent_as_text(server: DashboardServer, tmp_path: Path) -> None:
    make_hostile(tmp_path / "runs")
    (found,) = runs(server).values()
    assert found["name"] == HOSTILE
    series = json.loads(ask(server, "/api/run?id=innocent")[2])["series"]
    assert series[0]["name"] == HOSTILE


def test_a_missing_folder_and_a_used_port_are_user_errors(server: DashboardServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        RunIndex(tmp_path / "nowhere")
    with pytest.raises(UserError, match="try --port 0"), serve(RunIndex(tmp_path), "127.0.0.1", server.port):
        pass


def test_the_command_listens_on_this_machine_only_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "defedavg", "view", ".", "--port", "0"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as made:
        assert made.stdout is not None
        line = made.stdout.readline()
        assert "http://127.0.0.1:" in line
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("GET", "/api/runs")
                assert connection.getresponse().status == 200
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        made.send_signal(signal.SIGINT)
        assert made.wait(timeout=60) == 0
        assert "Traceback" not in made.stderr.read()  # type: ignore[union-attr]
