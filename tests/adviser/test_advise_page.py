"""docs/advise.md: how good the advice is, compared with the results in the repository."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "advise.md").read_text(encoding="utf-8"))
KEYS = ("fresh", "fresh2")


def stored(kind: str, key: str) -> list[dict[str, Any]]:
    """Return the grids or the advice of all scenarios of a key."""
    paths = [ROOT / "results" / "advise" / f"{kind}-{key}-{number}.json" for number in range(20)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def close(regrets: list[float]) -> int:
    """Return how many choices are within 10 %."""
    return sum(regret <= 0.1 for regret in regrets)


def test_the_page_has_the_regrets_of_both_keys() -> None:
    (first, near), (second, also_near) = (
        (100 * median(regrets), close(regrets))
        for regrets in ([a["regret"] for a in stored("advice", k)] for k in KEYS)
    )
    cost = max(100 * advice["cost"] for advice in stored("advice", "fresh2"))
    assert f"the median regret is {first:.1f} %, and {near} of 20 choices are within 10 %" in PAGE
    assert f"a median regret of {second:.1f} % with {also_near} within 10 %, at a cost of at most {cost:.1f} %" in PAGE


def test_the_page_has_the_regrets_on_new_seeds() -> None:
    regrets = {key: [a / best - 1 for a, best in (each["new_seeds"] for each in stored("advice", key))] for key in KEYS}
    (first, near), (second, also_near) = ((100 * median(found), close(found)) for found in regrets.values())
    assert f"takes {first:.1f} % (`fresh`) and {second:.1f} % (`fresh2`) longer" in PAGE
    assert f"and {near} and {also_near} of 20 choices are within 10 %" in PAGE


def test_the_page_says_how_lucky_the_best_cell_of_one_seed_is() -> None:
    regrets = []
    for key in KEYS:
        for grid in stored("grid", key):
            for chosen, other in ((0, 1), (1, 0)):
                times = [tuple(math.inf if hit is None else hit for hit in hits) for hits in grid["cells"].values()]
                best = min(times, key=lambda hits: hits[chosen])
                regrets.append(best[other] / min(hits[other] for hits in times) - 1)
    assert f"has a median regret of {100 * median(regrets):.1f} % on the other seed" in PAGE
    assert f"with {close(regrets)} of {len(regrets)} choices within 10 %" in PAGE
