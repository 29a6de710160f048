"""Ctrl-C saves the runs in progress, whatever the interval of checkpoints is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

from defedavg.errors import UserError
from defedavg.experiments import deferred_stop
from defedavg.experiments.checkpointing import CheckpointDir
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.deferred_stop import DeferredStop
from defedavg.experiments.run_events import Event
from defedavg.experiments.study_run import StudyRun
from defedavg.training import Trainer, TrainingJob
from helpers.interrupted_studies import assert_same, ignore, study, uninterrupted


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    """Handle SIGINT as Python does; a shell without job control lets its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_is_a_request_and_a_later_one_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    with DeferredStop(notes.append) as stop:
        stop.stop_if_requested()
        press()
        assert stop.requested
        assert "Ctrl-C again" in notes[0]
        with pytest.raises(KeyboardInterrupt):
            stop.stop_if_requested()
        press()  # one that follows at once belongs to the first
        monkeypatch.setattr(deferred_stop, "SAME_REQUEST", 0.0)
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert stop.requested


def test_a_signal_without_a_handler_keeps_its_effect() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredStop() as stop:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        press()
    assert not stop.requested


def test_outside_the_main_thread_nothing_changes() -> None:
    def entered() -> bool:
        with DeferredStop():
            return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(entered).result()


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_a_study_that_ctrl_c_stops_continues_where_it_was(executor: str, tmp_path: Path) -> None:
    """The default interval of a minute has not passed, so that only Ctrl-C can have saved a checkpoint."""
    chosen, compute, events = study(), ComputeConfig(executor, max_batch_jobs=4), 0

    def stop_at_the_ninth(_event: Event) -> None:
        nonlocal events
        events += 1
        if events == 9:
            press()

    every: list[Event] = []
    assert StudyRun(chosen, tmp_path / "whole", compute=compute).run(every.append)
    first = StudyRun(chosen, tmp_path / "part", compute=compute)
    assert not first.run(stop_at_the_ninth)
    assert first.stop_requested
    assert CheckpointDir(tmp_path / "part" / "checkpoints").paths()
    with pytest.raises(UserError, match="unfinished run; continue it with --resume"):
        StudyRun(chosen, tmp_path / "part", compute=compute)
    resumed = StudyRun(chosen, tmp_path / "part", compute=compute, resume=True)
    assert not any("no checkpoint" in note for note in resumed.notes)
    later: list[Event] = []
    assert resumed.run(later.append)
    assert len(later) < len(every)  # not from the beginning
    assert_same(tmp_path / "part", tmp_path / "whole")


def test_before_the_first_round_a_replaced_study_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = study()
    whole = uninterrupted(tmp_path / "study", chosen)
    before = (whole / "metrics.jsonl").read_bytes()
    train = Trainer.train

    def pressed(trainer: Trainer, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        press()
        return train(trainer, jobs)

    monkeypatch.setattr(Trainer, "train", pressed)
    with pytest.raises(KeyboardInterrupt):
        StudyRun(chosen, whole, force=True).run(ignore)
    assert (whole / "metrics.jsonl").read_bytes() == before
