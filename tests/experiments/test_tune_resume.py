"""A search for rates that is interrupted and resumed is the same as an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.checkpointing import CheckpointDir
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import Event
from defedavg.experiments.search_standings import standing_to_json
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.tune import PairOutcome, Tuning, pairs_of
from helpers.command_line import call, refuse
from helpers.interrupted_studies import InterruptionError, ignore, interrupt_after, interrupted, refuses
from helpers.rate_searches import (
    BASE,
    SMALL_BATCHES,
    finished_search,
    interrupted_search,
    results,
    search_in,
    study,
)

TRAINING = {"updates_per_round": 4, "local_steps": 2}
STOP = {"target_accuracy": 0.8, "max_rounds": 16, "eval_every_rounds": 2}
REACHED = {"target_accuracy": 0.5, "max_rounds": 16, "eval_every_rounds": 1}


def small(**more: Any) -> config.Study:
    return study(**{"algorithms": ["fedbuff"], "seeds": [0], "training": TRAINING, "stop": STOP, **more})


def two_settings() -> config.Study:
    return small(algorithms=["fedavg", "fedbuff"], seeds=[0, 1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_search(tmp_path_factory.mktemp("searches") / "whole", two_settings())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished search, which no test changes."""
    folder = tmp_path_factory.mktemp("stopped") / "search"
    interrupted_search(folder, small(), 12)
    return folder


@pytest.fixture
def unfinished(tmp_path: Path, stopped: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "search"))


@pytest.mark.parametrize("after", [1, 8, 21, 30, 39, 48, 60])
def test_a_search_interrupted_anywhere_ends_like_an_uninterrupted_one(tmp_path: Path, whole: Path, after: int) -> None:
    folder = tmp_path / "search"
    standings = interrupted_search(folder, two_settings(), after)
    resumed = search_in(folder, two_settings(), resume=True)
    assert [standing_to_json(each) for each in resumed.tuning.standings()] == standings
    assert not resumed.tuning.sweep.notes
    assert resumed.run(ignore)
    assert results(folder) == results(whole)
    assert not (folder / "checkpoints").exists()


def test_a_search_is_interrupted_several_times(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "search"
    for number in range(4):
        interrupted_search(folder, two_settings(), 14, resume=number > 0)
    assert search_in(folder, two_settings(), resume=True).run(ignore)
    assert results(folder) == results(whole)


def test_paused_runs_pause_again_and_ended_ones_are_not_run_again(tmp_path: Path) -> None:
    chosen = small(algorithms=["fedavg", "fedbuff"], seeds=[0, 1])
    expected = results(finished_search(tmp_path / "whole", chosen))
    found: set[str] = set()
    for after in range(10, 66, 7):
        folder = tmp_path / f"after-{after}"
        standings = interrupted_search(folder, chosen, after)
        resumed = search_in(folder, chosen, resume=True)
        ended = {spec for spec, one in zip(resumed.tuning.specs, standings, strict=True) if one["status"] != "running"}
        paused = [one for one in standings if one["held"]]
        found |= {one["status"] for one in standings} | ({"paused"} if paused else set())
        seen: list[Event] = []
        assert resumed.run(seen.append)
        assert not ended & {event.spec for event in seen}
        assert results(folder) == expected
    assert {"paused", "dropped", "running"} < found


@pytest.mark.parametrize("after", [9, 10])
def test_a_run_is_dropped_before_the_checkpoint_and_ends_after_it(tmp_path: Path, after: int) -> None:
    """The pair that diverges is the last one that the others wait for: one of them is dropped, and ends later."""
    stop = {"target_accuracy": 0.8, "max_rounds": 12, "eval_every_rounds": 3}
    chosen = small(task={"model": "mlp"}, training=BASE["training"], stop=stop)
    options: dict[str, Any] = {"rates": ((1.0,), (0.001, 0.05, 0.1, 1e30)), "rungs": (0.25, 0.5)}
    options["compute"] = ComputeConfig(max_batch_jobs=64)
    expected = results(finished_search(tmp_path / "whole", chosen, **options))
    standings = interrupted_search(tmp_path / "part", chosen, after, **options)
    assert [one["status"] for one in standings] == ["dropped", "running", "running", "diverged"]
    assert standings[0]["passed"] == 1  # of two: its end was not yet reported
    assert standings[0]["rounds"] == 4  # one more than were evaluated
    assert search_in(tmp_path / "part", chosen, **options, resume=True).run(ignore)
    assert results(tmp_path / "part") == expected


@pytest.mark.parametrize("after", [5, 19])
def test_a_search_of_the_reference_executor_is_resumed(tmp_path: Path, after: int) -> None:
    options: dict[str, Any] = {"compute": ComputeConfig("reference")}
    expected = results(finished_search(tmp_path / "whole", small(), **options))
    interrupted_search(tmp_path / "part", small(), after, **options)
    assert search_in(tmp_path / "part", small(), **options, resume=True).run(ignore)
    assert results(tmp_path / "part") == expected


def test_settings_that_were_decided_are_not_decided_again() -> None:
    chosen = small(algorithms=["fedavg", "fedbuff"])
    pairs = pairs_of(chosen.points(), (1.0,), (0.05, 0.1))
    decided: list[set[str]] = []

    def search() -> Tuning:
        return Tuning(
            pairs, chosen.seeds, ComputeConfig(), (),
            decided=lambda rivals: decided.append({pair.point.settings.algorithm for pair in rivals}),
        )  # fmt: skip

    first = search()
    assert first.run(ignore)
    assert len(decided) == 2
    standings = [
        standing if spec.settings.algorithm == "fedavg" else type(standing)(PairOutcome())
        for spec, standing in zip(first.specs, first.standings(), strict=True)
    ]
    decided.clear()
    again = search()
    again.resume(standings, {}, None)
    assert again.run(ignore)
    assert decided == [{"fedbuff"}]
    assert again.outcomes == first.outcomes


def test_ctrl_c_saves_the_search_when_the_batch_ends(tmp_path: Path) -> None:
    """The default interval of a minute has not passed, so that only Ctrl-C can have saved a checkpoint."""
    expected = results(finished_search(tmp_path / "whole", small()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    notes: list[str] = []
    events: list[Event] = []

    def press(event: Event) -> None:
        events.append(event)
        if len(events) == 9:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        assert not search_in(tmp_path / "part", small(), notify=notes.append).run(press)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(notes) == 1
    assert '"interrupted"' in (tmp_path / "part" / "points.jsonl").read_text()
    with pytest.raises(UserError, match="continue it with --resume"):
        search_in(tmp_path / "part", small())
    later: list[Event] = []
    assert search_in(tmp_path / "part", small(), resume=True).run(later.append)
    assert results(tmp_path / "part") == expected
    assert 0 not in {event.evaluation.round for event in later if hasattr(event, "evaluation")}


def test_a_search_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    expected = results(finished_search(tmp_path / "whole", small()))
    with pytest.raises(InterruptionError):
        search_in(tmp_path / "part", small(), checkpoint_interval=float("inf")).run(interrupt_after(9))
    resumed = search_in(tmp_path / "part", small(), resume=True)
    assert resumed.tuning.sweep.notes == ["there is no checkpoint yet, so the search starts from the beginning"]
    assert resumed.run(ignore)
    assert results(tmp_path / "part") == expected


# The command.

GRID = ("--global-rates", "1", "--local-rates", "0.05,0.1", "--device", "cpu")


def test_the_command_can_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(small(stop=REACHED).to_toml())
    words = ("tune", "small.toml", *GRID, "--resume")
    first = call(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "winner: " in first.stdout
    folder = tmp_path / "runs" / "study-tune"
    before = results(folder)
    again = call(*words, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert results(folder) == before
    refuse(call(*words, "--keep-all", cwd=tmp_path), "pairs dropped at shares", "never (--keep-all)")
    refuse(call(*words, "--force", cwd=tmp_path), "--force starts again and --resume continues")
    refuse(call(*words[:-1], "--checkpoint-every", "-1", cwd=tmp_path), "--checkpoint-every")
    refuse(
        call("run", "small.toml", "--set", "name=study-tune", "--resume", cwd=tmp_path),
        "holds a search",
        "tune --resume",
    )


def test_a_finished_search_trains_nothing(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "search"))
    (folder / "checkpoints").mkdir()  # killed before it was removed
    before, seen = results(folder), list[Event]()
    resumed = search_in(folder, two_settings(), resume=True)
    assert resumed.run(seen.append)
    assert seen == []
    assert results(folder) == before
    assert [decision.winner.label for decision in resumed.decisions]
    assert not (folder / "checkpoints").exists()


# What is refused, in one line and without a change.


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
        lambda state: state["search"]["options"].update(rungs="0.5"),
        lambda state: state["search"]["options"].update(rungs=[None]),
        lambda state: state.update(search=[]),
        lambda state: state.update(search="none"),
        lambda state: state.pop("search"),
        lambda state: state.update(open=[]),
        lambda state: state["open"][0].update(number=3),
        lambda state: state["open"][0].update(number=-1),
    ],
)
def test_a_damaged_state_is_refused(unfinished: Path, change: Callable[[dict[str, Any]], object]) -> None:
    _edit(unfinished, change)
    with refuses(unfinished, "the checkpoint in .* is not valid; start again with --force"):
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
def test_a_finished_search_with_damaged_results_is_refused(tmp_path: Path, whole: Path, field: str, value: Any) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "search"))
    path = folder / "points.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(first), field: value}) + "\n", *others]))
    with refuses(folder, r"points\.jsonl is not valid; start again with --force"):
        search_in(folder, two_settings(), resume=True)
    path.write_text("".join(others))
    with refuses(folder, r"points\.jsonl is not valid"):
        search_in(folder, two_settings(), resume=True)


def test_rates_with_equal_labels_are_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        pairs_of(small().points(), (1.0,), (0.1234567, 0.1234568))


def test_the_limits_of_batches_are_those_of_the_first_session(tmp_path: Path) -> None:
    chosen = small(seeds=[0, 1])
    expected = results(finished_search(tmp_path / "whole", chosen, compute=SMALL_BATCHES))
    interrupted_search(tmp_path / "part", chosen, 12, compute=SMALL_BATCHES)
    later = search_in(tmp_path / "part", chosen, compute=ComputeConfig(), resume=True)
    assert later.run(ignore)
    assert results(tmp_path / "part") == expected
