"""Settings of [training] that change local training, one option at a time and together."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "local_lr": 0.02},
    "nesterov": {"momentum": 0.9, "nesterov": True, "local_lr": 0.02},
    "adam": {"optimizer": "adam", "local_lr": 0.01},
    "adam with other numbers": {"optimizer": "adam", "local_lr": 0.01, "beta1": 0.7, "beta2": 0.9, "epsilon": 1e-3},
    "adam with decay": {"optimizer": "adam", "local_lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "local_lr": 0.01, "weight_decay": 0.5},
    "decay": {"weight_decay": 0.1},
    "proximal term": {"prox": 0.5},
    "clipped": {"clip_norm": 0.1},
    "step": {"local_schedule": "step(10, 0.7)", "global_schedule": "step(7, 0.9)"},
    "cosine": {"local_schedule": "cosine(40)", "global_schedule": "cosine(300)"},
    "adam to rate zero": {"optimizer": "adam", "local_schedule": "cosine(20)"},
    "seconds": {
        "local_schedule": "inverse-sqrt(0.5)",
        "global_schedule": "cosine(100)",
        "schedule_by": "seconds",
    },
    "augmented": {"augment": "flip+crop(2)"},
    "together": {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
        "prox": 0.3,
        "clip_norm": 0.2,
        "local_schedule": "inverse-sqrt(10)",
        "augment": "crop(1)",
    },
}
