"""A run of the paper that was interrupted continues from its checkpoint, and ends as if it had not been."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.config.settings import Settings
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import Event, RunEvaluated
from defedavg.paper.result_files import ResultFiles, compute_runs
from defedavg.paper.run_checkpoints import FOLDER
from defedavg.paper.run_grid import Choices, PaperRun
from helpers.paper_runs import quiet, small_runs, small_settings, stored

SEEDS = (0, 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "settings", small_settings)


def outcomes(store: ResultFiles, runs: list[PaperRun]) -> list[dict[str, Any]]:
    """Return the results without the real time and the work past the end, which depends on the runs in a batch."""
    found = [dict(result) for result in store.results(runs, SEEDS)]
    return [{k: v for k, v in result.items() if k not in ("wall_seconds", "updates_trained")} for result in found]


def interrupted(store: ResultFiles, runs: list[PaperRun], rounds: int, compute: ComputeConfig | None = None) -> None:
    """Compute runs and stop when one has merged some rounds; every state before is in a checkpoint."""

    def stop(event: Event) -> None:
        if isinstance(event, RunEvaluated) and event.evaluation.round >= rounds:
            raise KeyboardInterrupt

    missing = stored(store, store.missing(runs, SEEDS))
    assert compute_runs(missing, compute or ComputeConfig(), stop, checkpoint_interval=0.0) is False


def continued(
    store: ResultFiles, runs: list[PaperRun], compute: ComputeConfig | None = None
) -> tuple[list[str], dict[tuple[str, int], int]]:
    """Compute the missing runs; return the notes and, by run and seed, the first round that was evaluated."""
    notes, first = list[str](), dict[tuple[str, int], int]()

    def watch(event: Event) -> None:
        if isinstance(event, RunEvaluated):
            first.setdefault((event.spec.label, event.spec.seed), event.evaluation.round)

    assert compute_runs(stored(store, store.missing(runs, SEEDS)), compute or ComputeConfig(), watch, notes.append)
    return notes, first


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "settings", small_settings)
        store = ResultFiles(tmp_path_factory.mktemp("whole"), Choices())
        compute_runs(stored(store, store.missing(small_runs(), SEEDS)), ComputeConfig(), quiet)
        assert not (store.folder / FOLDER).exists()
        return outcomes(store, small_runs())


def test_interrupted_runs_end_as_if_they_had_not_been(whole: list[dict[str, Any]], tmp_path: Path) -> None:
    runs, store = small_runs(), ResultFiles(tmp_path, Choices())
    interrupted(store, runs, 8)
    interrupted(store, runs, 12)
    in_progress = len(list((tmp_path / FOLDER).iterdir()))
    assert in_progress > 1
    notes, first = continued(store, runs)
    assert sum(each > 0 for each in first.values()) == in_progress
    assert notes == [f"runs continued from checkpoints: {in_progress}"]
    assert outcomes(store, runs) == whole
    assert not (tmp_path / FOLDER).exists()


def test_ctrl_c_saves_runs_whatever_the_interval_is(whole: list[dict[str, Any]], tmp_path: Path) -> None:
    """The default interval of a minute has not passed."""
    runs, store = small_runs(), ResultFiles(tmp_path, Choices())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(event: Event) -> None:
        if isinstance(event, RunEvaluated) and event.evaluation.round >= 8:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        assert compute_runs(stored(store, store.missing(runs, SEEDS)), ComputeConfig(), press) is False
    finally:
        signal.signal(signal.SIGINT, before)
    in_progress = len(list((tmp_path / FOLDER).iterdir()))
    _, first = continued(store, runs)
    assert sum(each > 0 for each in first.values()) == in_progress > 0
    assert outcomes(store, runs) == whole


def test_a_later_command_may_select_other_runs(whole: list[dict[str, Any]], tmp_path: Path) -> None:
    runs, store = small_runs(), ResultFiles(tmp_path, Choices())
    interrupted(store, runs, 8)
    rounds: dict[tuple[str, int], int] = {}
    for run in reversed(runs):
        _, first = continued(store, [run])
        rounds |= first
    assert len(rounds) == len(runs) * len(SEEDS)
    assert any(each > 0 for each in rounds.values())
    assert outcomes(store, runs) == whole
    assert not (tmp_path / FOLDER).exists()


def test_the_reference_executor_continues_too(tmp_path: Path) -> None:
    (run,) = small_runs("fedavg")
    compute, plain = ComputeConfig(executor="reference"), ResultFiles(tmp_path / "plain", Choices())
    compute_runs(stored(plain, plain.missing([run], SEEDS)), compute, quiet)
    store = ResultFiles(tmp_path / "stopped", Choices())
    interrupted(store, [run], 4, compute)
    notes, _ = continued(store, [run], compute)
    assert notes == ["runs continued from checkpoints: 1"]
    assert outcomes(store, [run]) == outcomes(plain, [run])


@pytest.mark.parametrize("fault", ["damaged", "options", "settings"])
def test_a_checkpoint_that_does_not_fit_is_not_used(
    fault: str, whole: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = small_runs("fedavg")
    store = ResultFiles(tmp_path, Choices())
    interrupted(store, [run], 3, ComputeConfig(executor="reference") if fault == "options" else None)
    paths = sorted((tmp_path / FOLDER).iterdir())
    if fault == "damaged":
        content = paths[0].read_bytes()
        paths[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "settings":
        monkeypatch.setattr(Choices, "settings", lambda choices, each: _other(small_settings(choices, each)))
    notes, first = continued(store, [run])
    reasons = {
        "damaged": "its checkpoint is damaged (its checksum is wrong)",
        "options": "its checkpoint was made with --executor reference --device cpu --precision float32",
        "settings": "its checkpoint was made with other settings",
    }
    assert f"{run.label} seed 0 starts from the beginning: {reasons[fault]}" in notes
    assert first[run.label, 0] == 0
    if fault != "settings":
        assert outcomes(store, [run]) == [each for each in whole if each["piece"]["cell"]["algorithm"] == "fedavg"]
    assert not (tmp_path / FOLDER).exists()


def _other(settings: Settings) -> Settings:
    return replace(settings, training=replace(settings.training, local_steps=6))
