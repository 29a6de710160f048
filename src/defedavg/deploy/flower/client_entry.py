"""The ClientApp: it handles a message itself, or passes it to a client process that lives longer.

Flower ends a ClientApp after one message. Where clients train between messages, and where the node's setting ``warm``
asks for it, a client process keeps data and model in memory. This module then does not import PyTorch, because the
import takes longer than many jobs.
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...errors import UserError, first_line
from ..client.client_socket import ProcessAddress, request
from ..transport import Vector
from .vector_record import read_vector, vector_record

STATE = "defedavg"


def client_app(task: str) -> ClientApp:
    """Return a ClientApp for the task that the function ``module:function`` makes."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return handle(task, message, context)

    app.query()(answer)
    app.train()(answer)
    return app


def handle(task: str, message: Message, context: Context) -> Message:
    """Return the reply to a message of the server."""
    content = message.content
    fields: dict[str, Any] = dict(content["fields"])
    kind = str(fields.pop("kind"))
    weights = read_vector(content["weights"]) if "weights" in content else None
    client = client_number(context)
    try:
        found, update = _answer(task, client, context, kind, fields, weights)
    except Exception as error:
        if kind != "hello":
            raise
        # Flower would report the number of the node instead of the client's.
        why = first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        found, update = {"client": client, "error": why}, None
    reply = RecordDict({"fields": ConfigRecord(found)})
    if update is not None:
        reply["update"] = vector_record(update)
    return Message(reply, reply_to=message)


def _answer(
    task: str, client: int, context: Context, kind: str, fields: dict[str, Any], weights: Vector | None
) -> tuple[dict[str, Any], Vector | None]:
    config, node = dict(context.run_config), context.node_config
    step_seconds = float(node.get("step_seconds", 0.0))
    if kind == "exchange" or bool(node.get("warm", False)):
        launch = {"task": task, "config": config, "client": client, "step_seconds": step_seconds}
        known = context.state.get(STATE)  # the address of the client process that an earlier message started
        address = None
        if isinstance(known, ConfigRecord):
            address = ProcessAddress(str(known["path"]), bytes(known["secret"]))  # type: ignore[arg-type]
        address, found, update = request(address, f"{context.node_id:x}", launch, kind, fields, weights)
        context.state[STATE] = ConfigRecord({"path": address.path, "secret": address.secret})
        return found, update
    from ..client.handler import ClientHandler

    return ClientHandler(task, config, client, step_seconds).answer(kind, fields, weights)


def client_number(context: Context) -> int:
    """Return which client this node runs, from the node's own settings."""
    number = context.node_config.get("client", context.node_config.get("partition-id"))
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UserError("this node has no client number; start its SuperNode with --node-config 'client=0' (0, 1, …)")
    return number
