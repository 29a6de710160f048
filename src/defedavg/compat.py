"""Old names of modules, classes and hooks: they work for one more version, each with one warning that names the new.

Delete this file, and the lines that use it, in the next version.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from .errors import UserError

MODULES = {
    "protocol": ("algorithms.protocol",),
    "plan": ("planning.plan", "planning.records"),
    "timeline": ("planning.simulator",),
    "profiles": ("planning.devices",),
    "stats": ("planning.plan_stats",),
    "simulation": ("config.build", "experiments.simulation"),
    "algorithms.server": ("algorithms.base",),
    "tasks.splits": ("tasks.partition",),
    "deploy.flower_client": ("deploy.flower",),
    "deploy.settings": ("deploy.deploy_config",),
}
"""Old module -> the modules that hold its names now."""

NAMES = {
    "Server": "ServerMachine",
    "OpenRound": "BufferedRound",
    "DrawnRound": "SampledRound",
    "Rule": "ClientPolicy",
    "Settle": "EndOfInstant",
    "Redraw": "Resample",
    "Timeline": "Simulator",
    "Fate": "JobOutcome",
    "Counting": "PlanStatsCollector",
    "make_timeline": "make_simulator",
    "make_goal": "make_stopping_rule",
    "named_task": "build_task",
    "read_orders": "read_deploy_config",
    "uncollected": "without_gc",
    "SPLITS": "PARTITIONS",
    "Drawn": "LazyPartition",
}
"""Old name of a class, function or table -> its new name, in whichever module it is."""

HOOKS = {
    "rule": "policy",
    "client_rule": "client_policy",
    "_arrived": "on_update",
    **{f"_{name}": name for name in ("merge", "check_setup", "weight", "invite", "accepts", "combine", "suspect")},
    "_opened": "after_merge",
    "_close": "close_round",
    "_open": "open_round",
    "_replacement": "with_replacement",
    "_arm": "start_timeout",
}
"""Old name of what an algorithm overrides or calls -> its new name."""


class RenamedWarning(FutureWarning):
    """An old name was used; the message says the new one."""


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that a name has changed; ``stacklevel`` 2 is the caller of the function that calls this one."""
    text = f"{old} is now {new}; the old name will stop working in the next version"
    warnings.warn(text, RenamedWarning, stacklevel=stacklevel + 1)


class _OldModule(ModuleType):
    """A stand-in for an old module; it resolves names in the modules that replace it."""

    def __getattr__(self, name: str) -> Any:
        return _resolve(self.__name__, name, MODULES[self.__name__.partition(".")[2]])


def install() -> None:
    """Make the old modules importable."""
    for old in MODULES:
        name = f"{__package__}.{old}"
        sys.modules.setdefault(name, _OldModule(name))


def renamed_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it resolves the old names of what the module holds."""
    return lambda name: _resolve(module, name, [module.partition(".")[2]] if name in NAMES else [])


def _resolve(module: str, name: str, targets: Sequence[str]) -> Any:
    new = NAMES.get(name, name)
    for target in () if name.startswith("__") else targets:
        home = import_module(f"{__package__}.{target}")
        if hasattr(home, new):
            if new == name:
                warn_renamed(module, home.__name__, stacklevel=3)
            else:
                warn_renamed(f"{module}.{name}", f"{home.__name__}.{new}", stacklevel=3)
            value = getattr(home, new)
            return _rule_of(value) if name == "Rule" else value
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _rule_of(policy: Callable[..., Any]) -> Callable[..., Any]:
    def rule(holds: bool = False, rests: bool = False, interruptible: bool = False, repeats: bool = False) -> Any:
        return policy(holds, rests, interruptible, repeats)

    return rule


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **more: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        warn_renamed(self.__name__, f"{self.__name__}.{name}")
        return vars(self)[name](*args, **more)


def make_callable(module: str) -> None:
    """Let a module that has taken the name of an old function be called as that function."""
    sys.modules[module].__class__ = _CallableModule


def refuse_old_hooks(kind: type) -> None:
    """Raise ``UserError`` if a server machine defines or calls hooks under their old names."""
    called: set[str] = set()
    for name, value in vars(kind).items():
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        called |= {*getattr(code, "co_names", ())} - {name}
    # In a class with new hooks, an old hook's name that the class itself calls is a helper of its own.
    migrated = not vars(kind).keys().isdisjoint(HOOKS.values())
    helpers = {old for old in called if migrated and hasattr(kind, old)}
    used = {old for old in HOOKS if old in vars(kind) or (old.startswith("_") and old in called)} - helpers
    if used:
        changes = ", ".join(f"{old} to {HOOKS[old]}" for old in HOOKS if old in used)
        raise UserError(f"{kind.__qualname__} uses old names of hooks; rename {changes}")
