"""The user's algorithm and task in a deployment: loaded by the server and the clients, never by a reader of its log."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.flower.app_template import write_app
from defedavg.errors import UserError
from helpers.user_code import TASK


def test_plugins_are_paths_separated_as_in_path(plugin: Path) -> None:
    flat = {**default_settings("mine", 6), "plugins": str(plugin)}
    assert read_deploy_config(flat).settings.algorithm == "mine"


def test_a_log_imports_no_file_that_it_names(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    code = tmp_path / "code.py"
    code.write_text(f"open({str(marker)!r}, 'w').close()\n")
    flat = {**default_settings("fedavg", 6), "plugins": str(code), "task.module": f"{code}:make"}
    del flat["clients.num_clients"]
    assert read_deploy_config(flat, stored=True).settings.algorithm == "fedavg"
    assert not marker.exists()
    with pytest.raises(UserError):
        read_deploy_config(flat)
    assert marker.exists()
    with pytest.raises(UserError, match="unknown algorithm 'other'"):
        read_deploy_config({**flat, "algorithm": "other"}, stored=True)


def test_the_generated_app_builds_the_users_task_for_each_client(tmp_path: Path) -> None:
    named = "def make(config, client):\n    return replace(make_all(config, client), name=f'client {client}')\n"
    code = f"from dataclasses import replace\n{TASK}\n\nmake_all = make\n\n\n{named}"
    (tmp_path / "task.py").write_text(code)
    flat = {**default_settings("fedavg", 6), "task.module": f"{tmp_path / 'task.py'}:make"}
    write_app(tmp_path / "app", flat)
    spec = importlib.util.spec_from_file_location("generated_task", tmp_path / "app" / "app" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [module.make(flat, client).name for client in (None, 3)] == ["client None", "client 3"]
