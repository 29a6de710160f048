"""A run that is broken off at any moment and taken up again ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from defedavg import checkpoints, config
from defedavg.algorithms import ALGORITHMS
from defedavg.checkpoints import KEPT, Damaged, Shelf
from defedavg.errors import UserError
from defedavg.execute import Standing
from defedavg.files import Claim
from defedavg.journal import Journal, Mark, read
from defedavg.resume import differences
from defedavg.runs import Run
from defedavg.simulation import named_task
from defedavg.sweep import Event, Finished, Item, Means, Resumed, Sweep
from test_cli import call, refuse

BASE: dict[str, Any] = {
    "name": "study",
    "algorithms": ["fedbuff", "favano"],
    "seeds": [0, 1],
    "task": {"model": "softmax", "split": "classes"},
    "clients": {"num_clients": 20},
    "training": {"updates_per_round": 3, "local_steps": 2},
    "stop": {"max_rounds": 12, "measure_rounds": 3},
}


def study(**more: Any) -> config.Study:
    return config.study({**BASE, **more})


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "wall_seconds"} for line in found]


def entries(folder: Path) -> list[dict[str, Any]]:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] is True
    return [{name: value for name, value in run.items() if name != "wall_seconds"} for run in summary["runs"]]


def contents(folder: Path, *under: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in under or (".",)
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }


def assert_same(one: Path, other: Path) -> None:
    """Every measurement in the same order, every entry, and every bit of every plan and last version."""
    assert lines(one) == lines(other)
    assert entries(one) == entries(other)
    assert contents(one, "plans", "weights") == contents(other, "plans", "weights")


class Broken(Exception):
    """What ends a sitting."""


def breaks(after: int) -> Callable[[Event], None]:
    """Ends a sitting at its so manyth event."""
    count = 0

    def watch(event: Event) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise Broken

    return watch


def quiet(event: Event) -> None:
    pass


def whole(folder: Path, chosen: config.Study, means: Means | None = None) -> Path:
    """The study, carried out in one sitting."""
    assert Run(chosen, folder, means=means).carry_out(quiet)
    return folder


def broken(folder: Path, chosen: config.Study, after: int = 9, means: Means | None = None) -> Path:
    """The study, broken off."""
    with pytest.raises(Broken):
        Run(chosen, folder, means=means, every=0.0).carry_out(breaks(after))
    assert 1 <= len(Shelf(folder / "checkpoints").paths()) <= KEPT
    return folder


# Real processes, real blows.


@pytest.mark.parametrize(("executor", "seeds"), [("batched", "[0, 1]"), ("reference", "[0]")])
def test_twenty_blows_at_random_moments_change_nothing(tmp_path: Path, executor: str, seeds: str) -> None:
    (tmp_path / "k.toml").write_text(
        f'algorithms = ["fedavg", "fedbuff", "favano", "asysg", "defedavg-niid"]\nseeds = {seeds}\n'
        '[task]\nmodel = "softmax"\nsplit = "classes"\n[clients]\nnum_clients = 20\n'
        "[training]\nupdates_per_round = 3\nlocal_steps = 4\n[stop]\nmax_rounds = 18\nmeasure_rounds = 3\n"
    )
    script = Path(__file__).with_name("sittings.py")
    words = [sys.executable, str(script), "k.toml", ".", executor, "20", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["blows"] == 20
    assert found["checkpoints"] > 0  # some fell where there was something to lose
    for number in range(found["studies"]):
        assert_same(tmp_path / "whole", tmp_path / str(number))
        assert not (tmp_path / str(number) / "checkpoints").exists()


def test_a_full_disk_ends_in_one_line_and_costs_nothing(tmp_path: Path) -> None:
    """No file may grow beyond 300 kB: enough for the first checkpoints, not for those of more runs."""
    (tmp_path / "study.toml").write_text(study(stop={"max_rounds": 30}).to_toml())
    words = [sys.executable, "-m", "defedavg", "run", "study.toml", "--checkpoint-every", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "limited", *words]
    done = subprocess.run(limited, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    refuse(done, "checkpoints", "cannot be written", "too large")
    folder = tmp_path / "runs" / "study"
    assert not list(folder.rglob("*.part"))
    assert call("run", "study.toml", "--resume", cwd=tmp_path).returncode == 0
    assert call("run", "study.toml", "--out", "whole", cwd=tmp_path).returncode == 0
    assert_same(tmp_path / "whole" / "study", folder)


# Every moment, without processes.


def resting(
    items: Sequence[Item], means: Means, at: int, resumed: dict[Item, Resumed] | None = None, fit: Any = None
) -> tuple[dict[Item, Finished], dict[Item, Standing], Any, dict[Item, list[Any]]]:
    """Carry out until the so manyth rest: what finished, where the others stand, and all that was measured."""
    count = 0
    over: dict[Item, Finished] = {}
    measured: dict[Item, list[Any]] = {item: list(seen) for item, (_, seen) in (resumed or {}).items()}

    def rest() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Broken

    sweep = Sweep(means, rest)
    try:
        for event in sweep.events(items, resumed, fit):
            if isinstance(event, Finished):
                over[event.item] = event
            else:
                measured.setdefault(event.item, []).append(event.evaluation)
    except Broken:
        pass
    return over, sweep.standings(), sweep.fit, measured


@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    executor=st.sampled_from(["batched", "reference"]),
    width=st.sampled_from([1, 5, 64]),
    moments=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    stop=st.sampled_from([{"max_rounds": 9}, {"max_seconds": 0.9}, {"target_accuracy": 0.5, "hits": 2}]),
    train_samples=st.sampled_from([0, 30]),
)
@examples(max_examples=25)
def test_any_rest_is_a_place_to_go_on_from(
    algorithm: str,
    executor: str,
    width: int,
    moments: list[int],
    stop: dict[str, Any],
    train_samples: int,
) -> None:
    stop = {"max_rounds": 15, "measure_rounds": 2, "train_samples": train_samples, **stop}
    (point,) = study(algorithms=[algorithm], stop=stop).points()
    items = [Item(point, point.settings, seed) for seed in (0, 1)]
    means = Means(executor, width=width)
    truth, _, _, seen = resting(items, means, -1)
    resumed: dict[Item, Resumed] = {}
    over: dict[Item, Finished] = {}
    fit = None
    for at in [*moments, -1]:
        left = [item for item in items if item not in over]
        more, standings, fit, measured = resting(left, means, at, resumed, fit)
        over |= more
        resumed = {item: (through_a_file(standing), measured.get(item, [])) for item, standing in standings.items()}
    assert over.keys() == truth.keys()
    for item, ended in truth.items():
        found = over[item].run
        assert torch.equal(found.weights, ended.run.weights)
        assert found.executor.updates_trained == ended.run.executor.updates_trained
        assert found.plan.hash() == ended.run.plan.hash()
        assert [replace(e, wall_seconds=0.0) for e in found.progress.evaluations] == [
            replace(e, wall_seconds=0.0) for e in seen[item]
        ]
        for name in ("status", "rounds", "seconds", "first_hit_seconds", "sustained_seconds", "diverged_at"):
            assert getattr(found.progress, name) == getattr(ended.run.progress, name)


def through_a_file(standing: Standing) -> Standing:
    """What comes back from a disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        checkpoints.write(path, standing.to_json(), dict(standing.tensors()))
        return Standing.from_json(*checkpoints.read(path))


def test_updates_that_would_not_be_the_same_again_are_kept(tmp_path: Path) -> None:
    """As on a device with models whose bits depend on the batch: they come back from the file, not from training."""
    (point,) = study(algorithms=["defedavg-niid"]).points()
    item = Item(point, point.settings, 0)
    sweep = Sweep(Means(width=64), lambda: None)
    for _ in sweep.events([item]):
        if sweep._lanes and sweep._lanes[item].deltas:
            break
    trainer, lane = sweep._trainer, sweep._lanes[item]
    assert trainer is not None
    assert trainer.repeats
    trainer.repeats = False
    marked = next(iter(lane.deltas))
    lane.deltas[marked] = torch.full_like(lane.deltas[marked], 7.0)
    back = through_a_file(Standing.of_lane(lane, trainer))
    trainer.train = None  # type: ignore[method-assign,assignment]
    kept, lane.deltas = dict(lane.deltas), {}
    with pytest.raises(TypeError):
        replace(back, deltas={}).restore_lane(lane, trainer)
    trainer.train = lambda jobs: [] if not jobs else pytest.fail("trained")  # type: ignore[method-assign]
    back.restore_lane(lane, trainer)
    assert list(lane.deltas) == list(kept)
    assert all(torch.equal(lane.deltas[update], delta) for update, delta in kept.items())


# The folder.


@pytest.mark.parametrize("after", [1, 7, 16, 23])
def test_a_study_broken_off_anywhere_ends_as_one_that_was_not(tmp_path: Path, after: int) -> None:
    chosen = study()
    folder = broken(tmp_path / "broken", chosen, after)
    run = Run(chosen, folder, resume=True)
    assert run.carry_out(quiet)
    assert_same(whole(tmp_path / "whole", chosen), folder)
    assert [(curve.label, curve.rounds) for curve in run.curves] == [
        (label, (0, 3, 6, 9, 12)) for label in ("fedbuff", "fedbuff", "favano", "favano")
    ]


def test_last_weights_are_a_state_dict(tmp_path: Path) -> None:
    chosen = study(seeds=[0], algorithms=["fedavg"], task={"model": "mlp"})
    (path,) = (whole(tmp_path / "x", chosen) / "weights").iterdir()
    model = named_task(chosen.points()[0].settings, 0).model()
    model.load_state_dict(load_file(path))


def test_a_damaged_checkpoint_is_seen_and_the_one_before_is_used(tmp_path: Path) -> None:
    chosen = study()
    folder = broken(tmp_path / "broken", chosen, 12)
    newest = Shelf(folder / "checkpoints").paths()[0]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    run = Run(chosen, folder, resume=True, every=0.0)
    (note,) = run.notes
    assert newest.name in note
    assert "checksum" in note
    with pytest.raises(Broken):
        run.carry_out(breaks(2))
    there = Shelf(folder / "checkpoints").paths()
    assert newest not in there
    assert len(there) <= KEPT
    newest.write_bytes(b"")
    for path in (newest, *there[1:]):
        path.write_bytes(b"")
    assert Run(chosen, folder, resume=True).carry_out(quiet)
    assert_same(whole(tmp_path / "whole", chosen), folder)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@examples(max_examples=60)
def test_no_damage_goes_unseen(where: float, bit: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        tensors = {"0/version.3": torch.arange(40.0), "0/version.4": torch.ones(7, dtype=torch.float64)}
        checkpoints.write(path, {"a": [1, 2.5, None]}, tensors)
        assert checkpoints.read(path)[0] == {"a": [1, 2.5, None]}
        data = bytearray(path.read_bytes())
        place = int(where * len(data))
        if cut:
            del data[place:]
        else:
            data[place] ^= 1 << bit
        path.write_bytes(data)
        try:
            state, found = checkpoints.read(path)
        except Damaged:
            return
        except UserError:  # the digit of the format version
            assert not cut
            return
        # White space between tokens of the header may change without changing anything.
        assert state == {"a": [1, 2.5, None]}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_checkpoints_that_are_all_damaged_are_said_and_left(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"nothing")
    before = contents(folder)
    with pytest.raises(UserError, match=r"no checkpoint can be used.*--force"):
        Run(study(), folder, resume=True)
    assert contents(folder) == before
    assert Run(study(), folder, force=True).carry_out(quiet)
    assert not (folder / "checkpoints").exists()


def test_a_checkpoint_of_another_study_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    before = contents(folder)
    other = study(seeds=[0, 1, 2], training={**BASE["training"], "local_lr": 0.1})
    with pytest.raises(UserError, match=r"seeds: \[0, 1\] → \[0, 1, 2\]; training.local_lr: 0.05 → 0.1") as error:
        Run(other, folder, resume=True)
    assert "\n" not in str(error.value)
    (folder / "config.toml").unlink()  # the checkpoint knows by itself
    with pytest.raises(UserError, match=r"training\.local_lr"):
        Run(other, folder, resume=True)
    (folder / "config.toml").write_text(study().to_toml())
    assert contents(folder) == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    newest = Shelf(folder / "checkpoints").paths()[0]
    save_file({}, newest, {"format": checkpoints.FORMAT, "format_version": str(checkpoints.VERSION + 1)})
    before = contents(folder)
    with pytest.raises(UserError, match=r"format version 2.*update defedavg"):
        Run(study(), folder, resume=True)
    assert contents(folder) == before


def test_other_means_are_refused(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    before = contents(folder)
    with pytest.raises(UserError, match="begun with --executor batched"):
        Run(study(), folder, resume=True, means=Means("reference"))
    assert contents(folder) == before


def test_threads_and_width_are_taken_over_and_other_hardware_is_said(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study(), means=Means(width=5))
    shelf = Shelf(folder / "checkpoints")
    found = shelf.newest()
    assert found is not None
    state, tensors = found
    assert state["fit"][0] == 5
    state["circumstances"] |= {"threads": 2, "hardware": "abacus"}
    shelf.save(state, tensors)
    try:
        run = Run(study(), folder, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    threads, hardware = run.notes
    assert "2 threads" in threads
    assert "abacus" in hardware
    assert run.carry_out(quiet)
    assert run.sweep._trainer is not None
    assert run.sweep._trainer.width == 5


def test_a_plan_that_is_another_now_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"

    def write(step: float) -> None:
        rows = [f"{i},{step * (1 + i % 3)},10,10" for i in range(20)]
        trace.write_text("\n".join(["client,step_seconds,up_mbps,down_mbps", *rows]))

    write(0.1)
    chosen = study(clients={"trace": str(trace)})
    folder = broken(tmp_path / "x", chosen, 12)
    write(0.11)
    with pytest.raises(UserError, match="the plan is another"):
        Run(chosen, folder, resume=True).carry_out(quiet)


def test_metrics_that_were_changed_are_refused(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("fedbuff", "fedBUFF", 1))
    before = contents(folder)
    with pytest.raises(UserError, match=r"metrics.jsonl is not what it was"):
        Run(study(), folder, resume=True)
    assert contents(folder) == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    claim = Claim(folder)
    for resume in (True, False):
        with pytest.raises(UserError, match="in use by another process"):
            Run(study(), folder, resume=resume, force=not resume)
    claim.release()
    assert Run(study(), folder, resume=True).carry_out(quiet)


def test_the_command_can_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(study(seeds=[0]).to_toml())
    first = call("run", "study.toml", "--resume", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert call("run", "study.toml", "--resume", "--json", cwd=tmp_path).stdout == first.stdout
    refuse(call("run", "study.toml", "--resume", "--set", "seeds=[1]", cwd=tmp_path), "seeds: [0] → [1]")


def test_a_study_without_a_checkpoint_is_begun_again(tmp_path: Path) -> None:
    chosen = study()
    folder = tmp_path / "x"
    with pytest.raises(Broken):
        Run(chosen, folder, every=float("inf")).carry_out(breaks(9))
    (folder / "config.toml.part").write_text("half of")
    run = Run(chosen, folder, resume=True)
    assert any("begun again" in note for note in run.notes)
    assert run.carry_out(quiet)
    assert_same(whole(tmp_path / "whole", chosen), folder)


def test_what_cannot_be_taken_up_is_left(tmp_path: Path) -> None:
    stranger = tmp_path / "other"
    stranger.mkdir()
    (stranger / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        Run(study(), stranger, resume=True)
    with pytest.raises(UserError, match="--force begins anew and --resume goes on"):
        Run(study(), stranger, resume=True, force=True)
    with pytest.raises(UserError, match="--checkpoint-every"):
        Run(study(), stranger, every=-1.0)
    assert contents(tmp_path) == {"other/mine.txt": b"mine"}


def test_a_journal_is_cut_back_to_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path)
    journal.append("one")
    mark = journal.mark()
    journal.append("två")
    journal.close()
    path.write_bytes(path.read_bytes() + b"half a li")
    assert read(path, mark) == b"one\n"
    journal = Journal(path, mark)
    journal.append("two")
    end = journal.mark()
    journal.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert read(path, end) == b"one\ntwo\n"
    assert read(path, Mark()) == b""
    path.write_bytes(b"on")
    with pytest.raises(UserError, match="not what it was"):
        Journal(path, mark)
    assert path.read_bytes() == b"on"


def test_differences_are_named_by_key() -> None:
    assert differences("a = 1\n[t]\nb = 2\n", "a = 1\n[t]\nb = 3\nc = 4\n") == ["t.b: 2 → 3", "t.c: not there → 4"]
