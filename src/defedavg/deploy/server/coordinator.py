"""The server's event loop. It reaches clients through a ``Transport`` only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError
from ...training import Evaluation, Status
from ..engine.clock_sync import Clocks
from ..engine.events import (
    Began,
    Event,
    Exchange,
    Exchanged,
    Failed,
    Joined,
    Left,
    Refused,
    Settled,
    TimerExpired,
    Train,
    Trained,
)
from ..model_identity import signature
from ..transport import POLICY_FIELDS, Message, Reply, Transport, size_of
from . import reply_checks as checks
from .reply_checks import BadReply
from .session import Session

NODES_SECONDS = 2.0  # between two looks at who is connected
HELLO_SECONDS = 60.0
GRACE_SECONDS = 10.0  # after the time of a message, before it is given up here
SHUN_SECONDS = 30.0  # before a node that gave no good answer is asked again


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that is out."""

    order: Train | Exchange
    node: int
    at: float
    gives_up: float


class Coordinator:
    """Runs one session over one port."""

    def __init__(
        self,
        session: Session,
        port: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        watch: Callable[[Evaluation], None] = lambda found: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.session = session
        self.port = port
        self.deploy = session.orders.deploy
        self._clock, self._sleep, self._watch, self._say = clock, sleep, watch, say
        self._zero = clock() - session.seconds
        self._signature = signature(session.executor.module)
        self._client_of: dict[int, int] = {}  # nodes that speak for a client
        self._hellos: dict[str, tuple[int, float]] = {}  # message -> node, when to give up
        self._shunned: dict[int, float] = {}  # node -> until when
        self._retired: set[int] = set()
        self._out: dict[str, SentMessage] = {}
        self._clocks = Clocks()
        self._looked = -NODES_SECONDS
        self._alone_since: float | None = None
        self._turned_away: dict[str, str] = {}
        session.in_flight = self._in_flight

    @property
    def now(self) -> float:
        """Seconds since version 0 went out, without the time in which no server was running."""
        if not self.session.engine.begun:
            return 0.0
        return max(self.session.seconds, self._clock() - self._zero)

    # The loop.

    def run(self) -> None:
        """Wait for clients, train to the goal, and leave when it is reached."""
        session = self.session
        if not session.engine.begun:
            self._gather()
        while session.progress.status is Status.RUNNING:
            if not self.turn():
                self._sleep(self.deploy.poll_seconds)

    def _gather(self) -> None:
        needed = self.deploy.min_clients or self.session.orders.settings.clients.num_clients
        patience = self._clock() + self.deploy.wait_seconds
        self._say(f"waiting for {needed} clients, at most {self.deploy.wait_seconds:g} s")
        while len(self.session.engine.present) < needed:
            if self._clock() > patience:
                raise UserError(self._too_few(needed))
            self._look()
            if not self._replies():
                self._sleep(self.deploy.poll_seconds)
        self._zero = self._clock()
        self._do(Began(0.0))

    def _too_few(self, needed: int) -> str:
        came = len(self.session.engine.present)
        why = "; ".join(f"{who}: {reason}" for who, reason in sorted(self._turned_away.items()))
        return (
            f"{came} of the {needed} clients expected came within {self.deploy.wait_seconds:g} s"
            + (f" ({why})" if why else "")
            + "; start the others, or lower deploy.min_clients"
        )

    def turn(self) -> bool:
        """One pass over everything that can have happened; whether anything had."""
        session = self.session
        self._look()
        busy = self._replies()
        if session.engine.unsettled:
            self._do(Settled(self.now))
        for token in session.engine.due(self.now, early=not self._hellos):
            self._do(TimerExpired(self.now, token))
        self._measure()
        if session.progress.status is Status.RUNNING:
            self._check_end()
        return busy

    def _measure(self) -> None:
        for evaluation in self.session.measure():
            self._watch(evaluation)

    def _check_end(self) -> None:
        if self.now > self.session.goal.max_seconds:
            self.session.end(Status.SECONDS)
        elif self.session.engine.present or self._hellos:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = self.now
        elif self.now - self._alone_since > self.deploy.wait_seconds:
            self._say(f"no client has been here for {self.deploy.wait_seconds:g} s")
            self.session.end(Status.STALLED)

    # Events and messages.

    def _do(self, event: Event) -> None:
        """An event, and the messages that follow from it; what happens after the end is not written down."""
        if self.session.over:
            return
        orders = [order for order in self.session.handle(event) if self._current(order)]
        if not orders:
            return
        nodes = {client: node for node, client in self._client_of.items()}
        messages = [self._message(nodes[order.client], order) for order in orders]
        ids = self.port.push(messages)
        now = self.now
        lost = []
        for order, message, name in zip(orders, messages, ids, strict=True):
            if not name:
                lost.append((order.client, message.node))
                continue
            self._out[name] = SentMessage(order, message.node, now, now + message.seconds + GRACE_SECONDS)
            version = -1 if order.version is None else order.version
            self.session.note(
                "sent", kind=message.kind, client=order.client, version=version, bytes=size_of(message.weights)
            )
        for client, node in lost:
            if self._client_of.get(node) == client:
                self._leave(client, "its node was gone when it was sent work")

    def _current(self, order: Train | Exchange) -> bool:
        return self.session.engine.links[order.client].node is not None

    def _message(self, node: int, order: Train | Exchange) -> Message:
        session, deploy = self.session, self.deploy
        weights = None if order.version is None else session.vector(order.version)
        recipe = session.executor.local_training
        fields: dict[str, Any] = {
            "client": order.client,
            "seed": recipe.seed,
            "batch_size": recipe.batch_size,
            "local_lr": recipe.local_lr,
            "sampling": recipe.sampling,
            "steps": session.engine.steps,
            "version": -1 if order.version is None else order.version,
        }
        if isinstance(order, Train):
            return Message(node, "train", {**fields, "index": order.index}, weights, deploy.job_seconds)
        policy = session.engine.policy
        fields |= {"wanted": order.wanted, "epoch": order.epoch, "jobs": order.jobs, "trained": order.trained}
        fields |= {name: getattr(policy, name) for name in POLICY_FIELDS}
        fields["patience"] = deploy.patience_seconds
        return Message(node, "exchange", fields, weights, deploy.patience_seconds + HELLO_SECONDS)

    def _in_flight(self) -> list[dict[str, Any]]:
        return [
            {"message": name, "client": sent.order.client, "node": str(sent.node), "version": sent.order.version}
            for name, sent in self._out.items()
        ]

    # Replies.

    def _replies(self) -> bool:
        waiting = [*self._hellos, *self._out]
        replies = self.port.pull(waiting) if waiting else []
        for reply in replies:
            if reply.to in self._hellos:
                self._greeted(self._hellos.pop(reply.to)[0], reply)
            elif reply.to in self._out:
                self._answered(self._out.pop(reply.to), reply)
                self._measure()  # the next reply may come after the end
            else:
                self.session.note("stale", message=reply.to)
        for name, (node, gives_up) in list(self._hellos.items()):
            if self._clock() > gives_up:
                del self._hellos[name]
                self._shunned[node] = self._clock() + SHUN_SECONDS
        for name, sent in list(self._out.items()):
            if name in self._out and self.now > sent.gives_up:
                del self._out[name]
                if self._client_of.get(sent.node) == sent.order.client:
                    self._leave(sent.order.client, "it did not answer in time")
        return bool(replies)

    def _answered(self, sent: SentMessage, reply: Reply) -> None:
        client = sent.order.client
        if self._client_of.get(sent.node) != client:
            self.session.note("stale", client=client, message=reply.to)
            return
        if reply.error is not None:
            if reply.failed:
                self._say(f"client {client} failed: {reply.error}")
                self._drop(client, Failed(self.now, client, reply.error))
            else:
                self._leave(client, reply.error)
            return
        try:
            event = self._read(sent, reply)
        except BadReply as error:
            self._say(f"client {client}: refused, {error}")
            self._drop(client, Refused(self.now, client, str(error)))
            return
        self._do(event)

    def _read(self, sent: SentMessage, reply: Reply) -> Trained | Exchanged:
        """The event that a reply is; everything is checked, and an update is on the disk."""
        client, order, session = sent.order.client, sent.order, self.session
        if checks.whole(reply.fields, "client") != client:
            raise BadReply(f"it speaks for client {reply.fields['client']}")
        seconds = checks.number(reply.fields, "seconds")
        event: Trained | Exchanged
        if isinstance(order, Train):
            found = checks.handed(reply.fields)
            event = Trained(
                self.now, client, found.index, found.version, found.steps, min(seconds, self.now - sent.at), reply.bytes
            )
        else:
            reports, clock = checks.reports(reply.fields)
            update = checks.handed(reply.fields) if reply.fields.get("update") is True else None
            event = Exchanged(self.now, client, reports, update, seconds, reply.bytes)
            found = update  # type: ignore[assignment]
        fault = session.engine.fault(event)
        if fault is not None:
            raise BadReply(fault)
        if found is not None and found.steps:
            values = checks.update(reply, session.vector(found.version), self.deploy.norm_bound)
            session.save_update(client, found.index, values)
        if isinstance(event, Exchanged):
            assert isinstance(order, Exchange)
            event = replace(event, reports=self._clocks.moved((client, order.epoch), event.reports, clock, event.t))
        return event

    def _drop(self, client: int, event: Failed | Refused) -> None:
        """A client that must begin anew, or is quarantined."""
        self._do(event)
        if self.session.engine.links[client].banned:
            self._say(f"client {client} is quarantined")
            self._retire(client)

    def _leave(self, client: int, why: str) -> None:
        self._retire(client, again=True)
        self._say(f"client {client} is gone: {why}")
        self._do(Left(self.now, client, why))

    def _retire(self, client: int, again: bool = False) -> None:
        """Its node speaks for nobody; with ``again``, it is asked who it is once more."""
        for node in [node for node, own in self._client_of.items() if own == client]:
            del self._client_of[node]
            if not again:
                self._retired.add(node)

    # Who is there.

    def _look(self) -> None:
        if self._clock() - self._looked < NODES_SECONDS:
            return
        self._looked = self._clock()
        online = self.port.nodes()
        self._retired &= online
        for node, client in list(self._client_of.items()):
            if node not in online:
                self._leave(client, "its node is gone")
        self._hellos = {name: hello for name, hello in self._hellos.items() if hello[0] in online}
        asked = {node for node, _ in self._hellos.values()}
        now = self._clock()
        shunned = {node for node, until in self._shunned.items() if until > now}
        strangers = sorted(online - set(self._client_of) - asked - self._retired - shunned)
        if not strangers:
            return
        fields: dict[str, Any] = {"num_clients": self.session.orders.settings.clients.num_clients}
        ids = self.port.push([Message(node, "hello", dict(fields), None, HELLO_SECONDS) for node in strangers])
        for node, name in zip(strangers, ids, strict=True):
            if name:
                self._hellos[name] = (node, now + HELLO_SECONDS + GRACE_SECONDS)

    def _greeted(self, node: int, reply: Reply) -> None:
        total = self.session.orders.settings.clients.num_clients
        who = f"node {node}"
        try:
            if reply.error is not None:
                raise BadReply(reply.error)  # noqa: TRY301
            client = checks.whole(reply.fields, "client")
            who = f"client {client}"
            if client >= total:
                raise BadReply(f"clients are numbered 0 to {total - 1}")  # noqa: TRY301
            if reply.fields.get("signature") != self._signature:
                raise BadReply("its model differs from the server's: use the same task on both sides")  # noqa: TRY301
            if self.session.engine.links[client].banned:
                raise BadReply("it is quarantined")  # noqa: TRY301
        except BadReply as error:
            self._turned_away[who] = str(error)
            self._shunned[node] = self._clock() + SHUN_SECONDS
            self._say(f"{who} cannot take part: {error}")
            self.session.note("turned away", node=str(node), why=str(error))
            return
        self._turned_away.pop(who, None)
        if self.session.engine.links[client].node is not None:
            self._retire(client)
            self._do(Left(self.now, client, "another node answers for it"))
        self._client_of[node] = client
        self._say(f"client {client} is here")
        self._do(Joined(self.now, client, str(node)))
