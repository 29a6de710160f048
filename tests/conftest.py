"""One thread per worker: two workers with two threads each would fight for two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
