"""The parts of a run: algorithms from outside the package are rehearsed once, built-in ones are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

from defedavg.algorithms import ALGORITHMS, BufferedRound, Setup, register
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import Broadcast, ClientPolicy
from defedavg.config.build import make_server, make_simulator
from defedavg.config.settings import ClientSettings, Settings, TrainingSettings


class Own(BufferedRound):
    """A buffered algorithm that broadcasts every version."""

    name: ClassVar[str] = "own-test"
    summary: ClassVar[str] = "a test"
    citation: ClassVar[str] = "none"
    equation: ClassVar[str] = "w"
    policy: ClassVar[ClientPolicy] = ClientPolicy()
    broadcasts: ClassVar[bool] = True

    def start(self) -> Actions:
        return [Broadcast(self.version)]

    def after_merge(self) -> Actions:
        return [Broadcast(self.version)]


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    module = ModuleType("defedavg.planning.rehearsal")
    module.rehearse = lambda *given: calls.append(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register(Own)
    yield calls
    del ALGORITHMS._known["own-test"], ALGORITHMS._sources["own-test"]


def test_another_algorithm_is_rehearsed_once_per_settings(rehearsed: list[Any]) -> None:
    settings = Settings("own-test", training=TrainingSettings(updates_per_round=3, local_steps=2))
    for seed in (0, 1):
        assert isinstance(make_server(settings, seed, None), Own)
    make_simulator(settings, 0)
    assert rehearsed == [(Own, Setup(100, 3, 2), settings.algorithm_settings, "auto")]
    make_server(Settings("own-test"), 0, None)
    assert len(rehearsed) == 2
    make_server(Settings("own-test", clients=ClientSettings(upload="background")), 0, None)
    assert rehearsed[2][3] == "background"


def test_built_in_algorithms_are_not_rehearsed(rehearsed: list[Any]) -> None:
    server = make_server(Settings("fedbuff"), 5, 2.5)
    assert server.setup == Setup(100, 10, 50, seed=5, timeout_seconds=2.5)
    assert rehearsed == []


def test_settings_of_the_algorithm_default_to_its_own() -> None:
    assert Settings("fedbuff").algorithm_settings == ALGORITHMS["fedbuff"].settings_type()
    assert Settings("fedbuff").flat()["fedbuff.concurrency"] == 0
