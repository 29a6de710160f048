"""The configuration of a stored run: read as far as possible, and nothing that it names is imported."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from defedavg.config import study as config
from helpers.user_errors import line_of

HOSTILE = """
name = "hostile"
algorithms = ["fedavg", "evil"]
plugins = ["evil.py", "{folder}/evil.py"]
[task]
module = "{module}:make"
[evil]
power = [1, 2]
anything = {{ nested = true }}
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w').close()\ndef make(config, client): pass\n"
    for name in ("evil.py", "evil_installed_xyz.py"):
        (tmp_path / name).write_text(code)
    return marker


@pytest.mark.parametrize("module", ["evil.py", "evil_installed_xyz"])
def test_a_hostile_configuration_imports_nothing(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    study = config.stored_study(tomllib.loads(HOSTILE.format(folder=tmp_path, module=module)), folder=tmp_path)
    assert study.algorithms == ("fedavg", "evil")
    assert [point.settings.algorithm for point in study.points()] == ["fedavg"]
    assert study.tables["evil"] == {"power": [1, 2], "anything": {"nested": True}}
    assert study.points()[0].settings.clients.num_clients == 100
    again = config.stored_study(tomllib.loads(study.to_toml()), folder=tmp_path)
    assert again == study
    assert not marker.exists()
    assert {name for name in set(sys.modules) - before if "evil" in name} == set()


def test_the_same_configuration_is_imported_by_a_run(marker: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("plugins = ['evil.py']\n")
    assert "registers nothing" in line_of(lambda: config.load(path))
    assert marker.exists()


def test_a_run_refuses_algorithms_that_are_not_known() -> None:
    assert "unknown algorithm 'evil'" in line_of(lambda: config.study({"algorithms": ["fedavg", "evil"]}))
    assert "unknown key 'evil'" in line_of(lambda: config.study({"evil": {}}))


def test_a_stored_study_is_checked_like_any_other() -> None:
    assert "local_steps is 0" in line_of(lambda: config.stored_study({"training": {"local_steps": 0}}))
    assert "unknown key 'wrong'" in line_of(lambda: config.stored_study({"wrong": 3}))
    assert "did you mean 'concurrency'" in line_of(lambda: config.stored_study({"fedbuff": {"concurency": 3}}))
