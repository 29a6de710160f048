"""Checks of a server machine's actions, cheap enough for every plan and every deployment.

The simulators and the deployment engine call them before they carry out an action, so that a fault of an algorithm is
one line that names the algorithm, the round and the remedy, and no update is trained for a merge that is refused.
"""

from __future__ import annotations

import math
from typing import NoReturn

from ..algorithms import ServerMachine
from ..algorithms.protocol import ClientPolicy, Merge, Request, Send, ServerAction
from ..errors import UserError

SUM_TOLERANCE = 1e-9
"""How far from one the sum of the coefficients of past versions may be: rounding, and nothing more."""


def refuse(algorithm: str, fault: str) -> NoReturn:
    """Raise ``UserError`` for a fault of an algorithm; the message says what to change."""
    raise UserError(f"algorithm {algorithm!r}: {fault}") from None


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
    total = math.fsum(weight for _, weight in merge.past)
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
    total = server.setup.num_clients
    if isinstance(action, Send | Request) and not (isinstance(action.client, int) and 0 <= action.client < total):
        kind = type(action).__name__
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
