"""The decision of a search for learning rates: the winner, the runner-up, and a study file with the rates found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..config.settings import TABLES, TrainingSettings
from ..config.study import Study
from ..report.seed_figures import accuracy_text, time_to_target
from .tune import RatePair, Tuning, score


class Decision:
    """What a finished search decides. ``ranking`` has the best pair of every setting, the winner first."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        best = tuning.best()
        # If there is one setting only, its second pair is the runner-up.
        rivals = best if len(best) > 1 else tuning.pairs
        ranked = sorted(rivals, key=self._score)
        self.winner = ranked[0]
        self.runner_up = ranked[1] if len(ranked) > 1 else None
        self.ranking = sorted(best, key=self._score)

    def _score(self, pair: RatePair) -> tuple[float, float, float]:
        return score(self._tuning.outcomes[pair].values())

    def figure(self, pair: RatePair) -> str:
        """Return the figures by which a pair was ranked: its time to the target, and its best accuracy."""
        target = pair.point.settings.stop.target_accuracy
        records = [
            {**asdict(outcome), "first_hit_seconds": outcome.hit_seconds, "target_accuracy": target}
            for outcome in self._tuning.outcomes[pair].values()
        ]
        return f"time to {100 * target:g} %: {time_to_target(records)}; best accuracy: {accuracy_text(records)}"

    def lines(self) -> list[str]:
        """Return the winner and the runner-up, each in one line."""
        lines = [f"winner: {self.winner.label} ({self.figure(self.winner)})"]
        if self.runner_up is not None:
            lines.append(f"runner-up: {self.runner_up.label} ({self.figure(self.runner_up)})")
        return lines

    def study(self, searched: Study) -> Study:
        """Return the study with the rates of every algorithm in its table, at one value of every swept setting.

        A value that all algorithms share is that of the winner; one in an algorithm's own table is its best.
        """
        shared = self._shared_values(searched)
        named = {*TABLES, *searched.algorithms}  # the table of another algorithm would have no effect
        tables = {name: dict(table) for name, table in searched.tables.items() if name in named}
        for name, value in shared.items():
            table, _, key = name.partition(".")
            tables[table][key] = value
        for algorithm, pair in self._chosen(searched, shared).items():
            own = {name.partition(".")[2]: value for name, value in _own_values(searched, pair).items()}
            rates = {"global_lr": pair.global_lr, "local_lr": pair.local_lr}
            known = {name: rate for name, rate in rates.items() if rate is not None}
            tables[algorithm] = {**tables.get(algorithm, {}), **own, **known}
        # Every table of an algorithm overrides these two, so their values in the searched study have no effect.
        tables["training"] |= {name: getattr(TrainingSettings(), name) for name in ("global_lr", "local_lr")}
        return replace(searched, name=f"{searched.name[:94]}-tuned", tables=tables)

    def _shared_values(self, searched: Study) -> dict[str, Any]:
        shared: dict[str, Any] = {}
        for pair in self.ranking:
            own = _own_values(searched, pair)
            for name, value in pair.point.swept:
                if name not in own:
                    shared.setdefault(name, value)
        return shared

    def _chosen(self, searched: Study, shared: Mapping[str, Any]) -> dict[str, RatePair]:
        """Return the best pair of every algorithm at the shared values."""
        chosen: dict[str, RatePair] = {}
        for pair in self.ranking:
            own = _own_values(searched, pair)
            if all(name in own or shared[name] == value for name, value in pair.point.swept):
                chosen.setdefault(pair.point.settings.algorithm, pair)
        return chosen

    def to_toml(self, searched: Study) -> str:
        """Return the study of the rates found as TOML, with comments on their origin."""
        shared = self._shared_values(searched)
        chosen = self._chosen(searched, shared)
        lines = [
            f"The study {searched.name!r} with the learning rates of `defedavg tune`, in a table per algorithm.",
            "A rate is the best of its grid: more seeds reached the target, then sooner, then more accurately.",
            *(f"{pair.label} ({self.figure(pair)})" for pair in chosen.values()),
            f"Seeds of the search: {', '.join(map(str, searched.seeds))}. They chose the rates, so compare on others.",
        ]
        if shared:
            values = ", ".join(f"{name} = {value}" for name, value in shared.items())
            lines.append(f"Of the swept settings, this study has the values of the winner: {values}.")
        comments = "".join(f"# {''.join(s if s.isprintable() else '?' for s in line)}\n" for line in lines)
        return f"{comments}\n{self.study(searched).to_toml()}"


def _own_values(searched: Study, pair: RatePair) -> dict[str, Any]:
    """Return the swept values that come from the algorithm's own table, by the names of a sweep."""
    algorithm = pair.point.settings.algorithm
    given = searched.tables.get(algorithm, {})
    return {
        name: value
        for name, value in pair.point.swept
        if (table := name.partition(".")[0]) == algorithm or (table == "training" and name.partition(".")[2] in given)
    }
