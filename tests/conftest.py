"""One thread per worker of pytest-xdist, because the workers share the cores; in CI the same examples every time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for child processes; before PyTorch is imported

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from defedavg.report.dashboard.http_server import DashboardServer
    from helpers.browser_tabs import Open

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # tests of kernels need it, and Triton reads it when it is imported
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests with real server and client processes only on request (``-m deploy``), and slow tests first.

    Those are the tests without tracing: one that starts last would leave the other core idle.
    """
    items.sort(key=lambda item: item.get_closest_marker("no_cover") is None)
    if "deploy" not in str(config.getoption("-m")):
        for item in items:
            if item.get_closest_marker("deploy"):
                item.add_marker(pytest.mark.skip(reason="make test-deploy runs it"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test with the marker ``no_cover`` without tracing in a worker, too.

    There pytest-cov 7 has measured twice since the start: when it stops one measurement, the other continues.
    """
    # Not imported here: where nothing measures, the package need not be installed.
    measuring = sys.modules.get("coverage") if item.get_closest_marker("no_cover") else None
    other = None if measuring is None else measuring.Coverage.current()
    if other is None:
        return (yield)
    other.stop()
    try:
        return (yield)
    finally:
        other.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DashboardServer]:
    """A dashboard of tmp_path/runs."""
    from defedavg.report.dashboard.http_server import serve
    from defedavg.report.dashboard.run_index import RunIndex

    (tmp_path / "runs").mkdir()
    with serve(RunIndex(tmp_path / "runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser."""
    from helpers.browser_tabs import launched_browser

    with launched_browser() as launched:
        yield launched


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """A function that opens an address in its own tab."""
    from helpers.browser_tabs import tabs_of

    with tabs_of(browser) as opened:
        yield opened


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithms that a test registers, and plugins that it loads, are forgotten after it."""
    from defedavg import plugins
    from defedavg.algorithms import ALGORITHMS

    monkeypatch.setattr(plugins, "_loaded", dict(plugins._loaded))
    monkeypatch.setattr(ALGORITHMS, "_known", dict(ALGORITHMS._known))
    monkeypatch.setattr(ALGORITHMS, "_sources", dict(ALGORITHMS._sources))


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deployments in memory: nothing needs to be flushed to disk, and everything that was opened is closed."""
    from helpers.deployments import World

    monkeypatch.setattr("os.fsync", lambda handle: None)
    yield
    World.close_all()


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an algorithm; a process can load it from one path only."""
    from helpers.user_code import ALGORITHM

    path = tmp_path_factory.mktemp("plugin") / "algorithm.py"
    path.write_text(ALGORITHM)
    return path
