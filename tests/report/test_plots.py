"""Figures show exactly the data and are byte-identical for the same data."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PolyCollection
from matplotlib.figure import Figure

from defedavg.config.build import make_plan
from defedavg.config.study import ClientSettings, Settings, TrainingSettings
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.report.gantt import gantt
from defedavg.report.palette import look, looks
from defedavg.report.plots import Curve, accuracy_curves, band, loss_curves, save, split_map


def plan(algorithm: str, clients: int = 3, updates: int = 2, rounds: int = 8, mbps: float = math.inf) -> Plan:
    fleet = ClientSettings(
        num_clients=clients, slowness="uniform(1, 3)", step_seconds=0.02, uplink_mbps=mbps, downlink_mbps=mbps
    )
    return make_plan(Settings(algorithm, clients=fleet, training=TrainingSettings(updates)), 0, rounds)


def part(ax: Axes, name: str) -> Collection | None:
    found = [each for each in ax.collections if each.get_gid() == name]
    assert len(found) <= 1
    return found[0] if found else None


def boxes(ax: Axes, name: str) -> set[tuple[float, float, int]]:
    """Return start, end and client of every bar."""
    found = part(ax, name)
    if found is None:
        return set()
    corners = [np.asarray(path.vertices) for path in found.get_paths()]
    return {(float(c[0, 0]), float(c[1, 0]), round(float(c[:4, 1].mean()) + 0.02) - 1) for c in corners}


def curve(label: str, xs: tuple[float, ...], ys: tuple[float, ...], algorithm: str = "fedavg") -> Curve:
    return Curve(algorithm, label, xs, tuple(range(len(xs))), ys, tuple(1.0 - y for y in ys))


# The Gantt chart.


@pytest.mark.parametrize("algorithm", ["fedavg", "defedavg-niid", "defedavg-iid", "fedbuff", "asysg", "favano"])
@pytest.mark.parametrize("mbps", [math.inf, 400.0])
def test_every_job_is_a_bar_and_exactly_the_unmerged_jobs_are_hatched(algorithm: str, mbps: float) -> None:
    made = plan(algorithm, mbps=mbps)
    (ax,) = gantt({"title": made}).axes
    merged = {(u.client, u.index) for done in made.rounds for u, _ in done.merge.updates}
    last = max(made.seconds, *(job.start if job.outcome == "running" else job.end for job in made.jobs))
    used: set[tuple[float, float, int]] = set()
    unused: set[tuple[float, float, int]] = set()
    for job in made.jobs:
        if job.start < made.seconds:
            bar = (job.start, last if job.outcome == "running" else job.end, job.client)
            (used if (job.client, job.index) in merged else unused).add(bar)
    assert boxes(ax, "jobs") == used
    assert boxes(ax, "unused") == unused
    hatched = [each for each in ax.collections if each.get_hatch()]
    assert hatched == [each for each in ax.collections if each.get_gid() == "unused"]


def test_uploads_are_drawn_where_they_take_time() -> None:
    quick, slow = plan("fedbuff"), plan("fedbuff", mbps=400.0)
    first, second = gantt({"quick": quick, "slow": slow}, until=100.0).axes
    assert not boxes(first, "uploads")
    assert len(boxes(second, "uploads")) == len(slow.uploads) > 0


def test_one_panel_per_plan_and_one_line_per_merge() -> None:
    plans = {name: plan(name) for name in ("fedavg", "defedavg-niid", "defedavg-iid")}
    figure = gantt(plans)
    longest = max(made.seconds for made in plans.values())
    assert [ax.get_title(loc="left") for ax in figure.axes] == list(plans)
    tops = [ax.get_position().y0 for ax in figure.axes]
    assert tops == sorted(tops, reverse=True)
    for ax, made in zip(figure.axes, plans.values(), strict=True):
        lines = part(ax, "merges")
        assert lines is not None
        times = [float(np.asarray(path.vertices)[0, 0]) for path in lines.get_paths()]
        assert times == [done.time for done in made.rounds]
        assert ax.get_xlim() == figure.axes[0].get_xlim()
        assert ax.yaxis_inverted()  # the first client on top
        assert [span.get_gid() for span in ax.patches] == (["unknown"] if made.seconds < longest else [])
    assert figure.axes[-1].get_xlabel() == "simulated seconds"


def test_merges_at_the_same_time_share_a_label_and_labels_do_not_overlap() -> None:
    made = plan("defedavg-niid")
    (ax,) = gantt({"title": made}).axes
    times = [done.time for done in made.rounds]
    assert len(set(times)) < len(times), "the example has merges at the same time"
    labels = [text for text in ax.texts if text.get_gid() == "merge-labels"]
    assert "1–2" in [text.get_text() for text in labels]
    figure = gantt({"title": plan("fedbuff", clients=30, updates=2, rounds=50)})
    figure.draw_without_rendering()
    spans = sorted(
        tuple(t.get_window_extent().intervalx) for t in figure.axes[0].texts if t.get_gid() == "merge-labels"
    )
    assert len(spans) > 5
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_only_the_first_clients_and_the_first_seconds_are_shown() -> None:
    made = plan("defedavg-niid", clients=30, updates=5, rounds=100)
    (ax,) = gantt({"title": made}, clients=4, until=3.0).axes
    drawn = boxes(ax, "jobs") | boxes(ax, "unused")
    assert {client for _, _, client in drawn} == {0, 1, 2, 3}
    assert len(drawn) == sum(job.client < 4 and job.start < 3.0 for job in made.jobs)
    lines = part(ax, "merges")
    assert lines is not None
    assert len(lines.get_paths()) == sum(done.time <= 3.0 for done in made.rounds)
    assert "4 of 30" in ax.get_title(loc="right")
    (ax,) = gantt({"title": made}).axes
    assert len({client for _, _, client in boxes(ax, "jobs") | boxes(ax, "unused")}) == 20
    assert not [text for text in ax.texts if text.get_gid() == "merge-labels"], "a hundred merges carry no labels"


@pytest.mark.parametrize(("first", "count"), [(0, 7), (1, 7), (0, 30), (1, 30)])
def test_the_rows_carry_the_numbers_of_the_clients(first: int, count: int) -> None:
    made = plan("fedbuff", clients=count, updates=2, rounds=5)
    (ax,) = gantt({"title": made}, clients=count, first_number=first).axes
    shown = {round(y): text.get_text() for y, text in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)}
    assert all(int(text) == row - 1 + first for row, text in shown.items())
    assert (min(shown), shown[1]) == (1, str(first)), "the first client has a number"
    assert max(shown) <= count


def test_successive_versions_differ_in_colour() -> None:
    (ax,) = gantt({"title": plan("fedavg")}).axes
    bars = part(ax, "jobs")
    assert isinstance(bars, PolyCollection)
    assert len({tuple(colour) for colour in np.asarray(bars.get_facecolor()).tolist()}) == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"clients": 0}, "at least one"), ({"until": 0.0}, "above zero"), ({"until": math.inf}, "above zero")],
)
def test_plans_that_cannot_be_drawn_are_user_errors(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gantt({"title": plan("fedavg")}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="nothing to draw"):
        gantt({})
    with pytest.raises(UserError, match="nothing to draw"):
        gantt({"title": plan("fedavg", rounds=0)})


# Curves.


def test_band_holds_values_and_ends_each_seed_with_its_last_evaluation() -> None:
    found = band([((0.0, 2.0, 4.0), (0.1, 0.3, 0.5)), ((1.0, 3.0), (0.2, 0.8)), ((0.0, 2.0, 6.0), (0.0, 0.6, 0.9))])
    assert found.x.tolist() == [0, 1, 2, 3, 4, 6]
    assert found.mean == pytest.approx([0.05, 0.3 / 3, 1.1 / 3, 1.7 / 3, 1.1 / 2, 0.9])
    assert found.low == pytest.approx([0.0, 0.0, 0.2, 0.3, 0.5, 0.9])
    assert found.high == pytest.approx([0.1, 0.2, 0.6, 0.8, 0.6, 0.9])


def test_band_takes_the_last_evaluation_at_a_time_and_shows_divergence_as_a_gap() -> None:
    found = band([((0.0, 1.0, 1.0, 2.0), (0.1, 0.2, 0.7, math.inf))])
    assert found.x.tolist() == [0, 1, 2]
    assert found.mean[:2].tolist() == [0.1, 0.7]
    assert math.isnan(found.mean[2])
    assert band([]).x.size == band([((), ())]).x.size == 0


def test_curves_have_a_panel_per_title_a_mean_per_label_and_a_band_for_seeds() -> None:
    one = [curve("a", (0.0, 1.0, 2.0), (0.1, 0.5, 0.7)), curve("a", (0.0, 1.5), (0.2, 0.6)), curve("b", (0, 3), (0, 1))]
    figure = accuracy_curves({"left": one, "right": one[:1]}, target={"left": 0.6})
    left, right = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["left", "right"]
    means = [line for line in left.lines if line.get_gid() != "target"]
    assert len(means) == 2
    assert np.asarray(means[0].get_xdata()).tolist() == [0, 1, 1.5, 2]
    assert means[0].get_ydata() == pytest.approx([0.15, 0.35, 0.55, 0.7])
    assert part(left, "band") is not None
    assert part(right, "band") is None
    assert [line.get_gid() for line in right.lines].count("target") == 0
    (target,) = [line for line in left.lines if line.get_gid() == "target"]
    assert list(target.get_ydata()) == [0.6, 0.6]  # type: ignore[arg-type]
    assert "0.6" in [text.get_text() for text in left.texts]
    assert (left.get_xlabel(), left.get_ylabel()) == ("simulated seconds", "test accuracy")
    assert left.get_ylim() == right.get_ylim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "target"]


def test_the_x_axis_is_logarithmic_only_where_lengths_differ_much() -> None:
    short, long = curve("a", (0.0, 1.0), (0.1, 0.5)), curve("b", (0.0, 4.0, 9.0), (0.1, 0.5, 0.6))
    near, far = accuracy_curves({"near": [short, short], "far": [short, long]}).axes
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    assert all(np.all(np.asarray(line.get_xdata()) > 0) for line in far.lines)
    (rounds,) = accuracy_curves({"far": [short, long]}, against="rounds").axes
    assert (rounds.get_xscale(), rounds.get_xlabel()) == ("linear", "rounds")


def test_losses_are_logarithmic_where_all_are_positive() -> None:
    (ax,) = loss_curves({"a": [curve("a", (0.0, 1.0), (0.1, 0.5))]}).axes
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "test loss")
    (ax,) = loss_curves({"a": [curve("a", (0.0, 1.0), (0.1, 1.0))]}).axes
    assert ax.get_yscale() == "linear"


def test_looks_are_fixed_and_distinct() -> None:
    names = ("fedavg", "fedbuff", "favano", "asysg", "defedavg-iid", "defedavg-niid")
    assert len({look(name)["color"] for name in names}) == len({look(name)["marker"] for name in names}) == 6
    assert look("another") == look("another")
    assert look("another")["color"] not in {look(name)["color"] for name in names}
    for name in (*names, "another"):
        shades = [look(name, variant)["color"] for variant in range(5)]
        assert len(set(shades)) == 5
        every = {(style["color"], style["marker"]) for style in (look(name, variant) for variant in range(40))}
        assert len(every) == 40


def test_two_algorithms_of_plugins_never_share_a_look() -> None:
    names = [f"own-{i}" for i in range(60)]  # more than there are first looks
    styles = looks((name, name) for name in names).values()
    assert len({(style["color"], style["marker"], str(style["linestyle"])) for style in styles}) == 60


def test_curves_without_evaluations_and_targets_without_panels_are_user_errors() -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        accuracy_curves({"a": [curve("a", (), ())]})
    with pytest.raises(UserError, match="nothing to draw"):
        loss_curves({})
    with pytest.raises(UserError, match="unknown panel 'right'"):
        accuracy_curves({"left": [curve("a", (0.0,), (0.1,))]}, target={"right": 0.5})


# Splits and files.


@pytest.mark.parametrize("clients", [1, 10, 100, 1000])
def test_split_map_shows_the_counts(clients: int) -> None:
    counts = np.arange(clients * 10).reshape(clients, 10)
    figure = split_map(counts, "samples per client")
    ax = figure.axes[0]
    image = np.asarray(ax.images[0].get_array())
    assert np.array_equal(image.T, counts)
    low, high = ax.get_xlim()
    assert (low, high) == (-0.5, clients - 0.5), "clients are numbered from 0, as in files and on the page"
    assert all(tick == round(tick) for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_majorticklocs())
    assert bool(ax.texts) == (clients <= 10)
    with pytest.raises(UserError, match="nothing to draw"):
        split_map(np.zeros((0, 10)), "no clients")


def figures() -> list[Figure]:
    runs = [curve("a", (0.0, 1.0), (0.1, 0.5)), curve("a", (0.0, 1.2), (0.2, 0.6))]
    return [
        accuracy_curves({"a": runs}, target=0.5),
        gantt({"a": plan("defedavg-niid"), "b": plan("fedbuff", mbps=400.0)}),
        split_map(np.eye(10, dtype=int), "own class"),
    ]


def test_saving_writes_both_formats_with_the_same_bytes_every_time(tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    for number, (figure, again) in enumerate(zip(figures(), figures(), strict=True)):
        written = save(figure, tmp_path / f"first-{number}")
        assert written == [tmp_path / f"first-{number}.png", tmp_path / f"first-{number}.pdf"]
        for twin in (figure, again):
            for old, new in zip(written, save(twin, tmp_path / "second"), strict=True):
                assert old.read_bytes() == new.read_bytes()
        assert b"/FontFile2" in written[1].read_bytes(), "fonts are embedded as TrueType"
        assert b"CreationDate" not in written[1].read_bytes()
    assert dict(matplotlib.rcParams) == settings


def test_a_suffix_chooses_the_format(tmp_path: Path) -> None:
    figure = split_map(np.eye(3), "small")
    assert save(figure, tmp_path / "one.pdf") == [tmp_path / "one.pdf"]
    assert save(figure, str(tmp_path / "two.PNG")) == [tmp_path / "two.PNG"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one.pdf", "two.PNG"]
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "two.PNG").read_bytes().startswith(b"\x89PNG")


def test_files_that_cannot_be_written_are_user_errors_of_one_line(tmp_path: Path) -> None:
    figure = split_map(np.eye(3), "small")
    with pytest.raises(UserError, match=r"'\.svg'; use \.png or \.pdf"):
        save(figure, tmp_path / "a.svg")
    with pytest.raises(UserError, match="cannot be written") as caught:
        save(figure, tmp_path / "missing" / "a.png")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(UserError, match="needs a file name"):
        save(figure, ".")
