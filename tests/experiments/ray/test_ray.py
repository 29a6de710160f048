"""A real Ray cluster of two nodes on this machine: the same numbers as without one, whatever is lost on the way."""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from defedavg.algorithms import BUILT_IN
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.ray import scheduler
from defedavg.experiments.ray.connection import connect
from defedavg.experiments.run_events import Event, RunEvaluated, RunFinished, RunSpec
from defedavg.experiments.simulation import Simulation
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import Sweep
from defedavg.experiments.tune import Tuning, pairs_of
from helpers.interrupted_studies import InterruptionError, assert_same, ignore, interrupt_after, uninterrupted
from helpers.rate_searches import interrupted_search, results, search_in
from helpers.shifted_inputs import TASK_FILE
from helpers.user_code import write_user_code

BASE: dict[str, Any] = {
    "algorithms": ["defedavg-iid"],
    "task": {"model": "softmax", "split": "classes"},
    "clients": {"num_clients": 20},
    "training": {"updates_per_round": 4, "local_steps": 10},
    "stop": {"max_rounds": 20, "eval_every_rounds": 2},
}


def study(**more: Any) -> config.Study:
    return config.study({**BASE, **more})


class Machines:
    """Two nodes of one core each; one that was killed is replaced."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 120 << 20, "include_dashboard": False}
        # A node that is gone is asked five times before it is given up: every half second, not every three. One that is
        # only slow has ten seconds for each answer, as always.
        asked = {"_system_config": {"health_check_period_ms": 500}}
        self.cluster = Cluster(initialize_head=True, head_node_args={**small, **asked})
        self.second = self._add()
        self.address = str(self.cluster.address)

    def _add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=120 << 20, include_dashboard=False)

    def kill_node(self, worker: int) -> None:
        """The second node, with everything on it: its worker would otherwise go on until it misses its node."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        os.kill(worker, signal.SIGKILL)

    def mend(self) -> None:
        """Put another in its place."""
        self.second = self._add()

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Machines()
        yield found
        found.close()


pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def computed(
    chosen: config.Study, compute: ComputeConfig, strike: Strike | None = None
) -> tuple[dict[tuple[str, int], RunFinished], Sweep]:
    """Every run, by label and seed; ``strike`` is told of everything as it happens."""
    items = [RunSpec(point, point.settings, seed) for point in chosen.points() for seed in chosen.seeds]
    sweep, found = Sweep(compute, pauses=() if strike is None else (HALF,)), {}
    last: dict[RunSpec, int] = {}
    for event in sweep.events(items):
        if isinstance(event, RunEvaluated):
            assert event.evaluation.round > last.get(event.spec, -1)  # nothing is told twice
            last[event.spec] = event.evaluation.round
        else:
            found[event.spec.name.label, event.spec.seed] = event  # type: ignore[attr-defined]
        if strike is not None:
            strike(sweep, event)
    return found, sweep


def assert_equal(found: dict[tuple[str, int], RunFinished], truth: dict[tuple[str, int], RunFinished]) -> None:
    """Bit for bit."""
    assert found.keys() == truth.keys()
    for name, ended in truth.items():
        run = found[name].run
        assert torch.equal(run.weights, ended.run.weights)
        assert plain(run.progress) == plain(ended.run.progress)
        assert run.executor.updates_trained == ended.run.executor.updates_trained


def plain(progress: Any) -> Any:
    return replace(progress, evaluations=[replace(e, wall_seconds=0.0) for e in progress.evaluations])


def test_a_cluster_gives_the_numbers_of_the_other_executors(machines: Machines) -> None:
    chosen = study(algorithms=["fedavg", "fedbuff", "favano", "asysg", "defedavg-niid", "mifa"], seeds=[0, 1])
    found, sweep = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])
    reference, _ = computed(chosen, ComputeConfig("reference"))
    for name, ended in reference.items():
        truth, own = ended.run.weights, found[name].run.weights
        assert float((own - truth).norm() / truth.norm()) < 1e-5
        assert found[name].run.plan.hash() == ended.run.plan.hash()
    # One entry for each of the two tasks, and four for the arrays that they share.
    assert sweep._scheduler is not None
    assert len(sweep._scheduler._stored) == 2 + 4


def test_every_algorithm_gives_the_same_numbers_on_a_cluster(machines: Machines) -> None:
    rates = {name: {"global_lr": 0.05} for name in ("fadas", "ace", "ringmaster", "delay-adaptive-sgd")}
    chosen = study(algorithms=list(BUILT_IN), stop={"max_rounds": 20, "eval_every_rounds": 10}, **rates)
    found, _ = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert len(found) == len(BUILT_IN)
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_a_cluster_averages_running_statistics(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "normalised.py").write_text(TASK_FILE)
    chosen = study(task={"module": f"{tmp_path / 'normalised.py'}:make"})
    found, sweep = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])
    assert not sweep.notes  # the model is stacked
    variances = [ended.run.executor.named(ended.run.weights)["0.running_var"] for ended in found.values()]
    assert all(bool((variance > 1.5).all()) for variance in variances)


HALF = 0.5


class Strike:
    """Strikes once, while a run waits in its middle on the node to be hit; lets runs go on that wait there."""

    def __init__(self, strike: Callable[[Any], None], node: str) -> None:
        self.strike, self.node, self.struck = strike, node, False
        self.released: set[RunSpec] = set()

    def __call__(self, sweep: Sweep, event: Event) -> None:
        if not isinstance(event, RunEvaluated) or event.completed_share < HALF or event.spec in self.released:
            return
        assert sweep._scheduler is not None
        workers = [
            worker
            for worker in sweep._scheduler._workers
            if worker.slots.node == self.node and event.spec in worker.runs
        ]
        if workers and not self.struck:
            self.struck = True
            self.strike(workers[0])
        self.released.add(event.spec)
        assert event.pausable is not None
        event.pausable.held = True
        event.pausable.held = False


FOUR = {"seeds": [0, 1, 2, 3], "stop": {"max_rounds": 60, "eval_every_rounds": 2}}


@pytest.mark.parametrize("algorithm", ["defedavg-iid", "mifa"])
def test_a_worker_that_is_killed_changes_no_number(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(scheduler, "STATE_SECONDS", 0.2)
    strike = Strike(lambda worker: os.kill(worker.pid, signal.SIGKILL), machines.second.node_id)
    chosen = study(**FOUR, algorithms=[algorithm])
    found, sweep = computed(chosen, ComputeConfig("ray", ray_address=machines.address), strike)
    assert sweep._scheduler is not None
    assert sweep._scheduler.lost == 1
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_a_node_that_is_killed_changes_no_number(machines: Machines) -> None:
    strike = Strike(lambda worker: machines.kill_node(worker.pid), machines.second.node_id)
    try:
        found, sweep = computed(study(**FOUR), ComputeConfig("ray", ray_address=machines.address), strike)
    finally:
        machines.mend()
    assert sweep._scheduler is not None
    assert sweep._scheduler.lost == 1
    assert_equal(found, computed(study(**FOUR), ComputeConfig("batched"))[0])


def test_workers_without_a_run_help_with_the_jobs_of_others(machines: Machines) -> None:
    heavy = {
        "task": {"model": "cnn"},
        "training": {"updates_per_round": 6, "local_steps": 8},
        "stop": {"max_rounds": 5},
    }
    chosen = study(**heavy)
    found, sweep = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert sweep._scheduler is not None
    assert sweep._scheduler.helped > 0
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_helpers_train_with_the_options_of_the_run(machines: Machines) -> None:
    """Optimiser, rate of the schedule and augmentation travel with every job."""
    options = {"optimizer": "adam", "prox": 0.1, "local_schedule": "cosine(9)", "augment": "flip+crop(2)"}
    chosen = study(
        task={"model": "cnn"},
        training={"updates_per_round": 6, "local_steps": 8, "schedule_by": "seconds", **options},
        stop={"max_rounds": 5},
        algorithms=["fedbuff"],
        seeds=[0],
    )
    found, sweep = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert sweep._scheduler is not None
    assert sweep._scheduler.helped > 0
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_tuning_on_a_cluster_finds_the_same(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are compared at the evaluation at which they pause, on every executor."""
    chosen = study(seeds=[0, 1], stop={"target_accuracy": 0.8, "max_rounds": 40, "eval_every_rounds": 2})
    pairs = pairs_of(chosen.points(), (0.1, 1.0), (0.0001, 0.001, 0.05, 0.1))
    there = Tuning(pairs, chosen.seeds, ComputeConfig("ray", ray_address=machines.address))
    assert there.run(ignore)
    make = Simulation.batched_run
    monkeypatch.setattr(Simulation, "batched_run", lambda run: replace(make(run), defer_results=True))
    here = Tuning(pairs, chosen.seeds, ComputeConfig("batched", max_batch_jobs=7))
    assert here.run(ignore)
    assert there.records() == here.records()
    assert sum(record["status"] == "dropped" for record in there.records()) >= 8


def test_a_study_on_a_cluster_is_resumed(machines: Machines, tmp_path: Path) -> None:
    chosen = study(name="x", seeds=[0, 1])
    compute = ComputeConfig("ray", ray_address=machines.address)
    with pytest.raises(InterruptionError):
        StudyRun(chosen, tmp_path / "interrupted", compute=compute, checkpoint_interval=0.0).run(interrupt_after(9))
    assert StudyRun(chosen, tmp_path / "interrupted", compute=compute, resume=True).run(ignore)
    truth = uninterrupted(tmp_path / "whole", chosen)
    for folder in (truth, tmp_path / "interrupted"):  # runs on different workers are told of in no order
        lines = sorted((folder / "metrics.jsonl").read_text().splitlines(), key=lambda line: line.partition('"acc')[0])
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    assert_same(truth, tmp_path / "interrupted")


@pytest.mark.parametrize("state_seconds", [0.0, 30.0])
def test_a_search_on_a_cluster_is_resumed(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_seconds: float
) -> None:
    """A paused run pauses again, whether its last state is that of the pause or an earlier one."""
    monkeypatch.setattr(scheduler, "STATE_SECONDS", state_seconds)
    chosen = study(name="x", stop={"target_accuracy": 0.8, "max_rounds": 40, "eval_every_rounds": 2})
    options: dict[str, Any] = {
        "rates": ((0.1, 1.0), (0.001, 0.05, 0.1)),
        "compute": ComputeConfig("ray", ray_address=machines.address),
    }
    found = []
    for name, interruptions in (("whole", ()), ("parts", (25, 1))):
        folder = tmp_path / name
        for number, after in enumerate(interruptions):
            interrupted_search(folder, chosen, after, **options, resume=number > 0)
        assert search_in(folder, chosen, **options, resume=len(interruptions) > 0).run(ignore)
        mine = results(folder)
        found.append({**mine, "metrics": sorted(mine["metrics"], key=repr)})  # workers report in any order
    assert found[0] == found[1]
    assert "dropped" in found[0]["points"]


def test_user_code_runs_on_a_cluster(machines: Machines, plugin: Path, tmp_path: Path) -> None:
    """Workers receive the text of plugins and task modules: they need no shared disk."""
    chosen = config.load(write_user_code(tmp_path, plugin))
    found, _ = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert {name for name, _ in found} == {"fedavg", "mine"}
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_a_text_task_with_a_metric_runs_on_a_cluster(machines: Machines) -> None:
    module = Path(__file__).parents[3] / "examples" / "text_task.py"
    training = {"updates_per_round": 3, "local_steps": 5, "local_lr": 0.3}
    chosen = config.study({"task": {"module": f"{module}:make"}, "training": training, "stop": {"max_rounds": 6}})
    found, _ = computed(chosen, ComputeConfig("ray", ray_address=machines.address))
    assert_equal(found, computed(chosen, ComputeConfig("batched"))[0])


def test_other_versions_on_a_node_are_said(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "versions", lambda: {"torch": "9.9"})
    with pytest.raises(UserError, match=r"other versions \(torch .* there, 9.9 here\); install the same"):
        computed(study(), ComputeConfig("ray", ray_address=machines.address))


# Without a cluster.


def test_what_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"no Ray cluster at 127.0.0.1:1.*ray start --head"):
        ComputeConfig.choose("ray", "auto", ray_address="127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: other.accept()[0].sendall(b"220 some other service\r\n"))
        with pytest.raises(UserError, match="is not a Ray cluster"):
            ComputeConfig.choose("ray", "auto", ray_address=f"127.0.0.1:{other.getsockname()[1]}")
    with pytest.raises(UserError, match="HOST:PORT"):
        ComputeConfig.choose("ray", "auto", ray_address="somewhere")
    with pytest.raises(UserError, match="--executor ray"):
        ComputeConfig.choose("batched", "cpu", ray_address="127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'defedavg\[ray\]'"):
        connect(None)


def test_workers_have_equal_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": resources}

    there = [node("a", CPU=9), node("b", CPU=6, GPU=2), node("c")]
    monkeypatch.setattr(sys.modules["defedavg.experiments.ray.connection"], "nodes", lambda: there)
    from defedavg.experiments.ray.connection import worker_slots

    assert [(p.node, p.workers, p.cores) for p in worker_slots("cpu")] == [("a", 2, 4), ("b", 1, 4)]
    assert [(p.node, p.workers, p.cores) for p in worker_slots("cuda")] == [("b", 2, 3)]
    there[0] = node("a", CPU=2)
    assert [(p.node, p.workers, p.cores) for p in worker_slots("cpu")] == [("a", 1, 2), ("b", 3, 2)]
