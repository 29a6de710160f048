"""The server's event loop: it turns replies into events, and commands of the engine into messages.

Replies that have arrived together are handled in memory, one after the other. Then they are committed to disk together,
and only then the messages that follow from them are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...errors import UserError, counted
from ...training import Status
from ..engine import events
from ..engine.client_tracker import ClockSync
from ..engine.event_log import read_count, read_number
from ..engine.events import Event, Exchange, Exchanged, Failed, Left, Refused, Train, Trained
from ..transport import (
    POLICY_FIELDS,
    TRAINING_FIELDS,
    Message,
    RejectingTransport,
    Reply,
    Transport,
    WaitingTransport,
    model_signature,
    size_of,
)
from . import reply_checks as checks
from .reply_checks import BadReplyError
from .session import LogLine, Session

NODES_SECONDS = 2.0  # between two requests for the list of connected nodes
HELLO_SECONDS = 60.0
GRACE_SECONDS = 10.0  # after the time limit of a message, before the server stops waiting for its reply
RESTART_SECONDS = 1.0  # the most that a client waits whose job a newer version restarts: it has one message at a time
COOLDOWN_SECONDS = 30.0  # before a node whose answer to hello was bad or missing is greeted again


@dataclass(frozen=True, slots=True)
class MessageInFlight:
    """A message that was sent and not answered yet."""

    command: Train | Exchange
    node: int
    sent_at: float
    expires: float


class Coordinator:
    """Runs one session over one transport."""

    def __init__(
        self,
        session: Session,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        log_line: LogLine = print,
    ) -> None:
        self.session = session
        self.transport = transport
        self.deploy = session.config.deploy
        self._clock, self._sleep, self._log_line = clock, sleep, log_line
        self._zero = clock() - session.seconds
        self._signature = model_signature(session.executor.module, session.executor.layout.statistics)
        self._client_of: dict[int, int] = {}  # node -> the client that it runs
        self._hellos: dict[str, tuple[int, float]] = {}  # message -> node, when to stop waiting
        self._cooldown: dict[int, float] = {}  # node -> when it may be greeted again
        self._claims: dict[int, int] = {}  # node -> the client that it claims to be, while another node is that client
        self._ignored: set[int] = set()  # nodes of quarantined clients
        self._in_flight: dict[str, MessageInFlight] = {}
        self._outbox: list[tuple[Train | Exchange, Message]] = []  # sent after the next commit
        self._clocks = ClockSync()
        self._listed_at = -NODES_SECONDS
        self._alone_since: float | None = None
        self._excluded: dict[str, str] = {}  # client or node -> why it cannot take part
        session.in_flight = self._describe_in_flight

    @property
    def now(self) -> float:
        """Seconds since version 0 was sent, without the time in which no server was running."""
        if not self.session.engine.begun:
            return 0.0
        return max(self.session.seconds, self._clock() - self._zero)

    def run(self) -> None:
        """Wait for clients, then train until the run is over."""
        if not self.session.engine.begun:
            self.wait_for_clients()
        while self.session.progress.status is Status.RUNNING:
            if not self.step():
                self._pause()
        self.session.save()

    def wait_for_clients(self) -> None:
        """Wait until enough clients are connected, then start the run; raise ``UserError`` if they do not connect."""
        needed = self.deploy.min_clients or self.session.config.settings.clients.num_clients
        deadline = self._clock() + self.deploy.wait_seconds
        self._log_line(f"waiting for {counted(needed, 'client')}, at most {self.deploy.wait_seconds:g} s")
        while len(self.session.engine.connected) < needed:
            if self._clock() > deadline:
                why = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._excluded.items()))
                raise UserError(
                    f"{len(self.session.engine.connected)} of the {needed} clients expected connected within "
                    f"{self.deploy.wait_seconds:g} s{f' ({why})' if why else ''}; start the others, or lower "
                    "deploy.min_clients, then resume the run"
                )
            self._update_nodes()
            arrived = self._handle_replies()
            self._commit()
            if not arrived:
                self._pause()
        self._zero = self._clock()
        self._handle(events.Began(0.0))
        self._commit()

    def _pause(self) -> None:
        """Wait until something may have happened: a transport that can wait reports it, another one is polled."""
        seconds = min(self.deploy.poll_seconds, self.session.engine.seconds_to_timer(self.now))
        if isinstance(self.transport, WaitingTransport):
            self.transport.wait(seconds)
        else:
            self._sleep(self.deploy.poll_seconds)

    def step(self) -> bool:
        """Handle everything that has happened since the last call; return whether a reply arrived."""
        session = self.session
        self._update_nodes()
        busy = self._handle_replies()
        if session.engine.end_of_instant_pending:
            self._handle(events.InstantEnded(self.now))
        for token in session.engine.expired_timers(self.now, early=not self._hellos):
            self._handle(events.TimerExpired(self.now, token))
        self._commit()
        session.evaluate()
        session.save_if_due()
        if session.progress.status is Status.RUNNING:
            self._check_end()
        return busy

    def _check_end(self) -> None:
        self.session.engine.check_stall()
        if self.now > self.session.stopping_rule.max_seconds:
            self.session.end(Status.SECONDS)
        elif self.session.engine.connected or self._hellos:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = self.now
        elif self.now - self._alone_since > self.deploy.wait_seconds:
            self._log_line(f"no client has been connected for {self.deploy.wait_seconds:g} s")
            self.session.stall()

    def _handle(self, event: Event) -> None:
        """Handle an event in memory; ignore events after the end of the run. ``_commit`` has the rest."""
        if self.session.finished:
            return
        links = self.session.engine.links
        commands = [command for command in self.session.handle(event) if links[command.client].node is not None]
        nodes = {client: node for node, client in self._client_of.items()} if commands else {}
        self._outbox += [(command, self._message(nodes[command.client], command)) for command in commands]

    def _commit(self) -> None:
        """Write what was handled to disk, then send the messages that follow from it."""
        self.session.commit()
        outbox, self._outbox = self._outbox, []
        if not outbox:
            return
        ids = self.transport.push([message for _, message in outbox])
        now = self.now
        unreachable = []
        for (command, message), name in zip(outbox, ids, strict=True):
            sent = MessageInFlight(command, message.node, now, now + message.seconds + GRACE_SECONDS)
            if not name:
                unreachable.append(sent)
                continue
            self._in_flight[name] = sent
            fields = {name: message.fields[name] for name in ("client", "version")}
            self.session.note("sent", kind=message.kind, **fields, bytes=size_of(message.weights))
        for sent in unreachable:
            self._unanswered(sent, "its node had disconnected when a message was sent")
        self._commit()

    def _message(self, node: int, command: Train | Exchange) -> Message:
        session, deploy = self.session, self.deploy
        weights = None if command.version is None else session.start(command.client, command.version)
        training, policy = session.executor.local_training, session.engine.policy
        fields = {name: getattr(training, name) for name in TRAINING_FIELDS} | asdict(command)
        fields |= {"steps": session.engine.steps, "version": -1 if command.version is None else command.version}
        fields["rate"] = 0.0 if command.version is None else session.local_rate(command.version)
        if isinstance(command, Train):
            return Message(node, "train", fields, weights, deploy.job_seconds)
        patience = min(deploy.patience_seconds, RESTART_SECONDS) if policy.restart_on_model else deploy.patience_seconds
        fields |= {name: getattr(policy, name) for name in POLICY_FIELDS} | {"patience": patience}
        return Message(node, "exchange", fields, weights, patience + HELLO_SECONDS)

    def _describe_in_flight(self) -> list[dict[str, Any]]:
        return [
            {"message": name, "client": sent.command.client, "node": str(sent.node), "version": sent.command.version}
            for name, sent in self._in_flight.items()
        ]

    def _handle_replies(self) -> bool:
        waiting = [*self._hellos, *self._in_flight]
        replies = self.transport.pull(waiting) if waiting else []
        for reply in replies:
            if reply.to in self._hellos:
                self._greeted(self._hellos.pop(reply.to)[0], reply)
            elif reply.to in self._in_flight:
                self._answered(self._in_flight.pop(reply.to), reply)
                if self.session.commit_due:
                    self._commit()
                self.session.evaluate()  # this reply may end the run before the next one
            else:
                self.session.note("stale", message=reply.to)
        self._expire_messages()
        return bool(replies)

    def _expire_messages(self) -> None:
        for name, (node, expires) in list(self._hellos.items()):
            if self._clock() > expires:
                del self._hellos[name]
                self._cooldown[node] = self._clock() + COOLDOWN_SECONDS
        for name, sent in list(self._in_flight.items()):
            if name in self._in_flight and self.now > sent.expires:
                del self._in_flight[name]
                self._unanswered(sent, "it did not answer in time")

    def _unanswered(self, sent: MessageInFlight, why: str) -> None:
        if self._client_of.get(sent.node) == sent.command.client:
            self._leave(sent.command.client, why)

    def _answered(self, sent: MessageInFlight, reply: Reply) -> None:
        client = sent.command.client
        if self._client_of.get(sent.node) != client:
            self.session.note("stale", client=client, message=reply.to)
        elif reply.error is not None and not reply.failed:
            self._leave(client, reply.error)
        elif reply.error is not None:
            self._at_fault(f"client {client} failed: {reply.error}", Failed(self.now, client, reply.error))
        else:
            try:
                event = self._read(sent, reply)
            except BadReplyError as error:
                refused = Refused(self.now, client, str(error))
                self._at_fault(f"refused a reply of client {client}: {error}", refused)
            else:
                self._handle(event)

    def _read(self, sent: MessageInFlight, reply: Reply) -> Trained | Exchanged:
        """Check a reply, save its update and return its event."""
        client, command, session = sent.command.client, sent.command, self.session
        if checks.checked(reply.fields, "client", read_count) != client:
            raise BadReplyError(f"it claims to be client {reply.fields['client']}")
        seconds = checks.checked(reply.fields, "seconds", read_number)
        event: Trained | Exchanged
        update: events.UpdateInfo | None
        if isinstance(command, Train):
            update = checks.update_info(reply.fields)
            seconds = min(seconds, self.now - sent.sent_at)
            event = Trained(self.now, client, update.index, update.version, update.steps, seconds, reply.bytes)
        else:
            reports, clock = checks.reports(reply.fields)
            update = checks.update_info(reply.fields) if reply.fields.get("update") is True else None
            event = Exchanged(self.now, client, reports, update, seconds, reply.bytes)
        fault = session.engine.fault(event)
        if fault is not None:
            raise BadReplyError(fault)
        if update is not None and update.steps:
            start, variances = session.start(client, update.version), session.executor.layout.variances
            values = checks.update_values(reply, start, self.deploy.norm_bound, variances)
            session.add_update(client, update.index, values)
        if isinstance(event, Exchanged) and isinstance(command, Exchange):
            translated = self._clocks.to_server_time((client, command.epoch), event.reports, clock, event.t)
            event = replace(event, reports=translated)
        return event

    def _at_fault(self, line: str, event: Failed | Refused) -> None:
        """Handle a fault, after which the client restarts its work or is quarantined."""
        self._log_line(line)
        self._handle(event)
        if self.session.engine.links[event.client].quarantined:
            self._log_line(f"client {event.client} is quarantined")
            nodes = self._forget_nodes(event.client)
            self._ignored.update(nodes)
            for node in nodes:
                self._reject(node, f"it is quarantined after repeated faults; the last one: {event.why}")

    def _leave(self, client: int, why: str) -> None:
        self._forget_nodes(client)
        self._log_line(f"client {client} disconnected: {why}")
        self._handle(Left(self.now, client, why))

    def _forget_nodes(self, client: int) -> list[int]:
        """Separate a client from its nodes, and return them."""
        nodes = [node for node, number in self._client_of.items() if number == client]
        for node in nodes:
            del self._client_of[node]
        for node in [node for node, claimed in self._claims.items() if claimed == client]:
            del self._claims[node]
            self._cooldown.pop(node, None)  # it may be the client now
        return nodes

    def _nodes_due(self) -> bool:
        changed = isinstance(self.transport, WaitingTransport) and self.transport.nodes_changed
        return changed or self._clock() - self._listed_at >= NODES_SECONDS

    def _update_nodes(self) -> None:
        if not self._nodes_due():
            return
        now = self._listed_at = self._clock()
        online = self.transport.nodes()
        self._ignored &= online
        for node, client in list(self._client_of.items()):
            if node not in online:
                self._leave(client, "its node disconnected")
        self._hellos = {name: hello for name, hello in self._hellos.items() if hello[0] in online}
        greeted = {node for node, _ in self._hellos.values()}
        cooling_down = {node for node, until in self._cooldown.items() if until > now}
        new_nodes = sorted(online - set(self._client_of) - greeted - self._ignored - cooling_down)
        if not new_nodes:
            return
        total = self.session.config.settings.clients.num_clients
        hellos = [Message(node, "hello", {"num_clients": total}, None, HELLO_SECONDS) for node in new_nodes]
        ids = self.transport.push(hellos)
        for node, name in zip(new_nodes, ids, strict=True):
            if name:
                self._hellos[name] = (node, now + HELLO_SECONDS + GRACE_SECONDS)

    def _greeted(self, node: int, reply: Reply) -> None:
        """Handle the answer to a hello: the client joins, or cannot take part."""
        claimed = reply.fields.get("client")
        name = f"client {claimed}" if type(claimed) is int and 0 <= claimed < 2**31 else f"node {node}"
        try:
            if reply.error is not None:
                raise BadReplyError(reply.error)  # noqa: TRY301 (one place handles every reason)
            client = checks.checked(reply.fields, "client", read_count)
            self._check_client(client, node, reply)
        except BadReplyError as error:
            self._cooldown[node] = self._clock() + COOLDOWN_SECONDS
            if self._excluded.get(name) != str(error):  # every reason once, although the node is greeted again
                self._excluded[name] = str(error)
                self._log_line(f"{name} cannot take part: {error}")
                self.session.note("turned away", who=name, node=str(node), why=str(error))
            if reply.error is None:  # otherwise the client has reported the reason itself, and ends
                self._reject(node, str(error))
            return
        self._excluded.pop(name, None)
        self._client_of[node] = client
        self._log_line(f"client {client} connected")
        self._handle(events.Joined(self.now, client, str(node)))

    def _reject(self, node: int, reason: str) -> None:
        if isinstance(self.transport, RejectingTransport):
            self.transport.reject(node, reason)

    def _check_client(self, client: int, node: int, reply: Reply) -> None:
        total = self.session.config.settings.clients.num_clients
        if client >= total:
            raise BadReplyError(f"clients are numbered 0 to {total - 1}")
        own = self.deploy.node_of(client)
        if own is not None and own != node:
            raise BadReplyError(f"deploy.nodes gives client {client} to node {own}, not to node {node}")
        if self.session.engine.links[client].node is not None:
            self._claims[node] = client
            raise BadReplyError(f"another node, which stays connected, is client {client}; give each its own number")
        if isinstance(reply.fields.get("error"), str):
            raise BadReplyError(f"its task cannot be made: {reply.fields['error'][:300]}")
        if reply.fields.get("signature") != self._signature:
            raise BadReplyError("its model differs from the server's: use the same task on both sides")
        if self.session.engine.links[client].quarantined:
            raise BadReplyError("it is quarantined")
