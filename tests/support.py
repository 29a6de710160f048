"""Small things that several tests need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from defedavg.plan import Record, Round


def rounds_of(records: Iterable[Record]) -> Iterator[Round]:
    """The merges of a stream, as they come."""
    return (record for record in records if isinstance(record, Round))
