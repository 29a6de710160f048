"""The process that keeps a client's state between messages: its data, its model and its background training.

It ends when its parent process ends, when its node has started another client process (for another run), and when no
message has arrived for a while. A run that is over, or whose server has crashed, therefore leaves no process behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import first_line
from ..transport import Vector
from .client_socket import is_running, receive, send

if TYPE_CHECKING:
    from .handler import ClientHandler

LINGER_SECONDS = 600.0


class ClientProcess:
    """Answers messages to one client over a socket until it is no longer needed."""

    def __init__(self, launch: dict[str, Any]) -> None:
        self._launch = launch
        self._path, self._newest = Path(launch["path"]), Path(launch["newest"])
        self._handler: ClientHandler | None = None
        self._last_used = time.monotonic()
        self._busy = threading.Lock()

    def run(self) -> None:
        """Accept connections; never return."""
        os.umask(0o077)
        signal.signal(signal.SIGTERM, lambda *_: self._exit())
        listener = Listener(str(self._path), "AF_UNIX", authkey=bytes.fromhex(self._launch["secret"]))
        threading.Thread(target=self._exit_when_unneeded, daemon=True).start()
        while True:
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError):
                continue  # the other side does not know the secret
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _exit_when_unneeded(self) -> None:
        while self._is_needed():
            time.sleep(0.5)
        self._exit()

    def _exit(self) -> NoReturn:
        """Remove the socket and end at once, whatever the other threads do."""
        self._path.unlink(missing_ok=True)
        if self._is_newest():
            self._newest.unlink(missing_ok=True)
        os._exit(0)

    def _is_needed(self) -> bool:
        parent_runs = is_running(self._launch["parent"], self._launch["parent_started"])
        return parent_runs and self._is_newest() and time.monotonic() - self._last_used < LINGER_SECONDS

    def _is_newest(self) -> bool:
        try:
            return self._newest.read_text() == str(self._path)
        except OSError:
            return False

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                head, weights = receive(connection)
                with self._busy:
                    self._last_used = time.monotonic()
                    answer = self._answer(head, weights)
                    self._last_used = time.monotonic()
                send(connection, *answer)
            except (EOFError, OSError, ValueError, KeyError):
                return  # the other side disconnected or sent an invalid message

    def _answer(self, head: dict[str, Any], weights: Vector | None) -> tuple[dict[str, Any], Vector | None]:
        try:
            if self._handler is None:
                import torch  # imported late: the socket must listen before PyTorch is loaded

                from .handler import ClientHandler

                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
                launch = (self._launch[name] for name in ("task", "config", "client", "step_seconds"))
                self._handler = ClientHandler(*launch)
            fields, update = self._handler.answer(head["kind"], head["fields"], weights)
        except Exception as error:  # the server receives any error of a user's task
            return {"error": f"{type(error).__name__}: {first_line(error)}"}, None
        return {"fields": fields}, update


if __name__ == "__main__":
    ClientProcess(json.loads(sys.stdin.readline())).run()
