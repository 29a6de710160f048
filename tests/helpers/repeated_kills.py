"""Kills a run repeatedly: a script that forks a child for every session, so that PyTorch is imported once.

    python repeated_kills.py CONFIG FOLDER EXECUTOR KILLS SEED

Runs the study without interruption in FOLDER/whole. Then, in FOLDER/0, FOLDER/1, …: runs it for a time drawn from the
seed (mostly counted from its first event), sends SIGKILL, resumes it, and so on; if a study ends, the script starts
another, until it has killed KILLS times.
Prints as JSON how many studies it ran, and what was on disk at the kills.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.rng import key, uniform


def child(study: config.Study, folder: Path, executor: str, signals: int) -> NoReturn:
    """Run the study in a child process. It writes a byte at each event, so that the parent can wait for the first."""
    try:
        run = StudyRun(study, folder, compute=ComputeConfig(executor), resume=True, checkpoint_interval=0.0)
        os._exit(0 if run.run(lambda event: void(os.write(signals, b"."))) else 1)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)


def void(value: object) -> None:
    """Discard the value."""


def run_until_killed(
    study: config.Study, folder: Path, executor: str, seconds: float, *, after_event: bool
) -> tuple[bool, float]:
    """Return whether the study ended before it was killed, and the seconds from its first event (or its start)."""
    signals, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(signals)
        child(study, folder, executor, writer)
    os.close(writer)
    if after_event:  # however slow the machine is, the study trains for the seconds that were drawn
        os.read(signals, 1)
    began = time.monotonic()
    try:
        while time.monotonic() < began + seconds:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0
                return True, time.monotonic() - began
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, seconds
    finally:
        os.close(signals)


def main(path: str, place: str, executor: str, kills: int, seed: int) -> None:
    """Kill and resume the study."""
    torch.set_num_threads(1)
    study = config.load(path)
    build_task(study.points()[0].settings, 0)  # so that no child has to read the data
    ended, whole = run_until_killed(study, Path(place, "whole"), executor, 600.0, after_event=True)
    assert ended
    killed, studies, seen = 0, 0, {"checkpoints": 0, "parts": 0}
    while killed < kills:
        folder = Path(place, str(studies))
        while True:
            seconds = whole / 6 * uniform(key(seed, "kill", killed)) if killed < kills else 600.0
            # Every fourth kill counts from the start of the process, and may come before its first event.
            if run_until_killed(study, folder, executor, seconds, after_event=killed % 4 > 0)[0]:
                break
            killed += 1
            seen["checkpoints"] += len(list(folder.glob("checkpoints/*.safetensors"))) > 0
            seen["parts"] += len(list(folder.rglob("*.part"))) > 0
        studies += 1
    print(json.dumps({"kills": killed, "studies": studies, **seen}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
