"""Options and messages that all commands share."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from defedavg.cli import main
from defedavg.cli.options import current_name
from helpers.command_line import call, refuse, refused

PLUGIN = '''
from defedavg.algorithms import register
from defedavg.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    """FedAvg under another name."""

    name = "mine"
    summary = "FedAvg under another name."


register(Mine)
'''


STUDY = """
algorithms = ["mine"]
[task]
model = "softmax"
[clients]
num_clients = 5
[training]
updates_per_round = 2
local_steps = 2
[stop]
max_rounds = 2
"""


def test_only_a_former_name_of_an_option_of_the_command_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-batch-jobs", "--out")
    words = ["--width", "--width=4", "--out", "width", "--measure-rounds"]
    replaced = ["--max-batch-jobs", "--max-batch-jobs=4", "--out", "width", "--measure-rounds"]
    assert [current_name(word, options) for word in words] == replaced
    assert capsys.readouterr().err.count("--width is now --max-batch-jobs") == 2
    assert current_name("--width", (*options, "--width")) == "--width", "a command may have an option of that name"


def test_plugins_are_loaded_before_any_other_option_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setitem(sys.modules, "defedavg.plugins", SimpleNamespace(load_plugins=loaded.extend))
    (tmp_path / "link.py").symlink_to(tmp_path / "two.py")
    monkeypatch.chdir(tmp_path)
    wrong = refused("plan", "--rounds", "none", "--plugin", "one.py", "--plugin", "link.py")
    assert wrong.startswith("--rounds needs another value")
    assert loaded == [tmp_path / "one.py", tmp_path / "two.py"], "links are resolved, so a file is loaded once"
    for name in ("settings", "algorithms", "report", "view", "split", "run", "tune"):
        loaded.clear()
        CliRunner().invoke(main.app, [name, "--plugin", "one.py", "--help"])
        assert loaded == [tmp_path / "one.py"], name


def test_a_plugin_adds_an_algorithm_to_every_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "study.toml").write_text(STUDY)
    plugin = ("--plugin", "mine.py")
    listed = call("algorithms", *plugin, "--json", cwd=tmp_path)
    assert json.loads(listed.stdout)[-1]["name"] == "mine", listed.stderr
    assert "\n[mine]\n" in call("settings", *plugin, cwd=tmp_path).stdout
    for words in ((), ("study.toml",)):
        planned = call("plan", *words, *plugin, "--rounds", "2", "--json", cwd=tmp_path)
        assert "mine" in {entry["algorithm"] for entry in json.loads(planned.stdout)}, planned.stderr
    assert len(json.loads(call("split", "study.toml", *plugin, "--json", cwd=tmp_path).stdout)) == 5
    result = call("run", "study.toml", *plugin, "--json", cwd=tmp_path)
    assert [entry["algorithm"] for entry in json.loads(result.stdout)] == ["mine"], result.stderr
    again = call("run", tmp_path / "runs" / "study" / "config.toml", "--set", "name='again'", "--json", cwd=tmp_path)
    assert [entry["algorithm"] for entry in json.loads(again.stdout)] == ["mine"], "the study names its plugins"
    refuse(call("run", "study.toml", "--force", cwd=tmp_path), "mine")


def test_warnings_of_this_package_are_one_line_each_and_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class RenamedWarning(FutureWarning):
        __module__ = "defedavg.anywhere"

    class OtherWarning(FutureWarning):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others: list[object] = []
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(message))
        main.print_own_warnings()
        for text in ("stop.hits is now stop.consecutive_hits", "stop.hits is now stop.consecutive_hits", "another"):
            warnings.warn(text, RenamedWarning, stacklevel=1)
        warnings.warn("not from here", OtherWarning, stacklevel=1)
    assert capsys.readouterr().err == "defedavg: stop.hits is now stop.consecutive_hits\ndefedavg: another\n"
    assert [str(other) for other in others] == ["not from here"]
