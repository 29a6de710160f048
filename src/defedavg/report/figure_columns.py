"""The figures of runs that tables show: their keys, headings and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run: its key in a record and in CSV, its heading, its factor to the unit of the heading."""

    key: str
    name: str
    heading: str
    factor: float = 1.0
    alone: str = ".4g"  # the format of a mean without a deviation

    def in_metric(self, metric: str) -> Column:
        """Return the column for another metric than the accuracy, whose values are not percentages."""
        if metric == "accuracy" or "accuracy" not in self.key:
            return self
        name = self.name.replace("accuracy", "metric").removesuffix("_percent")
        heading = self.heading.replace("accuracy", metric).removesuffix(" (%)")
        return replace(self, name=name, heading=heading, factor=1.0, alone=".4g")


COLUMNS = (
    Column("first_hit_seconds", "time_to_target_s", "time to target (s)"),
    Column("rounds_to_target", "rounds_to_target", "rounds to target", alone=".6g"),
    Column("best_accuracy", "best_accuracy_percent", "best accuracy (%)", 100.0, ".1f"),
    Column("final_accuracy", "final_accuracy_percent", "final accuracy (%)", 100.0, ".1f"),
    Column("rounds", "rounds", "rounds", alone=".6g"),
    Column("seconds", "simulated_time_s", "simulated time (s)"),
    Column("updates_trained", "updates_trained", "updates trained", alone=".6g"),
    Column("updates_started", "updates_started", "updates started", alone=".6g"),
    Column("staleness_mean", "staleness", "staleness", alone=".2f"),
    Column("uplink_bytes", "uplink_mb", "uplink (MB)", 1e-6),
    Column("downlink_bytes", "downlink_mb", "downlink (MB)", 1e-6),
    Column("wall_seconds", "real_time_s", "real time (s)"),
)
"""Figures that every run has."""

CLIENT_COLUMNS = (
    Column("client_accuracy_mean", "client_accuracy_mean_percent", "mean over clients (%)", 100.0, ".1f"),
    Column("client_accuracy_worst_decile", "client_accuracy_worst_decile_percent", "worst decile (%)", 100.0, ".1f"),
    Column("client_accuracy_best_decile", "client_accuracy_best_decile_percent", "best decile (%)", 100.0, ".1f"),
    Column("client_accuracy_worst", "client_accuracy_worst_percent", "worst client (%)", 100.0, ".1f"),
    Column("client_accuracy_spread", "client_accuracy_spread_percent", "spread over clients (%)", 100.0, ".1f"),
    Column("client_loss_mean", "client_loss_mean", "loss, mean over clients"),
    Column("client_loss_worst_decile", "client_loss_worst_decile", "loss, worst decile"),
    Column("client_correlation_slowness", "client_correlation_slowness", "ρ slowness", alone=".2f"),
    Column("client_correlation_samples", "client_correlation_samples", "ρ samples", alone=".2f"),
    Column("client_correlation_updates", "client_correlation_updates", "ρ updates", alone=".2f"),
    Column("clients_evaluated", "clients_evaluated", "evaluated", alone=".6g"),
    Column("clients_left_out", "clients_left_out", "left out", alone=".6g"),
    Column("energy_joules", "energy_j", "energy (J)"),
    Column("client_energy_median", "client_energy_median_j", "median client (J)"),
    Column("client_energy_p95", "client_energy_p95_j", "95 % of clients (J)"),
    Column("client_energy_most", "client_energy_most_j", "most of a client (J)"),
)
"""Figures that tables show where some run has them: what each client gets, and energy."""

CLIENT_CAPTION = (
    "Of the last version on the own test samples of every client; every client has the same weight. Decile: mean over "
    "the tenth of the clients with the lowest or highest value. Spread: standard deviation over clients. ρ: Spearman's "
    "rank correlation with the client's time to answer, its training samples and its merged updates. Left out: clients "
    "without a test sample. Energy: of all local steps, merged or not, and of all messages."
)

SCORE = "client_accuracy_mean"


def for_terminal(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of clients that fit into a terminal: losses only where there is no accuracy."""
    keys = {column.key for column in columns}
    long = {"clients_evaluated"} | ({"client_loss_mean", "client_loss_worst_decile"} if SCORE in keys else set())
    return [column for column in columns if column.key not in long]
