"""Checks of a server machine's actions, cheap enough for every plan and every deployment.

The simulators and the deployment engine call them before they carry out an action, so that a fault of an algorithm is
one line that names the algorithm, the round and the remedy, and no update is trained for a merge that is refused.
"""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ..algorithms import ServerMachine
from ..algorithms.protocol import (
    ClientPolicy,
    Discard,
    Merge,
    Request,
    Resample,
    Send,
    ServerAction,
    SetTimer,
    Update,
)
from ..errors import UserError, first_line
from .state_checks import DeclaredState

SUM_TOLERANCE = 1e-9
"""How far from one the sum of the coefficients of past versions may be: rounding, and nothing more."""


def refuse(algorithm: str, fault: str) -> NoReturn:
    """Raise ``UserError`` for a fault of an algorithm; the message says what to change."""
    raise UserError(f"algorithm {algorithm!r}: {fault}") from None


def raised(kind: type[ServerMachine], error: BaseException) -> str:
    """Return what code of the algorithm raised, with file and line; nothing if the error arose elsewhere.

    Code of this package is no code of the algorithm, also where the algorithm inherits it.
    """
    own = {inner.__module__ for inner in _own_classes(kind)}
    lines = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in own
    ]
    return f"{type(error).__name__}: {first_line(error)} ({lines[-1]})" if lines else ""


def own_hooks(kind: type[ServerMachine]) -> list[str]:
    """Return the public methods that the algorithm's own classes define, as ``name()``."""
    members = {name: member for inner in _own_classes(kind) for name, member in vars(inner).items()}
    return [f"{name}()" for name, member in members.items() if callable(member) and not name.startswith("_")]


def _own_classes(kind: type[ServerMachine]) -> list[type]:
    package = __name__.partition(".")[0]
    return [inner for inner in kind.__mro__[:-1] if inner.__module__.partition(".")[0] != package]


def refuse_failure(server: ServerMachine, error: Exception, newest: int) -> None:
    """Report an error that code of the algorithm raised, or that it caused in code that it inherits.

    Any other error is left to the caller.
    """
    kind = type(server)
    if isinstance(error, UserError):
        return
    if failure := raised(kind, error):
        refuse(server.name, f"it raises {failure} after round {newest}; correct it")
    if _own_classes(kind) and _passed(server, error):
        refuse(server.name, f"after round {newest} it raises {from_a_hook(kind, error)}")


def from_a_hook(kind: type[ServerMachine], error: Exception) -> str:
    """Return an error of inherited code that received something wrong from the algorithm, and what to do about it."""
    returning = ", ".join(own_hooks(kind)) or "its hooks"
    failure = f"{type(error).__name__}: {first_line(error)}"
    return f"{failure}, from what a hook returned; check what these return: {returning}"


def _passed(server: ServerMachine, error: Exception) -> bool:
    """Return whether a method of this server machine was running when the error was raised."""
    return any(frame.f_locals.get("self") is server for frame, _ in traceback.walk_tb(error.__traceback__))


def check_result(server: ServerMachine, actions: Any, newest: int) -> None:
    """Check that a hook returned a list."""
    if not isinstance(actions, list):
        refuse(server.name, f"it returns {type(actions).__name__} after round {newest}; return a list of actions")


def expires(server: ServerMachine, timer: SetTimer) -> bool:
    """Return whether a timer ever expires; refuse a time that is not a number."""
    if not isinstance(timer.seconds, int | float):
        refuse(server.name, f"it sets a timer of {timer.seconds!r:.60} s; give zero seconds or more, a number")
    return math.isfinite(timer.seconds)


def discarded(server: ServerMachine, action: Discard) -> Update:
    """Return the update that the action discards; refuse anything else."""
    if not isinstance(action.update, Update):
        refuse(server.name, f"it discards {action.update!r:.60}, which is not an update; discard one that arrived")
    return action.update


def resampled(server: ServerMachine, action: Any) -> Resample:
    """Return the action if it is the last kind that exists, ``Resample``."""
    if not isinstance(action, Resample):
        refuse(server.name, f"it returns {action!r:.60}, which is not an action of a server")
    return action


def check_merge(server: ServerMachine, merge: Merge, newest: int) -> None:
    """Check the version of a merge and its past versions; ``newest`` is the newest version before it."""
    name = f"round {newest + 1}"
    if merge.version != newest + 1:
        refuse(server.name, f"version {merge.version} follows version {newest}; use self.merge() for merges")
    for version, _ in merge.past:
        if version != newest and not _may_use(server, merge, newest, version):
            allowed = sorted({newest, *(update.version for update, _ in merge.updates)})
            reach = f" and the {server.past_versions} before it (past_versions)" if server.past_versions else ""
            refuse(
                server.name,
                f"{name} uses past version {version}; it may use the newest version{reach} and the start versions of "
                f"its updates, here {', '.join(map(str, allowed))}; to use older ones, set the class attribute "
                "past_versions",
            )
    declared = DeclaredState(server.state_vectors(server.setup, server.settings))
    if fault := declared.fault(merge, lambda version: _may_use(server, merge, newest, version)):
        refuse(server.name, f"{name}: {fault}")
    total = declared.affine_sum(merge)
    if not abs(total - 1.0) <= SUM_TOLERANCE:
        refuse(
            server.name,
            f"{name}: the coefficients of past versions sum to {total:.12g}; they must sum to one, within "
            f"{SUM_TOLERANCE:g}; correct the argument past of self.merge()",
        )


def _may_use(server: ServerMachine, merge: Merge, newest: int, version: int) -> bool:
    declared = max(0, newest - server.past_versions) <= version < newest
    return declared or any(update.version == version for update, _ in merge.updates)


def check_broadcast(server: ServerMachine, version: int, broadcasts: int, newest: int) -> None:
    """Check that broadcasts are declared, and that each version is broadcast once, while it is the newest."""
    if not server.broadcasts:
        refuse(
            server.name,
            f"it returns Broadcast after round {newest}, but broadcasts is False; set the class attribute to True",
        )
    if version != broadcasts or version != newest:
        refuse(
            server.name,
            f"it broadcasts version {version} after {broadcasts} broadcasts, and the newest version is {newest}; "
            "broadcast every version once, when it is new",
        )


def refuse_action(server: ServerMachine, action: ServerAction, newest: int) -> NoReturn:
    """Report an action that names a client or a version that does not exist."""
    total, kind = server.setup.num_clients, type(action).__name__
    for name in ("client", "version"):
        number = getattr(action, name, 0)
        if isinstance(action, Send | Request) and type(number) is not int:
            number_type = type(number).__name__
            refuse(server.name, f"{kind} names the {name} {number!r} of type {number_type}; convert it with int()")
    if isinstance(action, Send | Request) and not 0 <= action.client < total:
        refuse(server.name, f"{kind} names client {action.client!r}; give one of 0 to {total - 1}")
    if isinstance(action, Send):
        refuse(
            server.name,
            f"it sends version {action.version!r} after round {newest}, which does not exist or was freed; send the "
            "newest version",
        )
    refuse(
        server.name,
        f"it returns {action!r:.60} in round {newest + 1}, which names a version or an update that does not exist or "
        "was freed; correct it",
    )


def refuse_stall(
    server: ServerMachine, policy: ClientPolicy, newest: int, *, failed: bool = False, repeated: bool = False
) -> NoReturn:
    """Report that every client waits for the server.

    ``failed``: clients fail and return. ``repeated``: some received a version that their policy does not let them use.
    """
    when = " after clients failed" if failed else ""
    if failed:
        remedy = "send them a version in returned()"
    elif repeated and not policy.allow_same_version:
        remedy = "send versions that clients have not trained from, or set allow_same_version=True in policy"
    else:
        request = ", and Request for updates that clients hold," if policy.hold_until_requested else ""
        remedy = f"return Send or Broadcast{request} in start() and after every merge, or merge fewer updates"
    refuse(server.name, f"no client has work after {newest} merges{when}; {remedy}")


def refuse_endless_round(server: ServerMachine, newest: int, events: int) -> NoReturn:
    """Report that very many events have passed without a merge."""
    refuse(
        server.name,
        f"{events:,} events have passed without a merge since round {newest}; merge updates when they arrive, or lower "
        "training.updates_per_round or clients.failure_rate",
    )
