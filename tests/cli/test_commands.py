"""The commands as a user runs them: real processes, real files, real signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from defedavg.algorithms import BUILT_IN
from defedavg.config import study as config
from defedavg.config.build import make_plan
from defedavg.config.examples import FIRST
from defedavg.experiments.bench import BenchLoad
from defedavg.planning.plan import Plan
from defedavg.report.tables import bench_table
from helpers.command_line import call, refuse

TINY = """
name = "tiny"
algorithms = ["fedavg", "defedavg-niid"]
seeds = [0, 1]
[task]
model = "softmax"
split = "classes"
[clients]
num_clients = 20
[training]
updates_per_round = 3
local_steps = 2
[stop]
max_rounds = 3
target_accuracy = 0.99
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return the file of a small study in an empty folder."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_the_split_of_a_swept_task_names_the_values_to_which_it_belongs(tiny: Path) -> None:
    sets = ("--set", "task.split=dirichlet", "--set", "task.alpha=[0.5, 10.0]", "--set", "stop.max_rounds=1")
    assert call("run", tiny, *sets, "--set", "seeds=3", cwd=tiny.parent).returncode == 0
    title = json.loads((tiny.parent / "runs" / "tiny" / "split.json").read_text())["title"]
    assert title == "mnist5k/softmax/dirichlet, alpha 0.5, seed 3"


def test_run_writes_a_complete_folder(tiny: Path) -> None:
    result = call("run", tiny, cwd=tiny.parent)
    assert result.returncode == 0, result.stderr
    assert "defedavg-niid" in result.stdout
    folder = tiny.parent / "runs" / "tiny"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] is True
    assert [(r["algorithm"], r["seed"]) for r in summary["runs"]] == [
        ("fedavg", 0), ("fedavg", 1), ("defedavg-niid", 0), ("defedavg-niid", 1)
    ]  # fmt: skip
    wanted = {
        "first_hit_seconds", "rounds", "best_accuracy", "final_accuracy", "diverged_at", "updates_trained",
        "wall_seconds",
    }  # fmt: skip
    assert all(wanted <= set(r) for r in summary["runs"])
    assert all(
        r["rounds"] == 3 and r["first_hit_seconds"] is None and r["diverged_at"] is None for r in summary["runs"]
    )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 4 * 4
    for entry in summary["runs"]:
        of_run = [m for m in metrics if (m["algorithm"], m["seed"]) == (entry["algorithm"], entry["seed"])]
        assert [m["round"] for m in of_run] == [0, 1, 2, 3]
    table = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert [(row["run"], row["seed"], row["round"], row["loss"]) for row in table] == [
        ("tiny", m["seed"], m["round"], m["loss"]) for m in metrics
    ]
    plans = sorted((folder / "plans").iterdir())
    assert len(plans) == 4
    for path in plans:
        plan = Plan.load(path)
        plan.check()
        assert plan.hash() in {r["plan_sha256"] for r in summary["runs"]}
    assert result.stdout.splitlines()[-1] == f"open in a browser: {Path('runs/tiny/report.html')}"
    assert (folder / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert np.sum(json.loads((folder / "split.json").read_text())["counts"]) == 4000
    assert summary["provenance"]["command"] == f"defedavg run {tiny}"
    assert not (folder / "plots").exists()  # figures are drawn on request
    drawn = call("report", folder, "-o", "page.html", "--png", cwd=tiny.parent)
    assert f"figures: {folder / 'plots'}" in drawn.stderr
    axes = [f"{what}-over-{axis}.png" for what in ("accuracy", "loss") for axis in ("seconds", "rounds")]
    assert {path.name for path in (folder / "plots").iterdir()} == {*axes, "split.png"}
    again = call("run", folder / "config.toml", "--set", "name='again'", "--json", cwd=tiny.parent)
    same = [{k: v for k, v in r.items() if k != "wall_seconds"} for r in json.loads(again.stdout)]
    assert same == [{k: v for k, v in r.items() if k != "wall_seconds"} for r in summary["runs"]]


def test_an_existing_run_is_kept_unless_forced(tiny: Path) -> None:
    small = ("--set", "seeds=[0]", "--set", "algorithms=['fedavg']")
    assert call("run", tiny, *small, cwd=tiny.parent).returncode == 0
    summary = tiny.parent / "runs" / "tiny" / "summary.json"
    before = summary.read_bytes()
    refuse(call("run", tiny, *small, cwd=tiny.parent), "already exists", "--force")
    assert summary.read_bytes() == before
    (summary.parent / "mine.txt").write_text("kept")
    assert call("run", tiny, *small, "--force", cwd=tiny.parent).returncode == 0
    assert summary.read_bytes() != before
    assert (summary.parent / "mine.txt").read_text() == "kept"


def test_force_keeps_a_folder_that_is_not_a_run(tiny: Path) -> None:
    folder = tiny.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "plans").write_text("mine")
    refuse(call("run", tiny, "--force", cwd=tiny.parent), "something other")
    assert (folder / "plans").read_text() == "mine"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_stop_signal_keeps_every_evaluation(tiny: Path, number: signal.Signals, name: str) -> None:
    words = ["run", str(tiny), "--set", "stop.max_rounds=100000", "--set", "training.local_steps=5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "defedavg", *words],
        cwd=tiny.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = tiny.parent / "runs" / "tiny" / "metrics.jsonl"
    limit = time.monotonic() + 120
    while time.monotonic() < limit and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 5):
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"stopped by {name}; every evaluation so far is kept; continue with --resume" in errors.decode()
    assert b"Traceback" not in errors
    summary = json.loads((metrics.parent / "summary.json").read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert summary["finished"] is False
    assert len(lines) >= 5
    for entry in summary["runs"]:
        assert entry["status"] == "interrupted"
        rounds = [m["round"] for m in lines if (m["algorithm"], m["seed"]) == (entry["algorithm"], entry["seed"])]
        assert rounds[-1] in (entry["rounds"], entry["rounds"] - 1)
    plans = list((metrics.parent / "plans").iterdir())
    assert len(plans) == len(summary["runs"])
    for plan in plans:
        Plan.load(plan).check()
    assert (metrics.parent / "report.html").exists(), "a report of the evaluations so far"


def test_a_diverged_run_is_a_result(tiny: Path) -> None:
    result = call("run", tiny, "--set", "training.local_lr=1e12", "--set", "task.model=mlp", cwd=tiny.parent)
    assert result.returncode == 0, result.stderr
    assert "diverged at round" in result.stdout
    runs = json.loads((tiny.parent / "runs" / "tiny" / "summary.json").read_text())["runs"]
    assert all(r["status"] == "diverged" and r["diverged_at"] >= 1 for r in runs)


def test_plan_as_table_and_json(tiny: Path) -> None:
    table = call("plan", tiny, "--rounds", "20", cwd=tiny.parent)
    assert table.returncode == 0, table.stderr
    assert "time/round" in table.stdout
    assert "never" in table.stdout
    plans: list[dict[str, Any]] = json.loads(call("plan", tiny, "--rounds", "20", "--json", cwd=tiny.parent).stdout)
    wanted = {
        "algorithm", "updates_per_round", "seed", "rounds", "seconds_per_round", "staleness_mean", "staleness_max",
        "jobs_started", "jobs_merged",
    }  # fmt: skip
    assert len(plans) == 4
    assert all(wanted <= set(entry) for entry in plans)
    assert all(entry["rounds"] == 20 and entry["jobs_merged"] <= entry["jobs_started"] for entry in plans)


@pytest.mark.parametrize(("most", "rounds", "notes"), [(7, 7, 0), (400, 400, 0), (1000, 400, 1)])
def test_plan_without_rounds_plans_those_of_the_study(tiny: Path, most: int, rounds: int, notes: int) -> None:
    words = ("--set", f"stop.max_rounds={most}", "--set", "algorithms=['asysg']", "--json")
    result = call("plan", tiny, *words, cwd=tiny.parent)
    assert {plan["rounds"] for plan in json.loads(result.stdout)} == {rounds}
    assert result.stderr.count("planning 400 of the 1,000 rounds of stop.max_rounds; --rounds N plans more") == notes


def test_a_command_that_a_signal_stops_says_so_in_one_line(tiny: Path) -> None:
    words = ["plan", str(tiny), "--rounds", "1000000000"]
    process = subprocess.Popen(
        [sys.executable, "-c", "import defedavg.cli.main as m; print('up', flush=True); m.main()", *words],
        cwd=tiny.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (143, b"stopped by SIGTERM\n")


def test_plan_of_the_example_draws_a_gantt_chart_and_saves(tmp_path: Path) -> None:
    result = call("plan", "--example", "figure1", "--gantt", "f.png", "--save", "plans", "--rounds", "20", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "f.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    saved = sorted((tmp_path / "plans").iterdir())
    assert [Plan.load(p).header.algorithm for p in saved] == ["defedavg-iid", "defedavg-niid", "fedavg"]


def test_algorithms_settings_split_and_help(tiny: Path) -> None:
    listed = call("algorithms", cwd=tiny.parent)
    assert "w[t+1] = w[t] − η/n Σ Δ" in listed.stdout
    names = [row["name"] for row in json.loads(call("algorithms", "--json", cwd=tiny.parent).stdout)]
    assert names == list(BUILT_IN)
    assert len(names) == 17
    settings = call("settings", cwd=tiny.parent)
    (tiny.parent / "all.toml").write_text(settings.stdout)
    assert call("plan", "all.toml", "--rounds", "2", cwd=tiny.parent).returncode == 0
    assert config.load(tiny.parent / "all.toml").points() == config.study(FIRST).points()  # all others are defaults
    for line in settings.stdout.splitlines():
        name, _, rest = line.partition(" = ")
        assert ("(default: " in rest) == (name in ("model", "split", "target_accuracy", "max_seconds",
                "eval_every_seconds", "local_lr")
                or line.startswith(("global_lr = 0.3", "concurrency = 10")))  # fmt: skip
    split = json.loads(call("split", tiny, "--json", "--plot", "s.pdf", cwd=tiny.parent).stdout)
    samples = [s for client in split for s in client["samples"]]
    assert len(split) == 20
    assert len(samples) == len(set(samples)) == 4000
    assert (tiny.parent / "s.pdf").exists()
    drawn = json.loads(call("split", tiny, "--json", "--set", "task.split=random-classes", cwd=tiny.parent).stdout)
    taken = [s for client in drawn for s in client["samples"]]
    assert len(drawn) == 20
    assert len(taken) == len(set(taken))
    assert (
        len({len(client["samples"]) for client in drawn}) > 2
    )  # the classes of clients have different numbers of holders
    assert "Plan without training" in call("plan", "--help", cwd=tiny.parent).stdout


def test_the_first_study_is_short_and_reaches_its_target_at_different_times(tmp_path: Path) -> None:
    """Runs the two cheapest algorithms on one seed; the whole study takes about a minute on two idle cores."""
    (tmp_path / "my.toml").write_text(call("settings", cwd=tmp_path).stdout)
    some = ("--set", "algorithms=['asysg', 'defedavg-iid']", "--set", "seeds=0", "--device", "cpu")
    result = call("run", "my.toml", *some, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    entries = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())["runs"]
    assert {entry["status"] for entry in entries} == {"target"}
    assert len({entry["first_hit_seconds"] for entry in entries}) == 2
    study = config.load(tmp_path / "my.toml")
    assert len(study.points()) == 6
    steps = 0
    for point in study.points():  # a bound on the work if no seed reaches the target
        plan = make_plan(point.settings, 0, point.settings.stop.max_rounds)
        rounds = [done for done in plan.rounds if done.time <= point.settings.stop.max_seconds]
        steps += sum(update.steps for done in rounds for update, _ in done.merge.updates)
    assert steps * len(study.seeds) < 1_200_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "none.toml"), ("no configuration file",)),
        (("plan", "none.toml"), ("no configuration file",)),
        (("run", "tiny.toml", "--set", "algorithms=['fedavgg']"), ("fedavgg", "did you mean 'fedavg'")),
        (("run", "tiny.toml", "--set", "task.data=mnist6k"), ("mnist6k", "mnist5k")),
        (("run", "tiny.toml", "--set", "task.model=rnn"), ("rnn", "cnn")),
        (("run", "tiny.toml", "--set", "task.split=sorted"), ("sorted",)),
        (("run", "tiny.toml", "--set", "task.classes_per_client=11"), ("11",)),
        (("run", "tiny.toml", "--set", "clients.num_clients=5000"), ("5000",)),
        (("run", "tiny.toml", "--set", "training.local_steps=0"), ("local_steps is 0",)),
        (("run", "tiny.toml", "--set", "training.local_lr=-1"), ("above zero",)),
        (
            ("plan", "tiny.toml", "--set", "algorithms=['defedavg-iid']", "--set", "training.updates_per_round=21"),
            ("21", "20"),
        ),
        (("plan", "tiny.toml", "--set", "fedavg.replacement=false", "--set", "training.updates_per_round=21"), ("21",)),
        (("plan", "tiny.toml", "--set", "clients.trace=bad.csv"), ("bad.csv, line 3", "step_seconds")),
        (("run", "tiny.toml", "--out", "tiny.toml"), ("tiny.toml",)),
        (("plan", "tiny.toml", "--gantt", "nowhere/f.png"), ("nowhere",)),
        (("plan", "tiny.toml", "--gantt", "f.bmp"), (".png",)),
        (("plan", "--example", "figure9"), ("figure1",)),
        (("plan", "tiny.toml", "--example", "figure1"), ("not both",)),
        (("report", "nowhere"), ("no folder nowhere",)),
        (("report", "."), ("no run",)),
        (("report", ".", "-o", "."), ("is a folder", "report.html")),
        (("report", ".", "-o", "a.png"), ("-o a.png does not name a page", "-o a.html", "--png or --pdf")),
        (
            ("report", ".", "-o", "runs.2/a.PDF"),
            ("-o runs.2/a.PDF does not name a page", "-o runs.2/a.html", "every run"),
        ),
        (("report", ".", "-o", "rep.2026"), ("-o rep.2026 does not name a page", "write -o rep.2026.html, or")),
        (("view", "nowhere"), ("no folder nowhere",)),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    tiny: Path, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    (tiny.parent / "bad.csv").write_text("client,step_seconds,up_mbps,down_mbps\n0,0.1,1,1\n1,fast,1,1\n")
    before = {p: p.read_bytes() for p in tiny.parent.rglob("*") if p.is_file()}
    refuse(
        call(*words, "--rounds", "3", cwd=tiny.parent) if words[0] == "plan" else call(*words, cwd=tiny.parent),
        *expected,
    )
    assert {p: p.read_bytes() for p in tiny.parent.rglob("*") if p.is_file()} == before


def test_infinite_settings_can_be_swept(tiny: Path) -> None:
    words = ("--set", "clients.uplink_mbps=[400,inf]", "--set", "seeds=[0]", "--json")
    assert len(json.loads(call("plan", tiny, "--rounds", "2", *words, cwd=tiny.parent).stdout)) == 4
    assert len(json.loads(call("run", tiny, *words, cwd=tiny.parent).stdout)) == 4


def test_a_plan_in_which_every_client_is_lost_at_once(tiny: Path) -> None:
    lines = ["client,step_seconds,up_mbps,down_mbps,leaves_at,returns_at"] + [f"{i},0.1,1,1,0," for i in range(20)]
    (tiny.parent / "gone.csv").write_text("\n".join(lines))
    words = ("--set", "clients.trace=gone.csv", "--rounds", "3")
    plans = json.loads(call("plan", tiny, *words, "--json", cwd=tiny.parent).stdout)
    assert all(entry["rounds"] == 0 and entry["stalled"] and entry["seconds_per_round"] is None for entry in plans)
    refuse(call("plan", tiny, *words, "--gantt", "f.png", cwd=tiny.parent), "nothing to draw")


def test_both_executors_write_the_same_results(tiny: Path) -> None:
    results = {}
    for executor in ("reference", "batched"):
        words = ("--executor", executor, "--set", f"name='{executor}'", "--device", "cpu", "--json")
        result = call("run", tiny, *words, cwd=tiny.parent)
        assert result.returncode == 0, result.stderr
        results[executor] = [
            {k: v for k, v in r.items() if k not in ("wall_seconds", "torch_threads")}
            for r in json.loads(result.stdout)
        ]
    assert results["batched"] == results["reference"]


def test_unknown_devices_and_executors_are_refused(tiny: Path) -> None:
    refuse(call("run", tiny, "--executor", "magic", cwd=tiny.parent), "reference")
    refuse(call("run", tiny, "--device", "tpu", cwd=tiny.parent), "tpu", "cpu")
    refuse(call("run", tiny, "--executor", "batched", "--max-batch-jobs", "0", cwd=tiny.parent), "--max-batch-jobs")
    refuse(call("run", tiny, "--precision", "tf32", "--device", "cpu", cwd=tiny.parent), "tf32", "CUDA", "float32")
    refuse(call("run", tiny, "--precision", "float16", "--device", "cpu", cwd=tiny.parent), "float16", "float32")
    refuse(call("run", tiny, "--memory", "lots", cwd=tiny.parent), "--memory", "12G")
    refuse(call("run", tiny, "--memory", "10k", "--device", "cpu", cwd=tiny.parent), "one client", "--memory")


SMALL = ("--model", "softmax", "--runs", "1", "--updates", "20", "--reference-updates", "10", "--repeats", "1")


def test_bench_measures_both_executors(tmp_path: Path) -> None:
    result = call("bench", *SMALL, "--image", "1,8,8", "--device", "cpu", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    speeds = json.loads(result.stdout)
    assert speeds["device"] == "cpu"
    counted = ("reference_updates_per_s", "batched_updates_per_s", "gemm_gflops", "mean_batch", "peak_memory_bytes")
    for name in counted:
        assert speeds[name] > 0
    # The difference between the times of two processes, which may be negative while others use the machine.
    assert math.isfinite(speeds["overhead_seconds"])
    assert speeds["ready_jobs_per_run"] >= 10  # at least the jobs of a round
    assert speeds["ratio"] == pytest.approx(speeds["batched_updates_per_s"] / speeds["reference_updates_per_s"])
    assert 0 < speeds["batch_fill"] <= 1
    assert speeds["gflop_per_update"] == pytest.approx(50 * 10 * 2 * (2 * 64 * 10) / 1e9)
    assert "1 of 1: " in result.stderr
    assert "reference executor in float32 and batched executor in float32 on cpu, 1 repetitions" in result.stderr
    rows = list(bench_table({**speeds, "precision": "bf16"}).columns[0].cells)
    assert rows[:2] == ["loop over clients, float32", "batched, bf16"]
    assert "a tiny study beyond training and PyTorch" in rows


@pytest.mark.parametrize(("speed", "updates", "loop"), [(0.5, 30, 2), (10.0, 60, 20), (2.0, 30, 6), (1e4, 300, 20)])
def test_bench_trains_what_fits_into_its_time(speed: float, updates: int, loop: int) -> None:
    load = BenchLoad(turn_seconds=9.0)
    assert load.updates_within(speed) == updates
    assert load.reference_updates_within(speed) == loop
    assert (BenchLoad().updates_within(speed), BenchLoad().reference_updates_within(speed)) == (300, 20)


def test_former_names_of_options_work_and_name_the_new_ones(tmp_path: Path) -> None:
    words = ("bench", *SMALL, "--image", "1,8,8", "--device", "cpu", "--width", "4", "--measure-rounds=5", "--json")
    result = call(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["width"] == 4
    assert result.stderr.splitlines()[:2] == [
        "defedavg: --width is now --max-batch-jobs; the old name works in this version only",
        "defedavg: --measure-rounds is now --eval-every-rounds; the old name works in this version only",
    ]
    for command in ("run", "tune"):
        result = call(command, "none.toml", "--width", "4", cwd=tmp_path)
        assert result.returncode == 2
        assert "--max-batch-jobs" in result.stderr
        assert "no configuration file" in result.stderr


def test_bench_refuses_impossible_options(tmp_path: Path) -> None:
    refuse(call("bench", "--image", "28x28", cwd=tmp_path), "--image", "1,28,28")
    refuse(call("bench", "--model", "magic", cwd=tmp_path), "magic", "cnn")
    refuse(call("bench", "--repeats", "0", cwd=tmp_path), "--repeats")
    refuse(call("bench", "--image", "1,4,4", cwd=tmp_path), "cnn", "16x16")


def test_missing_data_name_the_command_that_downloads_them(tiny: Path) -> None:
    for command in ("run", "split"):
        words = (command, tiny, "--set", "task.data='fashionmnist'", "--data-dir", tiny.parent / "nowhere")
        refuse(call(*words, cwd=tiny.parent), "defedavg data fetch fashionmnist", "--data-dir")
