"""``defedavg theory`` names the theorem that applies, says where none does, and marks rounds that are no guidance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from defedavg.theory.formulas import PRACTICAL_ROUNDS
from helpers.command_line import call, refuse

CONSTANTS = ("--smoothness", "1", "--noise", "10", "--gradient", "5", "--heterogeneity", "1", "--gap", "2")
STUDY = """
algorithms = ["defedavg-iid", "defedavg-niid", "fedavg"]
[task]
model = "softmax"
split = "{split}"
[clients]
num_clients = 6
[training]
updates_per_round = 2
local_steps = 5
[stop]
max_rounds = 50
"""


def theory(folder: Path, split: str, *words: str) -> list[dict[str, object]]:
    (folder / "study.toml").write_text(STUDY.format(split=split))
    done = call("theory", "--config", "study.toml", *CONSTANTS, "--max-staleness", "3", "--json", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stderr").write_text(done.stderr)
    reports: list[dict[str, object]] = json.loads(done.stdout)
    return reports


@pytest.mark.parametrize("split", ["iid", "sampled"])
def test_both_theorems_apply_to_identical_clients(split: str, tmp_path: Path) -> None:
    reports = theory(tmp_path, split)
    assert [report["theorem"] for report in reports] == [2, 1]
    assert f"task.split = {split} all clients have one distribution" in str(reports[0]["reason"])
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line == "defedavg: fedavg: no theorem is about this algorithm; use defedavg-iid or defedavg-niid"


@pytest.mark.parametrize("split", ["classes", "random-classes", "dirichlet", "shards", "sampled-classes"])
def test_the_iid_theorem_is_not_applied_to_different_clients(split: str, tmp_path: Path) -> None:
    reports = theory(tmp_path, split)
    assert [report["theorem"] for report in reports] == [1]
    assert f"with any split (task.split = {split})" in str(reports[0]["reason"])
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert len(lines) == 2
    assert f"Theorem 2 needs clients with one distribution, but task.split = {split} gives them different" in lines[0]
    alone = call("theory", "--config", "study.toml", "--set", "algorithms=defedavg-iid", *CONSTANTS, cwd=tmp_path)
    refuse(alone, "no theorem applies to this study: defedavg-iid: Theorem 2 needs", "use defedavg-niid")


def test_every_algorithm_without_a_theorem_has_its_own_reason(tmp_path: Path) -> None:
    theory(tmp_path, "classes")  # writes the study
    both = "algorithms=['fedavg', 'defedavg-iid']"
    result = call("theory", "--config", "study.toml", "--set", both, *CONSTANTS, cwd=tmp_path)
    refuse(
        result,
        "no theorem applies to this study: (1) fedavg: no theorem is about this algorithm; use defedavg-iid",
        "; (2) defedavg-iid: Theorem 2 needs clients with one distribution",
    )


def test_rounds_beyond_the_horizon_are_marked(tmp_path: Path) -> None:
    near = theory(tmp_path, "iid", "--epsilon", "10")[0]
    assert near["no_practical_guidance"] is None
    (far,) = theory(tmp_path, "classes", "--epsilon", "0.0001")
    assert "first term" in str(far["no_practical_guidance"])
    (stale,) = theory(tmp_path, "classes", "--epsilon", "10", "--max-staleness", "3000000")
    assert "the condition ηη̄ ≤" in str(stale["no_practical_guidance"])
    done = call(
        "theory", "--config", "study.toml", *CONSTANTS, "--max-staleness", "3", "--epsilon", "1e-4", cwd=tmp_path
    )
    printed = " ".join(done.stdout.split())
    assert "(no practical guidance)" in printed
    assert f"No practical guidance: more than {PRACTICAL_ROUNDS:,} rounds would be needed; the first term" in printed


def test_a_bound_whose_conditions_fail_is_marked(tmp_path: Path) -> None:
    theory(tmp_path, "classes")
    for staleness, marked in (("1", False), ("10000", True)):
        words = ("--max-staleness", staleness, "--rounds", "1000000")
        done = call("theory", "--config", "study.toml", *CONSTANTS, *words, cwd=tmp_path)
        assert ("(not proven: a condition fails)" in done.stdout) == marked


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rounds", "1" + "0" * 50, "at most 1e+30"),
        ("--smoothness", "1e308", "1e-30 to 1e+30"),
        ("--gap", "1e-308", "1e-30 to 1e+30"),
        ("--noise", "nan", "zero or more"),
        ("--epsilon", "inf", "epsilon is inf"),
    ],
)
def test_absurd_constants_are_refused(option: str, value: str, words: str, tmp_path: Path) -> None:
    refuse(call("theory", *CONSTANTS, "--max-staleness", "3", option, value, cwd=tmp_path), words)
