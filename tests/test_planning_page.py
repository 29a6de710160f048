"""The tables of docs/planning.md: every number is the one that the command above it prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from defedavg.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
STUDY = re.compile(r'```toml title="phones.toml"\n(.*?)```', re.DOTALL)
COMMAND_AND_TABLE = re.compile(r"```bash\ndefedavg (plan phones\.toml [^\n]+)\n```\n\n((?:\|[^\n]+\n)+)")
NUMBER = re.compile(r"\d+(?:\.(\d+))?")
UNITS = {"": 1.0, "%": 0.01, "s": 1.0, "min": 60.0, "h": 3600.0, "MB": 1e6, "GB": 1e9, "kJ": 1e3}

Plan = dict[str, Any]
COLUMNS: dict[str, Callable[[Plan], list[float]]] = {
    "rounds": lambda plan: [plan["rounds"]],
    "updates": lambda plan: [plan["jobs_merged"]],
    "time/round": lambda plan: [plan["seconds_per_round"]],
    "stale mean": lambda plan: [plan["staleness_mean"]],
    "slowest ¼": lambda plan: [plan["participation"][-1]],
    "heard: 10 %": lambda plan: [plan["coverage"][0]],
    "50 %": lambda plan: [plan["coverage"][1]],
    "100 %": lambda plan: [plan["coverage"][2]],
    "never": lambda plan: [plan["never_heard"]],
    "Gini": lambda plan: [plan["gini"]],
    "timed out": lambda plan: [plan["timed_out"]],
    "bytes up (most)": lambda plan: [plan["uplink_per_client"]["most"]],
    "bytes down (most)": lambda plan: [plan["downlink_per_client"]["most"]],
    "bytes up / down (most)": lambda plan: [plan[f"{link}_per_client"]["most"] for link in ("uplink", "downlink")],
    "energy (median / most)": lambda plan: [plan["energy_per_client"][name] for name in ("median", "most")],
}
OF_FIRST_TABLE = {"(above)": 1, "(automatic)": 0}
"""Rows that repeat a plan of the first command, by the words that mark them: FedBuff's and FedAvg's."""


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.strip("| \n").split("|")]


def tables() -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Return every command of the page that has a table, with the columns and the rows of that table."""
    for command, table in COMMAND_AND_TABLE.findall(PAGE.read_text(encoding="utf-8")):
        head, _, *rows = table.splitlines()
        yield command, cells(head), [cells(row) for row in rows]


def planned(command: str) -> list[Plan]:
    """Return the numbers that a command prints, one object per row."""
    done = CliRunner().invoke(app, [*shlex.split(command), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    plans: list[Plan] = json.loads(done.stdout)
    return plans


def agrees(shown: str, values: list[float]) -> bool:
    """Return whether the numbers of a cell, which share its last unit, are these values rounded to its digits."""
    unit = UNITS[NUMBER.sub("", shown).replace("/", "").strip()]
    found = list(NUMBER.finditer(shown))
    rounded = [f"{value / unit:.{len(each[1] or '')}f}" for each, value in zip(found, values, strict=True)]
    return rounded == [each[0] for each in found]


@pytest.mark.no_cover
def test_every_number_of_a_table_is_printed_by_the_command_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study,) = STUDY.findall(PAGE.read_text(encoding="utf-8"))
    (tmp_path / "phones.toml").write_text(study, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = list(tables())
    assert len(found) == 5 == PAGE.read_text(encoding="utf-8").count("\ndefedavg plan phones.toml")
    made = {command: planned(command) for command, _, _ in found}
    first = made[found[0][0]]
    for command, (_, *columns), rows in found:
        plans = iter(made[command])
        for label, *shown in rows:
            repeated = [place for mark, place in OF_FIRST_TABLE.items() if mark in label]
            plan = first[repeated[0]] if repeated else next(plans)
            for column, cell in zip(columns, shown, strict=True):
                values = COLUMNS[column](plan)
                assert agrees(cell, values), f"{command}: {label}, {column}: {cell}, not {values}"
        assert not list(plans), f"{command} prints rows that the table lacks"


def test_a_wrong_number_would_be_found() -> None:
    assert agrees("10.6 / 654 kJ", [10_610.0, 653_900.0])
    assert not agrees("10.6 / 652 kJ", [10_610.0, 653_900.0])
    assert agrees("35 %", [0.3512])
    assert not agrees("75", [74.0])
