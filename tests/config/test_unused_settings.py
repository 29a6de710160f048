"""A setting that a user gave and that no run reads is named in one line; a default value never is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from defedavg import make_task, simulate
from defedavg.config import study as config
from defedavg.config.unused_settings import NoEffectWarning, unused_settings
from helpers.command_line import call

TRACE = "client,step_seconds,up_mbps,down_mbps\n0,1,10,10\n1,2,10,10\n2,3,10,10\n"


def lines(**found: Any) -> list[str]:
    return unused_settings(config.study(found))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"algorithms": ["asysg"], "asysg": {"local_lr": 0.2}},
            ["asysg.local_lr has no effect: asysg does not use it"],
        ),
        (
            {"algorithms": ["asysg"], "training": {"local_steps": 7}},
            ["training.local_steps has no effect: asysg does not use it"],
        ),
        (
            {"algorithms": ["asysg"], "training": {"local_steps": [7, 8]}},
            ["training.local_steps has no effect: asysg does not use it; its 2 values give equal runs"],
        ),
        ({"algorithms": ["asysg", "fedavg"], "training": {"local_steps": 7}}, []),
        (
            {"algorithms": ["asysg", "fedavg"], "training": {"local_steps": [7, 8]}},
            [
                "training.local_steps has no effect on asysg: asysg does not use it; its 2 values give equal runs",
            ],
        ),
        (
            {"algorithms": ["fedavg"], "training": {"batch_size": 7}, "fedavg": {"batch_size": 8}},
            ["training.batch_size has no effect: [fedavg] overrides it"],
        ),
        (
            {"algorithms": ["favano"], "favano": {"global_lr": 2.0}},
            ["favano.global_lr has no effect: favano does not use it"],
        ),
        (
            {"algorithms": ["fedavg", "defedavg-niid"], "clients": {"upload": "blocking"}},
            [
                "clients.upload has no effect: clients of fedavg and defedavg-niid receive no version while they send "
                "an update unrequested"
            ],
        ),
        ({"algorithms": ["fedavg", "defedavg-iid"], "clients": {"upload": "blocking"}}, []),
        ({"algorithms": ["fedavg"], "clients": {"upload": "auto"}}, []),
        (
            {"algorithms": ["asysg"], "clients": {"upload": "blocking"}, "asysg": {"concurrency": 3}},
            ["clients.upload has no effect: clients of asysg receive no version while they send an update unrequested"],
        ),
        ({"algorithms": ["asysg"], "clients": {"upload": "blocking"}, "asysg": {"concurrency": [0, 3]}}, []),
        (
            {"algorithms": ["fedbuff", "asysg"], "clients": {"upload": ["blocking", "background"]}},
            [
                "clients.upload has no effect on fedbuff: its clients receive no version while they send an update "
                "unrequested; its 2 values give equal runs"
            ],
        ),
        (
            {"algorithms": ["fedavg"], "fedbuff": {"concurrency": 3}},
            ["[fedbuff] has no effect: fedbuff is not in algorithms"],
        ),
        ({"algorithms": ["fedavg"], "fedbuff": {"concurrency": 0}}, []),
        ({"task": {"alpha": 0.1}}, ["task.alpha has no effect: split = iid does not use it"]),
        ({"task": {"alpha": 0.1, "split": ["iid", "dirichlet"]}}, []),
        (
            {"task": {"classes_per_client": 3, "split": "sampled"}},
            ["task.classes_per_client has no effect: split = sampled does not use it"],
        ),
        ({"task": {"classes_per_client": 3, "split": "classes"}}, []),
        ({"task": {"classes_per_client": 3, "split": "random-classes"}}, []),
        (
            {"task": {"samples_per_client": 600, "split": "random-classes"}},
            ["task.samples_per_client has no effect: split = random-classes does not use it"],
        ),
        ({"task": {"samples_per_client": 600, "split": "sampled-classes"}}, []),
        ({"task": {"alpha": 0.5}}, []),
        ({"clients": {"return_seconds": 9.0}}, ["clients.return_seconds has no effect: clients.failure_rate is 0"]),
        ({"clients": {"return_seconds": 9.0, "failure_rate": [0.0, 0.1]}}, []),
        (
            {"clients": {"profile": "paper-cifar10", "step_seconds": 1.0, "model_megabytes": 1.0}},
            ["clients.profile has no effect: clients.step_seconds and clients.model_megabytes replace it"],
        ),
        ({"clients": {"profile": "paper-cifar10", "step_seconds": 1.0}}, []),
        ({"stop": {"stop_at_target": False}}, ["stop.stop_at_target has no effect: stop.target_accuracy is 0"]),
        ({"stop": {"consecutive_hits": 5}}, ["stop.consecutive_hits has no effect: stop.target_accuracy is 0"]),
        (
            {"stop": {"consecutive_hits": 5, "target_accuracy": 0.5, "stop_at_target": False}},
            ["stop.consecutive_hits has no effect: stop.stop_at_target is false"],
        ),
        ({"stop": {"consecutive_hits": 5, "target_accuracy": 0.5}}, []),
        ({"training": {"nesterov": True}}, ["training.nesterov has no effect: training.momentum is 0"]),
        ({"training": {"nesterov": True, "momentum": [0.0, 0.9]}}, []),
        (
            {"training": {"momentum": 0.9, "optimizer": "adam"}},
            ["training.momentum has no effect: training.optimizer is adam"],
        ),
        ({"training": {"momentum": 0.9, "optimizer": ["sgd", "adam"]}}, []),
        (
            {"training": {"beta2": 0.9, "epsilon": 1e-4}},
            [
                "training.beta2 has no effect: training.optimizer is sgd",
                "training.epsilon has no effect: training.optimizer is sgd",
            ],
        ),
        ({"training": {"beta1": 0.8, "optimizer": "adamw"}}, []),
        (
            {"training": {"schedule_by": "seconds"}},
            [
                "training.schedule_by has no effect: training.local_schedule is constant and "
                "training.global_schedule is constant"
            ],
        ),
        ({"training": {"schedule_by": "seconds", "global_schedule": "cosine(9)"}}, []),
        ({"algorithms": ["fedavg", "fedbuff"], "training": {"nesterov": True}, "fedbuff": {"momentum": 0.9}}, []),
        (
            {"algorithms": ["fedavg", "fedbuff"], "fedavg": {"nesterov": True}, "fedbuff": {"momentum": 0.9}},
            ["fedavg.nesterov has no effect: training.momentum is 0"],
        ),
    ],
)
def test_a_setting_without_effect_is_named(found: dict[str, Any], expected: list[str]) -> None:
    assert lines(**found) == expected


def test_what_a_trace_replaces(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    clients = {"trace": "trace.csv", "uplink_mbps": 5.0, "downlink_mbps": 5.0, "slowness": "equal", "step_seconds": 2.0}
    study = config.study({"clients": {**clients, "model_megabytes": 9.0, "jitter": 0.1}}, folder=tmp_path)
    names = ("step_seconds", "slowness", "uplink_mbps", "downlink_mbps")
    assert unused_settings(study) == [f"clients.{name} has no effect: clients.trace replaces it" for name in names]


def test_every_setting_with_its_default_is_silent(tmp_path: Path) -> None:
    printed = call("settings", cwd=tmp_path)
    (tmp_path / "all.toml").write_text(printed.stdout)
    assert unused_settings(config.load(tmp_path / "all.toml")) == []


STUDY = """
name = "unused"
algorithms = ["asysg"]
[task]
model = "softmax"
[clients]
num_clients = 4
[training]
updates_per_round = 2
batch_size = 2
[stop]
max_rounds = 2
target_accuracy = 0.01
[asysg]
local_lr = 0.2
[fedbuff]
concurrency = 3
"""


@pytest.mark.parametrize("command", ["run", "plan", "tune"])
def test_the_commands_print_one_line_each(command: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    done = call(command, "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "has no effect" in line]
    expected = [
        "[fedbuff] has no effect: fedbuff is not in algorithms",
        "asysg.local_lr has no effect: asysg does not use it",
    ]
    if command == "tune":
        expected.append("asysg.local_lr has no effect: tune tries --global-rates and --local-rates instead")
    assert notes == [f"defedavg: {line}" for line in expected]


def test_theory_prints_them_too(tmp_path: Path) -> None:
    constants = ("--smoothness", "1", "--noise", "1", "--gap", "1", "--max-staleness", "1")
    (tmp_path / "study.toml").write_text(
        STUDY.replace('"asysg"', '"defedavg-iid"').replace("[asysg]\nlocal_lr = 0.2", "")
    )
    done = call("theory", "--config", "study.toml", *constants, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["defedavg: [fedbuff] has no effect: fedbuff is not in algorithms"]


def test_simulate_warns() -> None:
    settings = {
        "task.model": "softmax",
        "clients.num_clients": 4,
        "training.updates_per_round": 2,
        "stop.max_rounds": 1,
    }
    with pytest.warns(NoEffectWarning, match="asysg.local_lr has no effect: asysg does not use it") as caught:
        simulate("asysg", settings={**settings, "asysg.local_lr": 0.2})
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate("asysg", settings=settings)


def test_simulate_warns_of_task_settings_beside_a_task() -> None:
    x, y = np.ones((12, 2), "float32"), np.arange(12) % 2
    clients = np.split(np.arange(12), 3)
    task = make_task(model=lambda: nn.Linear(2, 2), train=(x, y), test=(x, y), clients=clients)
    with pytest.warns(
        NoEffectWarning, match="task.alpha has no effect: the argument task makes the whole task"
    ) as caught:
        simulate(
            "fedavg", task=task, settings={"task.alpha": 0.1, "training.updates_per_round": 2, "stop.max_rounds": 1}
        )
    assert len(caught) == 1
