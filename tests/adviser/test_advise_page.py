"""docs/advise.md: how good the advice is, compared with the results in the repository."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "advise.md").read_text(encoding="utf-8"))
KEYS = ("fresh6", "fresh7")
"""The lists of scenarios that the present search had not seen."""
MOST_RATIO = 10.0


def stored(key: str, share: str = "") -> list[dict[str, Any]]:
    """Return the advice of all scenarios of a key; with a share of the budget, that of all seeds."""
    paths = [ROOT / "results" / "advise" / f"advice-{key}-{number}{share}.json" for number in range(20)]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [advice for each in found for advice in each["advice"]] if share else found


def on_new_seeds(advice: dict[str, Any]) -> float:
    """Return how much longer the advised cell takes than the best of the grid; infinite without advice."""
    if "new_seeds" not in advice:
        return math.inf
    advised, best = advice["new_seeds"]
    return float(advised / best - 1 if math.isfinite(advised) else math.inf)


def within(regrets: list[float], limit: float) -> int:
    """Return how many choices are within a limit."""
    return sum(regret <= limit for regret in regrets)


def percent(share: float) -> str:
    """Return a share as the page writes it."""
    return f"{100 * share:.1f} %"


def test_the_goal_is_met_on_both_lists() -> None:
    first, second = ([advice["regret"] for advice in stored(key)] for key in KEYS)
    assert median(first) <= 0.1
    assert median(second) <= 0.1
    assert all(advice["cost"] <= 0.05 for key in KEYS for advice in stored(key))
    assert f"the median regret is {percent(median(first))} for the key `fresh6` and {percent(median(second))}" in PAGE
    above = f"{20 - within(first, 0.1)} of these 20 and {20 - within(second, 0.1)} of the other 20 choices"
    assert above in PAGE


@pytest.mark.parametrize("key", ["fresh", *(f"fresh{number}" for number in range(2, 8))])
def test_the_page_has_the_figures_of_every_list(key: str) -> None:
    advice = stored(key)
    regrets, new = [each["regret"] for each in advice], list(map(on_new_seeds, advice))
    (budget,) = {each["budget_share"] for each in advice}
    figures = [f"{100 * budget:.4g} %", percent(median(regrets)), within(regrets, 0.1), percent(median(new))]
    figures += [within(new, 0.1), percent(max(each["cost"] for each in advice))]
    (row,) = re.findall(rf"\| `{key}` \|[^|]*\|([^`]*)\|", PAGE)
    assert row.split("| |")[0].strip(" |").split(" | ") == list(map(str, figures))


@pytest.mark.parametrize("key", KEYS)
def test_the_same_seed_and_budget_gave_the_same_advice_twice(key: str) -> None:
    names = ("advice", "steps", "regret", "new_seeds", "ended")
    once, again = stored(key), stored(key, "-1")[::3]
    assert [[each[name] for name in names] for each in once] == [[each[name] for name in names] for each in again]


@pytest.mark.parametrize(("share", "budget"), [("0.3", "1.5 %"), ("1", "5 %"), ("3", "15 %")])
def test_the_page_has_the_figures_of_every_budget(share: str, budget: str) -> None:
    advice = [each for key in KEYS for each in stored(key, f"-{share}")]
    assert len(advice) == 120
    regrets, new = [each["regret"] for each in advice], list(map(on_new_seeds, advice))
    ratio = math.exp(fmean(math.log(min(1 + regret, MOST_RATIO)) for regret in regrets))
    limits = (within(regrets, 0.1), within(regrets, 0.25), 120 - within(regrets, 1.0))
    figures = (budget, percent(median(regrets)), *limits, percent(median(new)), within(new, 0.1), f"{ratio:.2f}")
    assert f"| {' | '.join(map(str, figures))} |" in PAGE


def test_the_page_names_the_searches_without_advice_and_what_is_no_luck() -> None:
    without = [each["error"] for key in KEYS for each in stored(key, "-0.3") if "error" in each]
    assert len(without) == 3
    assert all(error.startswith("the budget is below one run") for error in without)
    advice = stored("fresh6")
    assert math.isinf(advice[0]["regret"])
    assert f"{-100 * on_new_seeds(advice[0]):.0f} % faster on new seeds" in PAGE
    assert all(min(advice[number]["regret"], on_new_seeds(advice[number])) > 0.5 for number in (5, 8))
