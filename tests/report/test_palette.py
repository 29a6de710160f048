"""An algorithm has one look: in figures, on the page, in the live view and in the progress table."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from defedavg.algorithms import ALGORITHMS
from defedavg.cli.progress_table import ProgressTable
from defedavg.config import study as config
from defedavg.experiments.run_events import RunEvaluated, RunSpec
from defedavg.report.page import build
from defedavg.report.palette import look, page_look, terminal_style
from defedavg.report.payload import live
from defedavg.report.plots import Curve, accuracy_curves
from defedavg.runstore.reader import RunFolder, read_run
from defedavg.training import Evaluation
from helpers.page_data import page_data
from helpers.run_folders import make_folder

BUILT_IN = ("fedavg", "fedbuff", "favano", "asysg", "defedavg-iid", "defedavg-niid")


def plotted(folder: RunFolder) -> dict[str, str]:
    """Return the colour of every label in the figure of a folder."""
    curves = [
        Curve(run.algorithm, run.label, tuple(run.trail.seconds), tuple(map(int, run.trail.rounds)),
              tuple(a or 0.0 for a in run.trail.accuracy), tuple(x or 0.0 for x in run.trail.loss))
        for run in folder.runs
    ]  # fmt: skip
    (legend,) = accuracy_curves({"all": curves}).legends
    handles = zip(legend.get_texts(), legend.legend_handles, strict=True)
    return {text.get_text(): to_hex(cast(Any, handle).get_color()) for text, handle in handles}


def paged(folder: RunFolder) -> dict[str, str]:
    """Return the same on the page."""
    (group,) = page_data(build([folder.path]))["groups"]
    return {series["name"]: series["look"]["light"].lower() for series in group["series"]}


def viewed(folder: RunFolder) -> dict[str, str]:
    """Return the same in the live view, whose script counts the settings of every algorithm."""
    counts: dict[str, int] = {}
    found = {}
    for series in live(folder):
        count = counts.get(series["algorithm"], 0)
        counts[series["algorithm"]] = count + 1
        found[series["name"]] = series["looks"][count]["light"].lower()
    return found


@pytest.mark.parametrize(
    ("algorithms", "sizes"),
    [(BUILT_IN, 2), (("defedavg-iid",), 2), (("asysg", "fedavg"), [1, 2, 3, 4, 5]), (("fedbuff",), [1, 2, 3, 4, 5, 6])],
)
def test_figure_page_and_live_view_agree(tmp_path: Path, algorithms: tuple[str, ...], sizes: int | list[int]) -> None:
    training = {"updates_per_round": sizes, "local_steps": 1}
    folder = read_run(make_folder(tmp_path, algorithms=algorithms, seeds=(0,), rounds=3, training=training))
    colours = plotted(folder)
    assert paged(folder) == viewed(folder) == colours
    if isinstance(sizes, int):
        assert colours == {name: look(name)["color"].lower() for name in algorithms}


def test_the_colours_of_the_built_in_algorithms_are_fixed() -> None:
    assert tuple(ALGORITHMS)[: len(BUILT_IN)] == BUILT_IN  # the plugins of other tests follow
    colours = ["#000000", "#009E73", "#CC79A7", "#E69F00", "#0072B2", "#D55E00"]
    assert [page_look(look(name))["light"] for name in BUILT_IN] == colours
    assert look("own")["color"] == look("own")["color"] != look("fedavg")["color"]


def test_the_progress_table_marks_runs_with_the_colour_of_the_algorithm() -> None:
    study = config.study({"algorithms": ["fedavg", "fedbuff"]})
    progress = ProgressTable("title", 2)
    for point in study.points():
        spec = RunSpec(point, point.settings, 0)
        evaluation = Evaluation(0, 0.0, 0.1, 2.3, None, 0.0, 0, 0.0)
        progress.add(
            RunEvaluated(
                spec, cast(Any, SimpleNamespace(task=SimpleNamespace(metric_name="accuracy"))), evaluation, None
            )
        )
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    console.print(progress.table(5))
    shown = cast(io.StringIO, console.file).getvalue()
    assert "\x1b[38;2;0;158;115m● " in shown  # 009E73
    assert terminal_style("fedbuff") == look("fedbuff")["color"]
    assert terminal_style("fedavg") == "default"  # black is invisible on a dark terminal
