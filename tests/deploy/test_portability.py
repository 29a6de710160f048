"""Nothing in a deployment depends on Linux: it must also run on macOS."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import defedavg.deploy
from defedavg.deploy.client import client_socket
from defedavg.deploy.client.client_socket import MAX_PATH_BYTES, is_running, process_start_time, socket_path
from defedavg.deploy.flower import signals
from defedavg.deploy.flower.processes import FlowerCluster
from defedavg.errors import UserError

SOURCES = sorted(Path(defedavg.deploy.__file__).parent.rglob("*.py"))
LINUX_ONLY = re.compile(
    r"/proc\b|/dev/shm|sys\.platform(?! != \"darwin\")|prctl|sched_|pidfd|inotify|\bfcntl\b|killpg|abstract socket"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_uses_an_interface_of_linux(path: Path) -> None:
    assert not LINUX_ONLY.findall(path.read_text())


def test_sockets_have_short_paths_even_if_the_temporary_folder_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{2**64 - 1:x}-abcdef.sock"  # the largest number of a node
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    path = socket_path(name)
    assert len(os.fsencode(path)) <= MAX_PATH_BYTES
    assert path.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(client_socket, "MAX_PATH_BYTES", 20)
    with pytest.raises(UserError, match="too long for a Unix socket; set TMPDIR"):
        socket_path(name)


def test_a_folder_for_sockets_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_socket, "MAX_PATH_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"defedavg-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(UserError, match="not private to this user"):
        socket_path("x.sock")


def test_a_process_is_recognised_by_its_number_and_its_start_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = process_start_time(process.pid)
        assert started is not None
        assert is_running(process.pid, started)
        assert not is_running(process.pid, started - 60.0)  # an earlier process with the same number
        assert not is_running(process.pid, None)
    finally:
        process.kill()
    while process_start_time(process.pid) is not None:
        pass  # until it has ended; nothing has waited for it, so it is a zombie
    assert not is_running(process.pid, started)
    process.wait()
    assert process_start_time(process.pid) is None


def test_a_cluster_ends_descendants_whose_environment_the_platform_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(self: psutil.Process) -> Any:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "environ", hidden)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with FlowerCluster(tmp_path) as cluster:
        process = cluster.spawn("parent", sys.executable, "-c", code)
        while len(cluster.processes()) < 2:
            assert process.poll() is None
        process.kill()  # its child is an orphan, which only the cluster remembers
        process.wait()
        assert len(cluster.processes()) == 1
    assert cluster.processes() == {}


def test_a_platform_without_sighup_has_fewer_stop_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(signal, "SIGHUP")
        assert importlib.reload(signals).STOP_SIGNALS == (signal.SIGTERM,)
    assert importlib.reload(signals).STOP_SIGNALS == (signal.SIGTERM, signal.SIGHUP)
