"""The process that keeps a client's desk between messages: its data, its model, and its background training.

It ends with the process whose number it was given, when its node has started another one (for another run), and when
nobody has asked for a while: a run that is over, or whose server is gone, leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from .client_socket import born, receive, send

LINGER_SECONDS = 600.0


class ClientProcess:
    """Serves one client until its node ends."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._path = Path(told["path"])
        self._desk: Any = None
        self._used = time.monotonic()
        self._busy = threading.Lock()

    def run(self) -> None:
        """Listen; never returns."""
        os.umask(0o077)
        listener = Listener(str(self._path), "AF_UNIX", authkey=bytes.fromhex(self._told["secret"]))
        threading.Thread(target=self._watch, daemon=True).start()
        while True:
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError):
                continue  # not one of ours
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _watch(self) -> None:
        while self._needed():
            time.sleep(0.5)
        self._path.unlink(missing_ok=True)
        if self._is_newest():
            Path(self._told["newest"]).unlink(missing_ok=True)
        os._exit(0)

    def _needed(self) -> bool:
        parent_lives = born(self._told["parent"]) == self._told["born"]
        return parent_lives and self._is_newest() and time.monotonic() - self._used < LINGER_SECONDS

    def _is_newest(self) -> bool:
        try:
            return Path(self._told["newest"]).read_text() == str(self._path)
        except OSError:
            return False

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                head, weights = receive(connection)
                with self._busy:
                    self._used = time.monotonic()
                    answer = self._answer(head, weights)
                    self._used = time.monotonic()
                send(connection, *answer)
            except (EOFError, OSError, ValueError, KeyError):
                return  # it went away, or spoke nonsense

    def _answer(self, head: dict[str, Any], weights: Any) -> tuple[dict[str, Any], Any]:
        from ...errors import first_line

        try:
            found = self._own_desk().answer(head["kind"], head["fields"], weights)
        except Exception as error:  # whatever a user's task raises is told to the server
            return {"error": f"{type(error).__name__}: {first_line(error)}"}, None
        return {"fields": found.fields}, found.update

    def _own_desk(self) -> Any:
        if self._desk is None:
            import torch

            from .handler import ClientHandler, find_task

            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
            told = self._told
            make = find_task(told["task"])
            self._desk = ClientHandler(make, told["config"], int(told["client"]), float(told["step_seconds"]))
        return self._desk


if __name__ == "__main__":
    ClientProcess(json.loads(sys.stdin.readline())).run()
