"""Absurd values of settings and traces are refused in one line that names the limit, before anything is computed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from defedavg import simulate
from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.config.settings import MAX_COUNT, MAX_JOB, MAX_UPDATES
from defedavg.errors import UserError
from defedavg.planning import traces
from defedavg.planning.devices import MAX_CLIENTS
from defedavg.planning.plan import Plan
from helpers.command_line import call, refuse

STUDY = """
algorithms = ["fedbuff"]
[task]
model = "softmax"
[clients]
num_clients = 6
[training]
updates_per_round = 2
local_steps = 1
[stop]
max_rounds = 2
"""
LIMITS: dict[str, float] = {
    "clients.num_clients": MAX_CLIENTS,
    "training.updates_per_round": MAX_UPDATES,
    "training.local_steps": MAX_JOB,
    "training.batch_size": MAX_JOB,
    "stop.max_rounds": MAX_COUNT,
    "stop.eval_every_rounds": MAX_COUNT,
    "stop.consecutive_hits": MAX_COUNT,
    "stop.train_samples": MAX_COUNT,
    "task.samples_per_client": MAX_CLIENTS,
    "task.classes_per_client": MAX_CLIENTS,
    "task.shards_per_client": MAX_CLIENTS,
    "training.timeout_seconds": 1e9,
    "clients.return_seconds": 1e9,
}
HUGE = "100000000000000000000"
HEADER = "client,step_seconds,up_mbps,down_mbps\n"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_a_value_above_the_limit_is_refused(name: str, limit: float, study: Path) -> None:
    refuse(call("run", "study.toml", "--set", f"{name}={HUGE}", cwd=study), name, f"at most {limit:,.0f}")
    assert not (study / "runs").exists()


@pytest.mark.parametrize("name", [name for name, limit in LIMITS.items() if isinstance(limit, int)])
def test_a_count_is_a_whole_number(name: str, study: Path) -> None:
    for value in ("1e308", "nan", "inf", "-inf", "true", '"many"', "9" * 5000):
        with pytest.raises(UserError, match=rf"{name} is .*; it must be a whole number"):
            config.load(study / "study.toml", (f"{name}={value}",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clients.step_seconds", "1e308"),
        ("clients.step_seconds", "-1.0"),
        ("clients.model_megabytes", "1e308"),
        ("clients.latency_seconds", "1e308"),
        ("clients.uplink_mbps", "1e-308"),
        ("clients.jitter", "1e308"),
        ("clients.slowness", '"uniform(1, 1e308)"'),
        ("clients.slowness", '"lognormal(1e308)"'),
        ("clients.availability", '"windows(1, 1e308)"'),
        ("clients.availability", '"windows(1e308, 1)"'),
        ("clients.failure_rate", "1.0"),
        ("training.local_lr", "inf"),
        ("training.local_lr", "1e308"),
        ("training.global_lr", "1e31"),
        ("training.local_lr", "-1"),
        ("favano.wait_seconds", "1e308"),
        ("fedbuff.concurrency", HUGE),
    ],
)
def test_absurd_durations_and_rates_are_refused(name: str, value: str, study: Path) -> None:
    options = ("--set", "algorithms=['favano', 'fedbuff']", "--set", f"{name}={value}")
    refuse(call("plan", "study.toml", *options, "--rounds", "3", cwd=study), name.partition(".")[2])


def test_the_limits_themselves_are_planned() -> None:
    tables: dict[str, Any] = {
        "algorithms": ["favano"],
        "clients": {"num_clients": 3, "failure_rate": 0.5, "return_seconds": 1e9, "step_seconds": 1e3},
        "training": {"updates_per_round": 2, "local_steps": MAX_JOB, "batch_size": 100, "timeout_seconds": 0.0},
        "stop": {"max_rounds": MAX_COUNT, "eval_every_seconds": math.inf},
        "favano": {"wait_seconds": 1e9},
    }
    (point,) = config.study(tables).points()
    assert len(Plan.collect(make_simulator(point.settings, 10**20), 3).rounds) == 3
    tables["training"]["batch_size"] = 101
    with pytest.raises(UserError, match="the samples of a job, must be at most 100,000,000"):
        config.study(tables)


def test_a_number_of_thousands_of_digits_from_python() -> None:
    with pytest.raises(UserError, match=r"training.local_steps is far larger; it must be at most 1,000,000"):
        simulate("fedavg", settings={"training.local_steps": 10**6000})


def test_rounds_of_a_plan(study: Path) -> None:
    refuse(call("plan", "study.toml", "--rounds", HUGE, cwd=study), "--rounds", "at most 1,000,000,000")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("device", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("binary", "is not text in UTF-8"),
        ("wide header", "the columns must be"),
        ("wide row", "1000000 cells, but the header has 4"),
        ("late", "must be at most 1,000,000,000,000"),
    ],
)
def test_a_trace_that_is_not_a_table(kind: str, words: str, study: Path) -> None:
    path = study / "trace"
    contents: dict[str, bytes] = {
        "binary": bytes(range(256)),
        "wide header": b"x," * 10**6,
        "wide row": HEADER.encode() + b"1," * (10**6 - 1) + b"1",
        "late": HEADER.strip().encode() + b",leaves_at,returns_at\n0,1,1,1,1e308,\n",
    }
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(contents[kind])
    text = STUDY.replace("num_clients = 6", f'trace = "{path}"')
    (study / "study.toml").write_text(text)
    refuse(call("plan", "study.toml", cwd=study), str(path), words)


def test_the_size_of_a_trace_is_limited(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_TRACE_BYTES", 1 << 20)
    path = study / "trace.csv"
    path.write_text(HEADER + "0,1,1,1\n")
    assert len(traces.read_trace(path).step_seconds) == 1
    with path.open("ab") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(UserError, match="has more than 1 MiB"):
        traces.read_trace(path)
