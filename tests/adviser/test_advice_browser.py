"""The page of an advice in a real browser; see ``helpers/browser_tabs.py``."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from defedavg.adviser.advice import advise
from defedavg.adviser.advice_files import advice_page
from defedavg.adviser.recommendation import Advice
from helpers.browser_tabs import CONTRAST, SCHEMES, Open


def small_advice() -> Advice:
    """Return an advice with two candidates: one reached the target, one missed it."""
    training = {"updates_per_round": [2], "local_steps": [5], "local_lr": [0.0001, 0.03], "global_lr": [1.0]}
    stop = {"target_accuracy": 0.3, "max_seconds": 0.5}
    study = {"task": {"model": "softmax"}, "clients": {"num_clients": 6}, "training": training, "stop": stop}
    return advise(study, algorithms=["fedavg"], budget_updates=300, seeds=1)


def advice_page_of(folder: Path, *kept: int) -> str:
    """Write the page of a small advice with some of four candidates: two reached the target, two missed it."""
    found = small_advice()
    hit, miss = found.ranking
    assert hit.time is not None
    early = replace(miss, label="early", missed=(replace(miss.missed[0], seconds=hit.time.mean / 2),))
    late = replace(miss, label="late", missed=(replace(miss.missed[0], seconds=0.4, metric=0.25),))
    rows = (hit, replace(hit, label="other", reason="is slower"), late, early)
    page = folder / "advice.html"
    page.write_text(advice_page(replace(found, ranking=tuple(rows[i] for i in kept)), {}), encoding="utf-8")
    return page.as_uri()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_of_an_advice_shows_a_missed_target_as_a_bound(tmp_path: Path, open_page: Open, scheme: str) -> None:
    tab = open_page(advice_page_of(tmp_path, 0, 1, 2, 3), 1280, scheme)
    times = tab.page.locator("#ranking tbody tr td:nth-child(3)").all_text_contents()
    assert times[2] == "not reached by 0.4 s (accuracy 25.0 %)"
    assert times[3].startswith("not reached by ")
    assert (tab.traces("front", "reached"), tab.traces("front", "missed")) == (2, 1)
    missed = tab.page.evaluate("document.getElementById('front').data.find(t => t.meta === 'missed')")
    assert (missed["x"], missed["marker"]["symbol"]) == ([0.4], "triangle-right-open")
    note = tab.page.text_content("#front-note")
    assert "An open triangle is a candidate that had not reached the target by this time" in note
    assert "Not shown: 1 candidate that missed the target" in note
    assert tab.page.locator("#ranking tr.best").count() == 1
    assert tab.page.evaluate(CONTRAST) == []
    assert tab.messages == []


def test_the_page_of_an_advice_without_a_hit_advises_nothing(tmp_path: Path, open_page: Open) -> None:
    page = open_page(advice_page_of(tmp_path, 2, 3)).page
    assert page.text_content("#conclusion").startswith(
        "no candidate reached 30 %; the best so far, late: not reached by"
    )
    assert "No candidate reached the target" in page.text_content("#front")
    assert not page.locator("p.how:has(#front-note)").is_visible()  # it explains a picture that is not there
    assert page.locator("#ranking tr.best").count() == 0
    assert page.locator("#ranking tbody tr").first.locator("td").last.text_content() == "best so far; not advised"


BOXES = """(names) => [...document.querySelectorAll(names)].map((e) => { const r = e.getBoundingClientRect();
  return { text: e.textContent, left: r.left, right: r.right, top: r.top, bottom: r.bottom }; })"""


def drawn(page: Any, names: str) -> list[dict[str, Any]]:
    """Return the texts of elements, and where they are."""
    return list(page.evaluate(BOXES, names))


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    across = one["left"] < other["right"] and other["left"] < one["right"]
    return bool(across and one["top"] < other["bottom"] and other["top"] < one["bottom"])


@pytest.mark.parametrize("width", [1200, 400])
def test_the_picture_has_names_a_legend_a_colour_bar_and_ticks_that_do_not_overlap(
    tmp_path: Path, open_page: Open, width: int
) -> None:
    found = small_advice()
    hit, miss = found.ranking
    assert hit.time is not None
    front = [
        replace(
            hit,
            label=f"fedavg n={place}",
            time=replace(hit.time, mean=hit.time.mean * 1.1**place),
            bytes=(hit.bytes or 0.0) / 1.2**place,
            worst_decile=0.1 + 0.1 * place,
            reason="is slower",
        )
        for place in range(4)
    ]
    slow = replace(front[0], label="slow", time=replace(hit.time, mean=hit.time.mean * 2))
    late = replace(miss, label="late", missed=(replace(miss.missed[0], seconds=0.4),))
    page_file = tmp_path / "advice.html"
    page_file.write_text(advice_page(replace(found, ranking=(*front, slow, late)), {}), encoding="utf-8")
    tab = open_page(page_file.as_uri(), width)
    names = drawn(tab.page, "#front .annotation-text-g")
    wide = width > 700
    assert [each["text"] for each in names] == [f"{i + 1} fedavg" + (f"n={i}" if wide else "") for i in range(4)]
    ticks = [drawn(tab.page, f"#front .{axis}tick text") for axis in "xy"]
    for texts, unit in zip(ticks, (" s", "B"), strict=True):
        assert len(texts) >= 2
        assert all(each["text"].endswith(unit) for each in texts)
    every = [*names, *ticks[0], *ticks[1], *drawn(tab.page, "#front .legendtext, #front .cbaxis text")]
    assert {"advised", "on the Pareto front", "raced, not on the front"} < {each["text"] for each in every}
    assert any(each["text"].endswith("%") for each in every)
    assert [(a["text"], b["text"]) for a, b in combinations(every, 2) if overlap(a, b)] == []
    assert all(each["left"] >= 0 and each["right"] <= width for each in every)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.locator("#ranking .badge.front").count() == 4
    assert tab.messages == []
