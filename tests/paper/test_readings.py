"""Readings of the paper: their values, the cells that they affect, the settings that they make, and their search."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.errors import UserError
from defedavg.paper.infer import HELD_OUT, MISSED, SEARCHED, STAGES, START, Candidate, Search, Stage, error
from defedavg.paper.infer_report import agreement, agreement_to_markdown, alternatives, report, to_markdown
from defedavg.paper.published import Cell, cells
from defedavg.paper.readings import FIRST, READINGS, Readings
from defedavg.paper.result_files import StoredRun
from defedavg.paper.run_grid import Choices, PaperRun
from defedavg.paper.run_request import PaperRequest
from helpers.command_line import call, refuse

EVERY = [replace(Readings(), **{name: value}) for name, reading in READINGS.items() for value in reading.values]
FASHION_FEDAVG = Cell("fashionmnist", "iid", "fedavg", 10)


@pytest.mark.parametrize("readings", [*EVERY, FIRST], ids=lambda readings: str(readings.differences(Readings())))
def test_every_reading_makes_valid_settings_of_every_cell(readings: Readings) -> None:
    assert all(getattr(readings, name) in READINGS[name].values for name in READINGS)
    for cell in cells():
        settings = Choices(readings=readings).settings(PaperRun(cell, cell.rates))
        assert settings.task.normalise == readings.normalise
        assert settings.clients.slowness == readings.slowness
        assert settings.training.weight_decay == float(readings.weight_decay)
        assert settings.training.augment == readings.augment
        own = settings.algorithm_settings
        if cell.algorithm == "asysg":
            assert own.concurrency == (cell.updates_per_round if readings.asysg_concurrency == "n" else 0)
        if cell.algorithm == "favano":
            assert own.anchor == readings.favano_anchor
        if cell.algorithm == "fedbuff":
            assert own.concurrency == int(readings.fedbuff_concurrency)
        if cell.algorithm == "defedavg-iid":
            assert settings.clients.upload == readings.upload


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_changes_the_settings_of_the_cells_that_it_affects_and_of_no_others(name: str) -> None:
    other = replace(Readings(), **{name: next(v for v in READINGS[name].values if v != getattr(Readings(), name))})
    for cell in cells():
        run = PaperRun(cell, cell.rates)
        same = Choices().settings(run) == Choices(readings=other).settings(run)
        assert same == (Readings().relevant(cell) == other.relevant(cell)), cell.label


def test_words_of_the_command_line() -> None:
    assert Readings.parse([]) == Readings()
    assert Readings.parse(["upload=blocking"]) == replace(Readings(), upload="blocking")
    assert Readings.parse(["first", "normalise=unit"]) == replace(FIRST, normalise="unit")
    for wrong in ("uploads=blocking", "upload", "upload=slow"):
        with pytest.raises(UserError):
            Readings.parse([wrong])


def test_stored_results_match_if_the_readings_that_affect_the_cell_are_equal() -> None:
    old = {"measure_seconds": 0.5, "normalise": "standard", "sampling": "replacement", "train_samples": 2000}
    for cell in cells():
        assert Choices(readings=FIRST).match(old, cell)
        assert not Choices(readings=replace(FIRST, normalise="unit")).match(old, cell)
        assert Choices(readings=replace(FIRST, fedbuff_concurrency="30")).match(old, cell) == (
            cell.algorithm != "fedbuff"
        )
        assert Choices().match(Choices().stored(), cell)
        assert not Choices(measure_seconds=1.0).match(Choices().stored(), cell)


def test_errors_are_symmetric_and_a_missed_target_has_a_fixed_error() -> None:
    cell, unreached = FASHION_FEDAVG, Cell("fashionmnist", "iid", "favano", 80)
    assert cell.seconds is not None
    assert error(cell, cell.seconds) == 0.0
    assert error(cell, 2 * cell.seconds) == pytest.approx(error(cell, cell.seconds / 2)) == pytest.approx(math.log(2))
    assert error(cell, None) == math.log(MISSED)
    assert error(unreached, None) == 0.0  # the paper did not reach the target either
    assert error(unreached, 440.0) == pytest.approx(math.log(2))


def test_at_least_a_third_of_the_cells_are_held_out_and_every_reading_is_searched_once() -> None:
    assert {*SEARCHED, *HELD_OUT} == set(cells())
    assert not {*SEARCHED} & {*HELD_OUT}
    assert len(HELD_OUT) >= 64 / 3
    searched = [name for stage in STAGES for name in stage.readings]
    assert sorted(searched) == sorted(READINGS)
    for stage in STAGES:  # a stage has cells that each of its readings affects
        assert all(any(name in r.relevant(c) for c in stage.cells for r in EVERY) for name in stage.readings)


def stored_result(cell: Cell, readings: Readings, seconds: float | None) -> dict[str, Any]:
    return {
        "piece": asdict(PaperRun(cell, cell.rates)), "seed": 0, "choices": Choices(readings=readings).stored(),
        "limit": 1e9, "status": "target" if seconds else "diverged", "first_hit_seconds": seconds,
        "sustained_seconds": None if seconds is None else 1.1 * seconds, "seconds": 1e3,
        "diverged_at": None if seconds else 7, "best_accuracy": 0.5, "curve": {"rounds": [1]},
    }  # fmt: skip


CELLS = (FASHION_FEDAVG, Cell("fashionmnist", "iid", "asysg", 10))
SMALL = (
    Stage("data", ("normalise",), CELLS[:1], keep=2),
    Stage("asysg", ("asysg_concurrency",), CELLS[1:]),
)
FACTORS = {"standard": 1.3, "symmetric": 1.1, "unit": 3.0, "n": 1.05, "all": None}


def factor(readings: Readings, cell: Cell) -> float | None:
    """Return the ratio to the paper's seconds that a fictitious run has."""
    value = readings.asysg_concurrency if cell.algorithm == "asysg" else readings.normalise
    return FACTORS[value]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace training by fictitious results; return the list of the runs that were computed."""
    labels: list[str] = []

    def compute(runs: list[tuple[StoredRun, int]], *_others: Any) -> bool:
        for each, _ in runs:
            ratio = factor(each.store.choices.readings, each.run.cell)
            assert each.run.cell.seconds is not None
            seconds = None if ratio is None else ratio * each.run.cell.seconds
            each.store.save(stored_result(each.run.cell, each.store.choices.readings, seconds), each.run)
            labels.append(each.label)
        return True

    monkeypatch.setattr("defedavg.paper.run_request.compute_runs", compute)
    return labels


def test_a_search_scores_every_combination_and_resumes(computed: list[str], tmp_path: Path) -> None:
    search = Search(PaperRequest(folder=tmp_path), SMALL)
    ranked, finished = search.run()
    assert finished
    assert len(computed) == len(set(computed)) == 3 + 2 * 2  # AsySG is affected by normalise, too
    first, second = ranked
    assert [candidate.readings.normalise for candidate in first] == ["symmetric", "standard", "unit"]
    assert [candidate.score("first_hit_seconds") for candidate in first] == pytest.approx(
        [math.log(1.1), math.log(1.3), math.log(3)]
    )
    assert {candidate.readings.normalise for candidate in second} == {"symmetric", "standard"}
    best = second[0]
    assert (best.readings.normalise, best.readings.asysg_concurrency) == ("symmetric", "n")
    # The second stage does not affect the cell of the first, so both cells count.
    assert best.score("first_hit_seconds") == pytest.approx((math.log(1.1) + math.log(1.05)) / 2)
    assert best.score("sustained_seconds") == pytest.approx((math.log(1.21) + math.log(1.155)) / 2)
    diverged = next(c for c in second if (c.readings.normalise, c.readings.asysg_concurrency) == ("symmetric", "all"))
    assert diverged.score("first_hit_seconds") == pytest.approx((math.log(1.1) + math.log(MISSED)) / 2)
    again, finished = Search(PaperRequest(folder=tmp_path, show_only=True), SMALL).run()
    assert finished
    assert [[c.readings for c in stage] for stage in again] == [[c.readings for c in stage] for stage in ranked]
    assert len(computed) == 7
    for path in (tmp_path / "infer" / "runs").glob("*asysg*"):
        path.unlink()
    partial, finished = Search(PaperRequest(folder=tmp_path, show_only=True), SMALL).run()
    assert (len(partial), finished) == (1, False)


def test_a_stage_computed_alone_serves_the_search(computed: list[str], tmp_path: Path) -> None:
    search = Search(PaperRequest(folder=tmp_path), SMALL)
    assert search.compute_stage(1, replace(START, normalise="symmetric"))
    assert len(computed) == 2
    assert all("asysg" in label for label in computed)
    _, finished = search.run()
    assert finished
    # The search keeps two scalings for its second stage, of which one was assumed.
    assert len(computed) == len(set(computed)) == 7


def test_the_report_names_the_best_the_next_and_the_unexplained(computed: list[str], tmp_path: Path) -> None:
    ranked, _ = Search(PaperRequest(folder=tmp_path), SMALL).run()
    rows = alternatives(SMALL[0], ranked[0])
    assert [row["value"] for row in rows] == list(READINGS["normalise"].values)
    assert [row["worse"] for row in rows] == pytest.approx([math.log(1.3 / 1.1), 0.0, math.log(3 / 1.1)])
    found = report(SMALL, ranked)
    assert found["readings"] == asdict(replace(START, normalise="symmetric", asysg_concurrency="n"))
    assert len(found["stages"][1]["combinations"]) == 4
    assert [row["error"] for row in found["cells"]] == pytest.approx([math.log(1.21), math.log(1.155)])  # sustained
    text = to_markdown(found)
    assert "| normalise | symmetric |" in text
    assert "within a factor of 1.25" in text
    far = {**found, "cells": [{**found["cells"][0], "error": 1.0}]}
    assert "1 of 1 searched cell." in to_markdown(far)
    json.dumps(found, allow_nan=False)


def test_agreement_counts_searched_and_held_out_cells() -> None:
    held_out = HELD_OUT[0]
    rows = [
        {**asdict(FASHION_FEDAVG), "first_hit": 51.89, "sustained": 2 * 51.89, "seeds": 2, "reached": 2,
         "sustained_reached": 2},
        {**asdict(held_out), "first_hit": 7.0, "sustained": None, "seeds": 2, "reached": 1, "sustained_reached": 0},
    ]  # fmt: skip
    table = {(row["cells"], row["time"]): row for row in agreement(rows)}
    everything = table["all", "first_hit"]
    assert (everything["number"], everything["timed"], everything["within"]) == (2, 1, 1)
    assert everything["mean_error"] == pytest.approx(math.log(MISSED) / 2)
    assert table["searched", "sustained"]["mean_error"] == pytest.approx(math.log(2))
    assert table["held out", "first_hit"]["timed"] == 0  # a seed missed the target
    assert "| held out | sustained | 1 | 0 | 0 |" in agreement_to_markdown(agreement(rows))


def test_the_commands_list_infer_and_refuse(tmp_path: Path) -> None:
    listed = json.loads(call("paper", "readings", "--json", cwd=tmp_path).stdout)
    assert [row["reading"] for row in listed] == list(READINGS)
    shown = call("paper", "infer", "--show", cwd=tmp_path)
    assert shown.returncode == 0
    assert "runs are missing" in shown.stderr
    refuse(
        call("paper", "infer", "--stage", str(len(STAGES) + 1), cwd=tmp_path), f"the search has {len(STAGES)} stages"
    )
    shown = call("paper", "infer", "--stage", "5", "--show", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "runs are missing; leave out --show to compute them\n")
    refuse(call("paper", "infer", "--reading", "upload=blocking", cwd=tmp_path), "--reading is for --stage")
    refuse(call("paper", "table1", "--reading", "upload=slow", cwd=tmp_path), "upload=background, upload=blocking")
    unknown = call("paper", "table1", "--reading", "nonsense", cwd=tmp_path)
    refuse(unknown, "unknown reading 'nonsense'", "NAME=VALUE", "`defedavg paper readings` lists them")
    assert "did you mean" not in unknown.stderr
    refuse(
        call("paper", "table1", "--reading", "normalize=unit", cwd=tmp_path), "did you mean 'normalise'?", "NAME=VALUE"
    )
    old = call("paper", "table1", "--show", "--normalise", "unit", "--sampling=shuffle", cwd=tmp_path)
    assert old.returncode == 0
    assert "--reading normalise=VALUE" in old.stderr
    assert "--reading sampling=VALUE" in old.stderr
    wrong = call("paper", "table1", "--show", "--normalise", "units", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "use one of normalise=standard" in wrong.stderr


def test_a_candidate_is_ranked_by_the_mean_over_both_kinds_of_time() -> None:
    seconds = FASHION_FEDAVG.seconds
    assert seconds is not None
    times = {FASHION_FEDAVG: {"first_hit_seconds": seconds / 2, "sustained_seconds": seconds}}
    assert Candidate(Readings(), times).mean_score == pytest.approx(math.log(2) / 2)


def test_the_scatter_has_a_point_for_every_cell(tmp_path: Path) -> None:
    from matplotlib.collections import PathCollection

    from defedavg.paper.scatter import scatter

    rows = [
        {**asdict(cell), "paper": cell.seconds, "first_hit": cell.seconds, "reached": 1, "seeds": 1} for cell in cells()
    ]
    missed = [{**row, "first_hit": None, "reached": 0} for row in rows]
    left, right = scatter({"before": missed, "after": rows}).axes
    assert [axes.get_title() for axes in (left, right)] == ["before", "after"]
    for axes, on_the_diagonal in ((left, 0), (right, 61)):  # the paper has no time in three cells
        points = [np.asarray(c.get_offsets())[0] for c in axes.collections if isinstance(c, PathCollection)]
        assert len(points) == 64
        assert sum(x == y for x, y in points) == on_the_diagonal
    shown = call("paper", "scatter", "--out", "nowhere", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr == "there are no results in nowhere; `defedavg paper table1` computes them\n"
    assert not (tmp_path / "nowhere").exists()


def test_time_models_without_results_are_an_empty_list(tmp_path: Path) -> None:
    result = call("paper", "timing", "--json", "--out", ".", cwd=tmp_path)
    assert (result.returncode, json.loads(result.stdout)) == (0, [])
    assert "there are no results in ." in result.stderr
