"""A search for rates that is interrupted and resumed is the same as an uninterrupted one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import Event
from defedavg.experiments.search_standings import standing_to_json
from defedavg.experiments.tune import PairOutcome, Tuning, pairs_of
from defedavg.training import Trainer, TrainingJob
from helpers.command_line import call, refuse
from helpers.interrupted_studies import InterruptionError, ignore, interrupt_after
from helpers.rate_searches import (
    BASE,
    SMALL_BATCHES,
    finished_search,
    interrupted_search,
    results,
    search_in,
    small,
    two_settings,
)

REACHED = {"target_accuracy": 0.5, "max_rounds": 16, "eval_every_rounds": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_search(tmp_path_factory.mktemp("searches") / "whole", two_settings())


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


def test_paused_runs_pause_again_and_ended_ones_are_not_run_again(tmp_path: Path, whole: Path) -> None:
    chosen, expected = two_settings(), results(whole)
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


@pytest.fixture
def _sigint() -> Iterator[None]:
    """Handle SIGINT as Python does; a shell without job control lets its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
def test_ctrl_c_saves_the_search_when_the_batch_ends(tmp_path: Path) -> None:
    """The default interval of a minute has not passed, so that only Ctrl-C can have saved a checkpoint."""
    expected = results(finished_search(tmp_path / "whole", small()))
    notes: list[str] = []
    events: list[Event] = []

    def press(event: Event) -> None:
        events.append(event)
        if len(events) == 9:
            os.kill(os.getpid(), signal.SIGINT)

    assert not search_in(tmp_path / "part", small(), notify=notes.append).run(press)
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


@pytest.mark.usefixtures("_sigint")
def test_a_command_that_ctrl_c_stops_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(small().to_toml())
    monkeypatch.chdir(tmp_path)
    train, batches = Trainer.train, 0

    def press_once(trainer: Trainer, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        nonlocal batches
        batches += 1
        if batches == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return train(trainer, jobs)

    monkeypatch.setattr(Trainer, "train", press_once)
    words = ["tune", "small.toml", *GRID, "--max-batch-jobs", "4"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 130
    stopping, line = first.stderr.splitlines()[-2:]
    assert stopping.startswith("stopping when the current batch ends")
    assert line == "stopped by Ctrl-C; every evaluation so far is kept; continue with --resume"
    assert "winner" not in first.stdout
    second = CliRunner().invoke(app, [*words, "--resume"])
    assert second.exit_code == 0, second.output
    assert "no checkpoint" not in second.stderr
    whole = CliRunner().invoke(app, [*words, "--out", "whole"])
    assert second.stdout == whole.stdout.replace("whole/", "runs/")
    assert results(Path("runs/study-tune")) == results(Path("whole/study-tune"))


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
    (folder / "tuned.toml").unlink()  # the command names it
    assert search_in(folder, two_settings(), resume=True).run(ignore)
    assert results(folder) == before


def test_the_limits_of_batches_are_those_of_the_first_session(tmp_path: Path) -> None:
    chosen = small(seeds=[0, 1])
    expected = results(finished_search(tmp_path / "whole", chosen, compute=SMALL_BATCHES))
    interrupted_search(tmp_path / "part", chosen, 12, compute=SMALL_BATCHES)
    later = search_in(tmp_path / "part", chosen, compute=ComputeConfig(), resume=True)
    assert later.run(ignore)
    assert results(tmp_path / "part") == expected


@pytest.mark.parametrize("after", [5, 40])
def test_how_far_a_paused_run_is_does_not_depend_on_the_memory_of_the_later_session(tmp_path: Path, after: int) -> None:
    """A run pauses after the versions that are made together, and their number depends on the memory."""
    stop = {"target_accuracy": 0.7, "max_rounds": 40, "eval_every_rounds": 1}
    chosen = small(seeds=[0, 1], training={"updates_per_round": 1, "local_steps": 2}, stop=stop)
    little, free = ComputeConfig(max_batch_jobs=16, memory=2_500_000), ComputeConfig(max_batch_jobs=16)
    expected = results(finished_search(tmp_path / "whole", chosen, compute=little))
    interrupted_search(tmp_path / "part", chosen, after, compute=little)
    assert search_in(tmp_path / "part", chosen, compute=free, resume=True).run(ignore)
    assert results(tmp_path / "part") == expected
    assert results(finished_search(tmp_path / "free", chosen, compute=free)) != expected


@pytest.mark.parametrize("after", [3, 20])
def test_the_limits_of_batches_of_later_tasks_are_those_of_the_first_session(tmp_path: Path, after: int) -> None:
    """Every model has batches of its own, and a checkpoint has the limits of the present ones only."""
    stop = {"target_accuracy": 0.7, "max_rounds": 40, "eval_every_rounds": 1}
    training = {"updates_per_round": 1, "local_steps": 2}
    chosen = small(seeds=[0, 1], task={"model": ["softmax", "mlp"]}, training=training, stop=stop)
    first = ComputeConfig(max_batch_jobs=2)
    expected = results(finished_search(tmp_path / "whole", chosen, compute=first))
    interrupted_search(tmp_path / "part", chosen, after, compute=first)
    interrupted_search(tmp_path / "part", chosen, 2, compute=ComputeConfig(max_batch_jobs=64), resume=True)
    assert search_in(tmp_path / "part", chosen, compute=ComputeConfig(), resume=True).run(ignore)
    assert results(tmp_path / "part") == expected
