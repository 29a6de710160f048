"""``plan`` refuses the tasks that ``run`` refuses, and names swept settings on which no plan depends."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import call, refused

SMALL = ("algorithms=['fedavg']", "clients.num_clients=10", "training.updates_per_round=2", "stop.max_rounds=2")


def words(*settings: str) -> list[str]:
    return [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


@pytest.mark.parametrize(
    "settings",
    [
        ("task.data=mnist5",),
        ("task.split=dirichle",),
        ("task.model=cn",),
        ("task.normalise=unity",),
        ("task.split=dirichlet", "task.alpha=-1"),
        ("task.split=classes", "task.classes_per_client=0"),
        ("task.split=shards", "task.shards_per_client=0"),
        ("task.split=sampled", "task.samples_per_client=0"),
        ("task.split=natural", "task.test_share=0.1", "task.min_samples_per_client=0"),
        ("task.split=['iid', 'dirichle']",),
    ],
)
def test_a_task_that_run_refuses_is_refused_with_the_same_line(settings: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("")
    lines = {refused(command, str(tmp_path / "study.toml"), *words(*settings)) for command in ("plan", "run")}
    assert len(lines) == 1
    assert any(word in str(lines) for word in ("unknown", "give", "must be"))


def test_a_swept_setting_without_effect_on_plans_is_named(tmp_path: Path) -> None:
    swept = ("task.split=dirichlet", "task.alpha=[0.1, 1]", "training.local_lr=[0.1, 0.2, 0.3]")
    done = call("plan", *words(*swept, "training.local_steps=[5, 10]"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "defedavg: task.alpha has no effect on a plan, which trains nothing; its 2 values give equal rows",
        "defedavg: training.local_lr has no effect on a plan, which trains nothing; its 3 values give equal rows",
    ]


def test_weights_by_samples_depend_on_the_task(tmp_path: Path) -> None:
    swept = ("task.split=dirichlet", "task.alpha=[1, 10]", "training.weighting=samples")
    done = call("plan", *words(*swept), "--save", "plans", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The plans differ in the coefficients of their merges, which the table does not show.
    first, second = (tmp_path / "plans").iterdir()
    assert first.read_bytes() != second.read_bytes()
    assert done.stderr == (
        "defedavg: task.alpha has no effect on the figures of these plans; its 2 values give equal rows\n"
    )


FAVANO = ("algorithms=['favano', 'fedavg']", "clients.num_clients=10", "training.updates_per_round=2")


@pytest.mark.parametrize(
    ("swept", "named"),
    [
        (("favano.anchor=['newest', 'start']",), ("favano.anchor",)),
        (("favano.reweight=['none', 'stochastic']", "favano.anchor=['newest', 'start']"),
         ("favano.reweight", "favano.anchor")),
        (("favano.reweight=['none', 'stochastic']", "favano.wait_seconds=[0.1, 0.5]"), ("favano.reweight",)),
        (("favano.send=['merge', 'draw']",), ()),
        (("training.local_steps=[10, 20]",), ()),
        (("favano.anchor=['start']",), ()),
    ],
)  # fmt: skip
def test_settings_that_change_coefficients_alone_are_named(
    swept: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    given = [word for setting in (*FAVANO, "seeds=[0, 1]", *swept) for word in ("--set", setting)]
    done = call("plan", *given, "--rounds", "12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"defedavg: {name} has no effect on the figures of these plans; its 2 values give equal rows" for name in named
    ]
