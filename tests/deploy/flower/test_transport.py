"""Replies over Flower's Grid: one that is still being uploaded does not delay the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from defedavg.deploy.flower import grid_transport
from defedavg.deploy.flower.grid_transport import GridTransport
from defedavg.deploy.transport import Reply


def answer(name: str, error: int | None = None) -> Any:
    """Return a stand-in for the reply to a message; only Flower's own processes can make a real one."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=name),
        has_error=lambda: error is not None,
        error=SimpleNamespace(code=error, reason="gone"),
        content=RecordDict({"fields": ConfigRecord({"client": 1})}),
    )


class FakeGrid:
    """A Grid on which ``ready`` replies are complete, and ``half`` are being uploaded until ``whole`` is set.

    Like Flower's Grid, it returns a reply once, and an error for one that it has already returned.
    """

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.half: set[str] = set()
        self.given: set[str] = set()
        self.whole = threading.Event()
        self.broken: Exception | None = None

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        if self.broken is not None:
            raise self.broken
        requested = set(ids)
        gone = requested & self.given
        found = (requested & (self.ready | self.half)) - self.given
        self.given |= found
        if found & self.half:
            assert self.whole.wait(60)
        return [*(answer(name) for name in sorted(found)), *(answer(name, 3) for name in sorted(gone))]


@pytest.fixture(params=[1, 8], ids=["one pull", "eight pulls"])
def grid(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeGrid:
    monkeypatch.setattr(grid_transport, "PULL_SECONDS", 0.05)
    monkeypatch.setattr(grid_transport, "MAX_PULLS", request.param)
    return FakeGrid()


def names(replies: list[Reply]) -> list[str]:
    assert all(reply.error is None for reply in replies)
    return [reply.to for reply in replies]


def until_some(transport: GridTransport, ids: list[str]) -> list[Reply]:
    deadline = time.monotonic() + 60
    while not (found := transport.pull(ids)):
        assert time.monotonic() < deadline
    return found


def transport_over(grid: Any) -> GridTransport:
    return GridTransport(grid)


def test_an_upload_that_hangs_does_not_delay_other_replies(grid: FakeGrid) -> None:
    transport = transport_over(grid)
    grid.ready, grid.half = {"b"}, {"a"}
    assert transport.pull(["a", "c", "d"]) == []  # the upload of a has begun
    grid.ready |= {"c"}
    assert names(until_some(transport, ["a", "c", "d"])) == ["c"]
    grid.ready |= {"d"}
    assert names(until_some(transport, ["a", "d"])) == ["d"]
    grid.whole.set()
    assert names(until_some(transport, ["a"])) == ["a"]


def test_a_reply_that_is_being_pulled_does_not_count_as_lost(grid: FakeGrid) -> None:
    transport = transport_over(grid)
    grid.half = {"a"}
    for _ in range(3):
        assert transport.pull(["a"]) == []  # the Grid returns an error: the first pull has the reply
    grid.whole.set()
    assert names(until_some(transport, ["a"])) == ["a"]
    [lost] = until_some(transport, ["a"])  # now the error counts
    assert lost.error is not None
    assert not lost.failed


def test_complete_replies_are_not_delayed_by_an_incomplete_one(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "MAX_PULLS", 8)
    transport = transport_over(grid)
    grid.ready, grid.half = {"b", "c"}, {"a"}
    assert sorted(names(until_some(transport, ["a", "b", "c"]))) == ["b", "c"]
    grid.whole.set()
    assert names(until_some(transport, ["a"])) == ["a"]


def test_the_number_of_pending_pulls_is_limited(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "MAX_PENDING_PULLS", 3)
    before = threading.active_count()
    transport = transport_over(grid)
    grid.half = set("abcdefgh")
    for name in sorted(grid.half):
        assert transport.pull([name]) == []
    assert threading.active_count() <= before + 3
    grid.whole.set()
    assert set(names(until_some(transport, ["z"]))) <= {"a", "b", "c"}


def test_an_error_of_a_pull_is_raised(grid: FakeGrid) -> None:
    grid.broken = ConnectionError("the SuperLink is gone")
    with pytest.raises(ConnectionError, match="gone"):
        transport_over(grid).pull(["a"])
