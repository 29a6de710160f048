"""Rates that are unlikely to learn are reported; those that suit the algorithm are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.config.doubtful_settings import doubtful_settings
from helpers.command_line import call


def lines(algorithm: str, **training: Any) -> list[str]:
    tables = {"clients": {"num_clients": 20}, "training": training}
    return doubtful_settings(config.study({"algorithms": [algorithm], **tables}))


def test_an_adaptive_server_optimiser_with_a_large_rate_is_doubtful() -> None:
    (line,) = lines("fadas")
    assert line.startswith("fadas: the server optimiser amsgrad changes every weight by about global_lr = 1")
    assert lines("fadas", global_lr=0.01) == []
    assert lines("fadas", server_optimizer="momentum") == []
    (line,) = lines("fedavg", server_optimizer="yogi")
    assert "yogi" in line
    assert lines("fedavg", server_optimizer=["yogi", "sgd"]) == []  # one of the runs may learn


@pytest.mark.parametrize("algorithm", ["ace", "ringmaster", "delay-adaptive-sgd"])
def test_a_step_for_every_arrival_with_a_large_rate_is_doubtful(algorithm: str) -> None:
    (line,) = lines(algorithm)
    assert line.startswith(
        f"{algorithm} takes a step for every arrival of 20 clients with global_lr = 1; try about 0.05"
    )
    assert lines(algorithm, global_lr=0.05) == []


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff", "favano", "fedasync", "mifa", "ca2fl", "area", "fedfa"])
def test_other_algorithms_have_no_doubtful_rate(algorithm: str) -> None:
    assert lines(algorithm) == []


def test_run_prints_the_line(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('name = "s"\nalgorithms = ["ace"]\n[task]\nmodel = "softmax"\n[stop]\nmax_rounds = 2\n')
    found = call("run", str(file), "--out", str(tmp_path / "runs"), cwd=tmp_path)
    assert found.returncode == 0
    assert "ace takes a step for every arrival of 100 clients" in found.stderr
