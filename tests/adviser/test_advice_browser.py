"""The page of an advice in a real browser; see ``helpers/browser_tabs.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from defedavg.adviser.advice import advise
from defedavg.adviser.advice_files import advice_page
from helpers.browser_tabs import CONTRAST, SCHEMES, Open


def advice_page_of(folder: Path, *kept: int) -> str:
    """Write the page of a small advice with some of four candidates: two reached the target, two missed it."""
    training = {"updates_per_round": [2], "local_steps": [5], "local_lr": [0.0001, 0.03], "global_lr": [1.0]}
    stop = {"target_accuracy": 0.3, "max_seconds": 0.5}
    study = {"task": {"model": "softmax"}, "clients": {"num_clients": 6}, "training": training, "stop": stop}
    found = advise(study, algorithms=["fedavg"], budget_updates=300, seeds=1)
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
    assert (missed["x"], missed["text"], missed["marker"]["symbol"]) == ([0.4], ["not reached"], "triangle-right-open")
    note = tab.page.text_content("#front-note")
    assert "had not reached the target by this time" in note
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
    assert page.locator("#ranking tr.best").count() == 0
    assert page.locator("#ranking tbody tr").first.locator("td").last.text_content() == "best so far; not advised"
