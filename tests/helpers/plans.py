"""A small valid plan, and the rounds of a stream of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from defedavg.planning.records import Record, Round
from helpers.strategies import case

GOOD = case("defedavg-iid", 5, 2, seed=1, step_seconds=0.05).plan(8)  # long jobs: some run during merges


def rounds_of(records: Iterable[Record]) -> Iterator[Round]:
    """Yield the rounds of a stream of records."""
    return (record for record in records if isinstance(record, Round))
