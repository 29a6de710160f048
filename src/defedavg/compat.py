"""Old names of modules, classes and hooks: they work for one more version, each with one warning that names the new.

Everything here is a table. ``install`` adds a finder for old modules; a package that has renamed names sets
``__getattr__ = renamed_names(__name__)``; a module that has taken the name of an old function calls
``make_callable``. Delete this file, and the lines that use it, in the next version.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
    "SPLITS": "PARTITIONS",
    "Drawn": "LazyPartition",
}
"""Old name of a class, function or table -> its new name, in whichever module it is."""

HOOKS = {
    "rule": "policy",
    "client_rule": "client_policy",
    "_arrived": "on_update",
    "_merge": "merge",
    "_check_setup": "check_setup",
    "_weight": "weight",
    "_opened": "after_merge",
    "_invite": "invite",
    "_accepts": "accepts",
    "_combine": "combine",
    "_close": "close_round",
    "_open": "open_round",
    "_replacement": "with_replacement",
    "_arm": "start_timeout",
    "_suspect": "suspect",
}
"""Old name of what an algorithm overrides or calls -> its new name."""


class RenamedWarning(FutureWarning):
    """An old name was used; the message says the new one."""


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that a name has changed; ``stacklevel`` 2 is the caller of the function that calls this one."""
    text = f"{old} is now {new}; the old name will stop working in the next version"
    warnings.warn(text, RenamedWarning, stacklevel=stacklevel + 1)


# Modules.


class _OldModules(MetaPathFinder, Loader):
    """Find an old module and make a stand-in for it, which resolves its names in the new modules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the signature is importlib's)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec for an old module of this package, and none for any other name."""
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __package__ and name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 (the signature is importlib's)
        """Let importlib make an empty module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Resolve the names of the module in those that replace it."""
        targets = [f"{__package__}.{name}" for name in MODULES[module.__name__.partition(".")[2]]]
        warn_renamed(module.__name__, " and ".join(targets))
        module.__getattr__ = _resolve_in(module.__name__, targets)  # type: ignore[method-assign]


def install() -> None:
    """Add the finder of old modules, once."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


# Names.


def renamed_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it resolves the old names of what the module holds."""
    resolve = _resolve_in(module, [module])

    def get(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return resolve(name, stacklevel=3)

    return get


def _resolve_in(module: str, targets: Sequence[str]) -> Callable[..., Any]:
    def get(name: str, stacklevel: int = 2) -> Any:
        for target in () if name.startswith("__") else map(import_module, targets):
            for new in (NAMES.get(name, name), name):
                if (target.__name__, new) != (module, name) and hasattr(target, new):
                    if new != name:
                        warn_renamed(f"{module}.{name}", f"{target.__name__}.{new}", stacklevel)
                    return _old_rule(getattr(target, new)) if name == "Rule" else getattr(target, new)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def _old_rule(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the old arguments of a client's policy."""

    def rule(holds: bool = False, rests: bool = False, interruptible: bool = False, repeats: bool = False) -> Any:
        return policy(holds, rests, interruptible, repeats)

    return rule


class _CallableModule(ModuleType):
    """A module that has taken the name of an old function, and can still be called as that function."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Call the function of the same name in the module."""
        name = self.__name__.rpartition(".")[2]
        warn_renamed(self.__name__, f"{self.__name__}.{name}")
        return vars(self)[name](*args, **more)


def make_callable(module: str) -> None:
    """Let a module be called as the function of the same name that it holds."""
    sys.modules[module].__class__ = _CallableModule


# Hooks of algorithms.


def refuse_old_hooks(kind: type) -> None:
    """Raise ``UserError`` if a server machine defines or calls hooks under their old names."""
    used = {name for name in HOOKS if name in vars(kind)}
    for value in vars(kind).values():
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        used |= {name for name in getattr(code, "co_names", ()) if name in HOOKS and name.startswith("_")}
    if used:
        changes = ", ".join(f"{old} to {HOOKS[old]}" for old in HOOKS if old in used)
        raise UserError(f"{kind.__qualname__} uses old names of hooks; rename {changes}")
