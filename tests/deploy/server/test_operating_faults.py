"""Faults of the machine: a full disk, a SuperLink that ends, client processes that are killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from defedavg.deploy.client.client_socket import remove_dead_sockets
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLogWriter, LogNote
from defedavg.deploy.flower.local_deployment import _raise_failure
from defedavg.deploy.flower.processes import FlowerCluster
from defedavg.errors import UserError
from defedavg.fileio import write_whole


class FullDisk:
    """A file on a disk that takes only a few more bytes; like the system, it writes a part before it refuses."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self._room])
        self._room -= written
        return int(written)

    def fileno(self) -> int:
        return int(self._file.fileno())


def test_a_full_disk_is_one_line_that_names_the_file_and_the_log_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLogWriter(path, {"settings": {}})
    log.add(LogNote("first", 0.0, {}))
    log.write()
    opened = log._file
    log._file = FullDisk(opened, 12)  # type: ignore[assignment]
    log.add(LogNote("second", 1.0, {}))
    with pytest.raises(UserError, match=r"events\.jsonl cannot be written: No space left on device; free some space"):
        log.write()
    opened.close()
    assert [line.name for line in logs.read(path).lines if isinstance(line, LogNote)] == ["first"]
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device; free some space"):
        write_whole(Path("/dev/full"), b"x")


def test_an_error_that_did_not_fit_on_the_disk_still_has_words(tmp_path: Path) -> None:
    cluster = FlowerCluster(tmp_path / "flower")
    _raise_failure(cluster, tmp_path)  # nothing has failed
    (tmp_path / "error.txt").touch()
    with pytest.raises(UserError, match=rf"could not write to {tmp_path}, its disk is full; free some space"):
        _raise_failure(cluster, tmp_path)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            r"printf '\033[91mERROR\033[0m : no such port\n\033[0m\n'; exit 3",
            "exit code 3; .* is: ERROR : no such port;",
        ),
        ("kill -9 $$", r"killed by signal 9 \(SIGKILL\); .* is: it printed nothing;"),
    ],
)
def test_a_dead_superlink_is_reported_with_its_cause_and_without_escape_codes(
    script: str, cause: str, tmp_path: Path
) -> None:
    with FlowerCluster(tmp_path / "flower") as cluster:
        cluster.superlink = cluster.spawn("superlink", "sh", "-c", script)
        cluster.superlink.wait()
        with pytest.raises(UserError, match=f"the SuperLink ended: {cause} continue with --resume") as found:
            _raise_failure(cluster, tmp_path)
    assert "\x1b" not in str(found.value)


def test_a_client_process_that_is_asked_to_end_removes_its_socket(tmp_path: Path) -> None:
    path, newest = tmp_path / "a.sock", tmp_path / "a.newest"
    newest.write_text(str(path))
    launch = {"path": str(path), "newest": str(newest), "secret": "00" * 32, "parent": os.getpid()}
    from defedavg.deploy.client.client_socket import process_start_time

    launch["parent_started"] = process_start_time(os.getpid())
    words = [sys.executable, "-m", "defedavg.deploy.client.client_process"]
    with subprocess.Popen(words, stdin=-1, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(launch) + "\n")
        process.stdin.close()
        deadline = time.monotonic() + 60
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_sockets_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    old = time.time() - 3600
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(tmp_path / "dead.sock"))
        alive.bind(str(tmp_path / "alive.sock"))
        alive.listen()
        with socket.socket(socket.AF_UNIX) as starting:
            starting.bind(str(tmp_path / "starting.sock"))
        (tmp_path / "dead.newest").write_text(str(tmp_path / "dead.sock"))
        (tmp_path / "alive.newest").write_text(str(tmp_path / "alive.sock"))
        for path in tmp_path.iterdir():
            if path.stem != "starting":
                os.utime(path, (old, old))
        remove_dead_sockets(tmp_path)
        remove_dead_sockets(tmp_path)  # the name of a socket goes after the socket
    assert {path.name for path in tmp_path.iterdir()} == {"alive.sock", "alive.newest", "starting.sock"}
