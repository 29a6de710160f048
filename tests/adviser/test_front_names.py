"""The picture of the front: ticks of its axes, places of names beside points, and the names themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import combinations, pairwise
from math import log
from types import SimpleNamespace
from typing import Any, cast

import pytest

from defedavg.adviser.advice_files import front_names
from defedavg.report.page import asset
from defedavg.rng import generator, key

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: apt-get install nodejs")


def computed(expression: str, given: Any = None) -> Any:
    """Return the value of an expression in the script of the picture; ``given`` is known in it."""
    assert NODE is not None
    program = f"{asset('front.js')};const given = {json.dumps(given)};console.log(JSON.stringify({expression}));"
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize(
    ("low", "high", "pixels", "gap", "ticks"),
    [
        (0.1, 100.0, 900, 70, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]),
        (0.1, 100.0, 280, 60, [0.1, 1, 10, 100]),
        (0.11, 0.3, 900, 70, [0.12, 0.15, 0.2, 0.25, 0.3]),
        (3.0, 3.3, 900, 70, [3, 3.05, 3.1, 3.15, 3.2, 3.25, 3.3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, pixels: int, gap: int, ticks: list[float]) -> None:
    assert computed(f"Front.ticks({low}, {high}, {pixels}, {gap})") == pytest.approx(ticks)


@needs_node
def test_ticks_are_far_enough_apart_and_never_fewer_than_two() -> None:
    draws = generator(key(0, "tests.adviser.ticks"))
    axes = [
        [low, low * (1 + ratio)]
        for low, ratio in zip(10 ** draws.uniform(-4, 7, 200), 10 ** draws.uniform(-1, 4, 200), strict=True)
    ]
    for pixels in (280, 900):
        found = computed(f"given.map(([low, high]) => Front.ticks(low, high, {pixels}, 60))", axes)
        for (low, high), ticks in zip(axes, found, strict=True):
            assert len(ticks) >= 2, (low, high, pixels)
            assert low <= ticks[0] < ticks[-1] <= high
            assert all(pixels * log(b / a) / log(high / low) >= 60 for a, b in pairwise(ticks))


def crowd(number: int, width: int, height: int, points: int) -> dict[str, Any]:
    """Return names of points in a box, and the marks of these points and of others."""
    draws = generator(key(number, "tests.adviser.names"))
    spots = [(float(draws.uniform(0, width)), float(draws.uniform(0, height))) for _ in range(3 * points)]
    labels = [
        {"x": x, "y": y, "radius": 8, "width": float(draws.uniform(50, 120)), "height": 30} for x, y in spots[:points]
    ]
    marks = [{"x": x, "y": y, "width": 16, "height": 16} for x, y in spots]
    return {"labels": labels, "marks": marks, "box": {"width": width, "height": height}}


def apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    across = abs(one["x"] - other["x"]) >= (one["width"] + other["width"]) / 2
    return bool(across or abs(one["y"] - other["y"]) >= (one["height"] + other["height"]) / 2)


@needs_node
@pytest.mark.parametrize(("width", "height", "points"), [(900, 420, 8), (300, 380, 4)])
def test_names_cover_neither_names_nor_points_and_stay_in_the_picture(width: int, height: int, points: int) -> None:
    crowds = [crowd(number, width, height, points) for number in range(20)]
    found = computed("given.map((crowd) => Front.place(crowd.labels, crowd.marks, crowd.box))", crowds)
    for each, spots in zip(crowds, found, strict=True):
        assert None not in spots
        names = [{**label, **spot} for label, spot in zip(each["labels"], spots, strict=True)]
        assert all(apart(one, other) for one, other in combinations(names, 2))
        assert all(apart(name, mark) for name in names for mark in each["marks"])
        for name in names:
            assert name["width"] / 2 <= name["x"] <= width - name["width"] / 2
            assert name["height"] / 2 <= name["y"] <= height - name["height"] / 2


@needs_node
def test_a_name_without_room_is_left_out() -> None:
    label = {"x": 20, "y": 20, "radius": 5, "width": 100, "height": 15}
    assert computed("Front.place(given, [], { width: 60, height: 60 })", [label]) == [None]


def test_a_name_has_the_settings_that_differ_from_others_of_its_algorithm() -> None:
    rows = [
        SimpleNamespace(algorithm="fedbuff", label="fedbuff n=5 K=5 concurrency=all η=1"),
        SimpleNamespace(algorithm="fedbuff", label="fedbuff n=2 K=5 concurrency=5 η=1"),
        SimpleNamespace(algorithm="fedavg", label="fedavg n=5 K=5 η=1"),
    ]
    assert list(front_names(cast(Any, rows)).values()) == ["n=5 concurrency=all", "n=2 concurrency=5", ""]
