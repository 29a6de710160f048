"""Cells: computed once, resumed, recomputed with the same numbers, shown, and added by plugins."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.cli import main as cli
from defedavg.config.build import make_plan
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import Event, RunEvaluated, Watch
from defedavg.fileio import FolderLock
from defedavg.suite.benchmark import (
    FLEETS,
    SEEDS,
    TASKS,
    TUNING_SEED,
    SuiteCell,
    SuiteTask,
    reported_study,
    select_cells,
)
from defedavg.suite.cell_files import CellFiles, differences, read_cell, stored_cells
from defedavg.suite.leaderboard import boards, leaders_text, page, row
from defedavg.suite.suite_estimate import work_of
from defedavg.suite.suite_run import BatchStudy, SuiteRequest
from helpers.user_code import ALGORITHM
from helpers.user_errors import line_of

ROOT = Path(__file__).parents[2]
TINY = SuiteTask(
    "tiny", "a few digits", "mnist5k", "softmax", "iid", target=0.5, updates=80, seconds=2.0, phone_seconds=40_000.0,
    step_seconds=0.01, model_megabytes=0.03, local_steps=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", TINY)


def suite(*words: object) -> int:
    """Run a command of the suite; return its exit code."""
    return int(cli.app(["suite", *map(str, words)], standalone_mode=False) or 0)


def cell(algorithm: str, fleet: str = "paper") -> SuiteCell:
    return SuiteCell(TINY, FLEETS[fleet], algorithm)


def request(folder: Path, algorithms: Sequence[str], watch: Watch | None = None, **more: Any) -> SuiteRequest:
    @contextmanager
    def watching(_study: BatchStudy, _runs: int) -> Iterator[Watch]:
        yield watch or (lambda _event: None)

    cells = tuple(select_cells(["tiny"], ["paper"], algorithms))
    work = folder / "work"
    lines: list[str] = []
    return SuiteRequest(cells, CellFiles(folder / "out"), work, ComputeConfig(), lines.append, watching, **more)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells, computed without interruption in shared batches."""
    folder = tmp_path_factory.mktemp("computed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "tiny", TINY)
        asked = request(folder, ["fedavg", "fedbuff", "fedasync"])
        assert asked.run(asked.batches())
    return folder


def test_a_stored_cell_has_figures_plans_and_provenance(computed: Path) -> None:
    stored = read_cell(CellFiles(computed / "out").path(cell("fedbuff")))
    assert [run["seed"] for run in stored["runs"]] == list(SEEDS)
    assert {point["seed"] for point in stored["tuning"]["points"]} == {TUNING_SEED}
    assert len(stored["tuning"]["points"]) == 6
    assert {"command", "commit", "torch", "device", "processor", "started"} <= set(stored["provenance"])
    assert not {"host", "pid", "folder"} & set(stored["provenance"])
    rates = {"fedbuff": stored["rates"]}
    (point,) = reported_study([cell("fedbuff")], rates).points()
    for run in stored["runs"]:
        assert run["plan_sha256"] == make_plan(point.settings, run["seed"], run["rounds"]).hash()
        assert 0 <= run["worst_decile_accuracy"] <= run["mean_client_accuracy"] <= 1
        assert run["uplink_bytes"] > 0
    assert not (computed / "work").exists() or not list((computed / "work").iterdir())


def test_the_best_rates_held_the_target_soonest(computed: Path) -> None:
    stored = read_cell(CellFiles(computed / "out").path(cell("fedasync")))
    times = {
        point["local_lr"]: point["seconds_to_target"]
        for point in stored["tuning"]["points"]
        if point["seconds_to_target"] is not None
    }
    assert times[stored["rates"]["local_lr"]] == min(times.values())


def test_the_command_of_a_row_gives_the_same_numbers(computed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Computed alone, a cell has the figures that it had in a batch with others."""
    words = read_cell(CellFiles(computed / "out").path(cell("fedbuff")))["command"].split()
    assert words[:3] == ["defedavg", "suite", "check"]
    assert suite(*words[2:], "--out", computed / "out") == 0
    assert "every figure and every plan is the same" in capsys.readouterr().out


def test_a_check_finds_a_changed_figure(computed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = CellFiles(computed / "out")
    stored: Any = json.loads(files.path(cell("fedbuff")).read_text())
    assert differences(stored, stored) == []
    stored["runs"][1]["uplink_bytes"] += 1
    CellFiles(tmp_path).save(cell("fedbuff"), stored)
    assert suite("check", "--task", "tiny", "--fleet", "paper", "--algorithm", "fedbuff", "--out", tmp_path) == 1
    found = capsys.readouterr()
    assert "seed 1, uplink_bytes" in found.out
    assert "another machine" not in found.err
    stored["provenance"] |= {"device": "cuda", "torch": "0.1"}
    CellFiles(tmp_path).save(cell("fedbuff"), stored)
    assert suite("check", "--task", "tiny", "--fleet", "paper", "--algorithm", "fedbuff", "--out", tmp_path) == 1
    assert "another machine (device: cuda, here cpu, torch: 0.1, here " in capsys.readouterr().err


def test_a_finished_cell_is_not_computed_again(computed: Path) -> None:
    def fail(_event: Event) -> None:
        raise AssertionError("a stored cell was computed")

    again = request(computed, ["fedavg", "fedbuff", "fedasync"], fail)
    assert again.missing() == []
    assert again.run(again.batches())


def test_an_interrupted_batch_continues_and_gives_the_same_numbers(computed: Path, tmp_path: Path) -> None:
    names: list[str] = ["fedavg", "fedbuff"]
    counts: list[Event] = []

    def stop(event: Event) -> None:
        counts.append(event)
        if len(counts) >= 25 and isinstance(event, RunEvaluated):
            raise KeyboardInterrupt

    sessions = 0
    while not (asked := request(tmp_path, names, stop, checkpoint_interval=0.0)).run(asked.batches()):
        sessions += 1
        counts.clear()
        assert sessions < 50, "no progress"
    assert sessions > 2
    for name in names:
        paths = [CellFiles(folder / "out").path(cell(name)) for folder in (computed, tmp_path)]
        assert differences(*map(read_cell, paths)) == []


def test_a_smaller_selection_does_not_touch_a_batch_in_progress(tmp_path: Path) -> None:
    def stop(_event: Event) -> None:
        raise KeyboardInterrupt

    first = request(tmp_path, ["fedavg", "fedbuff"], stop)
    assert not first.run(first.batches())
    (begun,) = request(tmp_path, ["fedavg", "fedbuff", "fedasync"]).batches()[:1]
    assert [cell.algorithm for cell in begun.cells] == ["fedavg", "fedbuff"]
    assert begun.folder.exists()
    (other,) = request(tmp_path, ["fedavg"]).batches()
    assert [cell.algorithm for cell in other.cells] == ["fedavg"]
    assert not other.folder.exists()


def test_a_batch_of_another_process_is_left_to_it(tmp_path: Path) -> None:
    asked = request(tmp_path, ["fedavg"])
    (batch,) = asked.batches()
    with FolderLock(batch.folder / "tuning"):
        assert asked.run([batch])
    assert not asked.files.has(cell("fedavg"))


def test_the_planned_updates_are_those_that_are_trained(computed: Path) -> None:
    impossible = SuiteCell(replace(TINY, name="never", target=1.0), FLEETS["paper"], "fedavg")
    work = work_of(impossible)
    (point,) = reported_study([impossible], {"fedavg": {}}).points()
    short = make_plan(point.settings, TUNING_SEED, impossible.max_rounds // 2)
    whole = make_plan(point.settings, TUNING_SEED, impossible.max_rounds)
    trained = [sum(u.steps > 0 for r in plan.rounds for u, _ in r.merge.updates) for plan in (short, whole)]
    assert work.updates == 6 * trained[0] + 3 * trained[1]
    stored = read_cell(CellFiles(computed / "out").path(cell("fedavg")))
    assert sum(run["updates_trained"] for run in stored["runs"]) <= 3 * TINY.updates


def test_an_estimate_needs_no_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--task", "cifar10-dirichlet", "--fleet", "equal", "--algorithm", "fedavg", "--out", tmp_path)
    assert suite("estimate", *words, "--updates-per-second", 1900) == 0
    assert "1 cell, at most" in capsys.readouterr().err
    assert "above zero" in line_of(lambda: suite("estimate", *words, "--updates-per-second", 0))


def test_options_before_a_command_are_refused() -> None:
    assert "after the command" in line_of(lambda: suite("--quick", "show"))
    assert "after the command" in line_of(lambda: suite("--out", "elsewhere", "show"))


def test_a_missing_data_set_is_one_line_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFEDAVG_DATA", str(tmp_path / "nothing"))
    lines: list[str] = []
    cells = tuple(select_cells(["mnist-writers", "tiny"], ["equal"], ["fedavg"]))
    asked = SuiteRequest(
        cells, CellFiles(tmp_path), tmp_path, ComputeConfig(), lines.append, lambda _t, _n: nullcontext(print)
    )
    assert [cell.task.name for cell in asked.missing()] == ["tiny"]
    assert len(lines) == 1
    assert lines[0].startswith("left out 1 cell: ")
    assert "defedavg data fetch mnist-writers" in lines[0]


@pytest.mark.usefixtures("registry")
def test_a_plugin_file_adds_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin, out = tmp_path / "my.py", tmp_path / "out"
    plugin.write_text(ALGORITHM)
    words = ["--task", "tiny", "--fleet", "phones", "--algorithm", "mine", "--plugin", plugin, "--out", out]
    assert suite("run", *words, "--work", tmp_path / "work") == 0
    assert "cells to compute: 1" in capsys.readouterr().err
    assert suite("run", *words, "--work", tmp_path / "work") == 0
    assert "cells to compute: 0; already stored: 1" in capsys.readouterr().err
    assert suite("show", "--out", out) == 0
    assert "mine" in capsys.readouterr().out
    assert suite("check", *words) == 0
    assert suite("page", "--out", out, "-o", tmp_path / "page.md") == 0
    text = (tmp_path / "page.md").read_text()
    assert "`defedavg suite check --task tiny --fleet phones --algorithm mine --plugin my.py`" in text
    plugin.write_text(ALGORITHM.replace("any n updates", "any n of the updates"))
    (found,) = select_cells(["tiny"], ["phones"], ["mine"])
    from defedavg.plugins import plugin_hashes

    assert not CellFiles(out, plugin_hashes([plugin])).has(found)  # the code has changed


def test_a_plugin_file_that_cannot_be_read_is_a_note_of_its_row_alone(
    computed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(computed / "out", "out")
    path = CellFiles(Path("out")).path(cell("fedbuff"))
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "command": f"{stored['command']} --plugin my.py", "plugins": ["0" * 64]}))
    Path("my.py").write_bytes(b"\xff\xfe\x00 no text")
    cells, (note,) = stored_cells(Path("out"))
    assert {each["algorithm"] for each in cells} == {"fedavg", "fedbuff", "fedasync"}
    assert note.startswith(f"{path}: ")
    assert "my.py cannot be read: " in note
    assert "so it is not known whether its row is current" in note


@pytest.mark.usefixtures("registry")
def test_a_row_of_a_plugin_that_changed_is_left_out_with_the_command_that_computes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = Path("parts/my.py")
    plugin.parent.mkdir()
    plugin.write_text(ALGORITHM)
    words = ["--task", "tiny", "--fleet", "phones", "--algorithm", "mine", "--plugin", plugin]
    assert suite("run", *words) == 0
    assert suite("page") == 0
    rows = [line for line in Path("leaderboard.md").read_text().splitlines() if line.startswith("| mine |")]
    row = rows[-1]  # the first is that of the table of all algorithms
    (digest,) = read_cell(Path("results/suite/tiny/phones/mine.json"))["plugins"]
    assert f"parts/my.py {digest[:8]} | `defedavg suite check " in row
    capsys.readouterr()
    plugin.write_text(ALGORITHM.replace("any n updates", "any n of the updates"))
    cells, (note,) = stored_cells(Path("results/suite"))
    assert cells == []
    assert "mine.json is left out: parts/my.py has changed; `defedavg suite run " in note
    command = note.split("`")[1]
    assert suite("show") == 0
    shown = capsys.readouterr()
    assert "mine" not in shown.out
    assert "computes it again" in shown.err
    assert suite(*shlex.split(command)[2:]) == 0
    assert [each["algorithm"] for each in stored_cells(Path("results/suite"))[0]] == ["mine"]
    plugin.unlink()
    cells, (note,) = stored_cells(Path("results/suite"))
    assert len(cells) == 1
    assert "parts/my.py is not in this folder, so it is not known whether its row is current" in note


def test_without_results_the_quick_part_is_named_only_for_tasks_that_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none"
    assert suite("show", "--out", out) == 0
    assert f"`defedavg suite --quick --out {out}` computes the first ones" in capsys.readouterr().err
    assert suite("show", "--out", out, "--task", "flights", "--fleet", "equal") == 0
    line = capsys.readouterr().err
    assert "--quick" not in line
    assert f"`defedavg suite run --task flights --fleet equal --out {out}` computes them" in line


@pytest.mark.parametrize("command", ["page", "findings"])
def test_a_folder_without_results_has_neither_page_nor_findings(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/leaderboard.md").write_text("as it was")
    first = "`defedavg suite --quick --out results/suit` computes the first ones"
    line = line_of(lambda: suite(command, "--out", "results/suit"))
    assert line == f"there are no results in results/suit; correct --out; {first}"
    line = line_of(lambda: suite(command))
    assert line == "there are no results in results/suite; `defedavg suite --quick` computes the first ones"
    assert Path("docs/leaderboard.md").read_text() == "as it was"


@pytest.mark.parametrize(("place", "page"), [(".", "leaderboard.md"), ("docs", "docs/leaderboard.md")])
def test_a_folder_is_no_file_for_the_page(
    computed: Path, place: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    line = line_of(lambda: suite("page", "--out", computed / "out", "-o", place))
    assert line == f"{place} is a folder; name a file, such as {page}"
    assert list(Path("docs").iterdir()) == []


def test_an_estimate_says_how_many_cells_are_stored(computed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "--task", "tiny", "--fleet", "paper", "--out", computed / "out", "--updates-per-second", 9)
    assert suite(*words, "--algorithm", "fedavg") == 0
    assert capsys.readouterr().err == "cells to compute: 0; already stored: 1\n"
    assert suite(*words, "--algorithm", "fedavg", "--algorithm", "quafl") == 0
    counts, *_, total = capsys.readouterr().err.splitlines()
    assert counts == "cells to compute: 1; already stored: 1"
    assert total.startswith("1 cell, at most ")


def test_the_page_of_a_folder_without_documentation_is_written_beside_the_results(
    computed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(computed / "out", "results/suite")
    assert suite("page") == 0
    assert Path("leaderboard.md").read_text().startswith("---")
    assert not Path("docs").exists()
    line = line_of(lambda: suite("page", "-o", "none/page.md"))
    assert line == "the folder none of --output does not exist; create it, or give another --output"
    Path("docs").mkdir()
    Path("docs/leaderboard.md").touch()
    Path("leaderboard.md").unlink()
    assert suite("page") == 0
    assert Path("docs/leaderboard.md").read_text()
    assert not Path("leaderboard.md").exists()


def test_damaged_and_outdated_files_are_named(computed: Path, tmp_path: Path) -> None:
    files = CellFiles(tmp_path)
    stored: Any = json.loads(CellFiles(computed / "out").path(cell("fedavg")).read_text())
    path = files.save(cell("fedavg"), stored)
    assert stored_cells(tmp_path)[1] == []
    damage: dict[str, Any] = {"rates": {"local_lr": "x"}, "runs": [], "tuning": None, "format": 3, "command": None}
    damage["plugins"] = "x"
    for name, value in damage.items():
        path.write_text(json.dumps({**stored, name: value}))
        assert "delete it" in line_of(lambda: files.has(cell("fedavg")))
        assert len(stored_cells(tmp_path)[1]) == 1
    path.write_text("[" * 100_000)
    assert "delete it" in line_of(lambda: read_cell(path))
    path.write_text(json.dumps({**stored, "settings_sha256": "0" * 64}))
    assert not files.has(cell("fedavg"))
    assert stored_cells(tmp_path)[0] == []
    assert "other settings" in stored_cells(tmp_path)[1][0]


def test_rows_are_ranked_and_say_what_was_not_reached(computed: Path) -> None:
    cells = stored_cells(computed / "out")[0]
    (board,) = boards(cells)
    times = [[run["seconds_to_target"] for run in stored["runs"]] for stored in board.cells]
    hits = [sum(value is not None for value in each) for each in times]
    assert hits == sorted(hits, reverse=True)
    missed = {**cells[0], "runs": [{**run, "seconds_to_target": None} for run in cells[0]["runs"]]}
    assert row(missed)[1] == "not reached"
    bad = [{**run, "diverged_at": 3} for run in missed["runs"]]
    assert row({**missed, "runs": bad})[1] == "not reached, 3 diverged"
    assert boards([missed, *cells[1:]])[0].cells[-1] is missed


def test_the_page_begins_with_the_fastest(computed: Path) -> None:
    cells = stored_cells(computed / "out")[0]
    (board,) = boards(cells)
    (line,) = [line for line in page(cells).splitlines() if line.startswith("| tiny | paper |")]
    assert f"| {leaders_text(board)} |" in line
    assert line.split(" | ")[2].startswith(board.cells[0]["algorithm"])
    assert "of 3 algorithms" in line
    assert "of 18 |" in line


# The results of this repository.


def test_the_page_is_what_the_stored_results_say() -> None:
    cells, notes = stored_cells(ROOT / "results" / "suite")
    assert notes == []
    assert cells
    assert (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8") == page(cells)


def test_stored_plans_are_those_of_this_code() -> None:
    for stored in stored_cells(ROOT / "results" / "suite")[0][::17]:
        found = SuiteCell(TASKS[stored["task"]], FLEETS[stored["fleet"]], stored["algorithm"])
        (point,) = reported_study([found], {found.algorithm: stored["rates"]}).points()
        run = stored["runs"][0]
        assert make_plan(point.settings, run["seed"], run["rounds"]).hash() == run["plan_sha256"], found.label
