"""Messages over Flower without its processes: raw bytes of vectors, and a client whose task cannot be made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from defedavg.deploy.flower import client_entry
from defedavg.deploy.flower.grid_transport import _reply
from defedavg.deploy.flower.vector_record import DTYPES, read_vector, vector_record


@given(st.sampled_from(DTYPES), st.lists(st.floats(width=16, allow_nan=False), max_size=9))
def test_a_vector_arrives_with_the_same_bits(dtype: str, values: list[float]) -> None:
    vector = np.array(values, dtype=dtype)
    found = read_vector(vector_record(vector))
    assert found.dtype == vector.dtype
    assert found.tobytes() == vector.tobytes()


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({"dtype": "float32", "data": b"12345"}),
        ConfigRecord({"dtype": "object", "data": b"12345678"}),
        ConfigRecord({"dtype": "float32"}),
        ConfigRecord({"dtype": "float32", "data": "text"}),
        ArrayRecord({"update": Array(np.zeros(3, dtype=np.float32))}),
    ],
    ids=["half a number", "objects", "no bytes", "text", "arrays"],
)
def test_a_record_that_is_not_a_vector_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"buffer|record|missing"):
        read_vector(record)
    content = RecordDict({"update": record})
    metadata = SimpleNamespace(reply_to_message_id="m")
    reply = _reply(SimpleNamespace(metadata=metadata, has_error=lambda: False, content=content))  # type: ignore[arg-type]
    assert reply.update is not None
    assert reply.update.dtype == object  # no model has it


def test_the_answer_of_a_client_without_a_task_names_the_client_and_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only Flower's own processes can make a real message.
    monkeypatch.setattr(client_entry, "Message", lambda content, reply_to: SimpleNamespace(content=content))
    hello = RecordDict({"fields": ConfigRecord({"kind": "hello", "num_clients": 3})})
    context = Context(run_id=1, node_id=7, node_config={"client": 2}, state=RecordDict(), run_config={})
    reply = client_entry.handle("no_such_module_xyz:make", SimpleNamespace(content=hello), context)  # type: ignore[arg-type]
    fields = dict(reply.content["fields"])
    assert fields["client"] == 2
    assert "no_such_module_xyz" in str(fields["error"])
