"""Ctrl-C and SIGTERM with Ray, and the progress of resumed runs; none of these tests starts a cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.ray.connection import WorkerSlots, connect
from defedavg.experiments.ray.scheduler import RayScheduler, WorkerHandle
from defedavg.experiments.run_events import RunSpec
from defedavg.experiments.simulation import Simulation
from defedavg.training import EvalCounters, Evaluation, RunState, Status
from defedavg.training.state_memory import StateNeed

Init = Callable[..., Any]


def interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def exit_like_ray(number: int, _frame: Any) -> None:
    sys.exit(number)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Init], None]]:
    """Return a function that replaces ``ray.init``; the signals have the handlers of a command."""
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("atexit.register", lambda function: function)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield lambda init: monkeypatch.setattr("ray.init", init)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_is_answered_when_it_has_started(start: Callable[[Init], None], number: int) -> None:
    """Ray's start must not be interrupted: the process would crash at its exit."""
    started = []

    def init(**_options: Any) -> None:
        os.kill(os.getpid(), number)
        started.append(True)

    start(init)
    with pytest.raises(KeyboardInterrupt):
        connect(None)
    assert started


def test_sigterm_has_the_handler_of_the_command_after_ray_has_started(start: Callable[[Init], None]) -> None:
    start(lambda **_options: signal.signal(signal.SIGTERM, exit_like_ray))
    connect(None)
    assert signal.getsignal(signal.SIGTERM) is interrupt


def test_sigterm_that_the_handler_of_ray_receives_stops_the_command(start: Callable[[Init], None]) -> None:
    def init(**_options: Any) -> None:
        signal.signal(signal.SIGTERM, exit_like_ray)
        os.kill(os.getpid(), signal.SIGTERM)

    start(init)
    with pytest.raises(KeyboardInterrupt):
        connect(None)


def test_ray_ends_its_processes_at_exit_without_an_interruption(
    start: Callable[[Init], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", registered.append)
    start(lambda **_options: None)
    connect(None)
    assert registered
    hangup = signal.getsignal(signal.SIGHUP)
    try:
        for function in registered:
            function()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize(("given", "variable"), [(None, ""), ("local", "127.0.0.1:1"), (None, "local")])
def test_a_cluster_of_this_command_is_started_beside_others(
    start: Callable[[Init], None], monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str
) -> None:
    """Without an address, Ray would join the cluster that was last started on this machine."""
    options: dict[str, Any] = {}
    monkeypatch.setenv("RAY_ADDRESS", variable)
    start(lambda **given: options.update(given))
    connect(given)
    assert options["address"] == "local"
    assert options["include_dashboard"] is False


def test_a_cluster_that_cannot_be_started_is_one_line(start: Callable[[Init], None]) -> None:
    def init(**_options: Any) -> None:
        raise OSError("no space left\non device")

    start(init)
    with pytest.raises(UserError, match="Ray cannot start a cluster on this machine: no space left"):
        connect(None)


# The progress of a run whose state is older than its last evaluation.

TARGET = 0.5


def evaluation(round_: int, accuracy: float) -> Evaluation:
    return Evaluation(round_, round_ / 4, accuracy, 1.0, None, 0.0, 0, 0.0)


KNOWN = [evaluation(0, 0.1), evaluation(2, 0.6), evaluation(4, 0.4)]


def begin(spec: RunSpec) -> Simulation:
    """Return a run that is resumed from its beginning, with evaluations that it made after that."""
    run = Simulation(spec.settings, spec.seed)
    run.resume(RunState(EvalCounters(), 0, None, None, dict(run.executor.versions)), KNOWN)
    return run


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> tuple[RayScheduler, WorkerHandle, RunSpec]:
    """Return a scheduler with a worker that has a resumed run; what the worker is told is discarded."""
    chosen = config.study(
        {
            "algorithms": ["defedavg-iid"],
            "task": {"model": "softmax"},
            "clients": {"num_clients": 20},
            "stop": {"target_accuracy": TARGET, "consecutive_hits": 2},
        }
    )
    spec = RunSpec(chosen.points()[0], chosen.points()[0].settings, 0)
    actor = SimpleNamespace(assign=SimpleNamespace(remote=lambda _assignment: None))
    worker = WorkerHandle(actor, WorkerSlots("a", "a", 1, 1))
    scheduler = RayScheduler(ComputeConfig("ray"), (0.5,), [])
    monkeypatch.setattr(scheduler, "_put_task", lambda _task: None)
    for name, value in {
        "_begin": begin,
        "_on_resume": lambda _spec, _run: 0,
        "_group_of": lambda _spec: "group",
        "_needs": {"group": StateNeed(0, 0)},
        "_specs": {0: spec},
        "_numbers": {spec: 0},
        "states": {spec: RunState(EvalCounters(), 0, None, None, {})},
    }.items():
        monkeypatch.setattr(scheduler, name, value, raising=False)
    scheduler._assign_run(worker, spec)
    return scheduler, worker, spec


def test_a_resumed_run_is_as_far_as_its_last_evaluation(
    resumed: tuple[RayScheduler, WorkerHandle, RunSpec],
) -> None:
    """It may be dropped before a worker has repeated what follows its state."""
    scheduler, _, spec = resumed
    progress = scheduler._remote[spec].progress
    assert (progress.rounds, progress.seconds, progress.first_hit_seconds) == (4, 1.0, 0.5)


@pytest.mark.parametrize("status", [Status.RUNNING, Status.DROPPED])
def test_repeated_evaluations_change_nothing(
    resumed: tuple[RayScheduler, WorkerHandle, RunSpec], status: Status
) -> None:
    scheduler, worker, spec = resumed
    progress = scheduler._remote[spec].progress
    progress.status = status
    before = replace(progress, evaluations=list(progress.evaluations))
    assert not list(scheduler._handle(worker, "evaluated", 0, KNOWN[0], (None, None)))
    assert progress == before
    events = list(scheduler._handle(worker, "evaluated", 0, evaluation(6, 0.7), (0.5, None)))
    assert len(events) == (status is Status.RUNNING)
    assert progress.rounds == (6 if status is Status.RUNNING else 4)
