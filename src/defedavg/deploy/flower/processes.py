"""A SuperLink and SuperNodes on this machine: start them, observe them, and end them with all their descendants.

Flower's processes start others, some of which outlive their parents. All of them inherit an environment variable with
the id of the cluster, by which they are found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from ...errors import UserError
from ...fileio import write_whole, writing
from ..ports import HOST, check_port, free_port
from ..run_processes import query, run_environment
from ..transport import not_installed
from .signals import signals_ignored

ID_VARIABLE = "DEFEDAVG_CLUSTER"
START_SECONDS = 60.0
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""The commands to a terminal that Flower prints, also into files."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files for TLS and for authenticated nodes; see ``defedavg deploy keys``."""

    ca: Path
    certificate: Path
    key: Path


def find_program(program: str) -> str:
    """Return the path of a program of Flower."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        raise not_installed("flower")
    return found


@dataclass
class FlowerCluster:
    """The processes of a deployment; use it in a ``with`` statement, which ends all of them."""

    folder: Path
    port: int = field(default_factory=free_port)
    tls: TlsFiles | None = None
    run_folder: Path | None = None  # of the one run for which the cluster is started
    database: bool = False  # whether the SuperLink keeps its state over a restart
    superlink: subprocess.Popen[bytes] | None = None
    supernodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster_id = os.urandom(8).hex()
        self._known: set[psutil.Process] = set()
        self.folder = self.folder.absolute()  # the processes may have another working directory
        programs = [find_program(program) for program in ("flower-superlink", "flower-supernode", "flwr")]
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            **os.environ,
            "PATH": os.pathsep.join([str(Path(programs[0]).parent), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            ID_VARIABLE: self.cluster_id,
            **(run_environment(self.run_folder) if self.run_folder is not None else {}),
        }
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> FlowerCluster:
        return self

    def __exit__(self, *raised: object) -> None:
        with signals_ignored():
            self.stop()

    @property
    def address(self) -> str:
        """The address of the SuperLink."""
        return f"{HOST}:{self.port}"

    def spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process that belongs to the cluster, with its output in a log file."""
        with writing(self.folder), (self.folder / f"{name}.log").open("ab") as out:
            closed = subprocess.DEVNULL
            process = subprocess.Popen(
                arguments, env=self.environment, stdin=closed, stdout=out, stderr=out, start_new_session=True
            )
        with contextlib.suppress(psutil.Error):
            self._known.add(psutil.Process(process.pid))
        return process

    def last_line(self, name: str) -> str:
        """Return the last line that a process has printed."""
        try:
            text = (self.folder / f"{name}.log").read_text(errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in COLOURS.sub("", text).splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"

    def cause_of_end(self, name: str) -> str:
        """Return how the SuperLink ended, and the last line that it has printed."""
        code = self.superlink.returncode if self.superlink is not None else None
        cause = f"exit code {code}"
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            cause = f"killed by signal {-code} ({names.get(-code, 'unknown')})"
        return f"{cause}; its last line in {self.folder / f'{name}.log'} is: {self.last_line(name)}"

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens; without a database it forgets everything when it ends."""
        check_port(self.port)
        connection: dict[str, Any] = {"insecure": True}
        tls = ["--insecure"]
        if self.tls is not None:
            connection = {"root-certificates": str(self.tls.ca)}
            tls = ["--enable-supernode-auth", "--ssl-ca-certfile", str(self.tls.ca)]
            tls += ["--ssl-certfile", str(self.tls.certificate), "--ssl-keyfile", str(self.tls.key)]
        connection["address"] = self.address
        text = tomli_w.dumps({"superlink": {"default": "local", "local": connection}})
        write_whole(self.folder / "config.toml", text.encode())
        self.superlink = self.spawn(
            "superlink",
            *(find_program("flower-superlink"), "--host", HOST, "--port", str(self.port)),
            *("--database", str(self.folder / "superlink.db")) if self.database else (),
            *("--disable-runtime-dependency-installation", *tls),
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.superlink.poll() is not None:
                raise UserError(f"the SuperLink did not start: {self.cause_of_end('superlink')}")
            with socket.socket() as probe:
                if probe.connect_ex((HOST, self.port)) == 0:
                    return
            time.sleep(0.1)
        raise UserError(f"the SuperLink did not listen within {START_SECONDS:g} s: {self.last_line('superlink')}")

    def start_supernode(
        self, name: str, key: Path | None = None, ca: Path | None = None, superlink: str | None = None, **settings: Any
    ) -> None:
        """Start a SuperNode with these settings of its own; ``superlink`` is the address it connects to."""
        node_config = " ".join(f"{word}={json.dumps(value)}" for word, value in settings.items())
        arguments = [find_program("flower-supernode"), "--superlink", superlink or self.address]
        arguments += ["--port", str(free_port()), "--node-config", node_config]
        arguments += ["--insecure"] if self.tls is None else ["--root-certificates", str(ca or self.tls.ca)]
        if key is not None:
            arguments += ["--auth-supernode-private-key", str(key)]
        self.supernodes[name] = self.spawn(f"node-{name}", *arguments)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Flower's command line and return its result."""
        command, closed = [find_program("flwr"), *arguments], subprocess.DEVNULL
        return subprocess.run(
            command, env=self.environment, stdin=closed, capture_output=True, text=True, timeout=60.0, check=False
        )

    def submit(self, app: Path, **settings: Any) -> str:
        """Start a run of an app and return its id."""
        values = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        run_config = ["--run-config", " ".join(values)] if values else []
        result = self.flwr("run", str(app), "local", "--format", "json", *run_config)
        try:
            answer = json.loads(result.stdout)
        except ValueError:
            answer = {}
        if not answer.get("success"):
            text = (str(answer.get("error-message", "")) or result.stderr or result.stdout).strip().splitlines()
            raise UserError(f"flwr run failed: {text[-1] if text else 'it printed nothing'}")
        return str(answer["run-id"])

    def processes(self) -> dict[int, psutil.Process]:
        """Return every running process that the cluster started, directly or not, by its number."""
        own, ended = os.getpid(), psutil.STATUS_ZOMBIE
        running = [p for p in psutil.process_iter() if p.pid != own and query(p.status, ended) != ended]
        found: dict[int, psutil.Process] = {}
        # Parents first: where a platform hides the environment of a process, its parent shows where it belongs.
        for process in sorted(running, key=lambda one: query(one.create_time, 0.0)):
            marked = query(process.environ, {}).get(ID_VARIABLE) == self.cluster_id
            if marked or process in self._known or query(process.ppid, None) in found:
                found[process.pid] = process
        self._known = set(found.values())
        return found

    def pids(self, word: str) -> list[int]:
        """Return the processes whose command line contains a word."""
        return sorted(pid for pid, process in self.processes().items() if word in " ".join(query(process.cmdline, [])))

    def stop(self) -> None:
        """End all processes: ask first, then kill."""
        for method, seconds in ((psutil.Process.terminate, 4.0), (psutil.Process.kill, 10.0)):
            for process in self.processes().values():
                with contextlib.suppress(psutil.Error):
                    method(process)
            deadline = time.monotonic() + seconds
            while self.processes() and time.monotonic() < deadline:
                for child in self._children():
                    child.poll()
                time.sleep(0.1)
            if not self.processes():
                break
        for child in self._children():
            child.wait(timeout=10.0)

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return [*self.supernodes.values(), *([self.superlink] if self.superlink else [])]
