"""The paper's experiments with small runs: sessions, tuned rates, figures and commands."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunEvaluated, RunFinished, Watch
from defedavg.paper.paper_tables import (
    rates_rows,
    rates_to_markdown,
    rows,
)
from defedavg.paper.published import FIGURE6_SIZES, LIMITS, cells
from defedavg.paper.result_files import ResultFiles, compute_runs, last_session
from defedavg.paper.run_grid import SHORTEST_LIMIT, Choices
from defedavg.paper.run_request import PaperRequest, select_cells
from defedavg.paper.tuned_rates import TunedRates
from helpers.command_line import call, refuse
from helpers.page_data import page_data
from helpers.paper_runs import quiet, small_runs, small_settings, stored


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "settings", small_settings)


def test_a_table_is_computed_in_several_sessions(small: None, tmp_path: Path) -> None:
    wanted, seeds = small_runs(), [0, 1]
    store = ResultFiles(tmp_path, Choices())
    assert [seed for _, seed in store.missing(wanted, seeds)] == [0] * 4 + [1] * 4
    assert compute_runs(stored(store, store.missing(wanted, seeds)[:3]), ComputeConfig(), quiet) is True
    assert len(store.missing(wanted, seeds)) == 5

    def stop(event: RunEvaluated | RunFinished) -> None:
        if isinstance(event, RunFinished):
            raise KeyboardInterrupt

    assert compute_runs(stored(store, store.missing(wanted, seeds)), ComputeConfig(), stop) is False
    assert 0 < len(store.missing(wanted, seeds)) < 5
    assert compute_runs(stored(store, store.missing(wanted, seeds)), ComputeConfig(), quiet) is True
    table = rows(store.results(wanted, seeds))
    assert [row["algorithm"] for row in table] == ["fedavg", "favano", "asysg", "defedavg-iid"]
    assert all(row["seeds"] == 2 for row in table)
    whole = ResultFiles(tmp_path / "whole", Choices())
    compute_runs(stored(whole, whole.missing(wanted, seeds)), ComputeConfig(), quiet)
    assert rows(whole.results(wanted, seeds)) == table


def test_results_of_other_choices_are_not_mixed(small: None, tmp_path: Path) -> None:
    (run,) = small_runs("fedavg")
    store = ResultFiles(tmp_path, Choices())
    compute_runs(stored(store, [(run, 0)]), ComputeConfig(), quiet)
    for choices, other in ((Choices(measure_seconds=1.0), run), (Choices(), replace(run, rates=(0.5, 0.5)))):
        with pytest.raises(UserError, match="another --out"):
            ResultFiles(tmp_path, choices).results([other], [0])
    path = store.path(run, 0)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"{half", b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="delete it"):
            store.results([run], [0])


def test_a_run_with_a_shorter_time_limit_is_computed_again(small: None, tmp_path: Path) -> None:
    (slow,) = small_runs("favano")
    (fast,) = small_runs("defedavg-iid")
    short, longer = Choices(max_seconds=1.0), Choices(max_seconds=2.0)
    store = ResultFiles(tmp_path, short)
    compute_runs(stored(store, [(slow, 0), (fast, 0)]), ComputeConfig(), quiet)
    status = {result["piece"]["cell"]["algorithm"]: result["status"] for result in store.results([slow, fast], [0])}
    assert status == {"favano": "max_seconds", "defedavg-iid": "target"}
    assert store.missing([slow, fast], [0]) == []
    assert ResultFiles(tmp_path, longer).missing([slow, fast], [0]) == [(slow, 0)]
    assert ResultFiles(tmp_path, Choices(max_seconds=0.5)).missing([slow, fast], [0]) == []
    # Another folder copies results that it lacks and results with a longer time limit than its own.
    mine = ResultFiles(tmp_path / "mine", store.choices)
    (given_up,) = store.results([slow], [0])
    mine.save({**given_up, "limit": 0.1}, slow)
    mine.adopt(store, [slow, fast], [0, 1])
    assert mine.results([slow, fast], [0, 1]) == store.results([slow, fast], [0])
    kept = ResultFiles(mine.folder, longer)
    kept.save({**given_up, "seconds": 0.0}, slow)  # both limits are too short now: the folder keeps its own result
    kept.adopt(ResultFiles(tmp_path, longer), [slow], [0])
    assert kept.results([slow], [0])[0]["seconds"] == 0.0


def test_tuned_rates_are_found_stored_and_used(small: None, tmp_path: Path) -> None:
    wanted = tuple(select_cells(["fashionmnist"], ["iid"], [10], ["asysg", "defedavg-iid"]))
    request = PaperRequest(folder=tmp_path, cells=wanted, seeds=range(2), rates="tuned", compute=ComputeConfig())
    at_paper_rates = replace(request, rates="paper")
    paper_runs, paper, _ = at_paper_rates.table_runs()
    assert at_paper_rates.compute_missing(paper, paper_runs, "first") is True
    runs, store, finished = request.table_runs()
    assert finished is True
    assert [run.cell for run in runs] == list(wanted)
    for run in runs:
        record = json.loads((TunedRates(store, paper)).path(run.cell).read_text())
        points = {tuple(point["rates"]): point for point in record["points"]}
        assert len(points) == {"asysg": 6, "defedavg-iid": 10}[run.cell.algorithm]
        assert points[run.cell.rates]["known"] is True  # its stored result was used
        held = {pair: point["hit_seconds"] for pair, point in points.items() if point["hit_seconds"] is not None}
        assert held or run.cell.algorithm == "asysg"
        assert not held or held[run.rates] == min(held.values())
        for point in points.values():
            assert point["status"] in ("target", "dropped", "max_seconds", "diverged")
    assert request.compute_missing(store, runs, "tuned") is True
    for row in rows(store.results(runs, range(2))):
        assert row["seeds"] == 2
    assert replace(request, show_only=True).tuned_rates() == ({run.cell: run.rates for run in runs}, True)
    table = rates_rows({run.cell: run.rates for run in runs})
    assert len(rates_to_markdown(table).splitlines()) == 4
    tuned = TunedRates(store, paper)
    path = tuned.path(wanted[0])
    record = json.loads(path.read_text())
    given_up = {"limit": 0.5, "points": [{**point, "hit_seconds": None} for point in record["points"]]}
    path.write_text(json.dumps({**record, **given_up}), encoding="utf-8")
    assert list(tuned.known(wanted)) == [wanted[1]]  # the first would now have a longer limit
    assert list(tuned.known(wanted, any_limit=True)) == list(wanted)
    path.write_text("{half", encoding="utf-8")
    with pytest.raises(UserError, match="delete it to tune the rates again"):
        request.tuned_rates()


def test_a_session_is_reported_and_logged(small: None, tmp_path: Path) -> None:
    lines: list[str] = []
    watched: list[tuple[str, int]] = []

    @contextmanager
    def watching(title: str, runs: int) -> Iterator[Watch]:
        watched.append((title, runs))
        yield quiet

    request = PaperRequest(
        folder=tmp_path,
        cells=tuple(select_cells(["fashionmnist"], ["iid"], [10], ["fedavg"])),
        notify=lines.append,
        watching=watching,
    )
    runs, store, _ = request.table_runs()
    assert request.compute_missing(store, runs, "table 1") is True
    assert request.compute_missing(store, runs, "table 1") is True  # nothing is missing: no second session
    assert lines == ["runs to compute: 1; already stored: 0"]
    assert watched == [("table 1", 1)]
    (line,) = (store.folder / "provenance.jsonl").read_text(encoding="utf-8").splitlines()
    session = json.loads(line)
    assert list(session) == [
        "time", "command", "real_seconds", "version", "commit", "python", "torch", "device", "precision"
    ]  # fmt: skip
    assert isinstance(session["command"], list)
    assert session["device"] == platform.machine()
    assert last_session(store.folder)["command"] == shlex.join(session["command"])
    assert last_session(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("rates", ["paper", "tuned"])
def test_a_session_is_logged_if_it_was_interrupted_and_not_if_it_computed_nothing(
    rates: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_values: Any) -> None:
        raise UserError("no data")

    def stop(_event: RunEvaluated | RunFinished) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def stopping(_title: str, _runs: int) -> Iterator[Watch]:
        yield stop

    cells = tuple(select_cells(["fashionmnist"], ["iid"], [10], ["fedavg"]))
    request = PaperRequest(folder=tmp_path / "out", cells=cells, rates=rates, watching=stopping)

    def compute() -> bool:
        runs, store, finished = request.table_runs()
        return finished and request.compute_missing(store, runs, "table 1")

    with monkeypatch.context() as patch:
        patch.setattr("defedavg.experiments.sweep.build_task", fail)
        with pytest.raises(UserError, match="no data"):
            compute()
    assert not request.folder.exists()
    assert compute() is False
    (log,) = request.folder.rglob("provenance.jsonl")
    assert len(log.read_text(encoding="utf-8").splitlines()) == 1


def test_a_continued_run_is_logged_though_it_was_interrupted_before_its_next_evaluation(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: RunEvaluated | RunFinished) -> None:
        if isinstance(event, RunEvaluated) and event.evaluation.round > 3:
            raise KeyboardInterrupt

    def stop_at_once(*_values: Any) -> None:
        raise KeyboardInterrupt

    request = PaperRequest(folder=tmp_path, cells=tuple(select_cells(["fashionmnist"], ["iid"], [10], ["fedavg"])))
    runs, store, _ = request.table_runs()
    missing = stored(store, store.missing(runs, [0]))
    assert compute_runs(missing, ComputeConfig(), stop, checkpoint_interval=0.0) is False
    monkeypatch.setattr("defedavg.experiments.sweep.run_batched", stop_at_once)
    assert request.compute_missing(store, runs, "table 1") is False
    assert len((store.folder / "provenance.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_the_list_marks_the_rates_that_are_not_those_of_table_2(tmp_path: Path) -> None:
    text = call("paper", "--list", cwd=tmp_path).stdout
    lines = {tuple(line.split()[:4]): line for line in text.splitlines() if "fashionmnist" in line or "cifar10" in line}
    assert len(lines) == 64
    assert "1 / 0.05 [0.1 / 0.05]" in lines["iid", "cifar10", "defedavg-iid", "10"]
    assert sum("[" in line for line in lines.values()) == sum(cell.correction is not None for cell in cells()) == 5
    assert ">880 " in lines["iid", "fashionmnist", "favano", "80"]
    assert lines["iid", "fashionmnist", "fedavg", "10"].split()[-2:] == ["51.89", "77.8"]
    presets = json.loads(call("paper", "list", "--json", cwd=tmp_path).stdout)
    (preset,) = (
        each for each in presets if (each["dataset"], each["algorithm"], each["n"]) == ("cifar10", "defedavg-iid", 10)
    )
    assert [preset[name] for name in ("global_lr", "local_lr")] == [0.1, 0.05]
    assert [preset[name] for name in ("stated_global_lr", "stated_local_lr")] == [1.0, 0.05]
    assert presets[0]["given_up_after"] == 77.835  # 1.5 × 51.89 is 77.83500000000001


def test_the_help_names_the_bounds_of_the_time_limit(tmp_path: Path) -> None:
    text = " ".join(call("paper", "table1", "--help", cwd=tmp_path).stdout.replace("│", " ").split())
    for bound in (SHORTEST_LIMIT, *(limit for limits in LIMITS.values() for limit in limits.values())):
        assert f" {bound:.0f} s" in text


def test_figures_are_drawn_from_stored_results(small: None, tmp_path: Path) -> None:
    from defedavg.paper.figures import curves, figure1

    wanted = tuple(select_cells(["fashionmnist"], ["iid"], None, ["defedavg-iid", "fedavg"], FIGURE6_SIZES))
    request = PaperRequest(folder=tmp_path, cells=wanted, compute=ComputeConfig())
    runs, store, _ = request.table_runs(10)
    request.compute_missing(store, runs, "figure 2")
    accuracy, loss = curves(store.results(runs, range(1)), 2)
    assert [axes.get_title() for axes in accuracy.axes] == ["FashionMNIST, IID"]
    assert [axes.get_ylabel() for axes in loss.axes] == ["training loss"]
    assert accuracy.axes[0].get_xlabel() == "simulated seconds"
    runs, store, _ = request.defedavg_runs(6)
    assert [run.cell.updates_per_round for run in runs] == [*FIGURE6_SIZES[1:], 5]
    request.compute_missing(store, runs, "figure 6")
    accuracy, _ = curves(store.results(runs, range(1)), 6)
    assert [text.get_text() for text in accuracy.legends[0].get_texts()] == [f"n = {n}" for n in FIGURE6_SIZES]
    assert len({line.get_color() for line in accuracy.legends[0].get_lines()}) == len(FIGURE6_SIZES)
    assert accuracy.axes[0].get_xlabel() == "rounds"
    assert [run.local_steps for run in request.defedavg_runs(7)[0]] == [20, 50, 100]
    with pytest.raises(UserError, match="no run matches"):
        replace(request, cells=tuple(select_cells(None, None, [20]))).table_runs(10)
    assert [axes.get_title("left") for axes in figure1().axes] == ["FedAvg", "DeFedAvg-nIID", "DeFedAvg-IID"]


def test_the_commands_list_refuse_and_draw(tmp_path: Path) -> None:
    listed = call("paper", "list", "--json", cwd=tmp_path)
    assert len(json.loads(listed.stdout)) == 64
    refuse(call("paper", "table1", "--dataset", "mnist", cwd=tmp_path), "mnist", "fashionmnist")
    refuse(call("paper", "table1", "--n", "5", cwd=tmp_path), "--n is 5; it must be one of 10, 20, 40, 80")
    refuse(call("paper", "figure6", "--n", "7", cwd=tmp_path), "--n is 7; it must be one of 5, 10, 20, 40, 80")
    refuse(call("paper", "table1", "--seeds", "0", cwd=tmp_path), "--seeds")
    refuse(call("paper", "table2", "--rates", "best", cwd=tmp_path), "best", "tuned")
    refuse(call("paper", "figure2", "--max-time", "0", cwd=tmp_path), "--max-time")
    refuse(call("paper", "figure2", "--n", "20", "--show", cwd=tmp_path), "--n")
    for show in ((), ("--show",)):
        for option in ("--measure-seconds", "--train-samples"):
            refuse(call("paper", "table1", option, "-1", *show, cwd=tmp_path), f"{option} is -1; it must be zero or mo")
        refuse(call("paper", "table1", "--measure-seconds", "nan", *show, cwd=tmp_path), "--measure-seconds is nan")
    wrong = call("paper", "figure8", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "figure7" in wrong.stderr
    for rates in ("paper", "tuned"):
        missing = call(
            "paper", "table1", "--n", "10", "--rates", rates, "--data-dir", tmp_path / "nowhere", cwd=tmp_path
        )
        assert missing.returncode == 2
        assert "defedavg data fetch fashionmnist" in missing.stderr
        assert not (tmp_path / "results").exists()  # nothing was computed, so nothing is logged
    nothing = call("paper", "figure6", "--show", cwd=tmp_path)
    assert nothing.returncode == 0
    assert "no results are stored yet" in nothing.stderr
    drawn = call("paper", "figure1", "--out", tmp_path / "here", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "here/figures/figure1.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "here/figures/figure1.png").stat().st_size > 10_000


def test_the_help_of_n_lists_the_values_that_the_command_takes(tmp_path: Path) -> None:
    for command, values in (
        ("rounds", "10, 20, 40 or 80"),
        ("table1", "10, 20, 40 or 80"),
        ("figure6", "5, 10, 20, 40"),
    ):
        shown = call("paper", command, "--help", cwd=tmp_path, COLUMNS="200")
        assert f"Updates per round: {values}" in shown.stdout
        assert "figure6: also 5" not in shown.stdout
    refuse(call("paper", "rounds", "--n", "5", cwd=tmp_path), "--n is 5; it must be one of 10, 20, 40, 80")
    assert call("paper", "figure6", "--n", "5", "--show", cwd=tmp_path).returncode == 0


def test_old_option_names_print_the_new_ones(tmp_path: Path) -> None:
    shown = call("paper", "table1", "--show", "--beyond", "2", "--width", "3", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stderr.splitlines()[:2] == [
        "defedavg: --beyond is now --time-limit-factor; the old name works in this version only",
        "defedavg: --width is now --max-batch-jobs; the old name works in this version only",
    ]
    for option, new in (("--beyond", "--time-limit-factor"), ("--width", "--max-batch-jobs")):
        refused = call("paper", "table1", "--show", option, "0", cwd=tmp_path)
        assert refused.returncode == 2
        assert f"{new} is 0" in refused.stderr
    assert "--beyond" not in call("paper", "table1", "--help", cwd=tmp_path).stdout


def test_commands_end_with_the_page_of_their_runs(small: None, tmp_path: Path) -> None:
    wanted = tuple(select_cells(["fashionmnist"], None, [10], ["fedavg", "asysg"]))
    request = PaperRequest(folder=tmp_path / "results/paper", cells=wanted, compute=ComputeConfig())
    runs, store, _ = request.table_runs()
    request.compute_missing(store, runs, "table 1")
    replace(request, rates="tuned", cells=wanted[:1]).tuned_rates()

    def page(*command: str) -> dict[str, Any]:
        done = call("paper", *command, "--show", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        where = done.stdout.splitlines()[-1].removeprefix("open in a browser: ")
        return page_data((tmp_path / where).read_text(encoding="utf-8"))

    made = page("table1")
    assert made["title"] == "Table 1 at the paper's rates"
    assert [group["title"] for group in made["groups"]] == ["fashionmnist, iid", "fashionmnist, non-iid"]
    assert [s["name"] for s in made["groups"][0]["series"]] == ["fedavg n=10", "asysg n=10"]
    for group, setting in zip(made["groups"], ("iid", "non-iid"), strict=True):
        for series in group["series"]:
            (run,) = series["runs"]
            (kept,) = [
                result
                for result in store.results(runs, range(1))
                if (result["piece"]["cell"]["setting"], result["piece"]["cell"]["algorithm"])
                == (setting, series["name"].split()[0])
            ]
            assert run["x"]["seconds"] == pytest.approx(kept["curve"]["seconds"], rel=1e-5)
            assert run["accuracy"] == pytest.approx(kept["curve"]["accuracy"], rel=1e-4)
    assert len(page("figure2")["groups"]) == 2
    figures = tmp_path / "results/paper/figures"
    drawn = (figures / "figure2-accuracy.png").read_bytes()
    part = call("paper", "figure2", "--show", "--algorithm", "fedavg", cwd=tmp_path)
    assert "figure2 keeps its content: only `paper figure2` without a selection draws it" in part.stderr
    assert (figures / "figure2-accuracy.png").read_bytes() == drawn
    assert (figures / "figure2-part-accuracy.png").read_bytes() != drawn
    (tuned,) = page("table2")["groups"]
    assert tuned["title"] == wanted[0].label
    assert {s["name"] for s in tuned["series"]} >= {"η=1, η̄=0.1", "η=0.1, η̄=0.001"}
