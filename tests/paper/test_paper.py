"""The paper's experiments: published values, stored results, tables, figures and commands."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunEvaluated, RunFinished, Watch
from defedavg.paper.paper_tables import (
    ranking,
    ranking_to_markdown,
    rates_rows,
    rates_to_markdown,
    rows,
    to_csv,
    to_markdown,
)
from defedavg.paper.published import COMPARED, FIGURE6_SIZES, Cell, cells
from defedavg.paper.result_files import ResultFiles, compute_runs, last_session
from defedavg.paper.run_grid import Choices, PaperRun
from defedavg.paper.run_request import PaperRequest, select_cells
from defedavg.paper.tuned_rates import TunedRates
from helpers.command_line import call, refuse
from helpers.page_data import page_data

CELLS = cells()


def test_every_cell_is_listed_once() -> None:
    assert len(CELLS) == len(set(CELLS)) == 64
    assert sum(cell.seconds is None for cell in CELLS) == 3  # printed as ">880" and ">1400"
    assert Cell("fashionmnist", "iid", "defedavg-iid", 10).seconds == 26.39
    assert Cell("cifar10", "non-iid", "favano", 80).seconds == 4751.8
    assert Cell("cifar10", "iid", "defedavg-iid", 10).rates == (1.0, 0.05)
    assert Cell("fashionmnist", "non-iid", "fedbuff", 10).rates == (0.1, 0.005)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_every_cell_is_a_valid_run_with_the_rates_its_algorithm_has(cell: Cell) -> None:
    kind = ALGORITHMS[cell.algorithm]
    assert (cell.rates[0] is not None) == kind.uses_global_lr
    assert (cell.rates[1] is not None) == kind.uses_local_lr
    settings = Choices().settings(PaperRun(cell, cell.rates))
    assert settings.training.updates_per_round == cell.updates_per_round
    assert settings.training.local_steps == 50
    assert settings.clients.step_seconds == {"fashionmnist": 0.0017, "cifar10": 0.00314}[cell.dataset]
    assert settings.stop.target_accuracy == cell.target
    assert settings.stop.consecutive_hits == 5
    assert settings.task.split == ("iid" if cell.setting == "iid" else "classes")
    if cell.rates[0] is not None:
        assert settings.training.global_lr == cell.rates[0]


def test_selection_of_cells() -> None:
    few = select_cells(None, None, [5])
    assert {c.algorithm for c in few} == {names[-1] for names in COMPARED.values()}
    assert select_cells(None, None, None) == [*CELLS, *few]
    assert {c.algorithm for c in select_cells(None, ["iid"], None, ["asysg"])} == {"asysg"}
    assert {c.updates_per_round for c in select_cells(["cifar10"], ["iid"], [10, 80])} == {10, 80}
    for wrong in ((["mnist"], None, None), (None, ["iidd"], None), (None, None, [11])):
        with pytest.raises(UserError):
            select_cells(*wrong)


def test_the_time_limit_follows_the_papers_seconds() -> None:
    def limit(choices: Choices, *cell: Any) -> float:
        return choices.limit(PaperRun(Cell(*cell), (1.0, 1.0)))

    assert limit(Choices(time_limit_factor=2.0), "fashionmnist", "iid", "fedavg", 20) == 2 * 179.1
    assert limit(Choices(), "cifar10", "iid", "favano", 80) == 1400.0  # the time that the paper states
    assert (
        limit(Choices(time_limit_factor=1.0), "fashionmnist", "iid", "defedavg-iid", 10) == 60.0
    )  # FedAvg needs 51.89
    assert limit(Choices(), "cifar10", "iid", "defedavg-iid", 10) == 302.12
    assert limit(Choices(), "cifar10", "non-iid", "favano", 80) == 2500.0
    assert {Choices(max_seconds=7.0).limit(PaperRun(cell, cell.rates)) for cell in CELLS} == {7.0}


def small_settings(choices: Choices, run: PaperRun) -> config.Settings:
    """Return the settings of a small run that replaces one of the paper's."""
    global_lr, local_lr = run.rates
    training: dict[str, Any] = {"updates_per_round": 4, "local_steps": 5}
    training |= {} if global_lr is None else {"global_lr": global_lr}
    training |= {} if local_lr is None else {"local_lr": local_lr}
    ends = (
        {"max_seconds": 1.0, "max_rounds": 1000} if run.rounds is None else {"max_rounds": 12, "stop_at_target": False}
    )
    tables: dict[str, Any] = {
        "algorithms": [run.cell.algorithm],
        "task": {"model": "softmax"},
        "clients": {"num_clients": 20},
        "training": training,
        "stop": {"target_accuracy": 0.7, "consecutive_hits": 5, "train_samples": 20, **ends},
    }
    return config.study(tables).points()[0].settings


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "settings", small_settings)


def quiet(event: RunEvaluated | RunFinished) -> None:
    pass


def small_runs(*algorithms: str) -> list[PaperRun]:
    return [PaperRun(cell, cell.rates) for cell in select_cells(["fashionmnist"], ["iid"], [10], algorithms or None)]


def test_a_table_is_computed_in_several_sessions(small: None, tmp_path: Path) -> None:
    wanted, seeds = small_runs(), [0, 1]
    store = ResultFiles(tmp_path, Choices())
    assert [seed for _, seed in store.missing(wanted, seeds)] == [0] * 4 + [1] * 4
    assert compute_runs(store, store.missing(wanted, seeds)[:3], ComputeConfig(), quiet) is True
    assert len(store.missing(wanted, seeds)) == 5

    def stop(event: RunEvaluated | RunFinished) -> None:
        if isinstance(event, RunFinished):
            raise KeyboardInterrupt

    assert compute_runs(store, store.missing(wanted, seeds), ComputeConfig(), stop) is False
    assert 0 < len(store.missing(wanted, seeds)) < 5
    assert compute_runs(store, store.missing(wanted, seeds), ComputeConfig(), quiet) is True
    table = rows(store.results(wanted, seeds))
    assert [row["algorithm"] for row in table] == ["fedavg", "favano", "asysg", "defedavg-iid"]
    assert all(row["seeds"] == 2 for row in table)
    whole = ResultFiles(tmp_path / "whole", Choices())
    compute_runs(whole, whole.missing(wanted, seeds), ComputeConfig(), quiet)
    assert rows(whole.results(wanted, seeds)) == table


def test_results_of_other_choices_are_not_mixed(small: None, tmp_path: Path) -> None:
    (run,) = small_runs("fedavg")
    store = ResultFiles(tmp_path, Choices())
    compute_runs(store, [(run, 0)], ComputeConfig(), quiet)
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
    compute_runs(store, [(slow, 0), (fast, 0)], ComputeConfig(), quiet)
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


def test_figures_are_drawn_from_stored_results(small: None, tmp_path: Path) -> None:
    from defedavg.paper.figures import curves, figure1

    wanted = tuple(select_cells(["fashionmnist"], ["iid"], None, ["defedavg-iid", "fedavg"]))
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


def entry(cell: Cell, **more: Any) -> dict[str, Any]:
    base = {
        "piece": asdict(PaperRun(cell, cell.rates)), "first_hit_seconds": None, "sustained_seconds": None,
        "diverged_at": None, "seconds": 900.0, "best_accuracy": 0.5,
    }  # fmt: skip
    return {**base, **more}


def test_rows_describe_missed_targets() -> None:
    cell = Cell("fashionmnist", "iid", "defedavg-iid", 10)
    other = replace(cell, algorithm="favano", updates_per_round=80)
    results = [
        entry(cell, first_hit_seconds=20.0, sustained_seconds=25.0),
        entry(cell, first_hit_seconds=30.0),
        entry(other, diverged_at=7),
        entry(other),
        entry(other, diverged_at=9, first_hit_seconds=30.0),
    ]
    ours, theirs = rows(results)
    assert ours["first_hit"] == 25.0
    assert ours["first_hit_sd"] == pytest.approx(50**0.5)
    assert (ours["sustained"], ours["sustained_reached"]) == (25.0, 1)
    assert ours["ratio"] == pytest.approx(25 / 26.39)
    assert theirs["ratio"] is None
    assert ours["note"] == "reached, but not held by 900 s (best 50.0 %)"
    assert theirs["note"] == "diverged at round 7, 9; not reached by 900 s (best 50.0 %)"
    text = to_markdown([ours, theirs])
    assert "25 ± 7.1 (2/2)" in text
    held = rows([entry(cell, first_hit_seconds=1.0, sustained_seconds=time) for time in (20.0, 30.0)])
    assert "1 ± 0 (2/2) | 25 ± 7.1 (2/2)" in to_markdown(held)
    assert held[0]["note"] == ""
    far = rows([entry(cell, first_hit_seconds=900.0), entry(cell, first_hit_seconds=1120.0)])
    assert "1010 ± 160 (2/2)" in to_markdown(far)
    assert ">880" in text
    assert len(to_csv([ours, theirs]).splitlines()) == 3
    partly = rows([entry(cell, first_hit_seconds=20.0), entry(cell)])[0]
    assert partly["ratio"] is None  # a mean over only the successful seeds would be biased
    assert "not reached" in partly["note"]


def test_ranking_counts_a_failed_seed_as_infinite_and_names_undecided_algorithms() -> None:
    defedavg, fedavg = Cell("cifar10", "iid", "defedavg-iid", 80), Cell("cifar10", "iid", "fedavg", 80)
    other = replace(defedavg, algorithm="favano")

    def seeds(cell: Cell, *held: float | None, **more: Any) -> list[dict[str, Any]]:
        return [entry(cell, seed=seed, sustained_seconds=time, **more) for seed, time in enumerate(held)]

    results = [
        *seeds(defedavg, 150.0, None, 90.0),
        *seeds(fedavg, 140.0, 170.0, None),
        *seeds(other, None, seconds=160.0),
    ]
    (found,) = ranking(results)
    assert list(found["here"].items())[:2] == [("defedavg-iid", 150.0), ("fedavg", 170.0)]
    assert (found["first"], found["first_in"], found["seeds"], found["open"]) == ("defedavg-iid", 1, 3, [])
    text = ranking_to_markdown([found]).replace("\N{NO-BREAK SPACE}", " ")
    assert "defedavg-iid 150, fedavg 170, favano >160 |" in text
    assert "defedavg-iid 154, fedavg 288, favano >1400 | 1 of 3 seeds | yes |" in text
    # FAVANO was given up before FedAvg's time, so it might have been faster.
    (found,) = ranking(
        [*seeds(defedavg, None, diverged_at=5), *seeds(fedavg, 170.0), *seeds(other, None, seconds=160.0)]
    )
    assert (found["first"], found["paper_first"], found["open"]) == ("fedavg", "defedavg-iid", ["favano"])
    assert "defedavg-iid\N{NO-BREAK SPACE}diverged" in ranking_to_markdown([found])
    assert "1 of 1 seeds, unless favano is faster | no |" in ranking_to_markdown([found])
    (found,) = ranking([*seeds(defedavg, None), *seeds(fedavg, None)])
    assert (found["first"], found["open"]) == (None, [])
    assert "| – | no algorithm holds it |" in ranking_to_markdown([found])
    assert ranking(seeds(defedavg, 1.0)) == []  # a single algorithm has no ranking


def test_the_commands_list_refuse_and_draw(tmp_path: Path) -> None:
    listed = call("paper", "list", "--json", cwd=tmp_path)
    assert len(json.loads(listed.stdout)) == 64
    assert "defedavg-niid" in call("paper", "--list", cwd=tmp_path).stdout
    refuse(call("paper", "table1", "--dataset", "mnist", cwd=tmp_path), "mnist", "fashionmnist")
    refuse(call("paper", "table1", "--n", "11", cwd=tmp_path), "11")
    refuse(call("paper", "table1", "--seeds", "0", cwd=tmp_path), "--seeds")
    refuse(call("paper", "table2", "--rates", "best", cwd=tmp_path), "best", "tuned")
    refuse(call("paper", "figure2", "--max-time", "0", cwd=tmp_path), "--max-time")
    refuse(call("paper", "figure2", "--n", "20", "--show", cwd=tmp_path), "--n")
    wrong = call("paper", "figure8", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "figure7" in wrong.stderr
    missing = call("paper", "table1", "--n", "10", "--data-dir", tmp_path / "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert "defedavg data fetch fashionmnist" in missing.stderr
    assert not list((tmp_path / "results").rglob("*.json.gz"))
    nothing = call("paper", "figure6", "--show", cwd=tmp_path)
    assert nothing.returncode == 0
    assert "no results are stored yet" in nothing.stderr
    drawn = call("paper", "figure1", "--out", tmp_path / "here", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "here/figures/figure1.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "here/figures/figure1.png").stat().st_size > 10_000


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
    (tuned,) = page("table2")["groups"]
    assert tuned["title"] == wanted[0].label
    assert {s["name"] for s in tuned["series"]} >= {"η=1, η̄=0.1", "η=0.1, η̄=0.001"}


def test_stored_results_are_recognised_and_not_computed_again() -> None:
    folder = Path(__file__).parents[2] / "results" / "paper"
    request = PaperRequest(folder=folder, cells=tuple(CELLS), choices=Choices(max_seconds=1.0), show_only=True)
    for rates, count in (("paper", 64), ("tuned", 32)):
        runs, store, _ = replace(request, rates=rates).table_runs()
        assert len(runs) == count
        assert store.missing(runs, [0]) == []


def test_results_in_the_repository_match_their_tables() -> None:
    folder = Path(__file__).parents[2] / "results" / "paper"
    for name in ("table1", "table1-tuned"):
        store = ResultFiles(folder / name, Choices())
        tuned = TunedRates(store, ResultFiles(folder / "table1", Choices()))
        rates = {cell: cell.rates for cell in CELLS} if name == "table1" else tuned.known(CELLS, any_limit=True)
        results = store.results([PaperRun(cell, pair) for cell, pair in rates.items()], range(3))
        assert (folder / name / "table1.md").read_text(encoding="utf-8") == to_markdown(rows(results))
        assert (folder / name / "table1.csv").read_text(encoding="utf-8") == to_csv(rows(results))
        assert (folder / name / "ranking.md").read_text(encoding="utf-8") == ranking_to_markdown(ranking(results))


def test_the_documentation_has_the_tables_of_the_results() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "reproduction.md").read_text(encoding="utf-8")
    tables = [f"{kind}/{name}.md" for kind in ("table1", "table1-tuned") for name in ("table1", "ranking")]
    for name in (*tables, "table1-tuned/table2.md"):
        assert (root / "results" / "paper" / name).read_text(encoding="utf-8") in text
