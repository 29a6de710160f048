"""Precisions on the CPU: bfloat16 where the processor has it, a clear error elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig, check_fallback, reference_precision
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.tune import Tuning, pairs_of
from defedavg.tasks import build, make_task
from defedavg.training import StackingError, Trainer, run_batched
from defedavg.training.precision import check_precision, cpu_has_bf16
from helpers.command_line import refused
from helpers.interrupted_studies import ignore
from helpers.small_runs import batched_run, how
from helpers.user_errors import line_of

NOISY = """
import numpy as np, torch
from torch import nn
from defedavg import make_task


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


def make(config, client):
    x, y = np.zeros((8, 4), "float32"), np.arange(8) % 2
    return make_task(model=Noisy(4, 2), train=(x, y), test=(x, y), clients=np.split(np.arange(8), 4), classes=2)
"""


def test_a_processor_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    with pytest.raises(UserError, match=r"bf16 needs a processor with AVX512-BF16 or AMX, or a CUDA device; use float"):
        check_precision("bf16", "cpu")
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    with pytest.raises(UserError, match="AVX512-BF16"):
        check_precision("bf16", "cpu")
    check_precision("bf16", "cuda")
    with pytest.raises(UserError, match="tf32 needs a CUDA device"):
        check_precision("tf32", "cpu")


@pytest.mark.parametrize(("device", "instead"), [("cpu", "float32"), ("cuda", "float32 or tf32")])
def test_the_reference_executor_refuses_bfloat16_in_which_it_does_not_compute(device: str, instead: str) -> None:
    with pytest.raises(UserError) as refusal:
        ComputeConfig("reference", device, precision="bf16")
    assert str(refusal.value) == (
        f"the reference executor does not compute in bf16; use --executor batched or --precision {instead}"
    )
    assert ComputeConfig("reference", device, precision=instead.split()[-1]).executor == "reference"
    assert ComputeConfig("batched", "cuda", precision="bf16").precision == "bf16"


@pytest.mark.parametrize("command", ["run", "tune", "paper table1"])
def test_every_command_that_computes_refuses_bfloat16_with_the_reference_executor(command: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("")
    file = [] if command.startswith("paper") else [str(tmp_path / "study.toml")]
    words = ("--executor", "reference", "--device", "cpu", "--precision", "bf16")
    assert refused(*command.split(), *file, *words).endswith("use --executor batched or --precision float32")


@pytest.mark.parametrize("begin", ["run", "tune"])
def test_a_model_that_cannot_be_stacked_is_refused_in_bfloat16_before_anything_is_written(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    (tmp_path / "noisy.py").write_text(NOISY)
    task = {"module": str(tmp_path / "noisy.py:make")}
    study = config.study(
        {"task": task, "training": {"updates_per_round": 1}, "stop": {"max_rounds": 1, "target_accuracy": 0.5}}
    )
    compute = ComputeConfig(precision="bf16")

    def start() -> None:
        if begin == "run":
            StudyRun(study, tmp_path / "study", compute=compute)
        else:
            Tuning(pairs_of(study.points(), (1.0,), (0.1,)), study.seeds, compute).run(ignore)

    assert line_of(start) == (
        "the model is trained one client at a time: it draws from the global generator; use nn.Dropout, nn.Dropout1d "
        "or nn.Dropout2d. This does not compute in bf16; use --precision float32"
    )
    assert not (tmp_path / "study").exists()
    assert StudyRun(study, tmp_path / "study").run(ignore)  # in float32 it is trained


def test_a_fallback_within_a_run_is_refused_in_bfloat16() -> None:
    reason = StackingError("it has no stacked form")
    for device, others in (("cpu", "float32"), ("cuda", "float32 or tf32")):
        line = line_of(partial(check_fallback, "bf16", device, reason))
        assert line.startswith(f"the model is trained one client at a time: {reason}. ")
        assert line.endswith(f"does not compute in bf16; use --precision {others}")
    assert [reference_precision(*pair) for pair in (("bf16", "cpu"), ("bf16", "cuda"), ("tf32", "cuda"))] == [
        "float32", "tf32", "tf32",
    ]  # fmt: skip
    check_fallback("float32", "cpu", reason)
    check_fallback("tf32", "cuda", reason)


@pytest.mark.skipif(not cpu_has_bf16(), reason="this processor has no bfloat16")
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet"])
def test_bfloat16_stays_within_the_documented_distance_and_is_bit_identical_in_every_batch(model: str) -> None:
    """After ten merges, relative to the distance from initialisation; docs/executor.md states the tolerance."""
    source = np.random.default_rng(0)
    data = source.normal(size=(120, 1, 28, 28)).astype(np.float32), source.integers(0, 10, 120)
    parts = [np.arange(i, 120, 6) for i in range(6)]
    task = make_task(model=lambda: build(model, (1, 28, 28), 10), train=data, test=data, clients=parts)
    chosen = how("defedavg-iid", local_lr=0.01)  # as in the test of the tolerance on a CUDA device
    chosen = replace(chosen, clients=replace(chosen.clients, upload="blocking"))
    found = {}
    for precision, width in (("float32", 64), ("bf16", 64), ("bf16", 1)):
        run = batched_run(chosen, task, 10)
        start = run.reference.versions[0]
        trainer = Trainer(task, run.reference.module, batch_size=4, precision=precision, max_batch_jobs=width)
        for _ in run_batched([run], trainer):
            pass
        found[precision, width] = run.reference.versions[run.newest]
    exact, half = found["float32", 64], found["bf16", 64]
    assert torch.equal(half, found["bf16", 1])
    far = float((half - exact).norm() / (exact - start).norm())
    print(f"{model}: {far:.1e}")
    assert 0 < far < 0.2


def test_an_unknown_precision_is_answered_with_all_values_of_the_option() -> None:
    with pytest.raises(UserError, match="known: auto, bf16, float32, tf32"):
        check_precision("fp8", "cpu")
