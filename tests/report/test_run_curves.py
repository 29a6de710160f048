"""The static figures of a run folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.errors import UserError
from defedavg.report.run_curves import curve_of, draw_run, figures_of
from defedavg.runstore.in_memory import folder_of_records
from defedavg.runstore.reader import RunFolder, read_run
from helpers.run_folders import make_folder


def folder(path: Path, **more: Any) -> RunFolder:
    losses: list[float] = [2.0, math.nan, 1.0]
    curve = [
        {"round": i, "seconds": 0.5 * i, "updates": i, "accuracy": 0.1 * i, "loss": loss}
        for i, loss in enumerate(losses)
    ]
    entry = {"label": "fedavg", "algorithm": "fedavg", "seed": 0, "status": "max_rounds", "curve": curve, **more}
    return replace(folder_of_records("study", [entry]), path=path)


def test_a_curve_leaves_out_evaluations_without_a_finite_loss(tmp_path: Path) -> None:
    (run,) = folder(tmp_path).runs
    curve = curve_of(run)
    assert (curve.rounds, curve.seconds, curve.loss) == ((0, 2), (0.0, 1.0), (2.0, 1.0))
    assert curve.accuracy == pytest.approx((0.0, 0.2))


def test_figures_are_drawn_in_the_wanted_format_and_stay_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    written = draw_run(folder(tmp_path / "run", metric="../../f1 score", label=r"$\frac"), [".png"])
    assert {path.parent for path in written} == {tmp_path / "run" / "plots"}
    assert {path.name for path in written} == {
        f"{what}-over-{axis}.png" for what in (".._.._f1_score", "loss") for axis in ("seconds", "rounds")
    }
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_link_is_not_followed_and_a_run_without_evaluations_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert draw_run(folder(tmp_path / "run", curve=[])) == []
    plots, elsewhere = tmp_path / "run" / "plots", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (plots / "loss-over-rounds.png").symlink_to(elsewhere / "file")
    with pytest.raises(UserError, match=r"loss-over-rounds\.png is a link"):
        draw_run(folder(tmp_path / "run"))
    (plots / "loss-over-rounds.png").unlink()
    plots.rmdir()
    plots.symlink_to(elsewhere)
    with pytest.raises(UserError, match="plots is a link"):
        draw_run(folder(tmp_path / "run"))
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("executor", "clock"), [("deployment", "seconds of the deployment"), ("batched", "simulated seconds")]
)
def test_the_axis_says_which_seconds_it_shows(tmp_path: Path, executor: str, clock: str) -> None:
    run = replace(folder(tmp_path), provenance={"executor": executor})
    labels = {name: figure.axes[0].get_xlabel() for name, figure in figures_of(run)}
    assert labels == {
        f"{what}-over-{axis}": label
        for what in ("accuracy", "loss")
        for axis, label in (("seconds", clock), ("rounds", "rounds"))
    }


def test_every_swept_task_or_fleet_has_a_panel_with_its_target(tmp_path: Path) -> None:
    task = {"model": "softmax", "split": "dirichlet", "alpha": [0.1, 1.0]}
    fleet = {"num_clients": 8, "slowness": ["equal", "uniform(1, 9)"]}
    path = make_folder(tmp_path, task=task, fleet=fleet, training={"updates_per_round": 2, "local_steps": [3, 4]})
    figure = dict(figures_of(read_run(path)))["accuracy-over-seconds"]
    assert [ax.get_title() for ax in figure.axes] == [
        f"alpha {alpha}, slowness {slowness}" for alpha in (0.1, 1.0) for slowness in ("equal", "uniform(1, 9)")
    ]
    assert all([line.get_gid() for line in ax.lines].count("target") == 1 for ax in figure.axes)
    (legend,) = figure.legends
    labels = [f"{name} local_steps={steps}" for name in ("fedavg", "defedavg-niid") for steps in (3, 4)]
    assert [text.get_text() for text in legend.get_texts()] == [*labels, "target"]
    colours = [[line.get_color() for line in ax.lines if line.get_gid() != "target"] for ax in figure.axes]
    assert len(set(colours[0])) == 4
    assert all(each == colours[0] for each in colours), "a setting has one colour in all panels"


def test_a_study_without_swept_task_or_fleet_has_one_panel_with_whole_labels(tmp_path: Path) -> None:
    path = make_folder(tmp_path, training={"updates_per_round": 2, "local_steps": [3, 4]})
    (ax,) = dict(figures_of(read_run(path)))["loss-over-rounds"].axes
    assert ax.get_title() == "study"
    assert len(ax.lines) == 4
