"""docs/reproduction.md: its pictures are those of the results in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = {
    "paper-scatter.png": "scatter.png",
    "paper-figure2.png": "figure2-accuracy.png",
    "paper-figure6.png": "figure6-accuracy.png",
}


@pytest.mark.parametrize(("shown", "drawn"), PICTURES.items())
def test_a_picture_of_the_page_is_the_one_that_was_drawn(shown: str, drawn: str) -> None:
    assert f"]({shown})" in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / shown).read_bytes()
    assert picture == (ROOT / "results" / "paper" / "figures" / drawn).read_bytes()


def test_every_picture_of_the_page_is_compared() -> None:
    assert {picture.name for picture in (ROOT / "docs").glob("paper-*.png")} == set(PICTURES)
