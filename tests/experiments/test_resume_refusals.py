"""Resuming a folder: damaged files, other settings, another environment; a refused folder is left unchanged."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from defedavg.config.build import build_task
from defedavg.errors import UserError
from defedavg.experiments import checkpointing
from defedavg.experiments.checkpointing import KEPT, CheckpointDir, DamagedError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.fileio import FolderLock
from defedavg.runstore.journal import Journal, JournalPosition, read_until
from helpers.command_line import call, refuse
from helpers.interrupted_studies import (
    BASE,
    InterruptionError,
    assert_same,
    contents,
    ignore,
    interrupt_after,
    interrupted,
    refuses,
    study,
    uninterrupted,
)


@pytest.mark.parametrize("after", [1, 7, 16, 23])
def test_a_study_interrupted_anywhere_ends_like_an_uninterrupted_one(tmp_path: Path, after: int) -> None:
    chosen = study()
    folder = interrupted(tmp_path / "interrupted", chosen, after)
    run = StudyRun(chosen, folder, resume=True)
    assert run.run(ignore)
    assert_same(uninterrupted(tmp_path / "whole", chosen), folder)
    assert [(each.label, each.trail.rounds) for each in run.run_folder().runs] == [
        (label, [0, 3, 6, 9, 12]) for label in ("fedbuff", "fedbuff", "favano", "favano")
    ]


def test_last_weights_are_a_state_dict(tmp_path: Path) -> None:
    chosen = study(seeds=[0], algorithms=["fedavg"], task={"model": "mlp"})
    (path,) = (uninterrupted(tmp_path / "x", chosen) / "weights").iterdir()
    model = build_task(chosen.points()[0].settings, 0).model()
    model.load_state_dict(load_file(path))


def test_a_damaged_checkpoint_is_detected_and_the_one_before_is_used(tmp_path: Path) -> None:
    chosen = study()
    folder = interrupted(tmp_path / "interrupted", chosen, 12)
    newest = CheckpointDir(folder / "checkpoints").paths()[0]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    run = StudyRun(chosen, folder, resume=True, checkpoint_interval=0.0)
    (note,) = run.notes
    assert newest.name in note
    assert "checksum" in note
    with pytest.raises(InterruptionError):
        run.run(interrupt_after(2))
    there = CheckpointDir(folder / "checkpoints").paths()
    assert newest not in there
    assert len(there) <= KEPT
    newest.write_bytes(b"")
    for path in (newest, *there[1:]):
        path.write_bytes(b"")
    assert StudyRun(chosen, folder, resume=True).run(ignore)
    assert_same(uninterrupted(tmp_path / "whole", chosen), folder)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@examples(max_examples=60)
def test_every_damage_is_detected(where: float, bit: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        tensors = {"0/version.3": torch.arange(40.0), "0/version.4": torch.ones(7, dtype=torch.float64)}
        checkpointing.write_checkpoint(path, {"a": [1, 2.5, None]}, tensors)
        assert checkpointing.read_checkpoint(path)[0] == {"a": [1, 2.5, None]}
        data = bytearray(path.read_bytes())
        place = int(where * len(data))
        if cut:
            del data[place:]
        else:
            data[place] ^= 1 << bit
        path.write_bytes(data)
        try:
            state, found = checkpointing.read_checkpoint(path)
        except DamagedError:
            return
        except UserError:  # the digit of the format version
            assert not cut
            return
        # White space between tokens of the header may change without changing anything.
        assert state == {"a": [1, 2.5, None]}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_damaged_checkpoints_are_reported_and_left_unchanged(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"nothing")
    with refuses(folder, r"no checkpoint can be used.*--force"):
        StudyRun(study(), folder, resume=True)
    assert StudyRun(study(), folder, force=True).run(ignore)
    assert not (folder / "checkpoints").exists()


def test_a_checkpoint_of_another_study_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    before = contents(folder)
    other = study(seeds=[0, 1, 2], training={**BASE["training"], "local_lr": 0.1})
    with pytest.raises(UserError, match=r"seeds: \[0, 1\] → \[0, 1, 2\]; training.local_lr: 0.05 → 0.1") as error:
        StudyRun(other, folder, resume=True)
    assert "\n" not in str(error.value)
    (folder / "config.toml").unlink()  # the checkpoint knows by itself
    with pytest.raises(UserError, match=r"training\.local_lr"):
        StudyRun(other, folder, resume=True)
    (folder / "config.toml").write_text(study().to_toml())
    assert contents(folder) == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    newest = CheckpointDir(folder / "checkpoints").paths()[0]
    save_file({}, newest, {"format": checkpointing.FORMAT, "format_version": str(checkpointing.FORMAT_VERSION + 1)})
    with refuses(folder, r"format version 2.*update defedavg"):
        StudyRun(study(), folder, resume=True)


def test_another_executor_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    with refuses(folder, "started with --executor batched"):
        StudyRun(study(), folder, resume=True, compute=ComputeConfig("reference"))


def test_threads_and_batch_limits_are_restored_and_other_hardware_is_reported(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study(), compute=ComputeConfig(max_batch_jobs=5))
    directory = CheckpointDir(folder / "checkpoints")
    found = directory.newest()
    assert found is not None
    state, tensors = found
    assert state["fit"][0] == 5
    state["fit"] = state["fit"][:2]  # as an earlier version saved it
    state["circumstances"] |= {"threads": 2, "hardware": "abacus"}
    directory.save(state, tensors)
    try:
        run = StudyRun(study(), folder, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    threads, hardware = run.notes
    assert "2 threads" in threads
    assert "abacus" in hardware
    assert run.run(ignore)
    assert run.sweep._trainer is not None
    assert run.sweep._trainer.max_batch_jobs == 5


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"

    def write(step: float) -> None:
        rows = [f"{i},{step * (1 + i % 3)},10,10" for i in range(20)]
        trace.write_text("\n".join(["client,step_seconds,up_mbps,down_mbps", *rows]))

    write(0.1)
    chosen = study(clients={"trace": str(trace)})
    folder = interrupted(tmp_path / "x", chosen, 12)
    write(0.11)
    with pytest.raises(UserError, match="the plan differs"):
        StudyRun(chosen, folder, resume=True).run(ignore)


def test_metrics_that_were_changed_are_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("fedbuff", "fedBUFF", 1))
    with refuses(folder, r"metrics.jsonl has changed"):
        StudyRun(study(), folder, resume=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "x", study())
    lock = FolderLock(folder)
    for resume in (True, False):
        with pytest.raises(UserError, match="in use by another process"):
            StudyRun(study(), folder, resume=resume, force=not resume)
    lock.release()
    assert StudyRun(study(), folder, resume=True).run(ignore)


def test_the_command_can_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(study(seeds=[0]).to_toml())
    first = call("run", "study.toml", "--resume", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert call("run", "study.toml", "--resume", "--json", cwd=tmp_path).stdout == first.stdout
    refuse(call("run", "study.toml", "--resume", "--set", "seeds=[1]", cwd=tmp_path), "seeds: [0] → [1]")


def test_a_study_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    chosen = study()
    folder = tmp_path / "x"
    with pytest.raises(InterruptionError):
        StudyRun(chosen, folder, checkpoint_interval=float("inf")).run(interrupt_after(9))
    (folder / "config.toml.part").write_text("half of")
    run = StudyRun(chosen, folder, resume=True)
    assert any("from the beginning" in note for note in run.notes)
    assert run.run(ignore)
    assert_same(uninterrupted(tmp_path / "whole", chosen), folder)


def test_a_folder_that_is_not_a_run_is_left_unchanged(tmp_path: Path) -> None:
    stranger = tmp_path / "other"
    stranger.mkdir()
    (stranger / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something other"):
        StudyRun(study(), stranger, resume=True)
    with pytest.raises(UserError, match="--force starts again and --resume continues"):
        StudyRun(study(), stranger, resume=True, force=True)
    with pytest.raises(UserError, match="--checkpoint-every"):
        StudyRun(study(), stranger, checkpoint_interval=-1.0)
    assert contents(tmp_path) == {"other/mine.txt": b"mine"}


def test_a_journal_is_truncated_to_a_position(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path)
    journal.append("one")
    position = journal.position()
    journal.append("två")
    journal.close()
    path.write_bytes(path.read_bytes() + b"half a li")
    assert read_until(path, position) == b"one\n"
    journal = Journal(path, position)
    journal.append("two")
    end = journal.position()
    journal.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert read_until(path, end) == b"one\ntwo\n"
    assert read_until(path, JournalPosition()) == b""
    path.write_bytes(b"on")
    with pytest.raises(UserError, match="has changed"):
        Journal(path, position)
    assert path.read_bytes() == b"on"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted(tmp_path_factory.mktemp("finished") / "study", study(seeds=[0]))


@pytest.mark.parametrize("damage", [b"\x00", b"[]\n", b'{"label": 1}\n', b"null\n"])
def test_a_finished_study_with_damaged_metrics_is_refused_in_one_line(
    tmp_path: Path, finished: Path, damage: bytes
) -> None:
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    (folder / "metrics.jsonl").write_bytes(damage)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1 is damaged; start again with --force"):
        StudyRun(study(seeds=[0]), folder, resume=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", -5),
        ("updates", -5),
        ("round", 1e308),
        ("seconds", -1e308),
        pytest.param("seconds", 10**400, id="seconds-too-large"),
        ("loss", "0.5"),
    ],
)
def test_a_finished_study_with_impossible_metrics_is_refused_in_one_line(
    tmp_path: Path, finished: Path, field: str, value: Any
) -> None:
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    first, *others = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed = json.dumps({**json.loads(first), field: value}) + "\n"
    (folder / "metrics.jsonl").write_text("".join([changed, *others]))
    with refuses(folder, r"metrics\.jsonl, line 1 is damaged; start again with --force"):
        StudyRun(study(seeds=[0]), folder, resume=True)


@pytest.mark.parametrize("value", [1e308, pytest.param(10**400, id="integer")])
def test_a_loss_whose_sums_overflow_is_unknown_in_a_resumed_study(tmp_path: Path, finished: Path, value: float) -> None:
    (tmp_path / "study.toml").write_text(study(seeds=[0]).to_toml())
    shutil.copytree(finished, tmp_path / "runs" / "study")
    path = tmp_path / "runs" / "study" / "metrics.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(first), "loss": value}) + "\n", *others]))
    result = call("run", "study.toml", "--resume", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("participation", [1.5, 0.5, 1.0, "/dev/null"]),
        ("participation", []),
        ("participation", None),
        ("rounds", "3"),
        pytest.param("seconds", 10**400, id="seconds-too-large"),
        ("wall_seconds", True),
        ("best_accuracy", [0.5]),
        ("target_accuracy", {}),
        ("label", "another"),
        ("label", None),
        ("seed", 1),
        ("seed", "0"),
        ("status", None),
        ("metric", "../../outside"),
    ],
)
def test_a_finished_study_with_a_damaged_summary_is_refused_in_one_line(
    tmp_path: Path, finished: Path, field: str, value: Any
) -> None:
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["runs"][0][field] = value
    (folder / "summary.json").write_text(json.dumps(summary))
    with refuses(folder, r"summary\.json is not valid; start again with --force"):
        StudyRun(study(seeds=[0]), folder, resume=True)


@pytest.mark.parametrize("change", ["remove a field", "remove a run", "repeat a run", "nest"])
def test_a_finished_study_with_other_runs_is_refused_on_the_command_line(
    tmp_path: Path, finished: Path, change: str
) -> None:
    (tmp_path / "study.toml").write_text(study(seeds=[0]).to_toml())
    shutil.copytree(finished, tmp_path / "runs" / "study")
    path = tmp_path / "runs" / "study" / "summary.json"
    summary = json.loads(path.read_text())
    match change:
        case "remove a field":
            del summary["runs"][1]["participation"]
        case "remove a run":
            del summary["runs"][1]
        case "repeat a run":
            summary["runs"].append(summary["runs"][1])
    path.write_text("[" * 100_000 if change == "nest" else json.dumps(summary))
    result = call("run", "study.toml", "--resume", cwd=tmp_path)
    refuse(result, "summary.json is not valid; start again with --force")


def test_runs_without_a_configuration_are_not_taken_for_those_of_another_study(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    (folder / "config.toml").unlink()
    other = study(seeds=[0], training={**BASE["training"], "local_lr": 0.5})
    line = r"holds runs, but no config\.toml that says of which study; use another --out or name, or remove the folder$"
    with refuses(folder, line):
        StudyRun(other, folder, resume=True)
    (folder / "summary.json").unlink()
    with refuses(folder, line):
        StudyRun(other, folder, resume=True)


def test_a_checkpoint_tells_the_study_of_finished_runs_without_a_configuration(tmp_path: Path, finished: Path) -> None:
    folder = interrupted(tmp_path / "study", study(seeds=[0]))
    shutil.copyfile(finished / "summary.json", folder / "summary.json")  # killed before the checkpoints were removed
    (folder / "config.toml").unlink()
    other = study(seeds=[0], training={**BASE["training"], "local_lr": 0.5})
    with refuses(folder, r"training\.local_lr: 0\.05 → 0\.5"):
        StudyRun(other, folder, resume=True)


def test_folders_that_a_killed_process_left_empty_are_used(tmp_path: Path) -> None:
    for name in ("plans", "weights"):
        (tmp_path / "study" / name).mkdir(parents=True)
    chosen = study(seeds=[0], stop={"max_rounds": 1})
    assert StudyRun(chosen, tmp_path / "study", resume=True).run(ignore)
