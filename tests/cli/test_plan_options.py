"""Options of ``plan`` that contradict others are refused in one line, and a stalled plan says how far it came."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import call, refused

LEAVING = """client,step_seconds,up_mbps,down_mbps,leaves_at,returns_at
0,0.01,10,50,10,
1,0.01,10,50,20,
2,0.01,10,50,30,
"""


def test_until_needs_a_chart() -> None:
    text = refused("plan", "--num-clients", "10", "--rounds", "2", "--until", "3")
    assert "--until" in text
    assert text.endswith("add --gantt FILE.png")


@pytest.mark.parametrize(
    ("option", "setting"),
    [("--num-clients", "clients.num_clients"), ("--updates-per-round", "training.updates_per_round")],
)
@pytest.mark.parametrize("value", ["5", "[3, 5]", "'no number'"])
def test_a_short_option_and_a_set_of_the_same_setting_are_not_combined(option: str, setting: str, value: str) -> None:
    text = refused("plan", option, "10", "--set", f" {setting} ={value}", "--rounds", "2")
    assert text == f"{option} and --set {setting}=… set the same value; give one of them"


def test_short_options_and_other_settings_are_combined(tmp_path: Path) -> None:
    words = ("--updates-per-round", "3", "--set", "clients.num_clients=10", "--set", "algorithms=['fedavg']")
    done = call("plan", *words, "--rounds", "2", "--gantt", "chart.png", "--until", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "chart.png").exists()


def test_a_stalled_plan_shows_its_rounds(tmp_path: Path) -> None:
    (tmp_path / "leave.csv").write_text(LEAVING)
    settings = ("clients.trace=leave.csv", "training.updates_per_round=1", "algorithms=['fedavg']")
    words = [word for setting in settings for word in ("--set", setting)]
    done = call("plan", *words, "--rounds", "1000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedavg (stalled after " in done.stdout
    assert " rounds)" in done.stdout
