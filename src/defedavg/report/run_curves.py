"""The figures of a run folder: metric and loss over simulated seconds and over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..training.stopping import Evaluation
from .plots import Curve, accuracy_curves, loss_curves, save


def curve_of(algorithm: str, label: str, evaluations: Sequence[Evaluation]) -> Curve:
    """Return the evaluations of a run as a curve, without those whose loss is not finite."""
    known = [e for e in evaluations if math.isfinite(e.loss)]
    return Curve(
        algorithm=algorithm,
        label=label,
        seconds=tuple(e.seconds for e in known),
        rounds=tuple(e.round for e in known),
        accuracy=tuple(math.nan if e.accuracy is None else e.accuracy for e in known),
        loss=tuple(e.loss for e in known),
    )


def save_curves(
    plots: Path,
    title: str,
    curves: Sequence[Curve],
    target: float | None,
    metric: str,
    clock: str = "simulated seconds",
) -> None:
    """Draw the curves into a folder, as PNG and PDF.

    ``metric`` names what their accuracies are, and ``clock`` what their seconds are.
    """
    for against in ("seconds", "rounds"):
        accuracy = accuracy_curves({title: curves}, target=target, against=against, name=f"test {metric}")
        loss = loss_curves({title: curves}, against=against)
        for figure, measure in ((accuracy, metric), (loss, "loss")):
            if against == "seconds":
                figure.axes[0].set_xlabel(clock)
            save(figure, plots / f"{measure}-over-{against}")
