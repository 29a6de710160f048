"""Run folders as ``defedavg run`` writes them, without training: the plans are real, the accuracies are a formula."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from defedavg.config import study as config
from defedavg.config.build import make_plan
from defedavg.fileio import file_name

TASK = {"model": "softmax", "split": "classes"}


def make_folder(
    root: Path,
    name: str = "study",
    *,
    algorithms: tuple[str, ...] = ("fedavg", "defedavg-niid"),
    seeds: tuple[int, ...] = (0, 1),
    rounds: int = 12,
    clients: int = 8,
    fleet: dict[str, Any] | None = None,
    finished: bool = True,
    target: float = 0.5,
    **tables: dict[str, Any],
) -> Path:
    """Write a run folder in which earlier algorithms of the list learn faster than later ones."""
    whole = {
        "task": TASK,
        "clients": fleet or {"num_clients": clients},
        "training": {"updates_per_round": 2, "local_steps": 3},
        "stop": {"target_accuracy": target, "max_rounds": rounds},
        **tables,
    }
    study = config.study({"name": name, "algorithms": list(algorithms), "seeds": list(seeds), **whole})
    folder = root / name
    (folder / "plans").mkdir(parents=True)
    (folder / "config.toml").write_text(study.to_toml(), encoding="utf-8")
    entries = []
    for position, point in enumerate(study.points()):
        for seed in seeds:
            plan = make_plan(point.settings, seed, rounds)
            plan.save(folder / "plans" / (file_name(point.label, seed) + ".jsonl.gz"))
            times = [0.0, *(done.time for done in plan.rounds)]
            curve = [0.9 - 0.8 * math.exp(-i / (2 + 3 * position + 0.3 * seed)) for i in range(len(times))]
            lines = [
                metrics_line(point.settings.algorithm, point.label, seed, i, time, accuracy)
                for i, (time, accuracy) in enumerate(zip(times, curve, strict=True))
            ]
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as out:
                out.writelines(lines)
            hit = next((t for t, a in zip(times, curve, strict=True) if a >= target), None)
            entries.append(
                {
                    "algorithm": point.settings.algorithm,
                    "label": point.label,
                    "swept": dict(point.swept),
                    "seed": seed,
                    "status": "max_rounds",
                    "target_accuracy": target,
                    "first_hit_seconds": hit,
                    "rounds": rounds,
                    "seconds": times[-1],
                    "best_accuracy": max(curve),
                    "final_accuracy": curve[-1],
                    "diverged_at": None,
                    "updates_trained": 2 * rounds,
                    "staleness_mean": 0.5,
                    "plan_sha256": plan.hash(),
                    "wall_seconds": 0.1,
                }
            )
    write_summary(folder, name, finished, entries if finished else [])
    counts = [[(3 * client + label) % 7 for label in range(10)] for client in range(clients)]
    (folder / "split.json").write_text(json.dumps({"title": "made up", "counts": counts}))
    return folder


def metrics_line(algorithm: str, label: str, seed: int, rounds: int, seconds: float, accuracy: float | None) -> str:
    """Return a line of metrics.jsonl."""
    run = {"algorithm": algorithm, "label": label, "seed": seed, "round": rounds, "seconds": seconds}
    values = {"accuracy": accuracy, "loss": None if accuracy is None else 1.0 - accuracy, "updates": 2 * rounds}
    return json.dumps({**run, **values, "train_loss": None, "staleness": 0.5, "wall_seconds": 0.1}) + "\n"


def write_summary(folder: Path, name: str, finished: bool, entries: list[dict[str, Any]], **provenance: Any) -> None:
    """Write summary.json."""
    written = {"command": f"defedavg run {name}.toml", "host": "elsewhere", "pid": 1, **provenance}
    whole = {"name": name, "version": "0.1.0", "finished": finished, "provenance": written, "runs": entries}
    (folder / "summary.json").write_text(json.dumps(whole), encoding="utf-8")


HOSTILE = (
    "<img src=x onerror=alert(1)>\"'`</script><script>document.title='owned'</script>&lt;b&gt; %{x} {{TITLE}} \u2028 é"
)
"""A name that tries to inject markup and script."""


def make_hostile(root: Path) -> Path:
    """Write a run folder in which every text is hostile or very long."""
    folder = make_folder(root, "innocent", algorithms=("fedavg",), seeds=(0,))
    summary = json.loads((folder / "summary.json").read_text())
    (entry,) = summary["runs"]
    labels = [HOSTILE, "long " * 200, "</script><script>throw 1</script>"]
    summary["runs"] = [{**entry, "label": label, "algorithm": label[:40], "status": HOSTILE} for label in labels]
    summary["name"] = HOSTILE
    summary["provenance"] = {"command": HOSTILE, "torch": HOSTILE * 20, HOSTILE: HOSTILE}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as out:
        for label in labels:
            out.writelines(metrics_line(label[:40], label, 0, i, i / 10, i / 20) for i in range(10))
    (folder / "config.toml").write_text(f'name = "x"\n"{"k" * 300}" = """\n{HOSTILE}"""\n', encoding="utf-8")
    (folder / "split.json").write_text(json.dumps({"title": HOSTILE, "counts": [[1, 2], [3, 4]]}))
    shutil.rmtree(folder / "plans")
    return folder


def rendered(table: Table) -> str:
    """Return a table as a wide terminal shows it."""
    console = Console(file=io.StringIO(), width=250)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
