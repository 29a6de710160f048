"""Server machines: illegal events raise and change nothing. The client pool is a set."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup
from defedavg.algorithms.client_pool import ClientPool
from defedavg.algorithms.protocol import Merge, ProtocolError, Request, Send, Update
from helpers.strategies import bounded, variants

SERVERS = [
    pytest.param(name, settings, id=f"{name}-{i}")
    for name, kind in ALGORITHMS.items()
    for i, settings in enumerate(variants(kind))
]
ALL_SERVERS = pytest.mark.parametrize(("name", "settings"), SERVERS)


def everything(server: ServerMachine) -> dict[str, Any]:
    """Return a deep copy of a server's attributes, comparable with ==."""
    state = copy.deepcopy(server.__dict__)
    pool = state.pop("pool")
    return {**state, "pool": {slot: getattr(pool, slot) for slot in ClientPool.__slots__}}


def running_server(name: str, settings: Any) -> tuple[ServerMachine, list[Update]]:
    """Return a server of six clients after some rounds, and the updates that arrived."""
    server = ALGORITHMS[name](Setup(6, 3, 4, seed=2), settings)
    given: list[Update] = []
    actions = list(server.start())
    jobs = [0] * 6
    message = Request if server.client_policy(server.settings).hold_until_requested else Send
    while server.version < 3:
        invited = {a.client for a in actions if isinstance(a, message)}
        if not invited:  # no client is named: any may answer, and pauses are over
            actions = server.timer(getattr(server, "timer_token", 0)) + server.end_of_instant()
            invited = {a.client for a in actions if isinstance(a, message)} or set(range(6))
        actions = []
        for client in sorted(invited):
            update = Update(client, jobs[client], server.version, server.steps_per_job(4))
            jobs[client] += 1
            given.append(update)
            actions += server.arrived(update)
        actions += server.end_of_instant()
    return server, given


@ALL_SERVERS
def test_illegal_updates_change_nothing(name: str, settings: Any) -> None:
    server, given = running_server(name, settings)
    last = max(given, key=lambda update: (update.index, update.client))
    fresh = 1 + max(update.index for update in given)
    for bad in (
        Update(0, fresh, server.version + 1, 1),
        Update(0, fresh, -1, 1),
        Update(6, fresh, 0, 1),
        Update(-1, fresh, 0, 1),
        last,
        Update(last.client, last.index - 1, last.version, 1),
        given[0],
    ):
        before = everything(server)
        with pytest.raises(ProtocolError):
            server.arrived(bad)
        assert everything(server) == before


@ALL_SERVERS
@pytest.mark.parametrize("client", [-1, 6])
def test_an_unknown_client_cannot_return(name: str, settings: Any, client: int) -> None:
    server, _ = running_server(name, settings)
    before = everything(server)
    with pytest.raises(ProtocolError, match=f"client {client} "):
        server.returned(client)
    assert everything(server) == before


@ALL_SERVERS
def test_an_unknown_timer_does_nothing(name: str, settings: Any) -> None:
    server, _ = running_server(name, settings)
    before = everything(server)
    assert server.timer(-7) == []
    assert everything(server) == before


@ALL_SERVERS
def test_an_update_is_merged_at_most_once(name: str, settings: Any) -> None:
    """It is not merged before it arrives either."""
    server = ALGORITHMS[name](Setup(4, 2, 3, seed=5), settings)
    arrived: set[Update] = set()
    merged: list[Update] = []
    pending = list(server.start())
    for step in range(40):
        update = Update(step % 4, step // 4, server.version, 1)
        arrived.add(update)
        pending = server.arrived(update) + server.end_of_instant() + server.timer(getattr(server, "timer_token", 0))
        for action in pending:
            if isinstance(action, Merge):
                merged += [u for u, _ in action.updates]
                assert set(merged) <= arrived
                assert action.version == server.version
    assert len(merged) == len(set(merged))
    assert merged


# The pool.


@bounded(100)
@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40), st.integers(0, 2**64 - 1))
def test_a_pool_is_a_set(total: int, moves: list[tuple[bool, int]], word: int) -> None:
    pool, twin = ClientPool(total), set(range(total))
    for add, raw in moves:
        client = raw % total
        (pool.add if add else pool.remove)(client)
        (twin.add if add else twin.discard)(client)
        assert len(pool) == len(twin)
        assert sorted(pool[i] for i in range(len(pool))) == sorted(twin)
        assert {c for c in range(total) if c in pool} == twin
    with pytest.raises(IndexError):
        pool[len(pool)]
    drawn = pool.sample(len(pool), word)
    assert sorted(drawn) == sorted(twin)
    assert pool.sample(len(pool) // 2, word) == drawn[: len(pool) // 2]
