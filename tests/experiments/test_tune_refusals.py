"""Resuming a search for rates: other options, damaged files and other folders are refused in one line, unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from defedavg.errors import UserError
from defedavg.experiments.checkpointing import FORMAT, CheckpointDir
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.tune import pairs_of
from helpers.interrupted_studies import ignore, interrupted, refuses
from helpers.rate_searches import finished_search, interrupted_search, search_in, small


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished search, which no test changes."""
    folder = tmp_path_factory.mktemp("stopped") / "search"
    interrupted_search(folder, small(), 12)
    return folder


@pytest.fixture
def unfinished(tmp_path: Path, stopped: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "search"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_search(tmp_path_factory.mktemp("finished") / "search", small())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"rates": ((1.0,), (0.001, 0.05))}, r"--local-rates 0\.001,0\.05,0\.1 → 0\.001,0\.05\)"),
        ({"rates": ((0.5, 1.0), (0.001, 0.05, 0.1))}, r"--global-rates 1\.0 → 0\.5,1\.0\)"),
        ({"rungs": ()}, r"pairs dropped at shares .* → pairs dropped never \(--keep-all\)"),
        ({"compute": ComputeConfig("reference")}, "started with --executor batched"),
    ],
)
def test_other_options_are_refused(unfinished: Path, options: dict[str, Any], line: str) -> None:
    with refuses(unfinished, line):
        search_in(unfinished, small(), **options, resume=True)
    if "compute" not in options:
        (unfinished / "summary.json").unlink()  # the checkpoint knows by itself
        with refuses(unfinished, line):
            search_in(unfinished, small(), **options, resume=True)


def test_another_study_and_contradictory_options_are_refused(unfinished: Path) -> None:
    with refuses(unfinished, r"another study \(seeds: \[0\] → \[1\]\)"):
        search_in(unfinished, small(seeds=[1]), resume=True)
    with refuses(unfinished, "--force starts again and --resume continues"):
        search_in(unfinished, small(), resume=True, force=True)


def test_the_folder_of_a_run_is_no_search_and_the_other_way_round(tmp_path: Path, unfinished: Path) -> None:
    folder = interrupted(tmp_path / "run", small(), 5)
    with refuses(folder, "holds no search for learning rates"):
        search_in(folder, small(), resume=True)
    with refuses(unfinished, "holds a search for learning rates.*tune --resume"):
        StudyRun(small(), unfinished, resume=True)
    shutil.copytree(folder / "checkpoints", unfinished / "checkpoints", dirs_exist_ok=True)
    for path in CheckpointDir(unfinished / "checkpoints").paths():
        shutil.copy(CheckpointDir(folder / "checkpoints").paths()[0], path)
    with refuses(unfinished, "the checkpoint in .* is not valid"):
        search_in(unfinished, small(), resume=True)
    foreign = tmp_path / "other"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something other"):
        search_in(foreign, small(), resume=True)


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state in the newest checkpoint and give it a correct checksum."""
    directory = CheckpointDir(folder / "checkpoints")
    newest = directory.newest()
    assert newest is not None
    state, tensors = newest
    change(state)
    directory.save(state, tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "interrupted"),
        ("status", "won"),
        ("status", "target"),
        ("status", "max_rounds"),  # but it has a state
        ("status", ["running"]),
        ("hit_seconds", 1.0),
        ("seconds", None),
        ("seconds", -1.0),
        ("seconds", "1"),
        ("rounds", 1.5),
        ("rounds", True),
        ("best_accuracy", []),
        ("diverged_at", -1),
        ("passed", -1),
        ("passed", 7),
        ("passed", None),
        ("held", 1),
        ("last_miss", "now"),
        pytest.param("last_miss", 10**400, id="last_miss-too-large"),
    ],
)
def test_a_state_that_no_search_has_is_refused(unfinished: Path, field: str, value: Any) -> None:
    _edit(unfinished, lambda state: state["search"]["runs"][-1].update({field: value}))
    with refuses(unfinished, "the checkpoint in .* is not valid; start again with --force"):
        search_in(unfinished, small(), resume=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["search"]["runs"].pop(),
        lambda state: state["search"]["runs"].append(None),
        lambda state: state["search"].update(runs={}),
        lambda state: state["search"].pop("runs"),
        lambda state: state["search"].pop("options"),
        lambda state: state["search"].update(options=[]),
        lambda state: state["search"].pop("max_batch_jobs"),
        lambda state: state["search"].update(max_batch_jobs=0),
        lambda state: state["search"].update(max_batch_jobs="4"),
        lambda state: state["search"]["options"].update(rungs="0.5"),
        lambda state: state["search"]["options"].update(rungs=[None]),
        lambda state: state.update(search=[]),
        lambda state: state.update(search="none"),
        lambda state: state.pop("search"),
        lambda state: state.update(open=[]),
        lambda state: state["open"][0].update(number=3),
        lambda state: state["open"][0].update(number=-1),
        lambda state: state["open"][0]["tally"].update(staleness=7),
        lambda state: state["open"][0]["tally"].update(staleness=["7"]),
        lambda state: state["open"][0]["tally"].update(updates=[1]),
        lambda state: state["open"][0]["tally"].update(newest=[-2.5, 0.1]),
        lambda state: state["open"][0]["tally"].update(newest=[2, 10**400]),
        lambda state: state["open"][0]["tally"].update(wall_seconds=None),
        lambda state: state["open"][0].update(first_hit_seconds="soon"),
        lambda state: state["open"][0].update(updates_trained=-1),
        lambda state: state["metrics"].update(size=[None]),
        lambda state: state["metrics"].update(size=-1),
        lambda state: state.update(fit=[0, 0]),
        lambda state: state.update(fit=[4, "4"]),
    ],
)
def test_a_damaged_state_is_refused(unfinished: Path, change: Callable[[dict[str, Any]], object]) -> None:
    _edit(unfinished, change)
    with refuses(unfinished, "the checkpoint in .* is not valid; start again with --force"):
        search_in(unfinished, small(), resume=True)


@pytest.mark.parametrize(("place", "value"), [(0, 20), (2, 10**17)])
def test_an_update_that_no_run_has_is_refused(unfinished: Path, place: int, value: int) -> None:
    """Of a client or a version that does not exist."""

    def change(state: dict[str, Any]) -> None:
        waiting = next(run["waiting"] for run in state["open"] if run["waiting"])
        waiting[0][place] = value

    _edit(unfinished, change)
    with pytest.raises(UserError, match="updates that this run does not have; start again with --force"):
        search_in(unfinished, small(), resume=True).run(ignore)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"size": ' + "9" * 5000 + "}", "[]"])
def test_a_state_that_is_not_a_json_object_is_damage(unfinished: Path, text: str) -> None:
    for path in CheckpointDir(unfinished / "checkpoints").paths():
        header = {"format": FORMAT, "format_version": "1", "state": text, "sha256": sha256(text.encode()).hexdigest()}
        save_file({}, path, header)
    with refuses(unfinished, r"no checkpoint can be used \(.*: the state is not .*JSON.*\); start again with --force"):
        search_in(unfinished, small(), resume=True)


def test_damaged_files_are_refused(unfinished: Path) -> None:
    metrics = unfinished / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace("fedbuff", "fedBUFF", 1))
    with refuses(unfinished, r"metrics\.jsonl has changed"):
        search_in(unfinished, small(), resume=True)
    metrics.write_text(text)
    for summary in ("", "[]", '{"finished": false}', "[" * 100_000):
        (unfinished / "summary.json").write_text(summary)
        with refuses(unfinished, r"summary\.json does not say how the search was started; start again with --force"):
            search_in(unfinished, small(), resume=True)
    (unfinished / "summary.json").unlink()
    for path in (unfinished / "checkpoints").iterdir():
        path.write_bytes(b"nothing")
    with refuses(unfinished, r"no checkpoint can be used.*--force"):
        search_in(unfinished, small(), resume=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "running"),
        ("status", None),
        ("label", "another"),
        ("local_lr", 0.2),
        ("seed", 1),
        ("seconds", "5"),
        ("rounds", -1),
        ("best_accuracy", {}),
    ],
)
def test_a_finished_search_with_damaged_results_is_refused(
    tmp_path: Path, finished: Path, field: str, value: Any
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "search"))
    path = folder / "points.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(first), field: value}) + "\n", *others]))
    with refuses(folder, r"points\.jsonl is not valid; start again with --force"):
        search_in(folder, small(), resume=True)
    path.write_text("".join(others))
    with refuses(folder, r"points\.jsonl is not valid"):
        search_in(folder, small(), resume=True)


def test_rates_with_equal_labels_are_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        pairs_of(small().points(), (1.0,), (0.1234567, 0.1234568))
