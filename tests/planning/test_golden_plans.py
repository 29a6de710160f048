"""Golden plans: small plans of every algorithm, compared line by line with files.

To accept a change, run with PYTHONPATH=tests ``python tests/planning/test_golden_plans.py --write`` and read the
difference before you commit it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.planning.plan import Plan
from helpers.strategies import Case, case, variants

FOLDER = Path(__file__).parent / "golden"
ROUNDS = 6
ARRIVALS = 18  # rounds of an algorithm that merges one update at a time
REGENERATE = "if the change is intended, run: python tests/planning/test_golden_plans.py --write"


def golden_cases() -> dict[str, Case]:
    """Return by file name every algorithm with each of its choices, and with both kinds of uploads.

    Uniform slowness without jitter needs no exp or log, so the numbers are the same on every machine.
    """
    found = {}
    for name, kind in ALGORITHMS.items():
        for settings in variants(kind):
            words = [
                f"{f.name}={getattr(settings, f.name)}"
                for f in dataclasses.fields(settings)
                if getattr(settings, f.name) != f.default
            ]
            n = 3 if kind.broadcasts else 2
            arguments: dict[str, Any] = {"steps": 4, "seed": 11, "settings": settings, "step_seconds": 0.02}
            found["-".join([name, *words])] = case(name, 5, n, **arguments)
            if kind.overlaps_uploads(settings):  # the upload that the algorithm itself does not choose
                upload = "blocking" if kind.client_policy(settings).background_upload else "background"
                found["-".join([name, *words, f"upload={upload}"])] = case(name, 5, n, upload=upload, **arguments)
    return found


CASES = golden_cases()


def golden_plan(name: str) -> Plan:
    """Plan the rounds of a case."""
    return CASES[name].plan(ROUNDS if ALGORITHMS[CASES[name].algorithm].uses_updates_per_round else ARRIVALS)


def first_difference(found: list[str], stored: list[str]) -> str:
    """Describe the first difference of two plans; empty if they are equal."""
    for number, (now, then) in enumerate(zip(found, stored, strict=False), start=1):
        if now != then:
            return f"line {number} differs\n  stored: {then}\n  found:  {now}"
    if len(found) != len(stored):
        return (
            f"line {min(len(found), len(stored)) + 1} differs: {len(stored)} lines are stored, {len(found)} were found"
        )
    return ""


@pytest.mark.parametrize("name", CASES)
def test_the_plan_has_not_changed(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    assert path.exists(), f"{path.name} is missing; {REGENERATE}"
    found = list(golden_plan(name).lines())
    difference = first_difference(found, path.read_text(encoding="utf-8").splitlines())
    assert not difference, f"{path.name}, {difference}\n{REGENERATE}"


@pytest.mark.parametrize("name", CASES)
def test_a_golden_plan_is_valid(name: str) -> None:
    plan = Plan.load(FOLDER / f"{name}.jsonl")
    assert len(plan.rounds) == len(golden_plan(name).rounds) >= ROUNDS
    plan.check()


def test_there_are_no_other_golden_plans() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{name}.jsonl" for name in CASES)


def test_golden_plans_differ() -> None:
    assert len({golden_plan(name).hash() for name in CASES}) == len(CASES)


def test_a_difference_is_reported_by_line() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) == ""
    assert first_difference(["a", "c"], ["a", "b"]).startswith("line 2 differs")
    assert first_difference(["a"], ["a", "b"]).startswith("line 2 differs: 2 lines")


def write() -> None:
    """Write all files again and remove those that no case needs."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.jsonl"):
        path.unlink()
    for name in CASES:
        golden_plan(name).save(FOLDER / f"{name}.jsonl")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/planning/test_golden_plans.py --write")
    write()
