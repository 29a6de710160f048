"""The client's side of Flower: a ClientApp that answers with a desk of its own, or over a socket with a warm one.

A ClientApp lives for one message. Where clients train on between messages, and where the node's setting ``warm`` asks
for it, a worker process keeps the desk between messages; this file then imports no PyTorch, which would cost more than
many a job.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...errors import UserError
from ..client.client_socket import Key, ask
from ..transport import Vector

STATE = "defedavg"


def client_app(task: str) -> ClientApp:
    """A ClientApp for the task that ``module:function`` makes."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return handle(task, message, context)

    app.query()(answer)
    app.train()(answer)
    return app


def handle(task: str, message: Message, context: Context) -> Message:
    """The reply to a message of the server."""
    content = message.content
    fields: dict[str, Any] = dict(content["fields"])
    kind = str(fields.pop("kind"))
    record = content.get("weights")
    weights: Vector | None = record["weights"].numpy() if isinstance(record, ArrayRecord) else None
    client, node = client_number(context), context.node_config
    step_seconds = float(node.get("step_seconds", 0.0))
    config = dict(context.run_config)
    if kind == "exchange" or bool(node.get("warm", False)):
        known = context.state.get(STATE)
        key = Key(str(known["path"]), bytes(known["secret"])) if isinstance(known, ConfigRecord) else None  # type: ignore[arg-type]
        place = f"{context.node_id:x}"
        order = {"task": task, "config": config, "client": client, "step_seconds": step_seconds}
        key, found, update = ask(key, place, order, kind, fields, weights)
        context.state[STATE] = ConfigRecord({"path": key.path, "secret": key.secret})
    else:
        from ..client.handler import ClientHandler, find_task

        answer = ClientHandler(find_task(task), config, client, step_seconds).answer(kind, fields, weights)
        found, update = answer.fields, answer.update
    reply = RecordDict({"fields": ConfigRecord(found)})
    if update is not None:
        reply["update"] = ArrayRecord({"update": Array(update)})
    return Message(reply, reply_to=message)


def client_number(context: Context) -> int:
    """Which client this node is, from its own settings."""
    found = context.node_config.get("client", context.node_config.get("partition-id"))
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError("this node has no client number; start its SuperNode with --node-config 'client=0' (0, 1, …)")
    return found
