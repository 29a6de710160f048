"""Kills a run again and again: a process of its own, which forks one for every sitting, so that none has to start anew.

    python sittings.py CONFIG FOLDER EXECUTOR KILLS SEED

Carries the study out whole in FOLDER/whole. Then, in FOLDER/0, FOLDER/1, …: lets it run for a time drawn from the seed,
sends SIGKILL, resumes it, and so on; where a study ends in spite of it, another is begun, until there were KILLS. Says
as JSON how many studies were carried out, and what stood on the disk when the blows fell.
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
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import ComputeConfig
from defedavg.rng import key, uniform


def sit(study: config.Study, folder: Path, executor: str) -> NoReturn:
    """The life of a process that may be killed."""
    try:
        run = StudyRun(study, folder, means=ComputeConfig(executor), resume=True, every=0.0)
        os._exit(0 if run.carry_out(lambda event: None) else 1)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)


def sitting(study: config.Study, folder: Path, executor: str, seconds: float) -> bool:
    """Whether the study was carried out before the blow fell."""
    pid = os.fork()
    if pid == 0:
        sit(study, folder, executor)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main(path: str, place: str, executor: str, kills: int, seed: int) -> None:
    """Kill."""
    torch.set_num_threads(1)
    study = config.load(path)
    build_task(study.points()[0].settings, 0)  # so that no sitting has to read the data
    began = time.monotonic()
    assert sitting(study, Path(place, "whole"), executor, 600.0)
    mean = (time.monotonic() - began) / 12
    blows, studies, seen = 0, 0, {"checkpoints": 0, "parts": 0}
    while blows < kills:
        folder = Path(place, str(studies))
        while not sitting(
            study, folder, executor, 2 * mean * uniform(key(seed, "kill", blows)) if blows < kills else 600
        ):
            blows += 1
            seen["checkpoints"] += len(list(folder.glob("checkpoints/*.safetensors"))) > 0
            seen["parts"] += len(list(folder.rglob("*.part"))) > 0
        studies += 1
    print(json.dumps({"blows": blows, "studies": studies, **seen}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
