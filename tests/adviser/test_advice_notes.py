"""The lines of ``advise`` about settings that a run would use otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from defedavg.adviser.notes import notes_on
from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config

STUDY: dict[str, Any] = {
    "algorithms": ["fedavg", "fedbuff"],
    "task": {"model": "softmax"},
    "clients": {"num_clients": 10},
    "training": {"updates_per_round": 4, "local_steps": [5, 20], "local_lr": 0.02, "global_lr": [0.5], "beta1": 0.5},
    "fedbuff": {"concurrency": 4, "local_lr": 0.03},
    "stop": {"target_accuracy": 0.5},
}

TRIED = [
    "advise tries other values of training.updates_per_round; training.updates_per_round = [4] fixes it",
    "advise tries other values of training.local_lr; training.local_lr = [0.02] fixes it",
    "advise tries other values of fedbuff.local_lr; fedbuff.local_lr = [0.03] fixes it",
    "advise tries other values of fedbuff.concurrency; fedbuff.concurrency = [4] fixes it",
]
IDLE = "training.beta1 has no effect: training.optimizer is sgd"


def test_single_values_that_the_grid_replaces_are_named() -> None:
    notes = notes_on(config.study(STUDY), ["fedavg", "fedbuff"])
    assert sorted(notes) == sorted([IDLE, *TRIED])


def test_without_names_the_algorithms_of_the_study_are_not_those_that_are_compared() -> None:
    first, *others = notes_on(config.study(STUDY), None)
    assert first == (
        f"advise compares all {len(ALGORITHMS)} algorithms; --algorithms fedavg,fedbuff compares those of the study "
        "alone"
    )
    assert sorted(others) == sorted([IDLE, *TRIED])
    plain = config.study({**STUDY, "algorithms": ["defedavg-iid"]})
    assert IDLE in notes_on(plain, None)[0]


def test_the_table_of_an_algorithm_has_an_effect_if_it_is_compared() -> None:
    plain = config.study({**STUDY, "algorithms": ["defedavg-iid"]})
    unused = "[fedbuff] has no effect: fedbuff is not in algorithms"
    assert unused not in notes_on(plain, None)
    assert unused in notes_on(plain, ["fedavg"])


@pytest.mark.parametrize("algorithms", [list(ALGORITHMS), ["asysg"]])
def test_a_list_that_an_algorithm_does_not_use_gives_no_equal_runs(algorithms: list[str]) -> None:
    notes = notes_on(config.study(STUDY), algorithms)
    assert not any("equal runs" in line for line in notes)
    unused = "training.local_steps has no effect: asysg does not use it"
    assert (unused in notes) == (algorithms == ["asysg"])
