"""The state of a run as checkpoints store it: the format on disk does not change."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from defedavg.algorithms.protocol import Update
from defedavg.training import EvalCounters, Evaluation, RunState

STORED: dict[str, Any] = {
    "tally": {
        "staleness": [0, 2],
        "updates": 9,
        "hits": 1,
        "since": 1.5,
        "newest": [3, 2.25],
        "measured": [2, 1.5],
        "wall_seconds": 0.5,
    },
    "updates_trained": 11,
    "first_hit_seconds": 1.5,
    "sustained_seconds": None,
    "versions": [2, 3],
    "waiting": [[4, 0, 3, 5, True], [1, 2, 2, 5, False]],
}
TENSORS = {name: torch.full((2,), float(i)) for i, name in enumerate(("version.2", "version.3", "update.4.0"))}


def test_a_stored_state_is_read_and_written_without_change() -> None:
    state = RunState.from_json(STORED, TENSORS)
    assert state.counters == EvalCounters([0, 2], 9, 1, 1.5, (3, 2.25), (2, 1.5), 0.5)
    assert state.waiting == (Update(4, 0, 3, 5), Update(1, 2, 2, 5))
    assert json.loads(json.dumps(state.to_json())) == STORED
    written = dict(state.tensors())
    assert written.keys() == TENSORS.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "change",
    [
        {"tally": {}},
        {"tally": {**STORED["tally"], "more": 1}},
        {"tally": {**STORED["tally"], "newest": 3}},
        {"waiting": [[1]]},
        {"versions": [7]},
        {"updates_trained": None},
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunState.from_json({**STORED, **change}, TENSORS)


def test_the_values_of_an_evaluation_have_the_order_of_its_line() -> None:
    evaluation = Evaluation(3, 1.5, None, 0.25, 0.5, 2.0, 30, 0.75)
    assert list(evaluation.by_name().items()) == list(asdict(evaluation).items())
