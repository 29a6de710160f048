"""The data of the report page match the files of the runs; ``test_browser`` checks how the page looks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.cli.report_command import close_with_page, close_with_records
from defedavg.config import study as config
from defedavg.config.build import make_fleet
from defedavg.errors import UserError
from defedavg.experiments.study_run import StudyRun
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import summarise
from defedavg.planning.records import Sent, Uploaded
from defedavg.planning.sparse_simulator import SPARSE_FROM_CLIENTS
from defedavg.report import payload as payloads
from defedavg.report.page import PLOTLY, asset, build, in_script, write, write_records
from defedavg.report.payload import payload
from defedavg.report.plan_digest import client_activity, digest, participation
from defedavg.runstore.in_memory import folder_of_records
from defedavg.runstore.layout import RunFiles, find_run_folders
from defedavg.runstore.reader import PartitionCounts, read_run
from defedavg.runstore.writer import write_partition
from helpers.page_data import page_data
from helpers.run_folders import HOSTILE, make_folder, make_hostile, metrics_line, write_summary
from helpers.strategies import case


def test_the_numbers_of_the_page_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, seeds=(0, 1, 2))
    (group,) = page_data(build([folder]))["groups"]
    assert [s["name"] for s in group["series"]] == ["fedavg", "defedavg-niid"]
    assert group["winner"] == 0
    assert "fedavg reached 50 % first" in group["conclusion"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for series in group["series"]:
        assert [run["seed"] for run in series["runs"]] == [0, 1, 2]
        for run in series["runs"]:
            expected = [line for line in lines if (line["label"], line["seed"]) == (series["name"], run["seed"])]
            assert run["accuracy"] == pytest.approx([line["accuracy"] for line in expected], rel=1e-4)
            assert run["loss"] == pytest.approx([line["loss"] for line in expected], rel=1e-4)
            assert run["x"]["seconds"] == pytest.approx([line["seconds"] for line in expected], rel=1e-5)
            assert run["x"]["rounds"] == [line["round"] for line in expected]
            assert run["x"]["updates"] == [line["updates"] for line in expected]
    assert group["split"]["counts"] == json.loads((folder / "split.json").read_text())["counts"]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff", "favano", "asysg", "defedavg-iid", "defedavg-niid"])
@pytest.mark.parametrize("bars", [True, False])
def test_the_digest_of_a_plan_matches_the_plan(tmp_path: Path, algorithm: str, bars: bool) -> None:
    folder = make_folder(tmp_path, algorithms=(algorithm,), seeds=(3,), rounds=20, clients=9)
    read = read_run(folder)
    settings = read.settings(algorithm)
    assert settings is not None
    path = read.plan_path(read.runs[0])
    assert path is not None
    plan, fleet = Plan.load(path), make_fleet(settings, 3)
    found, stats = digest(path, bars=bars), summarise(plan, fleet)
    size = fleet.model_megabytes * 1e6
    staleness = np.arange(len(found.staleness))
    assert (staleness * found.staleness).sum() / found.staleness.sum() == pytest.approx(stats.staleness_mean)
    assert found.merged.sum() == found.staleness.sum() == stats.jobs_merged
    after = plan.records[plan.records.index(plan.rounds[-1]) :]  # in transit when the plan ends: part of no round
    sent_later = sum(isinstance(record, Uploaded) for record in after)
    down_later = sum([9 if record.client is None else 1 for record in after if isinstance(record, Sent)])
    total = (stats.uplink_bytes + stats.downlink_bytes) / size
    assert found.traffic[-1] == total - sent_later - down_later
    assert found.traffic == sorted(found.traffic)
    assert len(found.traffic) == len(plan.rounds) + 1
    shares = participation(found.merged, fleet.step_times)
    assert np.mean(shares["share"]) == pytest.approx(1.0)
    assert shares["step"] == sorted(shares["step"])
    if bars:
        chart = client_activity(found, fleet.step_times)
        assert chart["by_speed"]
        assert chart["clients"] == np.argsort(fleet.step_times, kind="stable").tolist()
        assert len(chart["jobs"]["row"]) == sum(job.start < chart["until"] for job in plan.jobs)
        used = [(u.client, u.index) for done in plan.rounds for u, _ in done.merge.updates]
        assert sum(value >= 0 for value in chart["jobs"]["staleness"]) == len(set(used))


def test_the_activity_chart_of_many_clients_shows_clients_of_every_speed(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl.gz"
    case("defedavg-iid", 200, 20, seed=1).plan(200).save(path)
    found = digest(path, bars=True)
    speeds = np.linspace(1.0, 2.0, 200)
    chart = client_activity(found, speeds)
    assert len(chart["clients"]) == 24
    assert (chart["clients"][0], chart["clients"][-1], chart["of"]) == (0, 199, 200)
    assert len(chart["jobs"]["row"]) == len(chart["jobs"]["staleness"]) == len(chart["jobs"]["version"]) <= 1200
    assert participation(found.merged, speeds, 50)["clients_per_point"] == 4


def test_a_run_of_very_many_clients_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is streamed and leaves out jobs that no merge uses; the page marks what is unknown."""
    study = config.study(
        {
            "algorithms": ["fedavg", "asysg", "defedavg-niid"],
            "task": {"model": "softmax", "split": "sampled", "samples_per_client": 5},
            "clients": {"num_clients": SPARSE_FROM_CLIENTS},
            "training": {"updates_per_round": 3, "local_steps": 1},
            "stop": {"max_rounds": 4, "eval_every_rounds": 2},
        }
    )
    with monkeypatch.context() as patch:
        patch.delattr(Plan, "collect")
        assert StudyRun(study, tmp_path / "many").run(lambda event: None)
    folder = read_run(tmp_path / "many")
    (group,) = page_data(build([tmp_path / "many"]))["groups"]
    assert "every client has 5 samples drawn from all" in group["task"]
    assert group["split"]["of"] == len(group["split"]["counts"]) == 1000
    for series, entry in zip(group["series"], folder.runs, strict=True):
        path = folder.plan_path(entry)
        assert path is not None
        plan = Plan.load(path)
        plan.check()
        assert plan.header.sparse
        assert plan.hash() == entry.plan
        delays = [value for done in plan.rounds for value in done.merge.staleness]
        assert series["staleness"] == np.bincount(delays).tolist()
        assert series["participation"]["clients_per_point"] == -(-SPARSE_FROM_CLIENTS // 240)
        assert np.mean(series["participation"]["share"]) == pytest.approx(1.0, rel=0.02)  # the last group is smaller
        assert (series["lean_plans"], series["activity"], series["updates_started"]) == (True, None, None)
        (run,) = series["runs"]
        assert (run["x"]["rounds"], run["x"]["megabytes"]) == ([0, 2, 4], None)


def test_settings_with_different_tasks_or_targets_are_not_ranked_together(tmp_path: Path) -> None:
    paths = [
        make_folder(tmp_path, "a"),
        make_folder(tmp_path, "b"),
        make_folder(tmp_path, "c", target=0.6),
        make_folder(tmp_path, "d", task={"model": "softmax", "split": ["iid", "classes"]}),
    ]
    groups = payload([read_run(path) for path in paths], "all")["groups"]
    assert [len(group["series"]) for group in groups] == [6, 2, 2]
    names = [s["name"] for s in groups[0]["series"]]
    assert names[:4] == ["a: fedavg", "a: defedavg-niid", "b: fedavg", "b: defedavg-niid"]
    assert len({group["title"] for group in groups}) == 3
    looks = [(s["look"]["light"], s["look"]["symbol"]) for s in groups[0]["series"]]
    assert len(set(looks)) == len(looks)


def test_the_conclusion_says_when_a_lead_may_be_chance(tmp_path: Path) -> None:
    def conclusion(name: str, hits: dict[str, list[float]]) -> str:
        records = [
            {"label": label, "algorithm": label, "seed": seed, "target_accuracy": 0.5, "first_hit_seconds": hit}
            for label, seconds in hits.items()
            for seed, hit in enumerate(seconds)
        ]
        (group,) = payload([folder_of_records(name, records)], name)["groups"]
        return str(group["conclusion"])

    clear = conclusion("clear", {"a": [1.0, 1.1], "b": [3.0, 3.1]})
    assert clear == "a reached 50 % first: after 1.05 simulated seconds, 2.9 times as fast as b."
    assert "may be chance" in conclusion("close", {"a": [1.0, 3.0], "b": [2.0, 2.6]})
    assert "one seed only" in conclusion("single", {"a": [1.0], "b": [3.0]})
    assert "chance" not in conclusion("alone", {"a": [1.0, 3.0]})


def test_the_conclusion_says_when_a_faster_setting_reached_the_target_in_fewer_seeds(tmp_path: Path) -> None:
    def conclusion(hits: Mapping[str, Sequence[float | None]]) -> str:
        records = [
            {"label": label, "algorithm": label, "seed": seed, "target_accuracy": 0.5, "first_hit_seconds": hit}
            for label, seconds in hits.items()
            for seed, hit in enumerate(seconds)
        ]
        (group,) = payload([folder_of_records("study", records)], "study")["groups"]
        return str(group["conclusion"])

    sure, quick, slow = [2.0, 2.0], [1.0, None], [3.0, None]
    first = "a reached 50 % in the most seeds: after 2 simulated seconds in 2 of 2 seeds"
    faster = f"{first}. b was faster, but only in 1 of 2 seeds"
    assert conclusion({"a": sure, "b": quick}) == f"{faster}."
    assert (
        conclusion({"a": sure, "b": quick, "c": [None, None], "d": [None, None]})
        == f"{faster}. c and d did not reach it."
    )
    slower = "a reached 50 % first: after 2 simulated seconds; b reached it in 1 of 2 seeds."
    assert conclusion({"a": sure, "b": slow}) == slower
    third = conclusion({"a": sure, "b": [4.0, 4.0], "c": quick})
    assert third == f"{first}, 2 times as fast as b. c was faster, but only in 1 of 2 seeds."


def test_swept_fleets_are_ranked_apart_and_share_the_data_split(tmp_path: Path) -> None:
    swept = {"num_clients": 8, "slowness": ["equal", "uniform(1, 9)"]}
    one = make_folder(tmp_path, "one", fleet=swept)
    other = make_folder(tmp_path, "other", fleet={"num_clients": 8, "slowness": "equal"})
    write_partition(RunFiles(one), PartitionCounts("the split", [[1, 0]] * 8))
    groups = payload([read_run(path) for path in (one, other)], "both")["groups"]
    assert [group["title"] for group in groups] == ["one + other", "one"]
    names = [[series["name"] for series in group["series"]] for group in groups]
    assert names[0][:2] == ["fedavg slowness=equal", "defedavg-niid slowness=equal"]
    assert names[0][2:] == ["fedavg", "defedavg-niid"], "the same fleet in another study is compared"
    assert names[1] == ["fedavg slowness=uniform(1, 9)", "defedavg-niid slowness=uniform(1, 9)"]
    assert [group["split"]["title"] for group in groups] == ["the split"] * 2
    (alone,) = payload([read_run(other)], "other")["groups"]
    assert len(alone["series"]) == 2


def test_sizes_of_a_fleet_are_ranked_together_and_unequal_numbers_of_seeds_are_stated(tmp_path: Path) -> None:
    one = make_folder(tmp_path, "one", fleet={"num_clients": [6, 8]})
    other = make_folder(tmp_path, "other", seeds=(0,))
    (group,) = payload([read_run(path) for path in (one, other)], "both")["groups"]
    assert group["task"] == "mnist5k, model softmax; 6 or 8 clients, every client has 2 classes; 1 to 2 seeds"


def test_differing_settings_are_listed_apart_from_shared_ones(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, algorithms=("asysg", "fedbuff"), training={"updates_per_round": [2, 3]})
    (group,) = page_data(build([folder]))["groups"]
    table = group["differences"]
    assert {"algorithm", "training.updates_per_round"} <= set(table["columns"])
    column = table["columns"].index("training.updates_per_round")
    assert [row[column + 1] for row in table["rows"]] == ["2", "3", "2", "3"]
    assert table["shared"]["task.model"] == "softmax"
    assert "training.local_steps" not in table["columns"]


@given(
    st.recursive(st.none() | st.text() | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_no_text_can_end_the_data_block(value: Any) -> None:
    text = in_script(value)
    assert not re.search(r"[<>&\u2028\u2029]", text)
    text.encode("utf-8")
    json.loads(text)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = make_hostile(tmp_path)
    page = build([folder])
    found = page_data(page)
    assert HOSTILE in [s["name"] for group in found["groups"] for s in group["series"]]
    assert found["title"] == HOSTILE
    outside = page.replace(asset(PLOTLY), "")
    assert "<img" not in outside
    assert "owned'</script" not in outside
    assert outside.count("<script") == outside.count("</script>") == 3
    assert "charts that need the configuration are left out" in " ".join(found["folders"][0]["notes"])


def test_a_page_loads_nothing_from_a_network(tmp_path: Path) -> None:
    page = build([make_folder(tmp_path)]).replace(asset(PLOTLY), "")
    assert "default-src 'none'" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|@import|url\(", page)


def test_the_charting_library_has_the_documented_checksum() -> None:
    named = re.search(r"SHA-256 ([0-9a-f]{64})", asset("vendor/README.md"))
    assert named
    assert hashlib.sha256(asset(PLOTLY).encode()).hexdigest() == named[1]
    assert "MIT" in asset("vendor/plotly-LICENSE.txt")


def test_damaged_files_become_notes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with (folder / "metrics.jsonl").open("ab") as out:
        out.write(b'{"half": \n[1, 2]\n\xff\xfe\n{"seed": true, "round": 1}\n{"algorithm": "fedavg", "se')
    (plan, *_) = sorted((folder / "plans").iterdir())
    plan.write_bytes(b"not gzip")
    (folder / "split.json").write_text('{"counts": [[1, 2], [3]]}')
    (folder / "config.toml").write_text("name = ")
    (described,) = page_data(build([folder]))["folders"]
    notes = " ".join(described["notes"])
    for word in ("4 damaged lines", "cannot be read", "split.json", "configuration"):
        assert word in notes
    (folder / "summary.json").write_text("[]")
    assert "not a JSON object" in " ".join(read_run(folder).notes)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    )
)
def test_any_summary_can_be_read(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "config.toml").write_text('name = "x"')
    whole = {"name": value, "finished": value, "runs": [value, {"seed": 1, "label": value, "rounds": value}]}
    (folder / "summary.json").write_text(json.dumps({**whole, "provenance": {"pid": value}, "best": [value]}))
    (folder / "metrics.jsonl").write_text(json.dumps({"seed": 1, "round": 1, "seconds": value, "updates": 2}) + "\n")
    read = read_run(folder)
    assert all(entry.seed == 1 for entry in read.runs)
    in_script(payload([read], "any"))


def test_a_page_of_a_running_study_shows_its_evaluations_so_far(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, finished=False)
    (group,) = page_data(build([folder]))["groups"]
    assert {run["status"] for s in group["series"] for run in s["runs"]} == {"running"}
    assert "yet" in group["conclusion"]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text('name = "empty"')
    write_summary(empty, "empty", False, [])
    (group,) = page_data(build([empty]))["groups"]
    assert [run["status"] for s in group["series"] for run in s["runs"]] == ["no results yet"]


def test_folders_of_older_versions_have_a_page(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, training={"updates_per_round": [2, 3]})
    (folder / "split.json").unlink()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        label = line.pop("label")
        line["training.updates_per_round"] = int(label.split("=")[1])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = page_data(build([folder]))["groups"]
    assert [len(run["accuracy"]) for s in group["series"] for run in s["runs"]] == [13] * 8
    assert group["split"] is None


def test_a_page_of_many_evaluations_is_thinned_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MAX_EVALUATIONS", 20)
    found = page_data(build([make_folder(tmp_path)]))
    assert found["thinning"] == 3
    run = found["groups"][0]["series"][0]["runs"][0]
    assert run["x"]["rounds"] == [0, 3, 6, 9, 12]


def test_tuning_has_a_page_without_plans(tmp_path: Path) -> None:
    folder = tmp_path / "s-tune"
    folder.mkdir()
    (folder / "config.toml").write_text('name = "s"\nalgorithms = ["fedavg"]\n[stop]\ntarget_accuracy = 0.5\n')
    points = []
    for local, status in ((0.1, "target"), (0.01, "dropped")):
        label = f"fedavg η=1 η̄={local:g}"
        points.append(
            {
                "label": label,
                "algorithm": "fedavg",
                "swept": {},
                "global_lr": 1.0,
                "local_lr": local,
                "seed": 0,
                "status": status,
                "target_accuracy": 0.5,
                "first_hit_seconds": 2.0 if local == 0.1 else None,
                "best_accuracy": local,
            }
        )
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as out:
            out.writelines(metrics_line("fedavg", label, 0, i, i / 2, local * i) for i in range(4))
    (folder / "points.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    best = [{"label": "fedavg", "global_lr": 1.0, "local_lr": 0.1}]
    (folder / "summary.json").write_text(json.dumps({"name": "s", "finished": True, "best": best}))
    (group,) = page_data(build([folder]))["groups"]
    assert [s["chosen"] for s in group["series"]] == [True, False]
    assert [s["activity"] for s in group["series"]] == [None, None]
    columns = group["differences"]["columns"]
    assert columns == ["training.local_lr"]


def test_records_without_a_folder_have_a_page(tmp_path: Path) -> None:
    record = {"label": "fedavg", "algorithm": "fedavg", "seed": 0, "status": "target", "target_accuracy": 0.8}
    groups = {name: [{**record, "first_hit_seconds": 3.0}] for name in ("iid", "non-iid")}
    assert write_records(groups, tmp_path / "p.html", "Table 1") == (tmp_path / "p.html").stat().st_size
    found = page_data((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert [group["title"] for group in found["groups"]] == ["iid", "non-iid"]
    assert found["groups"][0]["series"][0]["seconds_to_target"] == 3.0


def test_run_folders_are_found_below_a_folder_and_missing_ones_are_user_errors(tmp_path: Path) -> None:
    inner = make_folder(tmp_path / "more" / "deep", "inner")
    outer = make_folder(tmp_path / "more", "outer")
    (tmp_path / "more" / "link").symlink_to(inner)
    assert list(find_run_folders(tmp_path)) == [inner, outer]
    assert write([tmp_path, outer], tmp_path / "r.html") > 1_000_000
    assert len(page_data((tmp_path / "r.html").read_text(encoding="utf-8"))["folders"]) == 2
    with pytest.raises(UserError, match="no folder"):
        build([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no run"):
        build([inner / "plans"])


def test_a_page_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    close_with_page([folder], folder, as_json=False)
    assert capsys.readouterr().out == f"open in a browser: {folder / 'report.html'}\n"
    close_with_page([tmp_path / "nowhere"], folder, as_json=False)
    assert capsys.readouterr().out.startswith("no page: there is no folder")
    close_with_page([folder], tmp_path / "nowhere", as_json=True)
    captured = capsys.readouterr()
    assert captured.out == "", "standard output is for the JSON"
    assert captured.err.startswith("no page: ")
    record = {"label": "fedavg", "algorithm": "fedavg", "seed": 0, "first_hit_seconds": 3.0}
    close_with_records({"iid": [record]}, tmp_path / "report.html", False, "Table 1")
    assert capsys.readouterr().out == f"open in a browser: {tmp_path / 'report.html'}\n"
