"""Models of characters: causal, trained alike by both executors, and in studies on a data set of a plugin."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from defedavg.report.payload import payload
from defedavg.report.tables import score_and_perplexity
from defedavg.runstore.metrics import perplexity
from defedavg.runstore.reader import read_run
from defedavg.tasks import Task, build, make_task, token_accuracy, token_cross_entropy
from defedavg.tasks.models import TEXT_MODELS
from helpers.command_line import call
from helpers.small_runs import batched_run, final_versions, how, reference
from helpers.user_errors import line_of

PLUGIN = """
import numpy as np
from defedavg.tasks import DataSet, register_dataset

def read(paths):
    starts = np.arange(60)[:, None]
    numbers = (starts + np.arange(11)) % 5
    part = numbers[:, :-1], numbers[:, 1:]
    return part, part

register_dataset(DataSet("counting", "0 1 2 3 4 0 1 …", "public domain", (10,), 60, 60, CLASSES, read, inputs="tokens"))
"""
STUDY = """
name = "characters"
algorithms = ["fedavg"]
plugins = ["counting.py"]
[task]
data = "counting"
model = "MODEL"
split = "SPLIT"
[clients]
num_clients = 6
[training]
updates_per_round = 3
local_steps = 10
local_lr = 1.0
[stop]
max_rounds = 6
eval_every_rounds = 3
"""


def write_study(folder: Path, model: str, split: str = "iid", classes: int = 5) -> Path:
    (folder / "counting.py").write_text(PLUGIN.replace("CLASSES", str(classes)))
    (folder / "study.toml").write_text(STUDY.replace("MODEL", model).replace("SPLIT", split))
    return folder / "study.toml"


def task_of(model: str) -> Task:
    """Return a float64 task for six clients: the next character of random texts of six characters."""
    texts = np.random.default_rng(0).integers(0, 7, (60, 7))
    data, parts = (texts[:, :-1], texts[:, 1:]), [np.arange(i, 60, 6) for i in range(6)]
    return make_task(
        model=lambda: build(model, (6,), 7).double(), train=data, test=data, clients=parts, loss=token_cross_entropy,
        metric=token_accuracy,
    )  # fmt: skip


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_both_executors_agree(model: str) -> None:
    task, chosen = task_of(model), how("defedavg-niid")
    expected = reference(chosen, task, 4)
    (found,) = final_versions([batched_run(chosen, task, 4)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_no_score_depends_on_later_characters(model: str) -> None:
    net, texts = build(model, (6,), 7).eval(), torch.arange(12).view(2, 6) % 7
    changed = texts.clone()
    changed[:, 4:] = 0
    scores, others = net(texts), net(changed)
    assert scores.shape == (2, 6, 7)
    torch.testing.assert_close(scores[:, :4], others[:, :4])
    assert not torch.allclose(scores[:, 4:], others[:, 4:])


def test_the_char_mlp_sees_five_characters() -> None:
    net, texts = build("char-mlp", (8,), 7).eval(), torch.arange(8)[None] % 7
    changed = texts.clone()
    changed[:, 0] = 6
    same = [torch.equal(score, other) for score, other in zip(net(texts)[0], net(changed)[0], strict=True)]
    assert same == [False] * 5 + [True] * 3
    assert sum(p.numel() for p in net.parameters()) == 7 * 8 + 40 * 64 + 64 + 64 * 7 + 7


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_images_are_refused(model: str) -> None:
    assert "needs inputs (length,) of character numbers, not (1, 8, 8)" in line_of(lambda: build(model, (1, 8, 8), 7))


def test_perplexity_is_the_exponential_of_the_loss_per_token() -> None:
    assert perplexity("token_accuracy", math.log(7)) == pytest.approx(7)
    assert perplexity("accuracy", 1.0) is None
    assert perplexity("token_accuracy", math.nan) is None
    assert math.isfinite(perplexity("token_accuracy", 1e9) or math.inf)
    assert score_and_perplexity(0.25, math.log(8), "token_accuracy") == "0.25 (perplexity 8)"
    assert score_and_perplexity(0.25, math.log(8), "accuracy") == "25.0 %"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_study_of_a_data_set_with_a_target_at_every_position(model: str, tmp_path: Path) -> None:
    done = call("run", write_study(tmp_path, model), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "one client at a time" not in done.stdout + done.stderr
    assert "perplexity" in done.stdout
    (entry,) = json.loads((tmp_path / "runs/characters/summary.json").read_text())["runs"]
    lines = [json.loads(line) for line in (tmp_path / "runs/characters/metrics.jsonl").read_text().splitlines()]
    assert entry["metric"] == "token_accuracy"
    assert entry["final_perplexity"] == pytest.approx(math.exp(lines[-1]["loss"]))
    assert entry["final_perplexity"] < math.exp(lines[0]["loss"])
    shown = json.dumps(payload([read_run(tmp_path / "runs/characters")], "characters"))
    assert '"final_perplexity": ' in shown


@pytest.mark.parametrize(
    ("model", "split", "classes", "words"),
    [
        ("char-lstm", "iid", 4, "counting has characters outside 0..3"),
        ("char-lstm", "classes", 5, "class"),
        ("cnn", "iid", 5, "the cnn needs inputs"),
    ],
)
def test_bad_studies_end_in_one_line(model: str, split: str, classes: int, words: str, tmp_path: Path) -> None:
    done = call("run", write_study(tmp_path, model, split, classes), cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
