"""``task.module``: a task of the user's own, found beside the study; every failure is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from defedavg import Task, simulate
from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.config.task_module import task_from_module
from helpers.user_errors import line_of

TASK = """
import numpy as np
from torch import nn

from defedavg import make_task

CALLS = []


def make(config, client):
    CALLS.append((dict(config), client))
    x = np.arange(40.0, dtype="float32").reshape(20, 2)
    y = np.arange(20) % 2
    return make_task(model=lambda: nn.Linear(2, 2), train=(x, y), test=(x, y), clients=np.split(np.arange(20), 5))


number = 3


def wrong(config, client):
    return 3


def fails(config, client):
    return config["no.such.setting"]


def empty(config, client):
    x = np.zeros((2, 2), "float32")
    return make_task(model=lambda: nn.Linear(2, 2), train=(x, x[:, 0]), test=(x, x[:, 0]), clients=[])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TASK)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "s.toml"
    path.write_text(text)
    return path


def test_the_module_defines_the_task_and_the_number_of_clients(folder: Path) -> None:
    study = config.load(write(folder, "[task]\nmodule = 'own.py:make'\n[training]\nlocal_steps = 7\n"))
    (point,) = study.points()
    assert point.settings.task.module == f"{folder / 'own.py'}:make"
    assert point.settings.clients.num_clients == 5
    assert study.python_files() == (str(folder / "own.py"),)
    task = build_task(point.settings, 4)
    assert isinstance(task, Task)
    assert task.num_clients == 5
    calls = sys.modules[task.model.__module__].CALLS
    (first, none), (second, client) = calls
    assert none is None
    assert client is None
    assert "clients.num_clients" not in first
    assert (second["clients.num_clients"], second["seed"], second["training.local_steps"]) == (5, 4, 7)
    assert second["algorithm"] == "defedavg-iid"


def test_a_file_that_sets_the_number_of_clients_is_not_imported_to_read_a_study(folder: Path) -> None:
    (folder / "own.py").write_text("raise KeyError('imported')")
    study = config.load(write(folder, "[task]\nmodule = 'own.py:make'\n[clients]\nnum_clients = 9\n"))
    assert study.points()[0].settings.clients.num_clients == 9


def test_writing_and_reading_gives_the_same_study_without_importing_again(folder: Path) -> None:
    study = config.load(write(folder, "[task]\nmodule = 'own.py:make'\n"))
    (folder / "own.py").unlink()
    again = config.load(write(folder, study.to_toml()))
    assert again.points() == study.points()
    assert 'data = "' not in study.to_toml()


def test_simulate_runs_the_task(folder: Path) -> None:
    settings = {"task.module": f"{folder / 'own.py'}:make", "training.updates_per_round": 2, "stop.max_rounds": 2}
    assert simulate("fedavg", settings=settings).rounds == 2
    made = task_from_module(settings["task.module"], {}, None)  # type: ignore[arg-type]
    assert "give one of them" in line_of(lambda: simulate("fedavg", settings=settings, task=made))


def test_a_client_of_a_deployment_gets_its_number(folder: Path) -> None:
    task = task_from_module(f"{folder / 'own.py'}:make", {"seed": 1}, 3)
    assert sys.modules[task.model.__module__].CALLS == [({"seed": 1}, 3)]
    assert task_from_module(lambda config, client: task, {}, 0) is task


@pytest.mark.parametrize(
    ("key", "value"), [("data", "cifar10"), ("model", "mlp"), ("split", "classes"), ("model", "['cnn', 'mlp']")]
)
def test_other_names_of_the_task_are_refused_beside_a_module(folder: Path, key: str, value: str) -> None:
    value = value if value.startswith("[") else f"'{value}'"
    path = write(folder, f"[task]\nmodule = 'own.py:make'\n{key} = {value}\n")
    assert line_of(lambda: config.load(path)) == (
        f"task.module makes the whole task, so task.{key} has no effect; remove one of the two"
    )


def test_defaults_beside_a_module_are_accepted(folder: Path) -> None:
    text = "[task]\nmodule = 'own.py:make'\ndata = 'mnist5k'\nmodel = 'cnn'\nsplit = 'iid'\n"
    assert config.load(write(folder, text)).points()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("own.py", "task.module is 'own.py'; write it as my_task.py:make"),
        ("own.py:", "task.module is 'own.py:'; write it as"),
        (":make", "task.module is ':make'; write it as"),
        ("own.py:a b", "task.module is 'own.py:a b'; write it as"),
        ("gone.py:make", "there is no Python file {folder}/gone.py"),
        ("own.py:other", "{folder}/own.py has no function 'other'"),
        ("own.py:number", "{folder}/own.py has no function 'number'"),
        ("own.py:wrong", "{folder}/own.py: the function returned int; return what defedavg.make_task makes"),
        ("own.py:fails", "{folder}/own.py, line 25: KeyError: 'no.such.setting'"),
        ("own.py:empty", "{folder}/own.py, line 30: cross_entropy needs integer targets"),
        ("no_such_package_xyz:make", "task.module 'no_such_package_xyz:make' cannot be imported: No module named"),
    ],
)
def test_every_failure_is_one_line(folder: Path, module: str, line: str) -> None:
    path = write(folder, f"[task]\nmodule = '{module}'\n")
    assert line_of(lambda: config.load(path)).startswith(line.format(folder=folder))


def test_an_installed_module_is_named_without_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "installed_task_xyz.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(folder))
    study = config.load(write(folder, "[task]\nmodule = 'installed_task_xyz:make'\n"))
    assert study.points()[0].settings.task.module == "installed_task_xyz:make"
    assert study.points()[0].settings.clients.num_clients == 5
    assert study.python_files() == ()
