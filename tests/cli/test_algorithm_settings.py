"""Settings of algorithms on the command line: a value that cannot be used is one line, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from defedavg.algorithms import ALGORITHMS, BUILT_IN
from helpers.command_line import call, refuse

BAD = [
    ("fedasync.alpha=0", "fedasync: alpha is 0.0; give a number above zero, at most 1"),
    ("fedasync.alpha=1.5", "fedasync: alpha is 1.5; give a number above zero, at most 1"),
    ("fedasync.exponent=-1", "fedasync: exponent is -1.0; give a finite number of zero or more"),
    ("fedasync.hinge_slope=inf", "fedasync: hinge_slope is inf; give a finite number of zero or more"),
    ("fedasync.hinge_bound=-1", "fedasync: hinge_bound is -1; give a finite number of zero or more"),
    ("fedasync.staleness=polynom", "staleness factor of fedasync 'polynom'", "polynomial"),
    ("fedasync.concurrency=-2", "fedasync: concurrency is -2; give a number of clients, or 0 for all"),
    ("fedasync.concurrency=30", "fedasync: concurrency is 30 but there are 20 clients"),
    ("delay-adaptive-sgd.rule=drop", "rule of delay-adaptive-sgd 'drop'"),
    ("delay-adaptive-sgd.threshold=-1", "delay-adaptive-sgd: threshold is -1; give a number of merges"),
    ("ringmaster.threshold=-3", "ringmaster: threshold is -3; give a number of merges"),
    ("ca2fl.concurrency=21", "ca2fl: concurrency is 21 but there are 20 clients"),
    ("ace.max_staleness=-1", "ace: max_staleness is -1; give a number of merges, or 0 for no bound"),
]


def plan(folder: Path, algorithm: str, *words: str) -> list[str]:
    """Return the words of a command that plans one algorithm with 20 clients."""
    (folder / "study.toml").write_text(f'algorithms = ["{algorithm}"]\n[clients]\nnum_clients = 20\n')
    return ["plan", "study.toml", "--rounds", "5", *(word for one in words for word in ("--set", one))]


@pytest.mark.parametrize(("setting", "words"), [(bad[0], bad[1:]) for bad in BAD], ids=[bad[0] for bad in BAD])
def test_a_bad_setting_is_one_line(tmp_path: Path, setting: str, words: tuple[str, ...]) -> None:
    refuse(call(*plan(tmp_path, setting.partition(".")[0], setting), cwd=tmp_path), *words)


@pytest.mark.parametrize("name", ["fedasync", "delay-adaptive-sgd", "ringmaster", "mifa", "ca2fl", "ace"])
def test_weights_by_samples_are_refused(tmp_path: Path, name: str) -> None:
    done = call(*plan(tmp_path, name, "training.weighting=samples"), cwd=tmp_path)
    refuse(done, f"{name} cannot weight updates by samples; set weighting = 'uniform'")


def test_stopped_jobs_cannot_be_omitted_from_a_plan(tmp_path: Path) -> None:
    words = plan(tmp_path, "ringmaster", "ringmaster.stop=true", "clients.plan_detail=used")
    refuse(call(*words, cwd=tmp_path), "'ringmaster': clients.plan_detail is 'used'", "set it to 'all'")


def test_the_algorithms_are_listed(tmp_path: Path) -> None:
    done = call("algorithms", cwd=tmp_path)
    assert done.returncode == 0
    listed = [line.split("  ")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [name for name in listed if name in ALGORITHMS] == list(BUILT_IN)
