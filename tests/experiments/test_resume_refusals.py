"""A folder whose run is taken up again: damage, other settings, other means; what cannot be gone on with is left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from defedavg.config.build import build_task
from defedavg.errors import UserError
from defedavg.experiments import checkpoints
from defedavg.experiments.checkpoints import KEPT, CheckpointDir, Damaged
from defedavg.experiments.journal import Journal, JournalPosition, read
from defedavg.experiments.resume import differences
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import ComputeConfig
from defedavg.fileio import FolderLock
from helpers.command_line import call, refuse
from helpers.interrupted_studies import (
    BASE,
    Broken,
    assert_same,
    breaks,
    broken,
    contents,
    quiet,
    refused,
    study,
    whole,
)


@pytest.mark.parametrize("after", [1, 7, 16, 23])
def test_a_study_broken_off_anywhere_ends_as_one_that_was_not(tmp_path: Path, after: int) -> None:
    chosen = study()
    folder = broken(tmp_path / "broken", chosen, after)
    run = StudyRun(chosen, folder, resume=True)
    assert run.carry_out(quiet)
    assert_same(whole(tmp_path / "whole", chosen), folder)
    assert [(curve.label, curve.rounds) for curve in run.curves] == [
        (label, (0, 3, 6, 9, 12)) for label in ("fedbuff", "fedbuff", "favano", "favano")
    ]


def test_last_weights_are_a_state_dict(tmp_path: Path) -> None:
    chosen = study(seeds=[0], algorithms=["fedavg"], task={"model": "mlp"})
    (path,) = (whole(tmp_path / "x", chosen) / "weights").iterdir()
    model = build_task(chosen.points()[0].settings, 0).model()
    model.load_state_dict(load_file(path))


def test_a_damaged_checkpoint_is_seen_and_the_one_before_is_used(tmp_path: Path) -> None:
    chosen = study()
    folder = broken(tmp_path / "broken", chosen, 12)
    newest = CheckpointDir(folder / "checkpoints").paths()[0]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    run = StudyRun(chosen, folder, resume=True, every=0.0)
    (note,) = run.notes
    assert newest.name in note
    assert "checksum" in note
    with pytest.raises(Broken):
        run.carry_out(breaks(2))
    there = CheckpointDir(folder / "checkpoints").paths()
    assert newest not in there
    assert len(there) <= KEPT
    newest.write_bytes(b"")
    for path in (newest, *there[1:]):
        path.write_bytes(b"")
    assert StudyRun(chosen, folder, resume=True).carry_out(quiet)
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
    with refused(folder, r"no checkpoint can be used.*--force"):
        StudyRun(study(), folder, resume=True)
    assert StudyRun(study(), folder, force=True).carry_out(quiet)
    assert not (folder / "checkpoints").exists()


def test_a_checkpoint_of_another_study_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
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
    folder = broken(tmp_path / "x", study())
    newest = CheckpointDir(folder / "checkpoints").paths()[0]
    save_file({}, newest, {"format": checkpoints.FORMAT, "format_version": str(checkpoints.VERSION + 1)})
    with refused(folder, r"format version 2.*update defedavg"):
        StudyRun(study(), folder, resume=True)


def test_other_means_are_refused(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    with refused(folder, "begun with --executor batched"):
        StudyRun(study(), folder, resume=True, means=ComputeConfig("reference"))


def test_threads_and_width_are_taken_over_and_other_hardware_is_said(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study(), means=ComputeConfig(width=5))
    shelf = CheckpointDir(folder / "checkpoints")
    found = shelf.newest()
    assert found is not None
    state, tensors = found
    assert state["fit"][0] == 5
    state["circumstances"] |= {"threads": 2, "hardware": "abacus"}
    shelf.save(state, tensors)
    try:
        run = StudyRun(study(), folder, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    threads, hardware = run.notes
    assert "2 threads" in threads
    assert "abacus" in hardware
    assert run.carry_out(quiet)
    assert run.sweep._trainer is not None
    assert run.sweep._trainer.max_batch_jobs == 5


def test_a_plan_that_is_another_now_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"

    def write(step: float) -> None:
        rows = [f"{i},{step * (1 + i % 3)},10,10" for i in range(20)]
        trace.write_text("\n".join(["client,step_seconds,up_mbps,down_mbps", *rows]))

    write(0.1)
    chosen = study(clients={"trace": str(trace)})
    folder = broken(tmp_path / "x", chosen, 12)
    write(0.11)
    with pytest.raises(UserError, match="the plan differs"):
        StudyRun(chosen, folder, resume=True).carry_out(quiet)


def test_metrics_that_were_changed_are_refused(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("fedbuff", "fedBUFF", 1))
    with refused(folder, r"metrics.jsonl is not what it was"):
        StudyRun(study(), folder, resume=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = broken(tmp_path / "x", study())
    claim = FolderLock(folder)
    for resume in (True, False):
        with pytest.raises(UserError, match="in use by another process"):
            StudyRun(study(), folder, resume=resume, force=not resume)
    claim.release()
    assert StudyRun(study(), folder, resume=True).carry_out(quiet)


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
        StudyRun(chosen, folder, every=float("inf")).carry_out(breaks(9))
    (folder / "config.toml.part").write_text("half of")
    run = StudyRun(chosen, folder, resume=True)
    assert any("begun again" in note for note in run.notes)
    assert run.carry_out(quiet)
    assert_same(whole(tmp_path / "whole", chosen), folder)


def test_what_cannot_be_taken_up_is_left(tmp_path: Path) -> None:
    stranger = tmp_path / "other"
    stranger.mkdir()
    (stranger / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        StudyRun(study(), stranger, resume=True)
    with pytest.raises(UserError, match="--force begins anew and --resume goes on"):
        StudyRun(study(), stranger, resume=True, force=True)
    with pytest.raises(UserError, match="--checkpoint-every"):
        StudyRun(study(), stranger, every=-1.0)
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
    assert read(path, JournalPosition()) == b""
    path.write_bytes(b"on")
    with pytest.raises(UserError, match="not what it was"):
        Journal(path, mark)
    assert path.read_bytes() == b"on"


def test_differences_are_named_by_key() -> None:
    assert differences("a = 1\n[t]\nb = 2\n", "a = 1\n[t]\nb = 3\nc = 4\n") == ["t.b: 2 → 3", "t.c: not there → 4"]
