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
from defedavg.runstore.reader import RunFolder


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
