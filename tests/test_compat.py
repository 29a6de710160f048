"""Old names: modules, classes and arguments work with one warning each; old hooks are refused with the new names."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from defedavg import compat
from defedavg.algorithms import BufferedRound, ServerMachine
from defedavg.algorithms.protocol import ClientPolicy
from defedavg.compat import HOOKS, MODULES, NAMES, RenamedWarning
from helpers.user_errors import line_of

OLD_ALGORITHM = """
from defedavg.algorithms import Server, register
from defedavg.algorithms.server import Actions
from defedavg.protocol import Rule, Send, Update


class FedAsync(Server):
    name = "fedasync"
    rule = Rule()

    def _check_setup(self) -> None:
        super()._check_setup()

    def start(self) -> Actions:
        return [Send(client, self.version) for client in range(self.setup.num_clients)]

    def _arrived(self, update: Update) -> Actions:
        return [self._merge([(update, -1.0)]), Send(update.client, self.version)]
"""

IMPORTS = [
    ("defedavg.protocol", "Update", "defedavg.algorithms.protocol", "Update"),
    ("defedavg.protocol", "Redraw", "defedavg.algorithms.protocol", "Resample"),
    ("defedavg.protocol", "Settle", "defedavg.algorithms.protocol", "EndOfInstant"),
    ("defedavg.plan", "Plan", "defedavg.planning.plan", "Plan"),
    ("defedavg.plan", "uncollected", "defedavg.planning.plan", "without_gc"),
    ("defedavg.timeline", "Timeline", "defedavg.planning.simulator", "Simulator"),
    ("defedavg.profiles", "Fleet", "defedavg.planning.devices", "Fleet"),
    ("defedavg.stats", "summarise", "defedavg.planning.plan_stats", "summarise"),
    ("defedavg.stats", "Counting", "defedavg.planning.plan_stats", "PlanStatsCollector"),
    ("defedavg.simulation", "Simulation", "defedavg.experiments.simulation", "Simulation"),
    ("defedavg.simulation", "make_timeline", "defedavg.config.build", "make_simulator"),
    ("defedavg.simulation", "named_task", "defedavg.config.build", "build_task"),
    ("defedavg.algorithms.server", "Actions", "defedavg.algorithms.base", "Actions"),
    ("defedavg.algorithms.server", "OpenRound", "defedavg.algorithms.base", "BufferedRound"),
    ("defedavg.tasks.splits", "iid", "defedavg.tasks.partition", "iid"),
    ("defedavg.tasks.splits", "SPLITS", "defedavg.tasks.partition", "PARTITIONS"),
]


@pytest.mark.parametrize(("old_module", "old", "new_module", "new"), IMPORTS)
def test_old_modules(old_module: str, old: str, new_module: str, new: str) -> None:
    expected = getattr(importlib.import_module(new_module), new)
    message = f"{old_module} is now {new_module};" if old == new else f"{old_module}.{old} is now {new_module}.{new};"
    with pytest.warns(RenamedWarning, match=message) as caught:
        assert getattr(importlib.import_module(old_module), old) is expected
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_name_that_never_existed_is_an_attribute_error() -> None:
    module = importlib.import_module("defedavg.profiles")
    with pytest.raises(AttributeError, match=r"module 'defedavg\.profiles' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("defedavg.nothing")


def test_old_names_of_packages() -> None:
    import defedavg.algorithms
    import defedavg.config
    import defedavg.tasks

    config: Any = defedavg.config

    for package, old, new in (
        (defedavg.algorithms, "Server", "ServerMachine"),
        (defedavg.algorithms, "DrawnRound", "SampledRound"),
        (defedavg.tasks, "Drawn", "LazyPartition"),
    ):
        with pytest.warns(RenamedWarning, match=f"{package.__name__}.{old} is now {package.__name__}.{new}"):
            assert getattr(package, old) is getattr(package, new)
        for other in ("nothing", "Timeline"):
            with pytest.raises(AttributeError, match=f"has no attribute '{other}'"):
                getattr(package, other)
    with pytest.warns(RenamedWarning, match=r"defedavg\.config\.load is now defedavg\.config\.study\.load"):
        assert config.load is config.study.load
    with pytest.warns(RenamedWarning, match=r"defedavg\.config\.study is now defedavg\.config\.study\.study"):
        assert config.study({"name": "called"}).name == "called"


def test_the_task_of_an_old_flower_app_still_reads_its_settings() -> None:
    with pytest.warns(RenamedWarning, match=r"read_orders is now defedavg\.deploy\.deploy_config\.read_deploy_config"):
        from defedavg.deploy.settings import read_orders  # type: ignore[import-not-found]
    assert read_orders({"algorithm": "fedbuff", "seed": 3}).settings.algorithm == "fedbuff"


def test_old_arguments_of_a_policy() -> None:
    with pytest.warns(RenamedWarning):
        from defedavg.protocol import Rule  # type: ignore[import-not-found]
    assert Rule() == ClientPolicy()
    assert Rule(holds=True, rests=True) == ClientPolicy(hold_until_requested=True, pause_when_full=True)
    assert Rule(interruptible=True, repeats=True) == ClientPolicy(interruptible=True, allow_same_version=True)


@pytest.mark.parametrize(("old", "new"), HOOKS.items())
def test_old_hooks_are_refused(old: str, new: str) -> None:
    line = line_of(lambda: type("Own", (BufferedRound,), {old: lambda self: None}))
    assert line == f"Own uses old names of hooks; rename {old} to {new}"
    assert hasattr(ServerMachine, new) or new in ServerMachine.__annotations__ or new in NEW_HOOKS


NEW_HOOKS = {"weight", "after_merge", "invite", "accepts", "combine", "close_round", "open_round", "with_replacement"}


def test_calls_of_old_hooks_are_found_too() -> None:
    def on_update(self: Any, update: Any) -> Any:
        return [self._merge([(update, 1.0)]), *self._arm()]

    line = line_of(lambda: type("Own", (BufferedRound,), {"on_update": on_update}))
    assert line == "Own uses old names of hooks; rename _merge to merge, _arm to start_timeout"


def test_a_helper_may_have_the_name_of_an_old_hook() -> None:
    def on_update(self: Any, update: Any) -> Any:
        return self._merge(update)

    helper: dict[str, Any] = {"_merge": lambda self, update: []}
    base = type("Own", (BufferedRound,), {"on_update": on_update, **helper})
    assert type("Derived", (base,), {"on_update": on_update}).__mro__[1] is base
    line = line_of(lambda: type("Half", (BufferedRound,), {"on_update": on_update, **helper, "_weight": lambda s: 1}))
    assert line == "Half uses old names of hooks; rename _weight to weight"


def test_the_old_example_gives_one_clear_line(tmp_path: Path) -> None:
    from defedavg.plugins import load_plugin

    path = tmp_path / "own_algorithm.py"
    path.write_text(OLD_ALGORITHM)
    with pytest.warns(RenamedWarning) as caught:
        line = line_of(lambda: load_plugin(path))
    assert line == (
        f"{path}, line 7: FedAsync uses old names of hooks; "
        "rename rule to policy, _arrived to on_update, _merge to merge, _check_setup to check_setup"
    )
    assert len({str(warning.message) for warning in caught}) == 4  # two modules, two classes
    assert {warning.filename for warning in caught} == {str(path)}


def test_every_old_name_has_a_new_one() -> None:
    """Every target of the tables exists, and no old name is in use again."""
    for old, targets in MODULES.items():
        for target in targets:
            if "flower" not in target and target != "planning.records":
                importlib.import_module(f"defedavg.{target}")
        assert old not in targets
    assert not set(NAMES) & set(NAMES.values())
    assert not set(HOOKS) & set(HOOKS.values())


def test_old_modules_cost_nothing_until_they_are_imported() -> None:
    code = "import sys, defedavg; print('torch' in sys.modules, 'defedavg.planning.plan' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_module_in_place_of_a_function_can_be_called() -> None:
    module = type(sys)("defedavg.made_up")
    module.made_up = lambda x: x + 1  # type: ignore[attr-defined]
    sys.modules["defedavg.made_up"] = module
    try:
        compat.make_callable("defedavg.made_up")
        with pytest.warns(RenamedWarning, match=r"defedavg\.made_up is now defedavg\.made_up\.made_up"):
            assert module(2) == 3  # type: ignore[operator]
    finally:
        del sys.modules["defedavg.made_up"]
