"""What ``defedavg advise`` prints: refused options, progress on a pipe, an early Ctrl-C, and the table."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from defedavg.adviser import advice as adviser
from defedavg.adviser import advice_files, constants
from defedavg.adviser.advice import advise
from defedavg.adviser.advice_files import folder_for_trace
from defedavg.adviser.interruption import NothingRacedError
from defedavg.adviser.racing import Race
from defedavg.adviser.recommendation import Advice
from defedavg.adviser.search import INTERRUPTED, AdviceSearch
from defedavg.cli import advise_command, options
from defedavg.cli.advise_command import ROWS, PlainProgress, ranking_table
from defedavg.cli.main import app, load_command
from defedavg.errors import UserError
from helpers.command_line import refused

STUDY = """name = "my"
[task]
model = "softmax"
[clients]
num_clients = 6
[training]
updates_per_round = [2]
local_steps = [5]
local_lr = [0.001, 0.01, 0.03]
global_lr = [1.0]
[stop]
target_accuracy = 0.3
max_seconds = 0.5
"""


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "my.toml").write_text(STUDY)
    out = ("--out", str(tmp_path / "runs"))
    return ("advise", str(tmp_path / "my.toml"), *out, "--algorithms", "fedavg", "--seeds", "1", "--budget", "300")


@cache
def small() -> tuple[Advice, list[str]]:
    """Return an advice in which one candidate misses the target, and the texts of its progress."""
    texts: list[str] = []
    training = {"updates_per_round": [2], "local_steps": [5], "local_lr": [0.0001, 0.03], "global_lr": [1.0]}
    study: dict[str, Any] = {
        "task": {"model": "softmax"},
        "clients": {"num_clients": 6},
        "training": training,
        "stop": {"target_accuracy": 0.3, "max_seconds": 0.5},
    }
    names = ["fedavg"]
    found = advise(study, algorithms=names, budget_updates=300, seeds=1, progress=lambda text, *_: texts.append(text))
    return found, texts


def shown(advice: Advice) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(ranking_table(advice))
    return captured.get()


@pytest.mark.parametrize("budget", ["0s", "abc", "-5", "0", "1.2.3", "1.2.3s"])
def test_a_refused_budget_says_that_a_time_needs_a_unit(budget: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(STUDY)
    line = refused("advise", tmp_path / "my.toml", "--budget", budget)
    assert line == (
        f"--budget is {budget!r}; give a number of updates above zero, such as 20k, or a time with its unit, such as "
        "90s or 10m"
    )


@pytest.mark.parametrize("names", ["", " ", "fedavg,", ",fedbuff"])
def test_an_empty_name_of_an_algorithm_says_what_to_give(names: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(STUDY)
    line = refused("advise", tmp_path / "my.toml", "--algorithms", names)
    assert line.startswith(f"--algorithms is {names!r}; give names separated by commas, such as fedavg,fedbuff")
    assert "defedavg algorithms" in line


def test_a_phase_that_reports_nothing_prints_lines_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    slow = constants.measure

    def measured(*args: Any) -> Any:
        time.sleep(0.5)
        return slow(*args)

    monkeypatch.setattr(adviser, "measure", measured)
    monkeypatch.setattr(advise_command, "QUIET_SECONDS", 0.05)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("measuring constants of the task; 0 %\n") >= 3
    assert "–" not in result.stderr


def test_lines_of_progress_have_the_time_left_only_if_it_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise_command, "QUIET_SECONDS", 0.02)
    with PlainProgress() as progress:
        for left in (None, 75.0):
            progress.report("planning 404 settings", 0.73, left)
            time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) - {"preparing …"} == {
        "planning 404 settings; 73 %",
        "planning 404 settings; 73 %, at most 1:15 left",
    }


def test_the_first_line_of_progress_does_not_wait_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise_command.FIRST_SECONDS <= 2.0
    monkeypatch.setattr(advise_command, "FIRST_SECONDS", 0.02)
    with PlainProgress() as progress:
        progress.report("planning 404 settings", 0.01, None)
        time.sleep(0.3)
    assert capsys.readouterr().err.splitlines() == ["planning 404 settings; 1 %"]


def test_the_constants_tell_at_which_point_they_are() -> None:
    points = [text for text in small()[1] if text.startswith("measuring constants of the task, point")]
    assert [re.findall(r"point \d of \d", text) for text in points] == [["point 1 of 2"], ["point 2 of 2"]]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(options, "read_study"), (adviser, "screen"), (adviser, "measure"), (Race, "run_of")],
    ids=["loading", "planning", "measuring", "starting"],
)
def test_ctrl_c_before_anything_was_raced_says_that_there_is_no_advice(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for seconds in ("FIRST_SECONDS", "QUIET_SECONDS"):  # no line of progress, however slow the machine is
            patch.setattr(advise_command, seconds, 3600.0)
        patch.setattr(owner, name, interrupted)
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "stopped by Ctrl-C; no candidate had been raced yet, so there is no advice; run the command again, nothing "
        "needs to be removed"
    ]
    assert not (tmp_path / "runs").exists()
    if name == "run_of":  # the slowest to prepare; running it again needs no --force
        assert CliRunner().invoke(app, words).exit_code == 0


def test_ctrl_c_after_the_race_does_not_claim_that_nothing_was_raced(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AdviceSearch, "ranking", interrupted)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert "no candidate" not in result.stderr
    assert issubclass(NothingRacedError, KeyboardInterrupt)  # a script that catches Ctrl-C catches it too


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [(adviser, "why", 0), (advice_files, "advice_json", 130)],
    ids=["reasons", "files"],
)
def test_ctrl_c_after_the_search_loses_no_advice(
    owner: Any, name: str, code: int, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tmp_path: Path
) -> None:
    original = getattr(owner, name)

    def pressed(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(owner, name, pressed)
        result = CliRunner().invoke(app, words)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == code
    assert "advice: fedavg" in result.stdout
    folder = tmp_path / "runs" / "my-advice"
    assert {each.name for each in folder.iterdir()} == {"advice.json", "advised.toml", "advice.html"}


def test_the_help_describes_the_rule_by_which_candidates_continue() -> None:
    text = " ".join((load_command("advise").help or "").split())
    assert "successive halving" not in text
    assert (
        "the candidates that reach the loss and the metric of the fastest one with the least delay continue, as many "
        "as a share of the budget can train" in text
    )


def test_the_table_names_the_metric_and_shows_accuracies_as_percentages() -> None:
    advice, _ = small()
    assert advice.best.reached
    slow = advice.ranking[-1]
    assert not slow.reached
    text = shown(advice)
    assert text.split("\n")[0].strip() == "time to 30 %"
    assert f"not reached by {slow.seconds:.3g} s" in text
    assert f"(accuracy {100 * slow.metric:.1f} %)" in text
    assert advice.time_text(slow) == f"not reached by {slow.seconds:.3g} s (accuracy {100 * slow.metric:.1f} %)"
    assert slow.reason.startswith(f"the target was {advice.time_text(slow)}")
    assert "reaches 30 % in" in advice.sentence()
    other = replace(advice, metric_name="f1", ranking=(slow,))
    assert shown(other).split("\n")[0].strip() == "time to 0.3"
    assert f"(f1 {slow.metric:.4g})" in shown(other)
    assert "no candidate reached 0.3 within" in (other.failure() or "")


def test_the_last_line_counts_the_candidates_that_the_table_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advice, _ = small()
    first = advice.ranking[0]
    for rows, line in ((ROWS, None), (ROWS + 3, f"3 more in {tmp_path / 'advice.json'}")):
        advise_command._print(replace(advice, ranking=(first,) * rows), tmp_path, as_json=False)
        found = [each for each in capsys.readouterr().out.splitlines() if " more in " in each]
        assert found == ([] if line is None else [line])


def test_the_leader_is_not_called_advised_if_it_missed_the_target() -> None:
    advice, _ = small()
    assert "← advised" in shown(advice)
    missed = replace(advice, ranking=(replace(advice.ranking[-1], reason=""),))
    assert "← advised" not in shown(missed)
    assert "best so far; not advised" in shown(missed)


def test_a_candidate_that_missed_a_seed_takes_several_lines_of_the_table() -> None:
    advice, _ = small()
    partly = replace(advice.best, missed=(replace(advice.ranking[-1].missed[0], seed=1, seconds=0.3, metric=0.2),))
    lines = [line.rstrip() for line in shown(replace(advice, ranking=(partly,))).splitlines()]
    assert advice.best.time is not None
    assert f"{advice.best.time.mean:.3g} s on 1 of 2 seeds;" in lines[2]
    assert lines[3].strip() == "on seed 1 not reached by 0.3 s"
    assert lines[4].strip() == "(accuracy 20.0 %)"


def test_the_last_line_has_singulars_and_the_number_that_reached_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advice, _ = small()
    for candidates, updates, words in (
        (1, 1, "1 candidate, 2 raced, 1 reached the target, 1 update; "),
        (6816, 2000, "6,816 candidates, 2 raced, 1 reached the target, 2,000 updates; "),
    ):
        changed = replace(advice, candidates=candidates, updates=updates, steps=5.0 * updates)
        advise_command._print(changed, tmp_path, as_json=False)
        assert f"\n{words}" in capsys.readouterr().out
    assert "(1 seed)" in advice.sentence()


def test_no_algorithm_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="algorithms is empty"):
        advise({"stop": {"target_accuracy": 0.3}}, algorithms=[])


def test_ctrl_c_before_the_target_keeps_the_exit_code_of_an_interruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = small()
    missed = replace(found, ranking=tuple(each for each in found.ranking if not each.reached), ended=INTERRUPTED)
    with pytest.raises(typer.Exit) as stopped:
        advise_command._print(missed, tmp_path, as_json=False)
    assert stopped.value.exit_code == 130
    assert "no candidate reached" in capsys.readouterr().err
    with pytest.raises(UserError, match="no candidate reached"):
        advise_command._print(replace(missed, ended="the budget is spent"), tmp_path, as_json=False)


def test_an_interrupted_search_claims_no_more_than_was_trained() -> None:
    found, _ = small()
    last = next(each for each in found.ranking if not each.reached)
    short = replace(last, seconds=0.02, missed=tuple(replace(each, seconds=0.02) for each in last.missed))
    longer = replace(short, seconds=0.01, missed=tuple(replace(each, seconds=0.03) for each in last.missed))
    spent = replace(found, ranking=(short, longer), ended="the budget is spent")
    line = spent.failure() or ""
    assert line.startswith(
        "no candidate reached 30 % within 0.03 s of simulated time, the longest that any was trained;"
    )
    assert line.endswith("set a lower stop.target_accuracy or a longer stop.max_seconds, or give a larger --budget")
    line = replace(spent, ended=INTERRUPTED).failure() or ""
    assert line.startswith(
        "no candidate reached 30 % within 0.03 s of simulated time, the longest that any was trained;"
    )
    assert line.endswith("; run the command again without interrupting it")
    assert "lower" not in line


def test_a_refused_search_leaves_no_folder(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "set stop.target_accuracy" in refused(*words, "--set", "stop.target_accuracy=0")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "my-advice").mkdir(parents=True)
    assert "set stop.target_accuracy" in refused(*words, "--set", "stop.target_accuracy=0")
    assert (tmp_path / "runs" / "my-advice").is_dir()  # not made by the command


@pytest.mark.parametrize("advised", [True, False])
def test_the_trace_of_a_log_stays_only_with_an_advice(tmp_path: Path, advised: bool) -> None:
    folder = tmp_path / "runs" / "my-advice"
    with suppress(KeyboardInterrupt), folder_for_trace(folder):
        (folder / "fleet.csv").touch()
        if advised:
            (folder / "advice.json").touch()
        raise KeyboardInterrupt
    assert (folder / "fleet.csv").exists() is (tmp_path / "runs").exists() is advised
