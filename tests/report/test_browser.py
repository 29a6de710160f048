"""The pages of reports and the live view in a real browser; see ``helpers/browser_tabs.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from defedavg.report.dashboard.http_server import DashboardServer
from defedavg.report.page import build, write, write_records
from helpers.browser_tabs import CONTRAST, SCHEMES, Open
from helpers.run_folders import HOSTILE, make_folder, make_hostile, metrics_line

WIDTHS = (400, 1600)
CHARTS = ("accuracy", "loss", "staleness", "participation", "activity", "split")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of two studies: two algorithms × two seeds, and three algorithms of one seed on another task."""
    root = tmp_path_factory.mktemp("report")
    make_folder(root, "first", clients=30)
    other = {"model": "softmax", "split": "iid"}
    make_folder(root, "second", algorithms=("fedbuff", "favano", "asysg"), seeds=(0,), task=other, target=0.7)
    write([root], root / "report.html", "Both")
    return root / "report.html"


def test_the_page_has_every_chart_and_every_control_works(report: Path, open_page: Open) -> None:
    tab = open_page(report.as_uri())
    page = tab.page
    assert page.text_content("h1") == "Both"
    assert "reached 50 % first" in page.text_content("#conclusion")
    assert page.locator("#results-table tbody tr").count() == 2
    assert page.locator("#results-table tr.best").count() == 1
    assert (tab.traces("accuracy", "mean"), tab.traces("accuracy", "band")) == (2, 2)
    assert (tab.traces("loss", "mean"), tab.traces("staleness"), tab.traces("participation")) == (2, 2, 2)
    names = page.evaluate("document.getElementById('activity').data.map(t => t.name)")
    assert names == ["idle", "training", "training not merged", "upload", "merge", "scale"]
    assert page.evaluate("document.getElementById('split').data[0].z.length") == 10
    axes = {"rounds": "rounds", "updates": "updates", "megabytes": "megabytes", "seconds": "simulated"}
    for value, text in axes.items():
        page.check(f"#axis input[value={value}]", force=True)
        assert tab.axis("accuracy").startswith(text)
        assert tab.axis("loss").startswith(text)
        assert tab.traces("accuracy", "mean") == 2
    page.uncheck("#spread")
    assert (tab.traces("accuracy", "band"), tab.traces("accuracy", "mean")) == (0, 2)
    page.check("#log")
    assert page.evaluate("document.getElementById('accuracy').layout.xaxis.type") == "log"
    page.locator("#chips input").first.uncheck()
    assert (tab.traces("accuracy", "mean"), tab.traces("staleness"), tab.traces("participation")) == (1, 1, 1)
    assert page.locator("#results-table input:checked").count() == 1
    page.locator("#results-table input").first.check()
    assert tab.traces("accuracy", "mean") == 2
    before = page.evaluate("document.getElementById('activity').data[1].base")
    page.select_option("#activity-choice", index=1)
    assert page.evaluate("document.getElementById('activity').data[1].base") != before
    page.check("#group-switch input[value='1']", force=True)
    tab.ready()
    assert (tab.traces("accuracy", "mean"), tab.traces("accuracy", "band"), tab.traces("staleness")) == (3, 0, 3)
    assert page.locator("#differences tbody tr").count() == 3
    assert page.locator("#folders h3").all_text_contents() == ["first", "second"]
    assert "defedavg run first.toml" in page.text_content("#folders")
    assert tab.messages == []
    assert tab.requests == [report.as_uri()]


def test_buttons_zoom_the_activity_chart(report: Path, open_page: Open) -> None:
    tab = open_page(report.as_uri())

    def shown() -> list[float]:
        found: list[float] = tab.page.evaluate("document.getElementById('activity').layout.xaxis.range")
        return found

    tab.page.click("[data-zoom=all]")
    low, high = shown()
    tab.page.click("[data-zoom=in]")
    assert shown()[1] - shown()[0] == pytest.approx((high - low) / 2)
    left = shown()
    tab.page.click("[data-zoom=right]")
    assert shown()[0] > left[0]
    tab.page.click("[data-zoom=left]")
    assert shown() == pytest.approx(left)
    for _ in range(3):
        tab.page.click("[data-zoom=out]")
    assert shown() == pytest.approx([low, high])
    assert tab.messages == []


def test_the_keyboard_reaches_every_control(report: Path, open_page: Open) -> None:
    tab = open_page(report.as_uri())
    page = tab.page
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("""(() => { const a = document.activeElement;
            return a.id || a.name || a.dataset.zoom || a.dataset.series || a.tagName; })()""")
        )
        visible = page.evaluate("""(() => { const a = document.activeElement; if (a === document.body) return true;
            const box = a.closest('label') || a; return getComputedStyle(box).outlineStyle !== 'none' ||
            getComputedStyle(a).outlineStyle !== 'none'; })()""")
        assert visible, "the focus is visible"
    wanted = {
        "theme",
        "group",
        "axis",
        "log",
        "spread",
        "activity-choice",
        "in",
        "out",
        "left",
        "right",
        "all",
        "0",
        "1",
    }
    assert wanted <= reached
    page.focus("#axis input:checked")
    page.keyboard.press("ArrowRight")
    assert tab.axis("accuracy").startswith("rounds")
    page.focus("#chips input[data-series='0']")
    page.keyboard.press("Space")
    assert tab.traces("accuracy", "mean") == 1
    assert page.evaluate("document.activeElement.dataset.series") == "0", "the focus is kept"
    page.keyboard.press("Space")
    assert tab.traces("accuracy", "mean") == 2
    page.focus("[data-zoom=in]")
    before = page.evaluate("document.getElementById('activity').layout.xaxis.range")
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('activity').layout.xaxis.range") != before
    page.focus("#theme")
    page.keyboard.press("Enter")
    tab.ready()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.messages == []


OVERLAPS = """(() => {
  const found = [];
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  for (const chart of document.querySelectorAll('.chart')) {
    if (!chart.offsetParent) continue;
    const texts = [...chart.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .cbtitle text')]
      .filter(t => t.textContent.trim()).map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([a, one], i) => texts.slice(i + 1).forEach(([b, two]) => {
      if (meets(one, two)) found.push(`${chart.id}: ${a} / ${b}`);
    }));
    const frame = chart.getBoundingClientRect();
    for (const [text, box] of texts) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push(`${chart.id}: ${text} is cut`);
    }
  }
  return found;
})()"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_is_legible_narrow_and_wide_light_and_dark(
    report: Path, open_page: Open, width: int, scheme: str
) -> None:
    tab = open_page(report.as_uri(), width, scheme)
    page = tab.page
    for group in ("0", "1"):
        page.check(f"#group-switch input[value='{group}']", force=True)
        tab.ready()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
        for chart in CHARTS:
            box = page.locator(f"#{chart}").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["height"] >= 200
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(CONTRAST) == []
    smallest = page.evaluate("""Math.min(...[...document.querySelectorAll('p, td, th, label, .chart text')]
        .filter(e => e.textContent.trim()).map(e => parseFloat(getComputedStyle(e).fontSize)))""")
    assert smallest >= 10
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")
    ink = page.evaluate("document.getElementById('accuracy').layout.font.color")
    assert ink == ("#e8eaed" if dark else "#1b1f24"), "charts follow the theme"
    assert tab.messages == []


def test_results_without_evaluations_have_a_table_and_no_empty_charts(tmp_path: Path, open_page: Open) -> None:
    record = {"algorithm": "fedavg", "seed": 0, "status": "target", "target_accuracy": 0.8, "first_hit_seconds": 3.0}
    evaluated = {**record, "label": "b", "curve": [{"round": 1, "seconds": 3.0, "updates": 4, "accuracy": 0.8}]}
    write_records({"bare": [{**record, "label": "a"}], "evaluated": [evaluated]}, tmp_path / "p.html", "Both")
    tab = open_page((tmp_path / "p.html").as_uri(), 1600)
    for group, shown in (("0", False), ("1", True), ("0", False)):
        tab.page.check(f"#group-switch input[value='{group}']", force=True)
        tab.ready()
        assert tab.page.is_visible("#results-table")
        assert tab.page.is_visible("#curves") is shown
        assert tab.page.is_visible("#chips") is shown
    assert tab.messages == []


def test_pages_of_a_deployment_do_not_call_its_seconds_simulated(tmp_path: Path, open_page: Open) -> None:
    folder = make_folder(tmp_path, "deployed", algorithms=("fedbuff",), seeds=(0,))
    summary = json.loads((folder / "summary.json").read_text())
    summary["provenance"]["executor"] = "deployment"
    (folder / "summary.json").write_text(json.dumps(summary))
    write([folder], tmp_path / "p.html", "Deployed")
    tab = open_page((tmp_path / "p.html").as_uri())
    assert tab.axis("accuracy") == "seconds of the deployment"
    assert tab.page.inner_text("#axis label:first-child") == "Seconds of the deployment"


def test_hostile_names_are_text_in_tables_and_in_charts(tmp_path: Path, open_page: Open) -> None:
    page_file = tmp_path / "report.html"
    page_file.write_text(build([make_hostile(tmp_path)]), encoding="utf-8")
    for width in WIDTHS:
        tab = open_page(page_file.as_uri(), width)
        page = tab.page
        assert page.title() == f"{HOSTILE} · defedavg"
        assert page.text_content("h1") == HOSTILE
        assert HOSTILE in page.locator("#results-table th span span").all_text_contents()
        assert page.locator("main img, main b b, #folders script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.traces("accuracy", "mean") == 3
        names = page.evaluate("document.getElementById('accuracy').data.map(t => t.name)")
        assert all("<" not in name and len(name) < 300 for name in names)
        page.evaluate("Plotly.Fx.hover(document.getElementById('accuracy'), [{curveNumber: 0, pointNumber: 5}])")
        shown = page.text_content("#accuracy .hoverlayer")
        assert "<img src=x onerror=alert(1)>" in shown or "long long" in shown or "</script>" in shown
        assert page.locator("#accuracy .hoverlayer a, #accuracy .hoverlayer image").count() == 0
        assert tab.messages == []
        assert tab.requests == [page_file.as_uri()]


def test_the_live_view_follows_runs_as_they_appear_grow_and_disappear(
    server: DashboardServer, tmp_path: Path, open_page: Open
) -> None:
    root = tmp_path / "runs"
    tab = open_page(server.address)
    page = tab.page
    assert "no runs yet" in page.text_content("#list")
    folder = make_folder(root, "alpha", finished=False)
    page.wait_for_selector("#list tr[data-run=alpha]")
    tab.until("document.getElementById('accuracy').data?.filter(t => t.meta === 'mean').length === 2")
    assert "running" in page.text_content("tr[data-run=alpha]")
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(metrics_line("fedavg", "fedavg", 0, 40, 77.0, 0.97))
    tab.until("document.getElementById('accuracy').data.some(t => t.meta === 'mean' && t.x.at(-1) === 77)")
    make_folder(root, "beta", algorithms=("fedbuff",), task={"model": "softmax", "split": "iid"})
    page.wait_for_selector("#list tr[data-run=beta]")
    assert tab.traces("accuracy", "mean") == 2, "a finished run is not ticked automatically"
    page.check("tr[data-run=beta] input")
    tab.until("document.getElementById('accuracy').data.filter(t => t.meta === 'mean').length === 3")
    page.check("#axis input[value=rounds]", force=True)
    assert tab.axis("loss").startswith("rounds")
    page.fill("#search", "fedbuff split=iid")
    tab.until("document.querySelectorAll('#list tbody tr').length === 1")
    assert page.get_attribute("#list tbody tr", "data-run") == "beta"
    page.fill("#search", "")
    with page.expect_popup() as popup:
        page.click("tr[data-run=beta] a")
    popup.value.wait_for_selector("html[data-ready=yes]")
    assert "beta" in popup.value.text_content("h1")
    popup.value.close()
    shutil.rmtree(folder)
    tab.until("!document.querySelector('#list tr[data-run=alpha]')")
    tab.until("document.getElementById('accuracy').data.filter(t => t.meta === 'mean').length === 1")
    assert tab.messages == []
    assert all(url.startswith((server.address, "data:,")) for url in tab.requests)
    server.shutdown()
    server.server_close()
    page.wait_for_selector("#error:not([hidden])")
    assert "does not answer" in page.text_content("#error")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_live_view_is_legible(
    server: DashboardServer, tmp_path: Path, open_page: Open, width: int, scheme: str
) -> None:
    make_folder(tmp_path / "runs", "alpha", finished=False)
    make_hostile(tmp_path / "runs")
    tab = open_page(server.address, width, scheme)
    page = tab.page
    page.check("tr[data-run=innocent] input")
    tab.until("document.getElementById('accuracy').data?.filter(t => t.meta === 'mean').length === 5")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(CONTRAST) == []
    assert page.locator("main img").count() == 0
    page.focus("tr[data-run=alpha] input")
    page.keyboard.press("Space")
    tab.until("document.getElementById('accuracy').data.filter(t => t.meta === 'mean').length === 3")
    assert page.evaluate("document.activeElement.dataset.key") == "box alpha", "a redrawn table keeps the focus"
    page.focus("#axis input:checked")
    page.keyboard.press("ArrowRight")
    assert tab.axis("accuracy").startswith("rounds")
    assert tab.messages == []
