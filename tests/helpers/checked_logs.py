"""The log of a deployment: every update is received once and merged at most once."""

from __future__ import annotations

from collections import Counter

from defedavg.deploy.engine.event_log import EventLog
from defedavg.deploy.engine.events import Exchanged, Trained
from defedavg.deploy.replay import Replay, replay

Updates = Counter[tuple[int, int]]
"""Client and index of updates, with how often each was seen."""


def received_and_merged(log: EventLog) -> tuple[Replay, Updates, Updates]:
    """Replay a log and check it; return the updates that were received and those that were merged."""
    found = replay(log)
    found.plan.check()
    received = Counter((e.client, e.index) for e in log.events if isinstance(e, Trained))
    received.update((e.client, e.update.index) for e in log.events if isinstance(e, Exchanged) and e.update)
    assert set(received.values()) <= {1}
    merged = Counter((u.client, u.index) for r in found.plan.rounds for u, _ in r.merge.updates)
    assert set(merged.values()) <= {1}
    return found, received, merged
