"""Small things that several tests need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from defedavg.planning.records import Record, Round
from helpers.strategies import case

GOOD = case("defedavg-iid", 5, 2, seed=1, step_seconds=0.05).plan(8)  # long jobs: some run while others are merged


def rounds_of(records: Iterable[Record]) -> Iterator[Round]:
    """The merges of a stream, as they come."""
    return (record for record in records if isinstance(record, Round))
