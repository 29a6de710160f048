"""Replies over Flower's Grid: one that is still being uploaded keeps nobody else's waiting."""

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
    """A reply to the message of that name, as far as it is looked at; only Flower's processes can make Flower's own."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=name),
        has_error=lambda: error is not None,
        error=SimpleNamespace(code=error, reason="gone"),
        content=RecordDict({"fields": ConfigRecord({"client": 1})}),
    )


class Link:
    """A Grid on which ``ready`` are whole, and ``half`` are being uploaded until ``whole`` is set.

    As Flower's does, it hands out a reply once, and says of one that was handed out that there is none.
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
        asked = set(ids)
        gone = asked & self.given
        found = (asked & (self.ready | self.half)) - self.given
        self.given |= found
        if found & self.half:
            assert self.whole.wait(60)
        return [*(answer(name) for name in sorted(found)), *(answer(name, 3) for name in sorted(gone))]


@pytest.fixture(params=[1, 8], ids=["one question", "eight questions"])
def link(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Link:
    monkeypatch.setattr(grid_transport, "PULL_SECONDS", 0.05)
    monkeypatch.setattr(grid_transport, "MAX_PULLS", request.param)
    return Link()


def names(replies: list[Reply]) -> list[str]:
    assert all(reply.error is None for reply in replies)
    return [reply.to for reply in replies]


def until_some(port: GridTransport, ids: list[str]) -> list[Reply]:
    deadline = time.monotonic() + 60
    while not (found := port.pull(ids)):
        assert time.monotonic() < deadline
    return found


def port_over(link: Any) -> GridTransport:
    return GridTransport(link)


def test_an_upload_that_hangs_keeps_no_other_reply_waiting(link: Link) -> None:
    port = port_over(link)
    link.ready, link.half = {"b"}, {"a"}
    assert port.pull(["a", "c", "d"]) == []  # a has begun to come
    link.ready |= {"c"}
    assert names(until_some(port, ["a", "c", "d"])) == ["c"]
    link.ready |= {"d"}
    assert names(until_some(port, ["a", "d"])) == ["d"]
    link.whole.set()
    assert names(until_some(port, ["a"])) == ["a"]


def test_a_reply_that_is_being_fetched_is_not_taken_for_lost(link: Link) -> None:
    port = port_over(link)
    link.half = {"a"}
    for _ in range(3):
        assert port.pull(["a"]) == []  # the link says that there is none: the first question has it
    link.whole.set()
    assert names(until_some(port, ["a"])) == ["a"]
    [lost] = until_some(port, ["a"])  # now it is believed
    assert lost.error is not None
    assert not lost.failed


def test_replies_that_come_together_with_half_a_one_are_not_kept_waiting(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_transport, "MAX_PULLS", 8)
    port = port_over(link)
    link.ready, link.half = {"b", "c"}, {"a"}
    assert sorted(names(until_some(port, ["a", "b", "c"]))) == ["b", "c"]
    link.whole.set()
    assert names(until_some(port, ["a"])) == ["a"]


def test_questions_that_hang_are_not_many(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "MAX_PENDING_PULLS", 3)
    before = threading.active_count()
    port = port_over(link)
    link.half = set("abcdefgh")
    for name in sorted(link.half):
        assert port.pull([name]) == []
    assert threading.active_count() <= before + 3
    link.whole.set()
    assert set(names(until_some(port, ["z"]))) <= {"a", "b", "c"}


def test_what_goes_wrong_in_a_question_is_told(link: Link) -> None:
    link.broken = ConnectionError("the SuperLink is gone")
    with pytest.raises(ConnectionError, match="gone"):
        port_over(link).pull(["a"])
