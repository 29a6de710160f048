"""Published values of the paper: target accuracies, seconds to the target (Table 1) and best rates (Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DATASETS: Final = ("fashionmnist", "cifar10")
SETTINGS: Final = ("iid", "non-iid")
SIZES: Final = (10, 20, 40, 80)

SIZE_OF: Final = {2: 10, 3: 20, 4: 40, 5: 80}
"""Updates per round, n, of figures 2 to 5."""

FIGURE6_SIZES: Final = (5, *SIZES)
FIGURE7_STEPS: Final = (20, 50, 100)
LOCAL_STEPS: Final = 50

COMPARED: Final = {
    "iid": ("fedavg", "favano", "asysg", "defedavg-iid"),
    "non-iid": ("fedavg", "favano", "fedbuff", "defedavg-niid"),
}
"""The algorithms that the paper compares in each setting; the last one is DeFedAvg."""

ALGORITHM_NAMES: Final = tuple(dict.fromkeys(name for names in COMPARED.values() for name in names))

TARGETS: Final = {"fashionmnist": {"iid": 0.9, "non-iid": 0.8}, "cifar10": {"iid": 0.7, "non-iid": 0.6}}
LIMITS: Final = {"fashionmnist": {"iid": 900.0, "non-iid": 900.0}, "cifar10": {"iid": 1500.0, "non-iid": 2500.0}}
"""The longest time limit of a run in simulated seconds; it exceeds nearly all times that the paper reports."""

# Seconds for n = 10, 20, 40, 80. None: the target was not reached within the time in BOUNDS.
_TABLE1: Final = {
    ("iid", "fedavg", "fashionmnist"): (51.89, 179.1, 184.9, 179.83),
    ("iid", "favano", "fashionmnist"): (424.25, 448.89, 556.25, None),
    ("iid", "asysg", "fashionmnist"): (335.16, 297.57, 231.22, 215.38),
    ("iid", "defedavg-iid", "fashionmnist"): (26.39, 49.26, 94.49, 99.72),
    ("iid", "fedavg", "cifar10"): (302.12, 411.64, 282.51, 287.81),
    ("iid", "favano", "cifar10"): (944.84, 994.19, 1269.1, None),
    ("iid", "asysg", "cifar10"): (501.60, 369.08, 400.92, 345.79),
    ("iid", "defedavg-iid", "cifar10"): (54.41, 108.52, 207.45, 154.26),
    ("non-iid", "fedavg", "fashionmnist"): (437.57, 447.81, 211.67, 443.56),
    ("non-iid", "favano", "fashionmnist"): (417.21, 382.01, 441.85, None),
    ("non-iid", "fedbuff", "fashionmnist"): (198.54, 218.26, 604.93, 422.88),
    ("non-iid", "defedavg-niid", "fashionmnist"): (103.25, 144.49, 196.98, 236.30),
    ("non-iid", "fedavg", "cifar10"): (934.11, 983.46, 1541.2, 1495.0),
    ("non-iid", "favano", "cifar10"): (1332.6, 1374.9, 1713.3, 4751.8),
    ("non-iid", "fedbuff", "cifar10"): (394.16, 789.63, 2008.8, 1463.5),
    ("non-iid", "defedavg-niid", "cifar10"): (331.60, 497.51, 684.31, 786.85),
}

BOUNDS: Final = {"fashionmnist": 880.0, "cifar10": 1400.0}
"""The t of an entry printed as ">t" in Table 1, by data set."""

Rates = tuple[float | None, float | None]
"""The global rate η and the local rate η̄; None where the algorithm does not have the rate."""

GLOBAL_GRID: Final = (0.1, 1.0)
LOCAL_GRID: Final = (0.001, 0.005, 0.01, 0.05, 0.1)

# Rates for n = 10, 20, 40, 80. For n = 5, which DeFedAvg alone has, they are in _RATES_OF_5.
_TABLE2: Final[dict[tuple[str, str, str], tuple[Rates, Rates, Rates, Rates]]] = {
    ("iid", "fedavg", "fashionmnist"): ((1.0, 0.1), (1.0, 0.01), (1.0, 0.01), (1.0, 0.01)),
    ("iid", "favano", "fashionmnist"): ((None, 0.1),) * 4,
    ("iid", "asysg", "fashionmnist"): ((0.1, None),) * 4,
    ("iid", "defedavg-iid", "fashionmnist"): ((0.1, 0.05), (0.1, 0.05), (0.1, 0.05), (1.0, 0.1)),
    ("iid", "fedavg", "cifar10"): ((1.0, 0.01),) * 4,
    ("iid", "favano", "cifar10"): ((None, 0.05),) * 4,
    ("iid", "asysg", "cifar10"): ((0.1, None),) * 4,
    ("iid", "defedavg-iid", "cifar10"): ((1.0, 0.05), (0.1, 0.01), (0.1, 0.05), (1.0, 0.01)),
    ("non-iid", "fedavg", "fashionmnist"): ((0.1, 0.05), (0.1, 0.05), (1.0, 0.01), (0.1, 0.1)),
    ("non-iid", "favano", "fashionmnist"): ((None, 0.05),) * 4,
    ("non-iid", "fedbuff", "fashionmnist"): ((0.1, 0.005), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)),
    ("non-iid", "defedavg-niid", "fashionmnist"): ((0.1, 0.05),) * 4,
    ("non-iid", "fedavg", "cifar10"): ((1.0, 0.01), (1.0, 0.01), (0.1, 0.05), (0.1, 0.05)),
    ("non-iid", "favano", "cifar10"): ((None, 0.05),) * 4,
    ("non-iid", "fedbuff", "cifar10"): ((0.1, 0.01), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)),
    ("non-iid", "defedavg-niid", "cifar10"): ((0.1, 0.05), (0.1, 0.1), (0.1, 0.05), (0.1, 0.05)),
}

_RATES_OF_5: Final[Rates] = (0.1, 0.05)  # in all four rows of DeFedAvg

_CORRECTED: Final[dict[tuple[str, str, str, int], tuple[Rates, str]]] = {
    **{
        ("iid", "defedavg-iid", "cifar10", n): (
            (0.1, 0.05),
            "Table 1 has the same number of rounds for n = 10, 20 and 40, which needs one pair of rates for all three; "
            "0.1/0.05 is the pair of n = 5 and n = 40",
        )
        for n in (10, 20)
    },
    ("iid", "defedavg-iid", "fashionmnist", 80): (
        (1.0, 0.01),
        "Table 1 has 1.3 times the rounds of FedAvg at 1.0/0.01, as on CIFAR-10, where both have 1.0/0.01; at 1.0/0.1 "
        "FedAvg needs a third of these rounds",
    ),
    ("non-iid", "defedavg-niid", "cifar10", 20): (
        (0.1, 0.05),
        "Table 1 has the same number of rounds for n = 10, 20, 40 and 80, and the other three have 0.1/0.05",
    ),
    ("non-iid", "fedavg", "fashionmnist", 80): (
        (0.1, 0.05),
        "Table 1 has the same number of rounds for n = 10, 20 and 80, and the other two have 0.1/0.05",
    ),
}
"""Cells in which Table 2 contradicts Table 1: the rates that are used instead, and why."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of Table 1."""

    dataset: str
    setting: str
    algorithm: str
    updates_per_round: int

    @property
    def label(self) -> str:
        """The cell in one line, for file names and progress lines."""
        return f"{self.dataset} {self.setting} {self.algorithm} n={self.updates_per_round}"

    @property
    def target(self) -> float:
        """The target accuracy."""
        return TARGETS[self.dataset][self.setting]

    @property
    def seconds(self) -> float | None:
        """The paper's seconds to the target; None if it reports that the target was not reached."""
        return _TABLE1[self.setting, self.algorithm, self.dataset][SIZES.index(self.updates_per_round)]

    @property
    def stated_rates(self) -> Rates:
        """The rates that Table 2 states."""
        if self.updates_per_round == FIGURE6_SIZES[0]:
            return _RATES_OF_5
        return _TABLE2[self.setting, self.algorithm, self.dataset][SIZES.index(self.updates_per_round)]

    @property
    def correction(self) -> tuple[Rates, str] | None:
        """Rates that are used because Table 2 contradicts Table 1, and why; None if it does not."""
        return _CORRECTED.get((self.setting, self.algorithm, self.dataset, self.updates_per_round))

    @property
    def rates(self) -> Rates:
        """The paper's rates: those that Table 2 states, unless they contradict Table 1."""
        return self.correction[0] if self.correction else self.stated_rates


def cells() -> list[Cell]:
    """Return all cells of Table 1 in the order of the table."""
    return [Cell(d, s, a, n) for s in SETTINGS for d in DATASETS for a in COMPARED[s] for n in SIZES]


def figure_cells(figure: int) -> list[Cell]:
    """Return the cells of a figure from 2 to 7."""
    if figure in SIZE_OF:
        return [cell for cell in cells() if cell.updates_per_round == SIZE_OF[figure]]
    sizes = FIGURE6_SIZES if figure == 6 else SIZES[:1]
    every = (*cells(), *figure6_cells())
    return [c for c in every if c.algorithm == COMPARED[c.setting][-1] and c.updates_per_round in sizes]


def figure6_cells() -> list[Cell]:
    """Return the cells of Figure 6 that Table 1 does not have: DeFedAvg with n = 5."""
    return [Cell(d, s, COMPARED[s][-1], FIGURE6_SIZES[0]) for s in SETTINGS for d in DATASETS]
