"""The paper's experiments: its figures as they are printed, and Table 1 made in parts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunEvaluated, RunFinished
from defedavg.paper.paper_tables import rates_rows, rates_to_markdown, rows, to_csv, to_markdown
from defedavg.paper.published import COMPARED, FIGURE6_SIZES, Cell, cells
from defedavg.paper.ranking import ranking, ranking_to_markdown
from defedavg.paper.result_files import ResultFiles, carry_out
from defedavg.paper.run_grid import Choices, Piece
from defedavg.paper.run_request import PaperRequest, chosen
from defedavg.paper.tuned_rates import TunedRates
from helpers.command_line import call, refuse
from helpers.page_data import page_data

MANY = cells()


def test_all_cells_are_there_once() -> None:
    assert len(MANY) == len(set(MANY)) == 64
    assert sum(cell.seconds is None for cell in MANY) == 3  # printed as ">880" and ">1400"
    assert Cell("fashionmnist", "iid", "defedavg-iid", 10).seconds == 26.39
    assert Cell("cifar10", "non-iid", "favano", 80).seconds == 4751.8
    assert Cell("cifar10", "iid", "defedavg-iid", 10).rates == (1.0, 0.05)
    assert Cell("fashionmnist", "non-iid", "fedbuff", 10).rates == (0.1, 0.005)


@pytest.mark.parametrize("cell", MANY, ids=lambda cell: cell.label)
def test_every_cell_is_a_valid_run_with_the_rates_its_algorithm_has(cell: Cell) -> None:
    kind = ALGORITHMS[cell.algorithm]
    assert (cell.rates[0] is not None) == kind.uses_global_lr
    assert (cell.rates[1] is not None) == kind.uses_local_lr
    settings = Choices().settings(Piece(cell, cell.rates))
    assert settings.training.updates_per_round == cell.updates_per_round
    assert settings.training.local_steps == 50
    assert settings.clients.step_seconds == {"fashionmnist": 0.0017, "cifar10": 0.00314}[cell.dataset]
    assert settings.stop.target_accuracy == cell.target
    assert settings.stop.consecutive_hits == 5
    assert settings.task.split == ("iid" if cell.setting == "iid" else "classes")
    if cell.rates[0] is not None:
        assert settings.training.global_lr == cell.rates[0]


def test_cells_are_chosen() -> None:
    few = chosen(None, None, [5])
    assert {c.algorithm for c in few} == {own[-1] for own in COMPARED.values()}
    assert chosen(None, None, None) == [*MANY, *few]
    assert {c.algorithm for c in chosen(None, ["iid"], None, ["asysg"])} == {"asysg"}
    assert {c.updates_per_round for c in chosen(["cifar10"], ["iid"], [10, 80])} == {10, 80}
    for wrong in ((["mnist"], None, None), (None, ["iidd"], None), (None, None, [11])):
        with pytest.raises(UserError):
            chosen(*wrong)


def test_a_run_is_given_up_beyond_the_papers_time() -> None:
    def limit(choices: Choices, *cell: Any) -> float:
        return choices.limit(Piece(Cell(*cell), (1.0, 1.0)))

    assert limit(Choices(time_limit_factor=2.0), "fashionmnist", "iid", "fedavg", 20) == 2 * 179.1
    assert limit(Choices(), "cifar10", "iid", "favano", 80) == 1400.0  # where the paper gave up
    assert (
        limit(Choices(time_limit_factor=1.0), "fashionmnist", "iid", "defedavg-iid", 10) == 60.0
    )  # FedAvg needs 51.89
    assert limit(Choices(), "cifar10", "iid", "defedavg-iid", 10) == 302.12
    assert limit(Choices(), "cifar10", "non-iid", "favano", 80) == 2500.0
    assert {Choices(max_seconds=7.0).limit(Piece(cell, cell.rates)) for cell in MANY} == {7.0}


def small_settings(choices: Choices, piece: Piece) -> config.Settings:
    """A small run in the place of one of the paper's."""
    wide, near = piece.rates
    training: dict[str, Any] = {"updates_per_round": 4, "local_steps": 5}
    training |= {} if wide is None else {"global_lr": wide}
    training |= {} if near is None else {"local_lr": near}
    ends = (
        {"max_seconds": 1.0, "max_rounds": 1000}
        if piece.rounds is None
        else {"max_rounds": 12, "stop_at_target": False}
    )
    tables: dict[str, Any] = {
        "algorithms": [piece.cell.algorithm],
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


def pieces(*algorithms: str) -> list[Piece]:
    return [Piece(cell, cell.rates) for cell in chosen(["fashionmnist"], ["iid"], [10], algorithms or None)]


def test_a_table_is_made_in_parts(small: None, tmp_path: Path) -> None:
    wanted, seeds = pieces(), [0, 1]
    store = ResultFiles(tmp_path, Choices())
    assert [seed for _, seed in store.missing(wanted, seeds)] == [0] * 4 + [1] * 4
    assert carry_out(store, store.missing(wanted, seeds)[:3], ComputeConfig(), quiet) is True
    assert len(store.missing(wanted, seeds)) == 5

    def stop(event: RunEvaluated | RunFinished) -> None:
        if isinstance(event, RunFinished):
            raise KeyboardInterrupt

    assert carry_out(store, store.missing(wanted, seeds), ComputeConfig(), stop) is False
    left = len(store.missing(wanted, seeds))
    assert 0 < left < 5
    assert carry_out(store, store.missing(wanted, seeds), ComputeConfig(), quiet) is True
    found = rows(store.results(wanted, seeds))
    assert [row["algorithm"] for row in found] == ["fedavg", "favano", "asysg", "defedavg-iid"]
    assert all(row["seeds"] == 2 for row in found)
    whole = ResultFiles(tmp_path / "whole", Choices())
    carry_out(whole, whole.missing(wanted, seeds), ComputeConfig(), quiet)
    assert rows(whole.results(wanted, seeds)) == found


def test_results_of_other_choices_are_not_mixed(small: None, tmp_path: Path) -> None:
    (piece,) = pieces("fedavg")
    store = ResultFiles(tmp_path, Choices())
    carry_out(store, [(piece, 0)], ComputeConfig(), quiet)
    for other, own in ((Choices(measure_seconds=1.0), piece), (Choices(), replace(piece, rates=(0.5, 0.5)))):
        with pytest.raises(UserError, match="another --out"):
            ResultFiles(tmp_path, other).results([own], [0])
    path = store.path(piece, 0)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"{half", b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="delete it"):
            store.results([piece], [0])


def test_a_run_given_up_too_soon_is_done_again(small: None, tmp_path: Path) -> None:
    (slow,) = pieces("favano")
    (fast,) = pieces("defedavg-iid")
    short, longer = Choices(max_seconds=1.0), Choices(max_seconds=2.0)
    store = ResultFiles(tmp_path, short)
    carry_out(store, [(slow, 0), (fast, 0)], ComputeConfig(), quiet)
    status = {one["piece"]["cell"]["algorithm"]: one["status"] for one in store.results([slow, fast], [0])}
    assert status == {"favano": "max_seconds", "defedavg-iid": "target"}
    assert store.missing([slow, fast], [0]) == []
    assert ResultFiles(tmp_path, longer).missing([slow, fast], [0]) == [(slow, 0)]
    assert ResultFiles(tmp_path, Choices(max_seconds=0.5)).missing([slow, fast], [0]) == []
    # Another folder takes over what it lacks, and what was given more time than its own.
    mine = ResultFiles(tmp_path / "mine", store.choices)
    (given_up,) = store.results([slow], [0])
    mine.keep({**given_up, "limit": 0.1}, slow)
    mine.adopt(store, [slow, fast], [0, 1])
    assert mine.results([slow, fast], [0, 1]) == store.results([slow, fast], [0])
    kept = ResultFiles(mine.folder, longer)
    kept.keep({**given_up, "seconds": 0.0}, slow)  # both are too short now: its own stays
    kept.adopt(ResultFiles(tmp_path, longer), [slow], [0])
    assert kept.results([slow], [0])[0]["seconds"] == 0.0


def test_tuned_rates_are_found_kept_and_used(small: None, tmp_path: Path) -> None:
    wanted = tuple(chosen(["fashionmnist"], ["iid"], [10], ["asysg", "defedavg-iid"]))
    request = PaperRequest(folder=tmp_path, cells=wanted, seeds=range(2), rates="tuned", means=ComputeConfig())
    at_paper_rates = replace(request, rates="paper")
    own, paper, _ = at_paper_rates.cells_with_rates()
    assert at_paper_rates.carry_out(paper, own, "first") is True
    found, store, finished = request.cells_with_rates()
    assert finished is True
    assert [piece.cell for piece in found] == list(wanted)
    for piece in found:
        record = json.loads((TunedRates(store, paper)).path(piece.cell).read_text())
        points = {tuple(point["rates"]): point for point in record["points"]}
        assert len(points) == {"asysg": 6, "defedavg-iid": 10}[piece.cell.algorithm]
        assert points[piece.cell.rates]["known"] is True  # it was run before, and not again
        held = {pair: one["hit_seconds"] for pair, one in points.items() if one["hit_seconds"] is not None}
        assert held or piece.cell.algorithm == "asysg"
        assert not held or held[piece.rates] == min(held.values())
        # Whoever was dropped had not held the target by then, and was behind.
        for one in points.values():
            assert one["status"] in ("target", "dropped", "max_seconds", "diverged")
    assert request.carry_out(store, found, "tuned") is True
    for row in rows(store.results(found, range(2))):
        assert row["seeds"] == 2
    assert replace(request, show=True).tuned() == ({piece.cell: piece.rates for piece in found}, True)
    table = rates_rows({piece.cell: piece.rates for piece in found})
    assert len(rates_to_markdown(table).splitlines()) == 4
    tuned = TunedRates(store, paper)
    path = tuned.path(wanted[0])
    record = json.loads(path.read_text())
    given_up = {"limit": 0.5, "points": [{**point, "hit_seconds": None} for point in record["points"]]}
    path.write_text(json.dumps({**record, **given_up}), encoding="utf-8")
    assert list(tuned.known(wanted)) == [wanted[1]]  # the first would now be given more time
    assert list(tuned.known(wanted, any_limit=True)) == list(wanted)
    path.write_text("{half", encoding="utf-8")
    with pytest.raises(UserError, match="tuned again"):
        request.tuned()


def test_figures_are_drawn_from_what_is_there(small: None, tmp_path: Path) -> None:
    from defedavg.paper.figures import curves, figure1

    wanted = tuple(chosen(["fashionmnist"], ["iid"], None, ["defedavg-iid", "fedavg"]))
    request = PaperRequest(folder=tmp_path, cells=wanted, means=ComputeConfig())
    own, store, _ = request.cells_with_rates(10)
    request.carry_out(store, own, "figure 2")
    accuracy, loss = curves(store.results(own, range(1)), 2)
    assert [axes.get_title() for axes in accuracy.axes] == ["FashionMNIST, IID"]
    assert [axes.get_ylabel() for axes in loss.axes] == ["training loss"]
    assert accuracy.axes[0].get_xlabel() == "simulated seconds"
    own, store, _ = request.defedavg(6)
    assert [piece.cell.updates_per_round for piece in own] == [*FIGURE6_SIZES[1:], 5]
    request.carry_out(store, own, "figure 6")
    accuracy, _ = curves(store.results(own, range(1)), 6)
    assert [text.get_text() for text in accuracy.legends[0].get_texts()] == [f"n = {n}" for n in FIGURE6_SIZES]
    assert len({line.get_color() for line in accuracy.legends[0].get_lines()}) == len(FIGURE6_SIZES)
    assert accuracy.axes[0].get_xlabel() == "rounds"
    assert [piece.local_steps for piece in request.defedavg(7)[0]] == [20, 50, 100]
    with pytest.raises(UserError, match="nothing is left"):
        replace(request, cells=tuple(chosen(None, None, [20]))).cells_with_rates(10)
    assert [axes.get_title("left") for axes in figure1().axes] == ["FedAvg", "DeFedAvg-nIID", "DeFedAvg-IID"]


def entry(cell: Cell, **more: Any) -> dict[str, Any]:
    base = {
        "piece": asdict(Piece(cell, cell.rates)), "first_hit_seconds": None, "sustained_seconds": None,
        "diverged_at": None, "seconds": 900.0, "best_accuracy": 0.5,
    }  # fmt: skip
    return {**base, **more}


def test_rows_say_what_happened() -> None:
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
    held = rows([entry(cell, first_hit_seconds=1.0, sustained_seconds=own) for own in (20.0, 30.0)])
    assert "1 ± 0 (2/2) | 25 ± 7.1 (2/2)" in to_markdown(held)
    assert held[0]["note"] == ""
    far = rows([entry(cell, first_hit_seconds=900.0), entry(cell, first_hit_seconds=1120.0)])
    assert "1010 ± 160 (2/2)" in to_markdown(far)
    assert ">880" in text
    assert len(to_csv([ours, theirs]).splitlines()) == 3
    partly = rows([entry(cell, first_hit_seconds=20.0), entry(cell)])[0]
    assert partly["ratio"] is None  # a mean over the lucky seeds alone is no time to the target
    assert "not reached" in partly["note"]


def test_ranking_counts_a_seed_that_fails_as_endless_and_says_what_is_undecided() -> None:
    own, fedavg = Cell("cifar10", "iid", "defedavg-iid", 80), Cell("cifar10", "iid", "fedavg", 80)
    other = replace(own, algorithm="favano")

    def seeds(cell: Cell, *held: float | None, **more: Any) -> list[dict[str, Any]]:
        return [entry(cell, seed=seed, sustained_seconds=time, **more) for seed, time in enumerate(held)]

    results = [*seeds(own, 150.0, None, 90.0), *seeds(fedavg, 140.0, 170.0, None), *seeds(other, None, seconds=160.0)]
    (found,) = ranking(results)
    assert list(found["here"].items())[:2] == [("defedavg-iid", 150.0), ("fedavg", 170.0)]
    assert (found["first"], found["first_in"], found["seeds"], found["open"]) == ("defedavg-iid", 1, 3, [])
    text = ranking_to_markdown([found]).replace("\N{NO-BREAK SPACE}", " ")
    assert "defedavg-iid 150, fedavg 170, favano >160 |" in text
    assert "defedavg-iid 154, fedavg 288, favano >1400 | 1 of 3 seeds | yes |" in text
    # FAVANO was given up before FedAvg's time: it might have been the first.
    (found,) = ranking([*seeds(own, None, diverged_at=5), *seeds(fedavg, 170.0), *seeds(other, None, seconds=160.0)])
    assert (found["first"], found["paper_first"], found["open"]) == ("fedavg", "defedavg-iid", ["favano"])
    assert "defedavg-iid\N{NO-BREAK SPACE}diverged" in ranking_to_markdown([found])
    assert "1 of 1 seeds, unless favano is | no |" in ranking_to_markdown([found])
    (found,) = ranking([*seeds(own, None), *seeds(fedavg, None)])
    assert (found["first"], found["open"]) == (None, [])
    assert "| – | nobody holds it |" in ranking_to_markdown([found])
    assert ranking(seeds(own, 1.0)) == []  # alone


def test_the_commands(tmp_path: Path) -> None:
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
    assert "no result is there yet" in nothing.stderr
    drawn = call("paper", "figure1", "--out", tmp_path / "here", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "here/figures/figure1.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "here/figures/figure1.png").stat().st_size > 10_000


def test_commands_end_with_the_page_of_their_runs(small: None, tmp_path: Path) -> None:
    wanted = tuple(chosen(["fashionmnist"], None, [10], ["fedavg", "asysg"]))
    request = PaperRequest(folder=tmp_path / "results/paper", cells=wanted, means=ComputeConfig())
    own, store, _ = request.cells_with_rates()
    request.carry_out(store, own, "table 1")
    replace(request, rates="tuned", cells=wanted[:1]).tuned()

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
                for result in store.results(own, range(1))
                if (result["piece"]["cell"]["setting"], result["piece"]["cell"]["algorithm"])
                == (setting, series["name"].split()[0])
            ]
            assert run["x"]["seconds"] == pytest.approx(kept["curve"]["seconds"], rel=1e-5)
            assert run["accuracy"] == pytest.approx(kept["curve"]["accuracy"], rel=1e-4)
    assert len(page("figure2")["groups"]) == 2
    (tuned,) = page("table2")["groups"]
    assert tuned["title"] == wanted[0].label
    assert {s["name"] for s in tuned["series"]} >= {"η=1, η̄=0.1", "η=0.1, η̄=0.001"}


def test_results_in_the_repository_are_what_the_table_says() -> None:
    folder = Path(__file__).parents[2] / "results" / "paper"
    for name in ("table1", "table1-tuned"):
        store = ResultFiles(folder / name, Choices())
        tuned = TunedRates(store, ResultFiles(folder / "table1", Choices()))
        rates = {cell: cell.rates for cell in MANY} if name == "table1" else tuned.known(MANY, any_limit=True)
        results = store.results([Piece(cell, own) for cell, own in rates.items()], range(3))
        assert (folder / name / "table1.md").read_text(encoding="utf-8") == to_markdown(rows(results))
        assert (folder / name / "table1.csv").read_text(encoding="utf-8") == to_csv(rows(results))
        assert (folder / name / "ranking.md").read_text(encoding="utf-8") == ranking_to_markdown(ranking(results))


def test_the_documentation_has_the_tables_of_the_results() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "reproduction.md").read_text(encoding="utf-8")
    tables = [f"{kind}/{name}.md" for kind in ("table1", "table1-tuned") for name in ("table1", "ranking")]
    for name in (*tables, "table1-tuned/table2.md"):
        assert (root / "results" / "paper" / name).read_text(encoding="utf-8") in text
