"""One thread per worker, since two workers with two threads each would fight for two cores; in CI, the same examples
every time, so that a red run can be repeated."""

from __future__ import annotations

import os

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
