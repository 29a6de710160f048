"""Readings of the paper: what its text leaves open and its numbers depend on, as values of settings.

Each reading has a name, the values that ``defedavg paper infer`` tries, what the paper says, and the cells of Table 1
that it affects. One value holds for all cells: no reading is chosen per cell or per algorithm.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from ..errors import UserError
from .published import Cell

ALL, N = "all", "n"
SAMPLES: Final = {"fashionmnist": 600, "cifar10": 500}
"""Training samples per client if 100 clients share the data set evenly."""


TEST_SHARE: Final = {"own": 0.0, "pooled": 0.25}
"""The share of all samples that is the test set, by the reading of the test data; 0 stands for the published one."""


@dataclass(frozen=True, slots=True)
class Readings:
    """One value for every reading. The defaults are those that ``infer.py`` found."""

    upload: str = "background"
    asysg_concurrency: str = N
    favano_anchor: str = "newest"
    favano_wait: str = "0.05"
    favano_alpha: str = "K"
    favano_send: str = "draw"
    fedbuff_concurrency: str = "100"
    fedbuff_clients: str = "distinct"
    slowness: str = "uniform(1, 5)"
    normalise: str = "symmetric"
    test_data: str = "own"
    split: str = "grouped-classes"
    sampling: str = "shuffle"
    weight_decay: str = "0"
    augment: str = "none"

    @classmethod
    def parse(cls, words: Sequence[str], base: Readings | None = None) -> Readings:
        """Return the readings for words like ``upload=blocking``, from the left; ``first`` sets all first readings.

        The others are those of ``base``, or the defaults.
        """
        readings = cls() if base is None else base
        for word in words:
            if word == "first":
                readings = FIRST
                continue
            name, equals, value = word.partition("=")
            if name not in READINGS:
                raise _unknown_reading(name)
            if not equals or value not in READINGS[name].values:
                values = ", ".join(f"{name}={known}" for known in READINGS[name].values)
                raise UserError(f"--reading {word} is not known; use one of {values}")
            readings = replace(readings, **{name: value})
        return readings

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Readings:
        """Return the readings of a stored result; one that it does not name is the first reading."""
        return replace(FIRST, **{name: values[name] for name in READINGS if name in values})

    def relevant(self, cell: Cell) -> dict[str, str]:
        """Return the readings that affect a cell."""
        return {name: value for name, value in asdict(self).items() if READINGS[name].affects(cell, self)}

    def differences(self, other: Readings) -> dict[str, str]:
        """Return the values that differ from those of ``other``."""
        return {name: value for name, value in asdict(self).items() if value != getattr(other, name)}

    def tables(self, cell: Cell) -> dict[str, dict[str, Any]]:
        """Return the settings that the readings give to a run of a cell, by table."""
        split = "iid" if cell.setting == "iid" else self.split
        samples = {"samples_per_client": SAMPLES[cell.dataset]} if split == "sampled-classes" else {}
        tables: dict[str, dict[str, Any]] = {
            "task": {"split": split, "normalise": self.normalise, "test_share": TEST_SHARE[self.test_data], **samples},
            "clients": {"slowness": self.slowness},
            "training": {"sampling": self.sampling},
        }
        if READINGS["upload"].affects(cell, self):
            tables["clients"]["upload"] = self.upload
        if float(self.weight_decay):
            tables["training"]["weight_decay"] = float(self.weight_decay)
        if self.augment != "none":
            tables["training"]["augment"] = self.augment
        own: dict[str, dict[str, Any]] = {
            "asysg": {"concurrency": cell.updates_per_round if self.asysg_concurrency == N else 0},
            "favano": {
                "anchor": self.favano_anchor,
                "wait_seconds": float(self.favano_wait),
                "reweight": {"K": "none", "steps": "stochastic"}[self.favano_alpha],
                "send": self.favano_send,
            },
            "fedbuff": {
                "concurrency": int(self.fedbuff_concurrency),
                "distinct_clients": self.fedbuff_clients == "distinct",
            },
        }
        return tables | ({cell.algorithm: own[cell.algorithm]} if cell.algorithm in own else {})


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of a reading, what the paper says about it, and whether it affects a cell."""

    values: tuple[str, ...]
    text: str
    affects: Callable[[Cell, Readings], bool] = lambda _cell, _readings: True


def _unknown_reading(name: str) -> UserError:
    # The names are long and have parts in common, so a name that is only half the same is no good suggestion.
    near = difflib.get_close_matches(name, ["first", *READINGS], n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(
        f"unknown reading {name!r}; {hint}--reading takes NAME=VALUE, and `defedavg paper readings` lists them"
    )


def _only(algorithm: str) -> Callable[[Cell, Readings], bool]:
    return lambda cell, _readings: cell.algorithm == algorithm


def _sends_unrequested(cell: Cell, readings: Readings) -> bool:
    broadcast = cell.algorithm == "asysg" and readings.asysg_concurrency == ALL
    return cell.algorithm == "defedavg-iid" or broadcast


READINGS: Final[Mapping[str, Reading]] = {
    "upload": Reading(
        ("background", "blocking"),
        "Algorithm 2 says that a client sends its update at once; it does not say whether the client waits meanwhile.",
        _sends_unrequested,
    ),
    "asysg_concurrency": Reading(
        (N, ALL), "The paper does not say how many clients compute gradients at a time under AsySG.", _only("asysg")
    ),
    "favano_anchor": Reading(
        ("newest", "start"),
        "The paper does not restate FAVANO. Its server averages models that clients return; they contain the version "
        "that a client started from (start), or the progress is added to the newest version (newest).",
        _only("favano"),
    ),
    "favano_wait": Reading(
        ("0.1", "0.05", "0.01"),
        "The paper does not say how many seconds FAVANO's server waits before it draws clients.",
        _only("favano"),
    ),
    "favano_alpha": Reading(
        ("steps", "K"),
        "The paper does not restate FAVANO. Its server divides the progress of a client by α, an estimate of the local "
        "steps that the client made before it was interrupted (steps); or by the local steps of a complete job (K).",
        _only("favano"),
    ),
    "favano_send": Reading(
        ("merge", "draw"),
        "The paper does not restate FAVANO. A drawn client receives the new version after the merge, so that it does "
        "not train during its upload and its download (merge); or the newest version with the interruption, so that "
        "the two take place at the same time (draw).",
        _only("favano"),
    ),
    "fedbuff_concurrency": Reading(
        ("100", "50", "30"), "The paper does not say how many clients train concurrently under FedBuff.",
        _only("fedbuff"),
    ),
    "fedbuff_clients": Reading(
        ("any", "distinct"),
        '"FedBuff caches local updates from any n active clients in each round": a fast client may have several '
        "updates in a round (any), or the updates of a round come from n clients, and one that has answered waits for "
        "the merge (distinct).",
        _only("fedbuff"),
    ),
    "slowness": Reading(
        ("uniform(1, 5)", "inverse-uniform(1, 5)"),
        '"The computation speeds of clients follow the uniform distribution over [1, 5]": durations, or literally '
        "speeds, are uniform.",
    ),
    "normalise": Reading(
        ("standard", "symmetric", "unit"),
        "The paper does not say how inputs are scaled: mean 0 and variance 1, [−1, 1], or [0, 1].",
    ),
    "test_data": Reading(
        ("own", "pooled"),
        "The paper does not say on which data it tests: the test set of the data, or a quarter of all samples.",
    ),
    "split": Reading(
        ("classes", "random-classes", "sampled-classes", "grouped-classes"),
        '"We randomly assign two classes of data to each client": every class has the same number of holders '
        "(classes), or the classes are drawn independently, and shared by their holders or drawn from, or groups of "
        "clients have two classes to themselves (grouped-classes).",
        lambda cell, _readings: cell.setting == "non-iid",
    ),
    "sampling": Reading(
        ("replacement", "shuffle"), "The paper does not say whether mini-batches are drawn with replacement."
    ),
    "weight_decay": Reading(("0", "0.0005"), "The paper does not mention weight decay."),
    "augment": Reading(("none", "flip+crop(4)"), "The paper does not mention augmentation."),
}  # fmt: skip

assert tuple(READINGS) == tuple(field.name for field in fields(Readings))

FIRST: Final = Readings(
    upload="blocking",
    asysg_concurrency=ALL,
    favano_anchor="start",
    favano_wait="0.1",
    favano_alpha="steps",
    favano_send="merge",
    fedbuff_concurrency="100",
    fedbuff_clients="any",
    slowness="uniform(1, 5)",
    normalise="standard",
    split="classes",
    sampling="replacement",
)
"""The readings of the results that were published first, in ``results/paper/first-reading``."""
