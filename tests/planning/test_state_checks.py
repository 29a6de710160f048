"""What an algorithm may do with state vectors: every fault is one line, in every simulator and command."""

from __future__ import annotations

import inspect
from itertools import islice
from pathlib import Path

import pytest

from defedavg import simulate
from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup, register
from defedavg.errors import UserError
from defedavg.planning.devices import Fleet
from defedavg.planning.plan import Plan
from defedavg.planning.plan_checks import checked_for_use
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers import stateful_algorithms as stateful
from helpers.command_line import call, refuse

FAULTS = list(stateful.FAULTS.items())
SETTINGS = {
    "task.model": "softmax",
    "clients.num_clients": 10,
    "training.local_steps": 2,
    "training.updates_per_round": 3,
    "stop.max_rounds": 30,
}


def ids(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize("detail", ["all", "used"])
@pytest.mark.parametrize(("kind", "words"), FAULTS, ids=ids)
def test_every_simulator_reports_a_fault(kind: type[ServerMachine], words: tuple[str, ...], detail: str) -> None:
    made = make_simulator_for(kind(Setup(10, 3, 2)), Fleet(10), detail)
    with pytest.raises(UserError) as caught:
        list(islice(checked_for_use(made.header, made), 2000))
    assert str(caught.value).startswith(f"algorithm {kind.name!r}: ")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_simulate_reports_a_fault(executor: str) -> None:
    register(stateful.MovesRunningStarts)
    with pytest.raises(UserError, match=r"the plan is not valid: .* was assigned after it began"):
        simulate("moves-running-starts", settings=SETTINGS, executor=executor)


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(("kind", "words"), FAULTS, ids=ids)
def test_the_commands_report_a_fault_in_one_line(
    kind: type[ServerMachine], words: tuple[str, ...], command: str, tmp_path: Path
) -> None:
    (tmp_path / "plugin.py").write_text(
        inspect.getsource(stateful) + f"\nfrom defedavg.algorithms import register\nregister({kind.__name__})\n"
    )
    (tmp_path / "study.toml").write_text(
        f'algorithms = ["{kind.name}"]\n[task]\nmodel = "softmax"\n[clients]\n'
        "num_clients = 10\n[training]\nlocal_steps = 2\nupdates_per_round = 3\n[stop]\nmax_rounds = 30\n"
    )
    done = call(command, "study.toml", "--plugin", "plugin.py", cwd=tmp_path)
    refuse(done, f"algorithm {kind.name!r}", *words)


ATTRIBUTES: list[tuple[str, str, str]] = [
    ("job_start", "()", "job_start is (); set it to pairs of a name and a number"),
    ("job_start", "'model'", "job_start is 'model'; set it to pairs"),
    ("job_start", "(('model', 1.0, 2.0),)", "job_start is (('model', 1.0, 2.0),); set it to pairs"),
    ("job_start", "(('model', float('nan')),)", "job_start is (('model', nan),); set it to pairs"),
    ("correction", "[('drift', 1.0)]", "correction is [('drift', 1.0)]; set it to pairs"),
    ("correction", "((1, 1.0),)", "correction is ((1, 1.0),); set it to pairs"),
    ("correction", "(('drift', True),)", "correction is (('drift', True),); set it to pairs"),
    ("server_optimizer", "'sdg'", "server_optimizer is 'sdg'; set it to one of 'sgd', 'momentum'"),
    ("server_optimizer", "None", "server_optimizer is None; set it to one of"),
    ("weightings", "'uniform'", "weightings is 'uniform'; set it to a tuple of 'uniform', 'samples'"),
    ("weightings", "()", "weightings is (); set it to a tuple of"),
    ("weightings", "('uniform', 'size')", "weightings is ('uniform', 'size'); set it to a tuple of"),
    ("weightings", "([],)", "weightings is ([],); set it to a tuple of"),
]


@pytest.mark.parametrize(("name", "value", "words"), ATTRIBUTES)
def test_a_class_attribute_that_is_wrong_is_one_line(name: str, value: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from defedavg.algorithms import register\nfrom defedavg.algorithms.fedavg import FedAvg\n\n\n"
        f"@register\nclass Bad(FedAvg):\n    name = 'bad'\n    {name} = {value}\n"
    )
    (tmp_path / "study.toml").write_text('algorithms = ["bad"]\n[task]\nmodel = "softmax"\n')
    done = call("plan", "study.toml", "--plugin", "plugin.py", cwd=tmp_path)
    refuse(done, "algorithm 'bad' (Bad): ", words)


@pytest.mark.usefixtures("registry")
def test_an_algorithm_without_a_fault_passes() -> None:
    register(stateful.Corrected)
    assert "corrected" in ALGORITHMS
    Plan.collect(make_simulator_for(stateful.Corrected(Setup(10, 3, 2)), Fleet(10), "all"), 40).check()
