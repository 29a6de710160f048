"""Random and damaged input on the real command line: a command succeeds, or ends with one line and exit code 2.

``DEFEDAVG_FUZZ`` sets the number of examples per test; ``make fuzz`` runs many.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.planning.plan_checks import PlanError
from helpers.command_line import call
from helpers.corruption import changed_bytes, changed_json, changed_json_lines, scalars
from helpers.deployments import World
from helpers.run_folders import make_folder
from helpers.study_strategies import SMALL, studies

EXAMPLES = int(os.environ.get("DEFEDAVG_FUZZ", "12"))
SECONDS = 40  # of computing; a command that takes longer hangs: each needs a few seconds
MEGABYTES = 12_000  # of address space, most of which PyTorch reserves and does not use

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="DEFEDAVG_FUZZ" not in os.environ,  # CI checks the same examples every time
)


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Yield an empty folder for one example."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run_checked(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command; assert that it succeeds, or fails with one line and exit code 2."""
    result = call(*words, cwd=folder, seconds=SECONDS, megabytes=MEGABYTES)
    shown = f"{[str(word) for word in words]}: exit code {result.returncode}\n{result.stderr[-3000:]}"
    event(f"{words[0]}: exit code {result.returncode}")  # `pytest --hypothesis-show-statistics` counts them
    assert result.returncode in (0, 2), shown
    assert "Traceback" not in result.stderr, shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", result.stdout + result.stderr), shown
    if result.returncode == 2:
        lines = result.stderr.splitlines()
        assert lines, shown
        assert all(line.startswith("defedavg: ") for line in lines), shown
    return result


# Settings.

READERS = [
    ["plan", "study.toml", "--rounds", "3"],
    ["plan", "study.toml", "--rounds", "3"],
    ["split", "study.toml"],
    ["theory", "--config", "study.toml", "--rounds", "3", "--points", "1", "--samples", "2"],
]
"""Commands that read settings and train nothing."""


@fuzzed
@given(data=st.data())
def test_any_settings_are_planned_or_refused(data: st.DataObject) -> None:
    text = tomli_w.dumps(data.draw(studies(trained=False))).encode()
    if data.draw(st.integers(0, 4)) == 0:
        text = data.draw(changed_bytes(text))
    with empty_folder() as folder:
        (folder / "study.toml").write_bytes(text)
        result = run_checked(folder, *data.draw(st.sampled_from(READERS)), "--json")
        if result.returncode == 0:
            assert json.loads(result.stdout)


@fuzzed
@given(study=studies(trained=True))
def test_any_settings_are_trained_or_refused(study: dict[str, Any]) -> None:
    with empty_folder() as folder:
        (folder / "study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
        result = run_checked(folder, "run", "study.toml")
        if result.returncode == 0:
            (summary,) = (folder / "runs").glob("*/summary.json")
            assert json.loads(summary.read_text())["finished"] is True
        else:
            assert not list(folder.glob("runs/*/summary.json"))


# Traces.

TRACE = """client,step_seconds,up_mbps,down_mbps,leaves_at,returns_at
0,0.01,10,20,,
1,0.02,10,20,0.5,1.5
2,0.05,1e3,inf,3,
3,0.03,5,20,,
"""


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """Return a trace with changed cells, lines or bytes."""
    rows = [line.split(",") for line in TRACE.splitlines()]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.integers(0, len(rows) - 1))
        cell = draw(st.integers(0, len(rows[row]) - 1)) if rows[row] else 0
        match draw(st.sampled_from(["cell", "cell", "cell", "remove", "repeat", "shorten", "lengthen"])):
            case "cell" if rows[row]:
                rows[row][cell] = str(draw(scalars()))
            case "remove" if len(rows) > 1:
                del rows[row]
            case "repeat":
                rows.insert(row, list(rows[row]))
            case "shorten" if rows[row]:
                del rows[row][cell]
            case _:
                rows[row].append("1")
    text = "\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass")
    return draw(changed_bytes(text)) if draw(st.integers(0, 2)) == 0 else text


@fuzzed
@given(trace=traces(), algorithm=st.sampled_from(sorted(ALGORITHMS)))
def test_any_trace_is_planned_or_refused(trace: bytes, algorithm: str) -> None:
    with empty_folder() as folder:
        (folder / "trace.csv").write_bytes(trace)
        study = {"algorithms": [algorithm], "clients": {"trace": "trace.csv"}, "training": {"updates_per_round": 2}}
        (folder / "study.toml").write_text(tomli_w.dumps(study))
        run_checked(folder, "plan", "study.toml", "--rounds", "3")


# Files that this program wrote, damaged.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study, its trained run, another run, and a deployment's log."""
    folder = tmp_path_factory.mktemp("whole")
    study = {**SMALL, "name": "study", "seeds": [0, 1]}
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    assert call("run", "study.toml", cwd=folder).returncode == 0
    make_folder(folder / "runs", "other", rounds=3)
    world = World(folder / "runs" / "deployment")
    world.coordinator.run()
    World.close_all()
    return folder


def _damaged_content(data: st.DataObject, path: Path) -> bytes:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    structured = path.suffix in (".json", ".jsonl", ".gz") and content.strip() and data.draw(st.integers(0, 3)) > 0
    if structured and path.suffix == ".json":
        changed = json.dumps(data.draw(changed_json(json.loads(content)))).encode("utf-8", "surrogatepass")
    elif structured:
        changed = data.draw(changed_json_lines(content.decode().splitlines()))
    else:
        return data.draw(changed_bytes(path.read_bytes()))
    return gzip.compress(changed) if path.suffix == ".gz" else changed


def damage(data: st.DataObject, path: Path) -> None:
    """Change the content of a file, or replace the file by something else."""
    how = data.draw(st.sampled_from(["content"] * 8 + ["remove", "folder", "pipe", "dangling", "device"]))
    content = _damaged_content(data, path) if how == "content" else b""
    path.unlink()
    match how:
        case "content":
            path.write_bytes(content)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "dangling":
            path.symlink_to("nowhere")
        case "device":
            path.symlink_to("/dev/zero")


COMMANDS: list[list[str]] = [
    ["runs", "list"],
    ["runs", "list", "--json"],
    ["runs", "compare", "study", "other"],
    ["runs", "table", "study", "other"],
    ["runs", "export", "all.csv"],
    ["report", "runs/study", "-o", "page.html"],
    ["report", "runs", "-o", "page.html"],
    ["run", "study.toml", "--resume"],
    ["runs", "remove", "study", "--yes"],
]


@fuzzed
@given(data=st.data())
def test_any_run_folder_is_read_or_refused(finished: Path, data: st.DataObject) -> None:
    with empty_folder() as folder:
        copy = folder / "copy"
        shutil.copytree(finished, copy)
        owned = sorted(path for path in (copy / "runs" / "study").rglob("*") if path.is_file())
        telling = [path for path in owned if path.suffix in (".json", ".jsonl", ".toml", ".gz")]
        for path in data.draw(st.lists(st.sampled_from(telling * 3 + owned), min_size=1, max_size=2, unique=True)):
            damage(data, path)
        run_checked(copy, *data.draw(st.sampled_from(COMMANDS)))


@fuzzed
@given(data=st.data())
def test_any_plan_is_read_or_refused(finished: Path, data: st.DataObject) -> None:
    with empty_folder() as folder:
        shutil.copytree(finished / "runs" / "study", folder / "study")
        plan = data.draw(st.sampled_from(sorted((folder / "study" / "plans").iterdir())))
        damage(data, plan)
        with contextlib.suppress(UserError, PlanError):
            Plan.load(plan).check()
        run_checked(folder, "report", "study", "-o", "page.html")


@fuzzed
@given(data=st.data())
def test_any_deployment_log_is_replayed_or_refused(finished: Path, data: st.DataObject) -> None:
    with empty_folder() as folder:
        shutil.copytree(finished / "runs" / "deployment", folder / "deployment")
        damage(data, folder / "deployment" / "events.jsonl")
        what_if = ["--what-if", "updates_per_round=2"] if data.draw(st.booleans()) else []
        run_checked(folder, "replay", "deployment", *what_if, "--rounds", "3")
