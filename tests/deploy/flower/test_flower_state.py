"""A deployment with state vectors and real Flower processes, whose server is killed once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from defedavg.config.build import make_executor
from defedavg.deploy.engine.events import Resumed
from helpers.flower_processes import Deployment


@pytest.mark.deploy
def test_a_killed_server_with_state_vectors_is_resumed(tmp_path: Path) -> None:
    """Every client keeps its last update on the server, and the server has an optimiser."""
    rounds = 3
    changes: dict[str, Any] = {
        "training__server_optimizer": "amsgrad",
        "training__global_lr": 0.1,
        "training__local_steps": 4,
    }
    with Deployment(
        tmp_path, algorithm="mifa", clients=2, training__updates_per_round=1, stop__max_rounds=rounds, **changes
    ) as run:
        run.start_nodes()
        run.submit()
        run.until("a merge", lambda: run.version() >= 1)
        run.kill("flwr-serverapp")
        run.read()
        assert not run.seen("done"), "the run ended before the server was killed"
        run.submit(resume=True)
        entry = run.finish()
        spec = importlib.util.spec_from_file_location("flower_state_task", run.app / "app" / "task.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert (entry["status"], entry["rounds"]) == ("max_rounds", rounds)
    log, found = run.checked()
    assert sum(isinstance(event, Resumed) for event in log.events) == 1
    executor = make_executor(run.config.settings, run.config.seed, module.make({"clients.num_clients": 2}, None))
    for record in found.plan.rounds:
        executor.apply(record)
    saved = run.folder / "state"
    newest = load_file(saved / f"version-{rounds}.safetensors")["weights"]
    torch.testing.assert_close(newest, executor.versions[rounds], rtol=1e-5, atol=1e-6)
    files = {path.name.rsplit("-", 1)[0]: path for path in saved.glob("state-*.safetensors")}
    assigned = executor.state.assigned()
    assert len(files) == len(assigned) == len(list(saved.glob("state-*.safetensors")))
    for vector, value in assigned.items():
        found_value = load_file(files[f"state-{vector.name}-{vector.index}"])["state"]
        torch.testing.assert_close(found_value, value, rtol=1e-4, atol=1e-6)
