"""The settings of the suite: the same tuning budget and limits for every algorithm, and a hash of all settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS, BUILT_IN, algorithm
from defedavg.suite import benchmark
from defedavg.suite.benchmark import (
    FLEETS,
    SEEDS,
    TASKS,
    TUNING_SEED,
    UPDATES_PER_ROUND,
    SuiteCell,
    batches,
    grid,
    reported_study,
    select_cells,
    tuning_runs,
    tuning_study,
)
from helpers.user_errors import line_of

TASK, FLEET = TASKS["digits-pairs"], FLEETS["paper"]


def test_the_suite_has_the_tasks_and_fleets_that_it_promises() -> None:
    assert [(task.data, task.split) for task in TASKS.values() if not task.quick] == [
        ("fashionmnist", "iid"), ("fashionmnist", "classes"), ("cifar10", "dirichlet"), ("flights", "natural"),
        ("mnist-writers", "natural"), ("shakespeare-roles", "natural"),
    ]  # fmt: skip
    assert [fleet.slowness for fleet in FLEETS.values()] == ["equal", "uniform(1, 5)", "phones"]
    assert FLEETS["phones"].availability == "phones"
    assert all(task.data == "mnist5k" for task in TASKS.values() if task.quick)  # comes with the installation
    assert TUNING_SEED not in SEEDS
    assert len(SEEDS) == 3


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_algorithm_has_the_same_number_of_tuning_runs(task: benchmark.SuiteTask) -> None:
    assert {name: tuning_runs(task, name) for name in BUILT_IN} == dict.fromkeys(BUILT_IN, 6)


def test_rates_are_those_that_an_algorithm_uses() -> None:
    assert grid(TASK, "fedbuff") == {"global_lr": [0.1, 1.0], "local_lr": [0.02, 0.1, 0.2]}
    assert grid(TASK, "ringmaster") == {"global_lr": [0.01, 0.1], "local_lr": [0.02, 0.1, 0.2]}  # single updates
    assert grid(replace(TASK, rate_scale=1.0), "fedbuff")["local_lr"] == [0.01, 0.05, 0.1]
    assert list(grid(TASK, "favano")) == ["local_lr"]
    assert list(grid(TASK, "asysg")) == ["global_lr"]
    assert grid(TASK, "fadas")["global_lr"] == [0.001, 0.01]  # AMSGrad on the server
    assert grid(TASKS["shakespeare-roles"], "fedbuff")["local_lr"] == [0.1, 0.5, 1.0]


def test_every_algorithm_has_the_same_limits() -> None:
    for cell in select_cells(None, None, None):
        kind = algorithm(cell.algorithm)
        updates = cell.max_rounds * kind.updates_per_merge(UPDATES_PER_ROUND)
        gradients = 5 if cell.task.name == "shakespeare-roles" else 10  # an update of the others has five steps there
        assert updates == cell.task.updates * (gradients if cell.algorithm == "asysg" else 1)
        assert cell.seconds == select_cells([cell.task.name], [cell.fleet.name], ["fedavg"])[0].seconds


def test_every_batch_is_a_valid_study_without_data() -> None:
    """Settings are checked when a study is made; no file is read."""
    for cells in batches(select_cells(None, None, None)):
        tuning = tuning_study(cells)
        assert tuning.seeds == (TUNING_SEED,)
        assert len(tuning.points()) == sum(tuning_runs(cell.task, cell.algorithm) for cell in cells)
        rates = {cell.algorithm: {k: v[0] for k, v in grid(cell.task, cell.algorithm).items()} for cell in cells}
        points = reported_study(cells, rates).points()
        assert [point.settings.algorithm for point in points] == [cell.algorithm for cell in cells]
        for point in points:
            assert point.settings.stop.max_rounds == cells[0].max_rounds
            assert point.settings.stop.target_accuracy == cells[0].target
            assert point.settings.stop.max_seconds == cells[0].seconds
            assert all(short.settings.stop.max_seconds == cells[0].seconds / 2 for short in tuning.points())


def changed(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}-other"
    return not value if isinstance(value, bool) else (value or 1) * 2


@pytest.mark.parametrize("name", [item.name for item in fields(TASK)])
def test_the_hash_covers_every_setting_of_a_task(name: str) -> None:
    cell = SuiteCell(TASK, FLEET, "fedavg")
    other = replace(cell, task=replace(TASK, **{name: changed(getattr(TASK, name))}))
    assert other.settings_sha256 != cell.settings_sha256


@pytest.mark.parametrize("name", [item.name for item in fields(FLEET)])
def test_the_hash_covers_every_setting_of_a_fleet(name: str) -> None:
    cell = SuiteCell(TASK, FLEET, "fedavg")
    other = replace(cell, fleet=replace(FLEET, **{name: changed(getattr(FLEET, name))}))
    assert other.settings_sha256 != cell.settings_sha256


@pytest.mark.parametrize(
    "name", ["SUITE_VERSION", "SEEDS", "TUNING_SEED", "CLIENTS", "HELD", "GLOBAL_RATES", "SINGLE_RATES"]
)
def test_the_hash_covers_the_constants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SuiteCell(TASK, FLEET, "fedavg")
    before = cell.settings_sha256
    monkeypatch.setattr(benchmark, name, getattr(benchmark, name) * 2)
    assert cell.settings_sha256 != before


def test_the_hash_covers_the_targets_on_phones(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [SuiteCell(TASK, fleet, "fedavg") for fleet in FLEETS.values()]
    before = [cell.settings_sha256 for cell in cells]
    monkeypatch.setattr(benchmark, "PHONE_TARGETS", {"digits-pairs": 0.6})
    assert [one == cell.settings_sha256 for one, cell in zip(before, cells, strict=True)] == [True, True, False]


def test_a_selection_names_its_mistakes() -> None:
    assert len(select_cells(["flights"], None, ["fedavg", "fedbuff", "fedavg"])) == 6
    assert len(select_cells(None, None, None)) == len(TASKS) * len(FLEETS) * len(ALGORITHMS)
    assert "did you mean 'flights'" in line_of(lambda: select_cells(["flihts"], None, None))
    assert "fleet of the suite" in line_of(lambda: select_cells(None, ["cars"], None))
    assert line_of(lambda: select_cells(None, ["nonsense"], None)).endswith("known: equal, paper, phones")
    assert "algorithm" in line_of(lambda: select_cells(None, None, ["fedavgg"]))
