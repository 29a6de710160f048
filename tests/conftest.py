"""One thread per worker, since two workers with two threads each would fight for two cores; in CI, the same examples
every time, so that a red run can be repeated."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from defedavg.report.dashboard.http_server import DashboardServer, serve
from defedavg.report.dashboard.run_index import RunIndex

torch.set_num_threads(1)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start whole clusters run where they are asked for (``-m deploy``), and nowhere else."""
    if "deploy" not in str(config.getoption("-m")):
        for item in items:
            if item.get_closest_marker("deploy"):
                item.add_marker(pytest.mark.skip(reason="make test-deploy runs it"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DashboardServer]:
    """A live view of tmp_path/runs."""
    (tmp_path / "runs").mkdir()
    with serve(RunIndex(tmp_path / "runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(timeout=30)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deployments in memory: nothing survives a test, so nothing need be on the disk; what was opened is closed."""
    from helpers.deployments import World

    monkeypatch.setattr("os.fsync", lambda place: None)
    yield
    World.close_all()
