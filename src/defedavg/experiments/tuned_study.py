"""The decisions of a search for learning rates: winners, runners-up, and study files with the rates found.

Times of different tasks, fleets or targets cannot be compared, so each of them that a study sweeps has a decision of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from ..config.settings import TABLES, TrainingSettings
from ..config.study import Study, SweepPoint
from ..report.groups import FLEET
from ..report.seed_figures import accuracy_text, time_to_target
from .tune import RatePair, Tuning, score

Swept: TypeAlias = tuple[tuple[str, Any], ...]


def decisions_of(tuning: Tuning) -> list[Decision]:
    """Return the decision for every swept task, fleet and target: one if the study sweeps none of them."""
    every = list(dict.fromkeys(_given(pair.point) for pair in tuning.pairs))
    labels = [_label(given) for given in every]
    if len(set(labels)) < len(labels):
        labels = [str(position) for position in range(1, len(every) + 1)]
    return [Decision(tuning, given, label) for given, label in zip(every, labels, strict=True)]


def _label(given: Swept) -> str:
    """Return values as a part of the name of a study."""
    words = "-".join(f"{name.partition('.')[2]}-{value}" for name, value in given)
    return re.sub(r"[^A-Za-z0-9._]+", "-", words).strip("-")[:60]


def _given(point: SweepPoint) -> Swept:
    """Return the swept values that are given, not chosen."""
    fleet = {f"clients.{key}" for key in FLEET}
    return tuple(
        (name, value)
        for name, value in point.swept
        if name.startswith("task.") or name in fleet or name == "stop.target_accuracy"
    )


class Decision:
    """What a finished search decides for one task, fleet and target.

    ``ranking`` has the best pair of every setting, the winner first. ``given`` are the swept values of task, fleet and
    target, and ``label`` is a name for them; both are empty if the study sweeps none.
    """

    def __init__(self, tuning: Tuning, given: Swept = (), label: str = "") -> None:
        self._tuning = tuning
        self.given, self.label = given, label
        best = [pair for pair in tuning.best() if _given(pair.point) == given]
        # If there is one setting only, its second pair is the runner-up.
        rivals = best if len(best) > 1 else [pair for pair in tuning.pairs if _given(pair.point) == given]
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
        label = f"-{self.label}" if self.label else ""
        return replace(searched, name=f"{searched.name[: 94 - len(label)]}{label}-tuned", tables=tables)

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
        chosen_values = {name: value for name, value in shared.items() if (name, value) not in self.given}
        if self.given:
            lines.append(f"This study is for {_listed(dict(self.given))}; each other value has one of its own.")
        if chosen_values:
            lines.append(f"Of the swept settings, this study has the values of the winner: {_listed(chosen_values)}.")
        comments = "".join(f"# {''.join(s if s.isprintable() else '?' for s in line)}\n" for line in lines)
        return f"{comments}\n{self.study(searched).to_toml()}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _own_values(searched: Study, pair: RatePair) -> dict[str, Any]:
    """Return the swept values that come from the algorithm's own table, by the names of a sweep."""
    algorithm = pair.point.settings.algorithm
    given = searched.tables.get(algorithm, {})
    return {
        name: value
        for name, value in pair.point.swept
        if (table := name.partition(".")[0]) == algorithm or (table == "training" and name.partition(".")[2] in given)
    }
