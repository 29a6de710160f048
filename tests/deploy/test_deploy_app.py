"""``deploy init``: the apps that it writes can be loaded, run as a simulation does, and be changed for a run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from defedavg.cli.deploy_command import _app_settings
from defedavg.cli.main import app
from defedavg.deploy import flower
from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.flower.app_template import write_app
from defedavg.errors import UserError
from defedavg.tasks import load, sampled_classes
from helpers.command_line import refused


def test_init_writes_an_app_with_every_setting(tmp_path: Path) -> None:
    folder = tmp_path / "my_app"
    result = CliRunner().invoke(app, ["deploy", "init", str(folder), "--algorithm", "fedbuff", "--clients", "8"])
    assert result.exit_code == 0, result.output
    whole = tomllib.loads((folder / "pyproject.toml").read_text())
    components = whole["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "my_app.server:app", "clientapp": "my_app.client:app"}
    config = read_deploy_config(_app_settings(folder))
    assert config.settings.algorithm == "fedbuff"
    assert config.settings.clients.num_clients == 8
    for name in ("server", "client", "task"):
        text = (folder / "my_app" / f"{name}.py").read_text()
        compile(text, name, "exec")
        assert "{package}" not in text


def test_the_apps_of_an_init_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path / "loaded_app", default_settings())
    monkeypatch.syspath_prepend(str(tmp_path / "loaded_app"))
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    assert isinstance(importlib.import_module("loaded_app.server").app, ServerApp)
    assert isinstance(importlib.import_module("loaded_app.client").app, ClientApp)
    task = importlib.import_module("loaded_app.task").make(default_settings(), 2)
    assert task.num_clients == 6


def test_clients_and_server_of_an_app_normalise_and_split_as_a_simulation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"task.model": "softmax", "task.split": "sampled-classes", "task.samples_per_client": 40}
    settings = default_settings() | chosen | {"task.normalise": "symmetric", "seed": 3}
    write_app(tmp_path / "symmetric_app", settings)
    monkeypatch.syspath_prepend(str(tmp_path / "symmetric_app"))
    app_config = _app_settings(tmp_path / "symmetric_app")
    make = importlib.import_module("symmetric_app.task").make
    train, test, _ = load("mnist5k", "unit")
    labels = train.targets.numpy()
    for client in (None, 0, 5):
        task = make(app_config, client)
        assert torch.equal(task.train.inputs, 2 * train.inputs - 1)
        assert torch.equal(task.test.inputs, 2 * test.inputs - 1)
        assert [part.tolist() for part in task.clients] == [
            part.tolist() for part in sampled_classes(labels, 6, 3, 40, 2)
        ]


def test_the_entry_points_are_functions_in_any_order_of_imports(tmp_path: Path) -> None:
    """Apps that an earlier version generated import ``server_app`` from the package, as new ones do."""
    for first in ("server_entry", "client_entry"):
        code = (
            f"import sys, defedavg.deploy.flower.{first}\n"
            "from defedavg.deploy.flower import client_app\n"
            "print('torch' in sys.modules, callable(client_app))\n"
            "from defedavg.deploy.flower import server_app\n"
            "assert callable(server_app)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.split() == [str(first == "server_entry"), "True"]
    with pytest.raises(AttributeError, match="no_app"):
        _ = flower.no_app


def test_settings_of_an_app_can_be_changed_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_app(tmp_path / "own", default_settings(clients=3))
    seen: list[Any] = []

    def kept(app: Path, config: Any, folder: Path, watch: Any, changes: dict[str, Any], **more: Any) -> None:
        seen.append((config.settings.stop.max_rounds, config.settings.clients.num_clients, changes))
        raise UserError("enough")

    monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", kept)
    refused("deploy", "local", "--transport", "flower", "--app", "own", "--clients", "2", "--set", "stop.max_rounds=7")
    assert seen == [(7, 2, {"stop.max_rounds": 7, "clients.num_clients": 2, "deploy.transport": "flower"})]
