"""Interrupted studies, and what a resumed study must be equal to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.checkpointing import KEPT, CheckpointDir
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import Event
from defedavg.experiments.study_run import StudyRun

BASE: dict[str, Any] = {
    "name": "study",
    "algorithms": ["fedbuff", "favano"],
    "seeds": [0, 1],
    "task": {"model": "softmax", "split": "classes"},
    "clients": {"num_clients": 20},
    "training": {"updates_per_round": 3, "local_steps": 2},
    "stop": {"max_rounds": 12, "eval_every_rounds": 3},
}


def study(**more: Any) -> config.Study:
    return config.study({**BASE, **more})


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "wall_seconds"} for line in found]


def entries(folder: Path) -> list[dict[str, Any]]:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] is True
    return [{name: value for name, value in run.items() if name != "wall_seconds"} for run in summary["runs"]]


def contents(folder: Path, *under: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in under or (".",)
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }


def assert_same(one: Path, other: Path) -> None:
    """Equal evaluations in the same order, equal entries, and bit-identical plans and weights."""
    assert lines(one) == lines(other)
    assert entries(one) == entries(other)
    assert contents(one, "plans", "weights") == contents(other, "plans", "weights")


class InterruptionError(Exception):
    """Ends a session."""


def interrupt_after(after: int) -> Callable[[Event], None]:
    """Return a callback that ends a session at one of its events."""
    count = 0

    def watch(event: Event) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise InterruptionError

    return watch


def ignore(event: Event) -> None:
    pass


def uninterrupted(folder: Path, chosen: config.Study, compute: ComputeConfig | None = None) -> Path:
    """Run the study in one session."""
    assert StudyRun(chosen, folder, compute=compute).run(ignore)
    return folder


def interrupted(folder: Path, chosen: config.Study, after: int = 9, compute: ComputeConfig | None = None) -> Path:
    """Run the study until it is interrupted."""
    with pytest.raises(InterruptionError):
        StudyRun(chosen, folder, compute=compute, checkpoint_interval=0.0).run(interrupt_after(after))
    assert 1 <= len(CheckpointDir(folder / "checkpoints").paths()) <= KEPT
    return folder


@contextmanager
def refuses(folder: Path, match: str) -> Iterator[None]:
    """Expect an error in the block and an unchanged folder."""
    before = contents(folder)
    with pytest.raises(UserError, match=match):
        yield
    assert contents(folder) == before
