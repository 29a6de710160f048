"""Old names of settings: they work wherever settings are read, with one warning, and stored runs are read silently."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

from defedavg import simulate
from defedavg.compat import RenamedWarning
from defedavg.config import study as config
from defedavg.config.renamed_settings import RENAMED, current_label, current_names
from defedavg.deploy.deploy_config import read_orders
from helpers.user_errors import line_of

VALUES: dict[str, Any] = {
    "stop.hits": 3,
    "stop.at_target": False,
    "stop.measure_rounds": 4,
    "stop.measure_seconds": 0.5,
    "clients.dropout": 0.25,
    "clients.record_jobs": "used",
}
pairs = pytest.mark.parametrize(("old", "new"), RENAMED.items())


def value_of(settings: config.Settings, name: str) -> Any:
    return settings.flat()[name]


def test_every_renamed_setting_is_tested_and_its_new_name_exists() -> None:
    assert set(VALUES) == set(RENAMED)
    assert set(RENAMED.values()) <= set(config.Settings().flat())


@pairs
def test_in_a_file_and_on_the_command_line(tmp_path: Path, old: str, new: str) -> None:
    table, _, key = old.partition(".")
    value = VALUES[old]
    path = tmp_path / "old.toml"
    path.write_text(f"[{table}]\n{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n")
    with pytest.warns(RenamedWarning, match=f"{old} is now {new}; ") as caught:
        study = config.load(path)
    assert len(caught) == 1
    assert value_of(study.points()[0].settings, new) == value
    path.write_text("")
    with pytest.warns(RenamedWarning, match=f"{old} is now {new}; ") as caught:
        study = config.load(path, (f"{old}={str(value).lower() if isinstance(value, bool) else value}",))
    assert len(caught) == 1
    assert value_of(study.points()[0].settings, new) == value


@pairs
def test_in_the_run_configuration_of_a_flower_app(old: str, new: str) -> None:
    with pytest.warns(RenamedWarning, match=f"{old} is now {new}"):
        found = read_orders({"algorithm": "fedavg", old: VALUES[old]})
    assert value_of(found.settings, new) == VALUES[old]


def test_in_simulate() -> None:
    settings = {"task.model": "softmax", "training.local_steps": 1, "stop.max_rounds": 4, "stop.measure_rounds": 2}
    with pytest.warns(RenamedWarning, match=r"stop\.measure_rounds is now stop\.eval_every_rounds"):
        result = simulate("fedavg", settings=settings)
    assert [evaluation.round for evaluation in result.evaluations] == [0, 2, 4]


@pairs
def test_both_names_are_refused(tmp_path: Path, old: str, new: str) -> None:
    table, _, key = old.partition(".")
    both = {key: VALUES[old], new.partition(".")[2]: VALUES[old]}
    for tables in (both, dict(reversed(both.items()))):
        line = line_of(lambda tables=tables: current_names({table: tables}))  # type: ignore[misc]
        assert line == f"{new} is set twice, once under its old name {old}; remove the old one"
    assert "is set twice" in line_of(lambda: current_names({old: 1, new: 1}))
    path = tmp_path / "s.toml"
    path.write_text("")
    with pytest.warns(RenamedWarning):
        assert "is set twice" in line_of(lambda: config.load(path, (f"{new}=1", f"{old}=1")))


def test_the_command_line_overrides_the_old_name_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[stop]\nhits = 2\n")
    with pytest.warns(RenamedWarning):
        study = config.load(path, ("stop.consecutive_hits=5",))
    assert study.points()[0].settings.stop.consecutive_hits == 5
    path.write_text("[stop]\nconsecutive_hits = 2\n")
    with pytest.warns(RenamedWarning):
        study = config.load(path, ("stop.hits=5",))
    assert study.points()[0].settings.stop.consecutive_hits == 5


def test_a_stored_study_is_read_without_a_warning() -> None:
    text = "name = 'old'\n[stop]\nhits = 3\nat_target = false\n[clients]\ndropout = [0.1, 0.2]\nrecord_jobs = 'all'\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study = config.stored_study(tomllib.loads(text))
    points = study.points()
    assert [point.label for point in points] == ["defedavg-iid failure_rate=0.1", "defedavg-iid failure_rate=0.2"]
    assert (points[0].settings.stop.consecutive_hits, points[0].settings.stop.stop_at_target) == (3, False)


def test_labels_of_stored_runs_get_the_present_names() -> None:
    assert current_label("fedavg dropout=0.1 hits=3 local_lr=0.5") == (
        "fedavg failure_rate=0.1 consecutive_hits=3 local_lr=0.5"
    )
    assert current_label("dropout") == "dropout"


def test_a_dictionary_is_translated_and_the_original_kept() -> None:
    old = {"name": "a", "stop": {"hits": 1, "max_rounds": 2}, "stop.at_target": True}
    assert current_names(old) == {
        "name": "a",
        "stop": {"consecutive_hits": 1, "max_rounds": 2},
        "stop.stop_at_target": True,
    }
    assert old["stop"] == {"hits": 1, "max_rounds": 2}


def test_a_renamed_setting_is_one_plain_line_of_the_command_line() -> None:
    code = (
        "from defedavg.cli import main\n"
        "from defedavg.config import study as config\n"
        "main.print_own_warnings()\n"
        "for _ in range(2):\n"
        "    config.study({'stop': {'hits': 3}})\n"
        "import warnings; warnings.warn('other')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *others = done.stderr.splitlines()
    assert first == (
        "defedavg: stop.hits is now stop.consecutive_hits; the old name will stop working in the next version"
    )
    assert "UserWarning: other" in others[0]
    assert len(others) <= 2
