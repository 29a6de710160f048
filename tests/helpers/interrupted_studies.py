"""A study that is broken off, and what it must be equal to when it was taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.checkpoints import KEPT, CheckpointDir
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import ComputeConfig, Event

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
    """Every measurement in the same order, every entry, and every bit of every plan and last version."""
    assert lines(one) == lines(other)
    assert entries(one) == entries(other)
    assert contents(one, "plans", "weights") == contents(other, "plans", "weights")


class Broken(Exception):
    """What ends a sitting."""


def breaks(after: int) -> Callable[[Event], None]:
    """Ends a sitting at its so manyth event."""
    count = 0

    def watch(event: Event) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise Broken

    return watch


def quiet(event: Event) -> None:
    pass


def whole(folder: Path, chosen: config.Study, means: ComputeConfig | None = None) -> Path:
    """The study, carried out in one sitting."""
    assert StudyRun(chosen, folder, means=means).carry_out(quiet)
    return folder


def broken(folder: Path, chosen: config.Study, after: int = 9, means: ComputeConfig | None = None) -> Path:
    """The study, broken off."""
    with pytest.raises(Broken):
        StudyRun(chosen, folder, means=means, every=0.0).carry_out(breaks(after))
    assert 1 <= len(CheckpointDir(folder / "checkpoints").paths()) <= KEPT
    return folder


@contextmanager
def refused(folder: Path, match: str) -> Iterator[None]:
    """What is done here ends in such an error, and the folder is as it was."""
    before = contents(folder)
    with pytest.raises(UserError, match=match):
        yield
    assert contents(folder) == before
