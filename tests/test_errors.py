"""The lines for unknown names, and numbers with their nouns."""

from __future__ import annotations

import pytest

from defedavg.errors import counted, unknown

MANY = [f"setting{letter}" for letter in "abcdefghij"]


@pytest.mark.parametrize(
    ("name", "known", "listed_by", "hint"),
    [
        ("phone", ["equal", "paper", "phones"], "", "did you mean 'phones'?"),
        ("nonsense", ["equal", "paper", "phones"], "", "known: equal, paper, phones"),
        ("sting", MANY, "", "did you mean 'settingj'?"),
        ("nope", [*MANY, "stop"], "defedavg settings", "`defedavg settings` lists them"),
        ("time", [*MANY, "optimizer"], "defedavg settings", "`defedavg settings` lists them"),
        ("accuracy", [*MANY, "target_accuracy"], "", "did you mean 'target_accuracy'?"),
        ("foo", MANY, "", "known: " + ", ".join(MANY)),
        ("foo", MANY, "defedavg settings", "`defedavg settings` lists them"),
        ("settinga", MANY[1:], "defedavg settings", "did you mean 'settingj'?"),
    ],
)
def test_few_names_are_listed_unless_one_is_near(name: str, known: list[str], listed_by: str, hint: str) -> None:
    assert str(unknown("thing", name, known, listed_by)) == f"unknown thing {name!r}; {hint}"


def test_numbers_have_their_nouns_in_the_right_form() -> None:
    assert [counted(number, "cell") for number in (0, 1, 2, 1200)] == ["0 cells", "1 cell", "2 cells", "1,200 cells"]
