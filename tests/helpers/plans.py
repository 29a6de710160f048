"""A small valid plan, the rounds of a stream of records, changed copies of records, and timers of started clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from defedavg.algorithms.protocol import Send, ServerAction, SetTimer
from defedavg.planning.records import Record, Round
from helpers.strategies import case

GOOD = case("defedavg-iid", 5, 2, seed=1, step_seconds=0.05).plan(8)  # long jobs: some run during merges


def rounds_of(records: Iterable[Record]) -> Iterator[Round]:
    """Yield the rounds of a stream of records."""
    return (record for record in records if isinstance(record, Round))


def with_fields(record: Any, **changes: Any) -> Any:
    """Return a copy of a record with other values of some fields."""
    return record._replace(**changes) if hasattr(record, "_replace") else dataclasses.replace(record, **changes)


def timers_of(actions: Iterable[ServerAction]) -> dict[int, int]:
    """Return the token of the timer that follows the message to each client."""
    tokens, sent = {}, -1
    for action in actions:
        if isinstance(action, Send):
            sent = action.client
        elif isinstance(action, SetTimer):
            tokens[sent] = action.token
    return tokens
