"""One horizon of simulated time for all algorithms, and the timeout that plans and runs print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import call, refuse

STUDY = """
name = "horizon"
algorithms = ["fedavg", "fedbuff"]
[task]
model = "softmax"
[clients]
num_clients = 20
step_seconds = 1.0
{clients}
[training]
updates_per_round = 3
local_steps = 2
[stop]
eval_every_rounds = 1000
{stop}
"""


def study(folder: Path, clients: str = "", stop: str = "") -> Path:
    (folder / "study.toml").write_text(STUDY.format(clients=clients, stop=stop))
    return folder


def plans(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = call("plan", "study.toml", "--json", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("text", ["300", "5m"])
def test_all_algorithms_get_the_same_time(text: str, tmp_path: Path) -> None:
    fedavg, fedbuff = plans(study(tmp_path, stop="max_rounds = 3"), "--seconds", text)
    assert fedavg["horizon_seconds"] == fedbuff["horizon_seconds"] == 300.0
    assert 280.0 < fedavg["seconds"] <= 300.0
    assert 280.0 < fedbuff["seconds"] <= 300.0
    assert 3 < fedavg["rounds"] < fedbuff["rounds"]
    assert fedavg["timeout_seconds"] is None
    assert fedavg["energy_per_client"] is None


def test_rounds_and_seconds_are_not_combined_and_the_seconds_of_a_study_are_not_those_of_a_plan(tmp_path: Path) -> None:
    study(tmp_path, stop="max_seconds = 20.0")
    both = call("plan", "study.toml", "--rounds", "4", "--seconds", "1d", cwd=tmp_path)
    refuse(both, "give --rounds or --seconds, not both")
    assert [plan["rounds"] for plan in plans(tmp_path, "--rounds", "30")] == [30, 30]


def test_a_wrong_time_is_one_line(tmp_path: Path) -> None:
    study(tmp_path)
    for command in ("plan", "run"):
        refuse(call(command, "study.toml", "--seconds", "soon", cwd=tmp_path), "--seconds is 'soon'", "15m, 6h or 1d")


def test_runs_end_with_the_horizon_and_not_after_the_default_number_of_rounds(tmp_path: Path) -> None:
    done = call("run", "study.toml", "--json", "--seconds", "15m", cwd=study(tmp_path))
    assert done.returncode == 0, done.stderr
    fedavg, fedbuff = json.loads(done.stdout)
    assert fedavg["status"] == fedbuff["status"] == "max_seconds"
    assert fedbuff["rounds"] > 400
    limited = call(
        "run", "study.toml", "--json", "--seconds", "15m", "--set", "stop.max_rounds=5", "--force", cwd=tmp_path
    )
    assert [entry["rounds"] for entry in json.loads(limited.stdout)] == [5, 5]
    assert "replaced" not in done.stderr


def test_the_timeout_is_printed_and_can_be_swept_below_the_slowest_client(tmp_path: Path) -> None:
    study(tmp_path, "failure_rate = 0.1\nreturn_seconds = 500.0\nslowness = 'lognormal(1)'\njoules_per_step = 2.0")
    words = ("--seconds", "1h", "--set", "algorithms=['fedavg']", "--set", "training.timeout_seconds=[2, 20, 600]")
    short, middle, long = plans(tmp_path, *words)
    assert [plan["timeout_seconds"] for plan in (short, middle, long)] == [2.0, 20.0, 600.0]
    assert [plan["swept"] for plan in (short, long)] == [{"training.timeout_seconds": t} for t in (2.0, 600.0)]
    assert short["timed_out"] > middle["timed_out"] > long["timed_out"]
    assert short["substitutes"] >= short["timed_out"]
    assert middle["rounds"] > long["rounds"]
    assert short["energy_joules"] > 0
    table = call("plan", "study.toml", *words, cwd=tmp_path).stdout
    assert "timeout_seconds=600" in table
    assert "10 min" in table
    run = call("run", "study.toml", "--seconds", "60", cwd=tmp_path)
    assert "fedavg, fedbuff: a client that has not answered after" in run.stderr
    assert "1.5 times what 95 % of the clients need; training.timeout_seconds sets it" in run.stderr
