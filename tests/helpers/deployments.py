"""A deployment without a network: clients in memory, on a clock that only the tests advance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from defedavg import make_task
from defedavg.config.build import make_executor
from defedavg.config.task_module import MakeTask
from defedavg.deploy.client.handler import ClientHandler
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLog
from defedavg.deploy.replay import Replay
from defedavg.deploy.server.coordinator import Coordinator
from defedavg.deploy.server.session import Session
from defedavg.deploy.transport import Message, Reply, size_of
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.tasks import Task
from helpers.checked_logs import received_and_merged

Tamper = Callable[["Node", Message, Reply], Reply | None]


class Clock:
    """A clock that advances only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def tiny_task(config: Mapping[str, Any], client: int | None) -> Task:
    """Return two classes that a line separates."""
    from torch import nn

    rng = np.random.Generator(np.random.Philox(key=5))
    x = rng.normal(size=(360, 4)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    total = int(config.get("clients.num_clients", 6))
    return make_task(
        model=lambda: nn.Linear(4, 2),
        train=(x[:300], y[:300]),
        test=(x[300:], y[300:]),
        clients=np.array_split(np.arange(300), total),
    )


@dataclass
class Node:
    """A client behind a node; ``tamper`` may change or withhold its replies."""

    handler: ClientHandler
    delay: float
    alive: bool = True
    tamper: Tamper | None = None
    answered: int = 0


@dataclass
class _Pending:
    node: int
    message: Message
    at: float


@dataclass
class MemoryTransport:
    """A transport whose replies arrive after the delay of their node; half of the delay is the job."""

    clock: Clock
    members: dict[int, Node] = field(default_factory=dict)
    pending: dict[str, _Pending] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    _names: Any = field(default_factory=itertools.count)

    def nodes(self) -> set[int]:
        return {name for name, node in self.members.items() if node.alive}

    def push(self, messages: Sequence[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = self.members.get(message.node)
            if node is None or not node.alive:
                ids.append("")
                continue
            name = f"m{next(self._names)}"
            self.sent.append(message)
            delay = 0.01 if message.kind == "hello" else node.delay
            self.pending[name] = _Pending(message.node, message, self.clock.now + delay)
            ids.append(name)
        return ids

    def pull(self, ids: Collection[str]) -> list[Reply]:
        arrived = [name for name in ids if name in self.pending and self.pending[name].at <= self.clock.now]
        replies = []
        for name in sorted(arrived, key=lambda name: (self.pending[name].at, name)):
            pending = self.pending.pop(name)
            reply = self._answer(name, pending)
            if reply is not None:
                replies.append(reply)
        return replies

    def _answer(self, name: str, pending: _Pending) -> Reply | None:
        node = self.members[pending.node]
        if not node.alive:
            return Reply(name, error="the node is unavailable")
        message = pending.message
        fields, update = node.handler.answer(message.kind, message.fields, message.weights)
        if message.kind == "train":
            fields["seconds"] = node.delay / 2  # the handler measures real time
        node.answered += 1
        reply = Reply(name, fields, update, size_of(update))
        return reply if node.tamper is None else node.tamper(node, message, reply)


FLAT: dict[str, Any] = {
    "name": "tiny",
    "algorithm": "defedavg-iid",
    "seed": 3,
    "clients.num_clients": 6,
    "training.updates_per_round": 3,
    "training.local_steps": 4,
    "training.local_lr": 0.1,
    "stop.max_rounds": 8,
    "deploy.job_seconds": 30.0,
    "deploy.poll_seconds": 0.05,
}


class World:
    """A server, six clients of different speed, and a clock. With ``save_seconds`` 0, it saves its state at once."""

    made: ClassVar[list[World]] = []

    def __init__(
        self,
        folder: Path,
        *,
        connected: Collection[int] | None = None,
        task: MakeTask = tiny_task,
        save_seconds: float = 0.0,
        **changes: Any,
    ) -> None:
        self.task, self.save_seconds = task, save_seconds
        self.flat = {**FLAT, **{name.replace("__", "."): value for name, value in changes.items()}}
        self.folder = folder
        self.config = read_deploy_config(self.flat)
        self.total = self.config.settings.clients.num_clients
        self.clock = Clock()
        self.transport = MemoryTransport(self.clock)
        self._next = 100
        for client in range(self.total) if connected is None else connected:
            self.connect(client)
        self.log_lines: list[str] = []
        self.session = Session(self.config, self.flat, task(self.flat, None), folder, save_seconds=save_seconds)
        self.coordinator = self._coordinator()
        World.made.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Close the logs of all worlds."""
        while cls.made:
            cls.made.pop().session.log.close()

    def _coordinator(self) -> Coordinator:
        return Coordinator(
            self.session, self.transport, clock=self.clock, sleep=self.clock.sleep, log_line=self.log_lines.append
        )

    def connect(self, client: int, tamper: Tamper | None = None, delay: float | None = None) -> int:
        """Connect a new node for a client and return its id."""
        self._next += 1
        handler = ClientHandler(self.task, self.flat, client)
        self.transport.members[self._next] = Node(
            handler, 0.4 * (1 + client) if delay is None else delay, tamper=tamper
        )
        return self._next

    def node_of(self, client: int) -> Node:
        """Return the newest node of a client."""
        return [node for node in self.transport.members.values() if node.handler.client == client][-1]

    def end_training(self) -> None:
        """End the threads of the clients.

        Every job seeds PyTorch's global generator, which all threads share. A thread that trains while another one
        draws initial weights would change them; in a deployment, every client is a process.
        """
        for node in self.transport.members.values():
            node.handler.close()

    def crash(self) -> None:
        """Lose the server and all messages in flight, and resume the run from its files."""
        self.session.log.close()
        self.transport.pending.clear()
        self.session = Session.resume(
            self.config, self.flat, self.task(self.flat, None), self.folder, self.log_lines.append, self.save_seconds
        )
        self.coordinator = self._coordinator()
        self.session.resumed()

    def until(self, condition: Callable[[], bool], steps: int = 20_000) -> None:
        """Advance the time until a condition holds."""
        if not self.session.engine.begun:
            self.coordinator.wait_for_clients()
        for _ in range(steps):
            if condition():
                return
            if not self.coordinator.step():
                self.clock.sleep(0.05)
        raise AssertionError(
            f"the run makes no progress at {self.clock.now:.1f} s in version {self.session.engine.server.version}"
        )


PLAIN: list[dict[str, Any]] = [
    {"algorithm": "defedavg-iid"},
    {"algorithm": "fedavg"},
    {"algorithm": "fedavg", "fedavg__replacement": False},
    {"algorithm": "fedbuff", "fedbuff__concurrency": 4, "fedbuff__staleness": "sqrt"},
    {"algorithm": "asysg", "training__global_lr": 0.5},
    {"algorithm": "defedavg-niid", "defedavg-niid__mode": "thrifty"},
    {"algorithm": "mifa"},
    {
        "algorithm": "fedbuff",
        "training__server_optimizer": "adam",
        "training__weighting": "samples",
        "training__global_lr": 0.02,
    },
]
ARRIVALS: list[dict[str, Any]] = [
    {"algorithm": "fedasync", "fedasync__staleness": "hinge"},
    {"algorithm": "delay-adaptive-sgd", "delay-adaptive-sgd__concurrency": 4},
    {"algorithm": "ringmaster", "ringmaster__threshold": 4},
    {"algorithm": "ca2fl", "ca2fl__concurrency": 5},
    {"algorithm": "ace", "ace__max_staleness": 6},
    {"algorithm": "area"},
    {"algorithm": "asofed", "training__weighting": "samples"},
    {"algorithm": "fadas", "training__global_lr": 0.02},
    {"algorithm": "fedfa", "fedfa__window": 4},
]
"""Algorithms that keep a number of clients training; most of them have state."""
BACKGROUND: list[dict[str, Any]] = [
    {"algorithm": "defedavg-niid"},
    {"algorithm": "favano", "favano__wait_seconds": 0.05},
    {"algorithm": "favano", "favano__wait_seconds": 0.05, "favano__reweight": "deterministic"},
    {"algorithm": "favano", "favano__wait_seconds": 0.05, "favano__send": "draw"},
    {"algorithm": "quafl", "quafl__wait_seconds": 0.05},
    {"algorithm": "ringmaster", "ringmaster__stop": True, "ringmaster__threshold": 3},
]
"""Algorithms whose clients train between messages."""


def checked(world: World) -> tuple[EventLog, Replay]:
    """Replay the log of a world and check every invariant: no update is lost, none is merged twice."""
    log = logs.read(world.folder / LOG)
    found, received, merged = received_and_merged(log)
    dropped = {(note.fields["client"], note.fields["index"]) for note in log.notes("dropped")}
    kept = set(world.session.engine.received)
    assert set(received) == set(merged) | dropped | kept
    assert not set(merged) & (dropped | kept)
    return log, found


def agrees(world: World, found: Replay) -> None:
    """Check that the executor computes the server's weights from the replayed plan; the clients of the world end."""
    world.end_training()
    executor = make_executor(world.config.settings, world.config.seed, world.task(world.flat, None))
    for record in found.plan.rounds:
        executor.apply(record)
    newest = world.session.engine.server.version
    torch.testing.assert_close(executor.versions[newest], world.session.executor.versions[newest], rtol=1e-5, atol=1e-6)
    assert set(executor.versions) == set(world.session.executor.versions)
    found_state, expected = world.session.executor.state.assigned(), executor.state.assigned()
    assert found_state.keys() == expected.keys()
    for vector, value in expected.items():
        torch.testing.assert_close(found_state[vector], value, rtol=1e-5, atol=1e-6)
