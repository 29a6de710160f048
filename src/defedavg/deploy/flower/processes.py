"""A SuperLink and SuperNodes on this machine: started, watched, and ended with everything they started.

Flower's processes start others, some of which outlive their parents. All of them inherit a mark in their environment,
by which they are found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from ...errors import UserError
from ...fileio import write_whole, writing
from ..client.client_socket import born
from .signals import uninterrupted

MARK = "DEFEDAVG_CLUSTER"
START_SECONDS = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Security:
    """Files for TLS and for authenticated nodes; see ``defedavg deploy keys``."""

    ca: Path
    certificate: Path
    key: Path


def find(program: str) -> str:
    """Where a program of Flower is."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        raise UserError("Flower is not installed here; run: pip install 'defedavg[flower]'")
    return found


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise if a port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port {port} cannot be used: {error.strerror}; choose another with --port") from None


@dataclass
class Cluster:
    """Use it in a ``with``: whatever it started is ended there."""

    folder: Path
    port: int = field(default_factory=free_port)
    security: Security | None = None
    link: subprocess.Popen[bytes] | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = os.urandom(8).hex()
        self.folder = self.folder.absolute()  # the processes may work elsewhere
        bin_folder = str(Path(find("flower-superlink")).parent)
        find("flower-supernode"), find("flwr")
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            **os.environ,
            "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            MARK: self.mark,
        }
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with uninterrupted():
            self.stop()

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"{HOST}:{self.port}"

    def _spawn(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with writing(self.folder), (self.folder / f"{name}.log").open("ab") as out:
            return subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def last_line(self, name: str) -> str:
        """The last thing that a process said."""
        try:
            lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens; its state is in a file, so it can be started again."""
        check_port(self.port)
        safe = (
            ["--insecure"]
            if self.security is None
            else [
                "--enable-supernode-auth",
                *("--ssl-ca-certfile", str(self.security.ca)),
                *("--ssl-certfile", str(self.security.certificate)),
                *("--ssl-keyfile", str(self.security.key)),
            ]
        )
        connection: dict[str, Any] = {"address": self.address}
        connection |= {"insecure": True} if self.security is None else {"root-certificates": str(self.security.ca)}
        text = tomli_w.dumps({"superlink": {"default": "local", "local": connection}})
        write_whole(self.folder / "config.toml", text.encode())
        self.link = self._spawn(
            "superlink",
            *(find("flower-superlink"), "--host", HOST, "--port", str(self.port)),
            *("--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation"),
            *safe,
        )
        self._until_listening()

    def _until_listening(self) -> None:
        assert self.link is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.link.poll() is not None:
                raise UserError(f"the SuperLink did not start: {self.last_line('superlink')}")
            with socket.socket() as probe:
                if probe.connect_ex((HOST, self.port)) == 0:
                    return
            time.sleep(0.1)
        raise UserError(f"the SuperLink did not listen within {START_SECONDS:g} s: {self.last_line('superlink')}")

    def start_node(
        self, name: str, key: Path | None = None, ca: Path | None = None, link: str | None = None, **settings: Any
    ) -> None:
        """Start a SuperNode with these settings of its own; ``link`` is where it finds the SuperLink."""
        own = " ".join(f"{word}={json.dumps(value)}" for word, value in settings.items())
        words = [find("flower-supernode"), "--superlink", link or self.address, "--port", str(free_port())]
        words += ["--node-config", own]
        if self.security is None:
            words.append("--insecure")
        else:
            words += ["--root-certificates", str(ca or self.security.ca)]
        if key is not None:
            words += ["--auth-supernode-private-key", str(key)]
        self.nodes[name] = self._spawn(f"node-{name}", *words)

    def flwr(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run Flower's own command line to its end."""
        return subprocess.run(
            [find("flwr"), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def submit(self, app: Path, **settings: Any) -> str:
        """Start a run of an app; gives its id."""
        words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        given = ["--run-config", " ".join(words)] if words else []
        done = self.flwr("run", str(app), "local", "--format", "json", *given)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {}
        if not found.get("success"):
            text = (str(found.get("error-message", "")) or done.stderr or done.stdout).strip().splitlines()
            raise UserError(f"flwr run was refused: {text[-1] if text else 'it said nothing'}")
        return str(found["run-id"])

    # Processes.

    def processes(self) -> dict[int, tuple[str, str]]:
        """Everything that this cluster started and is still there: pid -> when it started, and its command."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if f"{MARK}={self.mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # another user's, or just gone
            started = born(int(entry.name))
            if started is not None:
                found[int(entry.name)] = (started, command)
        return found

    def pids(self, word: str) -> list[int]:
        """The processes whose command holds a word."""
        return sorted(pid for pid, (_, command) in self.processes().items() if word in command)

    def kill_node(self, name: str) -> None:
        """SIGKILL a SuperNode; its helpers see that and end by themselves."""
        node = self.nodes.pop(name)
        node.kill()
        node.wait()

    def stop(self) -> None:
        """End everything: first kindly, then not."""
        for sign, seconds in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 10.0)):
            for pid, (started, _) in self.processes().items():
                if born(pid) == started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
            deadline = time.monotonic() + seconds
            while self.processes() and time.monotonic() < deadline:
                self._reap()
                time.sleep(0.1)
            if not self.processes():
                break
        for process in self._children():
            process.wait(timeout=10.0)

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return [*self.nodes.values(), *([self.link] if self.link else [])]

    def _reap(self) -> None:
        for process in self._children():
            process.poll()
