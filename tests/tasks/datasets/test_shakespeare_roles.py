"""shakespeare-roles and the alphabet: windows of characters, and the roles as users."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.tasks import classification_task, load_users, set_data_dir, token_accuracy, token_cross_entropy
from defedavg.tasks.datasets.catalog import load_pixels
from defedavg.tasks.datasets.characters import ALPHABET, CLASSES, LENGTH, encode, windows
from defedavg.tasks.datasets.shakespeare_roles import SHAKESPEARE_ROLES, speeches
from helpers.user_errors import line_of

PLAY = f"""First Citizen:
{"We are accounted poor citizens: the patricians good. " * 20}

MENENIUS:
{"What work's, my countrymen, in hand? " * 30}

First Citizen:
Speak,
speak.

Page:
No.
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    set_data_dir(tmp_path)
    yield
    set_data_dir(None)


def test_the_alphabet_is_fixed() -> None:
    assert ALPHABET == "\n !\"$&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    assert CLASSES == len(set(ALPHABET)) + 1 == 82
    assert encode("\n }").tolist() == [1, 2, 81]
    assert encode("é~\U0001f600").tolist() == [0, 0, 0]
    assert encode("abc").dtype == windows("a" * 200)[0].dtype == np.int64


@given(st.text(max_size=400))
def test_a_window_and_its_targets_are_the_text_shifted_by_one(text: str) -> None:
    inputs, targets = windows(text)
    numbers = encode(text)
    assert len(numbers) == len(text)
    assert inputs.shape == targets.shape == (max(0, (len(text) - 1) // LENGTH), LENGTH)
    assert inputs.flatten().tolist() == numbers[: inputs.size].tolist()
    assert targets.flatten().tolist() == numbers[1 : 1 + targets.size].tolist()


def test_the_speeches_of_a_role_are_joined() -> None:
    said = speeches(PLAY)
    assert list(said) == ["First Citizen", "MENENIUS", "Page"]
    assert said["First Citizen"].endswith("good. \nSpeak,\nspeak.")
    assert said["Page"] == "No."


@pytest.mark.parametrize("name", ["tinyshakespeare/input.txt", "tinyshakespeare.txt", "tinyshakespeare.txt.gz"])
def test_roles_are_users(tmp_path: Path, name: str) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / name).write_bytes(gzip.compress(PLAY.encode()) if name.endswith("gz") else PLAY.encode())
    train, test, classes = load_pixels("shakespeare-roles")
    counts = {role: (len(text) - 1) // LENGTH for role, text in speeches(PLAY).items()}
    assert (len(train) + len(test), classes) == (sum(counts.values()), 82)
    users = load_users("shakespeare-roles")
    assert users.test is not None
    for role in ("First Citizen", "MENENIUS"):
        assert (users.test == role).sum() == (counts[role] + 2) // 5
    assert set(users.train.tolist()) == {"First Citizen", "MENENIUS"}  # the page speaks less than a window
    assert train.inputs.shape[1:] == train.targets.shape[1:] == (LENGTH,)


def test_a_task_with_a_target_per_character(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text(PLAY)
    study = config.study({"task": {"data": "shakespeare-roles", "model": "mlp", "split": "natural"}})
    task = build_task(study.points()[0].settings, 0)
    assert (task.num_clients, task.classes) == (2, None)
    assert (task.loss, task.metric) == (token_cross_entropy, token_accuracy)
    assert classification_task("shakespeare-roles", "mlp", "iid", 3, 0).num_clients == 3
    line = line_of(lambda: classification_task("shakespeare-roles", "mlp", "dirichlet", 3, 0))
    assert line.startswith("split = dirichlet needs one class per sample")
    assert line.endswith("use natural, iid or sampled")
    assert line_of(lambda: classification_task("shakespeare-roles", "mlp", "nat", 3, 0)).startswith("unknown split")


def test_damaged_texts(tmp_path: Path) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    for content, said in (
        (b"no roles at all\n", "no role, a line 'NAME:', speaks more than 80 characters"),
        (b"A:\n\xff", "byte 3 is not UTF-8"),
        (b"x" * SHAKESPEARE_ROLES.published[path.name].size, "is not the published file"),
    ):
        path.write_bytes(content)
        assert said in line_of(lambda: load_users("shakespeare-roles"))
