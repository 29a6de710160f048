"""Studies with an algorithm and a task of the user's own: run, resumed, tuned, and refused after a change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunFinished, RunSpec
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import Sweep
from defedavg.experiments.tune import Tuning, pairs_of
from helpers.command_line import call
from helpers.interrupted_studies import InterruptionError, assert_same, ignore, interrupt_after
from helpers.rate_searches import finished_search, interrupted_search, results, search_in
from helpers.user_code import write_user_code


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_a_study_with_user_code_is_resumed(plugin: Path, tmp_path: Path, executor: str) -> None:
    study = config.load(write_user_code(tmp_path, plugin))
    compute = ComputeConfig(executor)
    whole = StudyRun(study, tmp_path / "whole", compute=compute)
    assert whole.run(ignore)
    assert {entry["algorithm"] for entry in whole.entries} == {"fedavg", "mine"}
    with pytest.raises(InterruptionError):
        StudyRun(study, tmp_path / "part", compute=compute, checkpoint_interval=0.0).run(interrupt_after(7))
    assert StudyRun(study, tmp_path / "part", compute=compute, resume=True).run(ignore)
    assert_same(tmp_path / "whole", tmp_path / "part")


def test_runs_whose_data_differ_do_not_share_batches(plugin: Path, tmp_path: Path) -> None:
    """The data of this task depend on the seed; the batched executor agrees with the reference for every seed."""
    study = config.load(write_user_code(tmp_path, plugin))
    specs = [RunSpec(point, point.settings, seed) for point in study.points() for seed in study.seeds]
    weights = {}
    for executor in ("reference", "batched"):
        events = Sweep(ComputeConfig(executor)).events(specs)
        weights[executor] = {e.spec: e.run.weights for e in events if isinstance(e, RunFinished)}
    for spec in specs:
        torch.testing.assert_close(weights["batched"][spec], weights["reference"][spec], rtol=1e-5, atol=1e-6)


def test_changed_user_code_is_not_resumed(plugin: Path, tmp_path: Path) -> None:
    file = write_user_code(tmp_path, plugin)
    with pytest.raises(InterruptionError):
        StudyRun(config.load(file), tmp_path / "part", checkpoint_interval=0.0).run(interrupt_after(7))
    task = tmp_path / "task.py"
    task.write_text(task.read_text() + "\n# another line\n")
    with pytest.raises(UserError, match=r"task\.py has changed since .* was started; restore it"):
        StudyRun(config.load(file), tmp_path / "part", resume=True)


def test_rates_are_tuned_for_user_code(plugin: Path, tmp_path: Path) -> None:
    study = config.load(write_user_code(tmp_path, plugin), ("stop.target_accuracy=0.6",))
    tuning = Tuning(pairs_of(study.points(), (1.0,), (0.01, 0.1)), study.seeds, ComputeConfig())
    assert tuning.run(ignore)
    assert {record["algorithm"] for record in tuning.records()} == {"fedavg", "mine"}


def test_a_search_over_seeds_with_different_data_trains_every_pair_to_its_end(plugin: Path, tmp_path: Path) -> None:
    """Seeds share no batches and are computed one after the other, so their runs cannot wait for each other."""
    study = config.load(write_user_code(tmp_path, plugin), ("stop.target_accuracy=0.99",))
    records = {}
    for executor in ("reference", "batched"):
        tuning = Tuning(pairs_of(study.points(), (1.0,), (0.01, 0.1)), study.seeds, ComputeConfig(executor))
        assert tuning.run(ignore)
        records[executor] = [{**each, "best_accuracy": None} for each in tuning.records()]  # may differ in a sample
    assert {each["status"] for each in records["batched"]} == {"max_rounds"}
    assert records["batched"] == records["reference"]
    assert tuning.sweep.notes == ["data or model differ from seed to seed, so no pair of rates is dropped early"]
    expected = results(finished_search(tmp_path / "whole", study))
    for after in (5, 33):
        interrupted_search(tmp_path / f"after-{after}", study, after)
        assert search_in(tmp_path / f"after-{after}", study, resume=True).run(ignore)
        assert results(tmp_path / f"after-{after}") == expected


def test_the_commands_accept_user_code(tmp_path: Path) -> None:
    write_user_code(tmp_path)
    for words in (("plan", "study.toml", "--rounds", "3"), ("run", "study.toml"), ("runs", "list")):
        done = call(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "mine" in done.stdout
    plain = tmp_path / "plain.toml"
    plain.write_text('algorithms = ["mine"]\n[clients]\nnum_clients = 6\n[training]\nupdates_per_round = 2\n')
    assert call("plan", "plain.toml", cwd=tmp_path).returncode == 2
    assert call("plan", "plain.toml", "--plugin", "algorithm.py", cwd=tmp_path).returncode == 0


def test_a_report_of_a_stored_run_executes_no_user_code(tmp_path: Path) -> None:
    file = write_user_code(tmp_path)
    assert call("run", file, cwd=tmp_path).returncode == 0
    for name in ("algorithm.py", "task.py"):
        (tmp_path / name).write_text("raise SystemExit('executed')\n")
    done = call("report", "runs/user-code", "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine" in (tmp_path / "page.html").read_text()
