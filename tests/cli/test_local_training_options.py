"""Options of local training on the command line: wrong values and options that an algorithm cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import call, refuse

QUICK = """
task.model = "softmax"
clients.num_clients = 12
training = { updates_per_round = 2, local_steps = 2 }
stop.max_rounds = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "quick.toml").write_text(QUICK)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer=lion", ["optimizer", "lion", "adamw"]),
        ("momentum=1", ["training.momentum is 1.0; it must be at least 0 and below 1"]),
        ("momentum=-0.1", ["training.momentum is -0.1; it must be at least 0 and below 1"]),
        ("momentum=nan", ["training.momentum is nan; it must be a number"]),
        ("nesterov=1", ["training.nesterov is 1; it must be true or false"]),
        ("beta1=1.0", ["training.beta1 is 1.0; it must be at least 0 and below 1"]),
        ("beta2=-1", ["training.beta2 is -1.0"]),
        ("epsilon=0", ["training.epsilon is 0.0; it must be between 1e-30 and 1"]),
        ("weight_decay=-1", ["training.weight_decay is -1.0; it must be zero or more, and finite"]),
        ("prox=inf", ["training.prox is inf; it must be zero or more, and finite"]),
        ("clip_norm=1e31", ["training.clip_norm is 1e+31; it must be at most 1e+30"]),
        ("local_schedule=cosine", ["training.local_schedule is 'cosine'; write cosine(end)", "like cosine(400)"]),
        ("global_schedule=step(0, 0.5)", ["training.global_schedule is 'step(0, 0.5)'; write step(every, factor)"]),
        ("local_schedule=cosine(-3)", ["training.local_schedule is 'cosine(-3)'; write cosine(end)"]),
        ("schedule_by=rounds", ["training.schedule_by", "rounds", "seconds"]),
        ("augment=rotate", ["training.augment is 'rotate'; write none, flip, crop(4) or flip+crop(4)"]),
        ("augment=crop(28)", ["pads by 28, but the images are 28×28; give a smaller crop"]),
    ],
)
def test_a_wrong_value_is_one_line(setting: str, words: list[str], folder: Path) -> None:
    refuse(call("run", "quick.toml", "--set", f"training.{setting}", "--out", "runs", cwd=folder), *words)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        ("asysg", "optimizer=adam"),
        ("asysg", "momentum=0.9"),
        ("asysg", "nesterov=true"),
        ("asysg", "prox=0.1"),
        ("asysg", "local_schedule=cosine(10)"),
        ("favano", "global_schedule=cosine(10)"),
    ],
)
def test_an_option_that_the_algorithm_cannot_take_is_one_line(algorithm: str, setting: str, folder: Path) -> None:
    name = setting.partition("=")[0]
    words = f"{algorithm} cannot use training.{name}; remove it, or set it in the tables of the other algorithms alone"
    given = ("--set", f'algorithms=["fedavg", "{algorithm}"]', "--set", f"training.{setting}")
    refuse(call("run", "quick.toml", *given, "--out", "runs", cwd=folder), words)
    refuse(call("plan", "quick.toml", *given, cwd=folder), words)
    own = ("--set", f'algorithms=["fedavg", "{algorithm}"]', "--set", f"fedavg.{setting}")
    assert call("plan", "quick.toml", *own, "--rounds", "2", cwd=folder).returncode == 0


def test_a_run_with_options_of_local_training(folder: Path) -> None:
    given = ("optimizer=adamw", "weight_decay=0.1", "clip_norm=1", "local_schedule=cosine(2)", "augment=flip+crop(2)")
    options = [word for setting in given for word in ("--set", f"training.{setting}")]
    found = call("run", "quick.toml", *options, "--out", "runs", cwd=folder)
    assert found.returncode == 0, found.stderr
    assert "has no effect" not in found.stderr


@pytest.mark.parametrize("setting", ["momentum=0.9", "augment=flip", "local_schedule=cosine(9)"])
def test_theory_is_about_plain_sgd(setting: str, folder: Path) -> None:
    words = f"the theorems assume plain SGD with constant rates; remove training.{setting.partition('=')[0]}"
    refuse(call("theory", "--set", f"training.{setting}", cwd=folder), words)


def test_settings_prints_the_options(folder: Path) -> None:
    text = call("settings", cwd=folder).stdout
    for name in ("optimizer", "momentum", "clip_norm", "local_schedule", "schedule_by", "augment"):
        assert f"{name} = " in text
