"""The check that a plan obeys availability, record by record, independently of the simulators.

A client that is not reachable starts no job and answers no request. It completes a running job, and an update that
leaves its client when its job ends is sent even then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .devices import Fleet
from .plan_checks import PlanError
from .records import Job, Record, Uploaded


def available(fleet: Fleet, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the same records, each after its check; raise ``PlanError`` at the first one that is not possible."""
    if fleet.schedule is None:
        yield from records
        return
    last: dict[int, tuple[int, float]] = {}  # client -> index and end of its last job
    for record in records:
        if isinstance(record, Job):
            _require_open(fleet, record.client, record.start, f"job {record.index} of client {record.client} starts")
            last[record.client] = (record.index, record.end)
        elif isinstance(record, Uploaded) and last.get(record.client) != (record.index, record.start):
            name = f"the upload of job {record.index} of client {record.client} starts"
            _require_open(fleet, record.client, record.start, name)
        yield record


def _require_open(fleet: Fleet, client: int, time: float, what: str) -> None:
    opens = fleet.opens(client, time)
    if opens != time:
        raise PlanError(f"{what} at {time} s, but the client is not available until {opens} s")
