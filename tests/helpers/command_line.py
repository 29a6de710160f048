"""Run the command line in child processes, forked from one that has imported PyTorch and read the digits: seconds.

A child has its own streams, working folder, environment and arguments. At its end it waits for its threads, calls the
exit functions and flushes its streams, as an interpreter does, but it does not free the modules, which would take most
of the time of a short command. A child whose standard output is a device or a pipe ends like every interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.errors import UserError

SECONDS = 300.0
WAITING = 6  # seconds of real time per second of computing that a command may take

_PARENT = """
import atexit, gc, json, os, resource, signal, sys, threading
import fontTools.subset, matplotlib.backends.backend_agg, matplotlib.backends.backend_pdf, numpy, torch
import defedavg.cli.main, defedavg.report.plots, defedavg.experiments.sweep
for commands in defedavg.cli.main.COMMANDS.values():
    for name in commands:
        defedavg.cli.main.load_command(name)
from defedavg.tasks.datasets.catalog import load

load("mnist5k")  # read once instead of by every child
gc.freeze()  # the children end in half the time: their collectors skip the modules
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for stream, (name, mode) in enumerate(request["streams"]):
        os.dup2(os.open(name, mode), stream)
    if request["seconds"]:
        signal.alarm(request["alarm"])
        resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"],) * 2)
    if request["megabytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["megabytes"] << 20,) * 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path.insert(0, request["cwd"])
    sys.argv = ["defedavg", *request["words"]]
    code = None
    try:
        defedavg.cli.main.main()
    except SystemExit as end:
        if request["whole_exit"] or not isinstance(end.code, int | None):
            raise
        code = end.code
    if request["whole_exit"]:
        break
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@cache
def _parent() -> subprocess.Popen[str]:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(parent.kill)
    return parent


def call(
    *words: str | Path,
    cwd: Path,
    stdout: str | None = None,
    seconds: int = 0,
    megabytes: int = 0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``defedavg`` with these words to its end; ``stdout`` is a device or a pipe for its standard output.

    A command that computes for over ``seconds`` is killed by ``SIGXCPU`` or ``SIGKILL``, and one that waits for several
    times as long by ``SIGALRM``, also on a busy machine. Its address space can be limited to ``megabytes``.
    """
    env = {**_environment(), **environment}
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        streams = [(os.devnull, os.O_RDONLY), (stdout or out.name, os.O_WRONLY), (err.name, os.O_WRONLY)]
        line = [str(word) for word in words]
        limits = {"seconds": seconds, "alarm": WAITING * seconds, "megabytes": megabytes}
        place = {"cwd": str(cwd), "env": env, "streams": streams, "whole_exit": stdout is not None}
        request = {"words": line, **place, **limits}
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        timeout = threading.Timer(SECONDS, parent.kill)
        timeout.start()
        try:
            parent.stdin.write(json.dumps(request) + "\n")
            parent.stdin.flush()
            code = parent.stdout.readline()
        finally:
            timeout.cancel()
        assert code, f"{line}: the forking process failed, or the command took over {SECONDS:g} s"
        return subprocess.CompletedProcess(
            line, int(code), Path(out.name).read_text("utf-8"), Path(err.name).read_text("utf-8")
        )


def refuse(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert that a command failed with exit code 2 and one line on standard error that holds these words."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


def refused(*words: str | Path) -> str:
    """Return the error message of a command that fails, run in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, UserError), result.output
    text = str(result.exception)
    assert "\n" not in text
    return text
