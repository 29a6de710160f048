"""Progress of a sweep: the table on a terminal, the plain lines elsewhere, and the TensorBoard logs."""

from __future__ import annotations

import io
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from defedavg.cli import plain_lines, progress_table
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.run_events import Event, RunEvaluated, RunFinished, RunSpec
from defedavg.experiments.study_run import StudyRun
from defedavg.runstore import tensorboard
from defedavg.training import Evaluation

STUDY = config.study(
    {
        "name": "small",
        "algorithms": ["fedavg", "defedavg-niid"],
        "task": {"model": "softmax", "split": "classes"},
        "clients": {"num_clients": 20},
        "training": {"updates_per_round": 3, "local_steps": 2},
        "stop": {"max_rounds": 10},
    }
)
POINT = STUDY.points()[0]
ITEM = RunSpec(POINT, POINT.settings, 0)
FIRST = Evaluation(0, 0.0, 0.1, 2.3, None, 0.0, 0, 0.0)


def evaluated(item: RunSpec, **more: Any) -> RunEvaluated:
    run = SimpleNamespace(task=SimpleNamespace(metric_name=more.pop("metric", "accuracy")))
    return RunEvaluated(item, cast(Any, run), replace(FIRST, **more), None)


def test_speed_and_time_left_follow_the_clock() -> None:
    now = [100.0]
    progress = progress_table.ProgressTable("title", 2, clock=lambda: now[0])
    progress.add(evaluated(ITEM))
    assert progress.line().startswith("fedavg seed 0: round 0, 0.00 s simulated, accuracy 10.0 %, – updates/s")
    now[0] = 104.0
    progress.add(evaluated(ITEM, round=2, seconds=1.5, accuracy=None, updates=6, staleness=1.25))
    assert progress.line() == (
        "fedavg seed 0: round 2, 1.50 s simulated, accuracy –, 1.5 updates/s, staleness 1.2, at most 0:16 left; "
        "0 of 2 runs finished"
    )
    assert progress.done == pytest.approx(0.2)
    assert progress.left == pytest.approx(4.0 * 1.8 / 0.2)
    progress.add(RunFinished(ITEM, cast(Any, SimpleNamespace()), 4.0))
    assert (progress.done, progress.rows) == (1, {})


def test_a_metric_of_the_task_replaces_the_accuracy() -> None:
    progress = progress_table.ProgressTable("title", 2)
    progress.add(evaluated(ITEM, metric="f1", accuracy=1.5))
    assert "simulated, f1 1.5, " in progress.line()
    console = Console(file=io.StringIO(), width=120)
    console.print(progress.table(2))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert " f1 " in shown
    assert "accuracy" not in shown
    progress.add(evaluated(replace(ITEM, seed=1)))
    console.print(progress.table(2))
    assert " metric " in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_the_runs_that_fit() -> None:
    progress = progress_table.ProgressTable("title", 9)
    for seed in range(5):
        progress.add(evaluated(RunSpec(POINT, POINT.settings, seed), round=1, updates=3))
    console = Console(file=io.StringIO(), width=120)
    console.print(progress.table(2))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.findall(r"seed (\d)", shown) == ["3", "4"]
    assert "and 3 more in progress" in shown
    for word in progress_table.HEAD:
        assert word in shown
    assert [progress_table.duration(s) for s in (None, 5.4, 65, 3661)] == ["–", "0:05", "1:05", "1:01:01"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_a_table_and_a_file_gets_plain_lines(
    tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_lines, "QUIET_SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, height=30, color_system=None)
    run = StudyRun(STUDY, tmp_path / "small")
    with progress_table.watching(console, "small", 2) as watch:
        assert run.run(watch)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b" in shown) == terminal
    if terminal:
        assert "small" in shown
    else:
        lines = shown.splitlines()
        assert len(lines) == 2 * 11
        assert all(
            re.match(r"(fedavg|defedavg-niid) seed 0: round \d+, .* simulated, accuracy ", line) for line in lines
        )
        assert lines[-1].endswith("of 2 runs finished")


def read_events(path: Path) -> list[Any]:
    """Return the events of a TensorBoard log, whose records are length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, events, start = path.read_bytes(), [], 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        events.append(Event.FromString(data[start + 12 : start + 12 + size]))
        start += 12 + size + 4
    return events


def test_tensorboard_logs_hold_every_evaluation_at_its_simulated_time(tmp_path: Path) -> None:
    run = StudyRun(STUDY, tmp_path / "small")
    received: list[Event] = []
    with progress_table.progress_and_logs("small", 2, run.folder, True) as watch:

        def receive(event: Event) -> None:
            received.append(event)
            watch(event)

        assert run.run(receive)
    assert len([event for event in received if isinstance(event, RunEvaluated)]) == 2 * 11
    logs = sorted((run.folder / "tensorboard").iterdir())
    assert [log.name for log in logs] == ["defedavg-niid_seed=0", "fedavg_seed=0"]
    wanted = [e.evaluation for e in received if isinstance(e, RunEvaluated) and e.spec.settings.algorithm == "fedavg"]
    (file,) = logs[1].iterdir()
    values: dict[str, list[tuple[int, float, float]]] = {}
    for event in read_events(file):
        for value in event.summary.value:
            values.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
    assert set(values) == {"test/accuracy", *tensorboard.TAGS} - {"train/loss"}
    assert [step for step, _, _ in values["test/accuracy"]] == [e.round for e in wanted]
    assert [t for _, t, _ in values["test/accuracy"]] == pytest.approx([e.seconds for e in wanted])
    assert [v for _, _, v in values["test/accuracy"]] == pytest.approx([e.accuracy for e in wanted])


def test_a_missing_tensorboard_writer_is_an_error_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"defedavg\[tensorboard\]"):
        tensorboard.summary_writer()
