"""The rehearsal accepts every built-in algorithm, and other correct ones."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.errors import UserError
from defedavg.planning.rehearsal import rehearse
from helpers.correct_machines import SETUP, Correct, CorrectBroadcast
from helpers.strategies import variants


@pytest.mark.parametrize("setup", [SETUP, Setup(1, 1, 1), Setup(20, 20, 3, 9), Setup(50_000, 900, 50, 3, 5.0)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_built_in_algorithms_pass(name: str, setup: Setup) -> None:
    for settings in variants(ALGORITHMS[name]):
        rehearse(ALGORITHMS[name], setup, settings)
    rehearse(ALGORITHMS[name], setup, None)


def test_correct_algorithms_pass() -> None:
    rehearse(Correct, SETUP, None)
    rehearse(CorrectBroadcast, SETUP, None)


def test_settings_are_scaled_to_the_small_fleet() -> None:
    fedbuff = ALGORITHMS["fedbuff"]
    rehearse(fedbuff, SETUP, fedbuff.settings_type(concurrency=80))


def test_an_algorithm_that_needs_many_clients_is_rehearsed_with_them() -> None:
    class NeedsMany(Correct):
        def check_setup(self) -> None:
            super().check_setup()
            if self.setup.num_clients < 50:
                raise UserError("give at least 50 clients")

    rehearse(NeedsMany, SETUP, None)
    with pytest.raises(UserError, match="algorithm 'mine': give at least 50 clients"):
        rehearse(NeedsMany, Setup(40, 2, 5), None)


def test_a_rehearsal_takes_well_under_a_second() -> None:
    fastest = []
    for _ in range(3):
        start = time.process_time()
        rehearse(ALGORITHMS["fedbuff"], Setup(1_000_000, 1_000, 50), None)
        fastest.append(time.process_time() - start)
    assert min(fastest) < 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """Settings that a small fleet cannot satisfy by clipping alone."""

    groups: int = 30


def test_settings_that_cannot_be_scaled_are_rehearsed_as_they_are() -> None:
    class Grouped(Correct):
        settings_type = Shares

        def check_setup(self) -> None:
            super().check_setup()
            if self.settings.groups != 30:
                raise UserError("groups must be 30")
            if self.setup.num_clients < self.settings.groups:
                raise UserError("every group needs a client")

    rehearse(Grouped, SETUP, Shares())
