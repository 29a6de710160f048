"""Time a large report: 100 runs × 500 evaluations, built, and opened in a real browser.

python benchmarks/report.py [--runs 100] [--measurements 500]

The plans are real ones (N = 100, n = 10, six algorithms in turn, 500 rounds); the accuracies are a formula, since
training would not change the times. Opening is timed in headless Chromium, if Playwright and Debian's chromium are
installed: until the first charts are drawn, and until all are. Times are medians of three. On a busy machine, compare
the processor times.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.config.build import make_plan
from defedavg.fileio import file_name
from defedavg.report.page import write


def make_runs(folder: Path, runs: int, evaluations: int) -> None:
    """Write a run folder as ``defedavg run`` does."""
    names = list(ALGORITHMS)
    seeds = math.ceil(runs / len(names))
    study = config.study({"name": "large", "algorithms": names, "seeds": list(range(seeds))})
    (folder / "plans").mkdir(parents=True)
    (folder / "config.toml").write_text(study.to_toml(), encoding="utf-8")
    entries = []
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as out:
        for number in range(runs):
            point, seed = study.points()[number % len(names)], number // len(names)
            plan = make_plan(point.settings, seed, evaluations - 1)
            plan.save(folder / "plans" / (file_name(point.label, seed) + ".jsonl.gz"))
            times = [0.0, *(done.time for done in plan.rounds)]
            for i, moment in enumerate(times):
                accuracy = 0.9 - 0.8 * math.exp(-i / (60 + 3 * number)) + 0.01 * math.sin(7 * i + number)
                line = {"algorithm": point.label, "label": point.label, "seed": seed, "round": i, "seconds": moment}
                more = {"accuracy": accuracy, "loss": 2.3 * math.exp(-i / 150) + 0.01, "train_loss": None}
                out.write(json.dumps({**line, **more, "staleness": 1.0, "updates": 10 * i, "wall_seconds": i}) + "\n")
            entry = {"algorithm": point.label, "label": point.label, "swept": {}, "seed": seed, "status": "max_rounds"}
            entries.append({**entry, "target_accuracy": 0.8, "first_hit_seconds": times[len(times) // 2]})
    summary = {"name": "large", "version": "0", "finished": True, "runs": entries}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def time_opening(page: Path) -> str:
    """Return the seconds until the first charts are drawn and until all are."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return "not opened: pip install playwright"
    if chromium is None:
        return "not opened: chromium is not installed (apt-get install chromium)"
    firsts, wholes, busy = [], [], []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(3):
            tab = browser.new_page(viewport={"width": 1600, "height": 1000})
            session = tab.context.new_cdp_session(tab)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            began = time.perf_counter()
            tab.goto(page.resolve().as_uri(), wait_until="commit")
            tab.wait_for_selector("#loss .main-svg")
            firsts.append(time.perf_counter() - began)
            tab.wait_for_selector("html[data-ready=yes]")
            wholes.append(time.perf_counter() - began)
            metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
            busy.append(metrics["ThreadTime"])
            tab.close()
        browser.close()
    first, whole, used = map(statistics.median, (firsts, wholes, busy))
    return f"first charts after {first:.2f} s, everything after {whole:.2f} s, {used:.2f} s of processor time"


def main() -> None:
    """Build the page, time it and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--measurements", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, page = Path(scratch) / "large", Path(scratch) / "report.html"
        make_runs(folder, given.runs, given.measurements)
        spent, busy = [], []
        for _ in range(3):
            began, used = time.perf_counter(), time.process_time()
            size = write([folder], page)
            spent.append(time.perf_counter() - began)
            busy.append(time.process_time() - used)
        print(f"{given.runs} runs x {given.measurements} evaluations: {size / 1e6:.2f} MB")
        print(f"built in {statistics.median(spent):.2f} s, {statistics.median(busy):.2f} s of processor time")
        print(f"opened: {time_opening(page)}")


if __name__ == "__main__":
    main()
