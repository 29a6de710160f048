"""The recommendation of ``advise`` and everything that led to it, in words and as a study that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..config import study as config
from ..config.settings import StopSettings
from ..config.study import Study
from ..durations import duration
from ..errors import counted
from ..tasks.task import ACCURACY
from .ranked import RankedCandidate
from .search import INTERRUPTED, SPENT

FEWER_BYTES = 0.8
"""A candidate that is as good as the leader is named if it sends at most this share of the leader's bytes."""
RACED_STOP = ("max_rounds", "max_seconds", "eval_every_rounds", "eval_every_seconds")
"""Settings of [stop] on which the time to the target depends."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation and everything that led to it."""

    study: Study
    ranking: tuple[RankedCandidate, ...]
    dropped: tuple[tuple[str, str], ...]  # settings that were not raced, and why
    candidates: int
    planned: int
    horizon: float
    target: float
    metric_name: str  # of what the target is a value
    seeds: tuple[int, ...]  # that candidates were run on
    stop: StopSettings  # of the race, which has no limit on rounds: a mean of the plan does not bound them
    steps: float  # trained, in local steps
    updates: int
    grid_steps: float  # of the whole grid to the horizon on one seed
    ended: str
    notes: tuple[str, ...]
    theory: str | None
    shortage: str | None  # that the budget was too small to choose among all settings, and what is needed
    seconds: float = field(compare=False)  # real

    @property
    def best(self) -> RankedCandidate:
        """The recommendation."""
        return self.ranking[0]

    @property
    def hits(self) -> int:
        """How many of the raced candidates reached the target on every seed."""
        return sum(not each.missed for each in self.ranking)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return self.ended == INTERRUPTED

    @property
    def target_text(self) -> str:
        """The target for readers: an accuracy as a percentage, the value of another metric as it is."""
        return f"{100 * self.target:g} %" if self.metric_name == ACCURACY else f"{self.target:g}"

    def time_text(self, candidate: RankedCandidate) -> str:
        """Return the time of a candidate to the target, or how far it came without reaching it, for readers."""
        return candidate.time_text(self.metric_name)

    @property
    def _nobody(self) -> str:
        """That no candidate reached the target; the best may have reached it on some of its seeds."""
        return f"no candidate reached {self.target_text}{'' if self.best.time is None else ' on all its seeds'}"

    @property
    def trained(self) -> str:
        """What was trained, for readers: updates, and as many of the length in which the budget is counted."""
        unit = single_value(self.study.tables["training"]["local_steps"])
        updates, equal = counted(self.updates, "update"), round(self.steps / unit)
        if equal == self.updates:
            return updates
        return f"{updates}, as many steps as {counted(equal, 'update')} of {counted(unit, 'step')}"

    def failure(self) -> str | None:
        """Return in one line that no candidate reached the target and what was found, or None."""
        if self.best.reached:
            return None
        found = (
            f"{self._nobody} within {duration(self._longest)} of simulated time, the longest that any was trained",
            *((self.ended,) if self.ended in (INTERRUPTED, SPENT) else ()),
            f"the best so far, {self.best.label}: {self.time_text(self.best)}",
            self._remedy,
        )
        return "; ".join(found)

    @property
    def _remedy(self) -> str:
        """What to do if no candidate reached the target."""
        if self.interrupted:
            return "run the command again without interrupting it"
        if self.shortage is not None:
            return self.shortage
        budget = ", or give a larger --budget" if self.ended == SPENT else ""
        return f"set a lower stop.target_accuracy or a longer stop.max_seconds{budget}"

    @property
    def _longest(self) -> float:
        """The simulated time until which a candidate was trained, at most."""
        missed = [run.seconds for each in self.ranking for run in each.missed]
        return max([each.seconds for each in self.ranking] + missed)

    def advised_study(self) -> Study:
        """Return the study with the recommended algorithm and settings."""
        tables = {name: dict(table) for name, table in self.study.tables.items() if name in config.TABLES}
        own = dict(self.study.tables.get(self.best.algorithm, {}))
        kept = {key: value for key, value in own.items() if key not in tables["training"]}
        tables[self.best.algorithm] = {key: single_value(value) for key, value in kept.items()}
        tables["training"] = {key: single_value(own.get(key, value)) for key, value in tables["training"].items()}
        tables["stop"] |= {name: getattr(self.stop, name) for name in RACED_STOP}
        for name, value in self.best.values.items():
            table, _, key = name.partition(".")
            tables[table][key] = value
        if not tables[self.best.algorithm]:
            del tables[self.best.algorithm]
        name = f"{self.study.name[:92]}-advised"
        return replace(self.study, name=name, algorithms=(self.best.algorithm,), tables=tables)

    def to_toml(self) -> str:
        """Return the recommended study as TOML, with its origin as comments."""
        found = "recommends" if self.best.reached else "found, which is no recommendation,"
        lines = [
            f"The setting that `defedavg advise` {found} for the study {self.study.name!r}: {self.best.label}",
            self.sentence(),
            f"Seeds of the race: {', '.join(map(str, self.seeds))}. They chose the setting, so compare on others.",
        ]
        comments = "".join(f"# {''.join(s if s.isprintable() else '?' for s in line)}\n" for line in lines)
        return f"{comments}\n{self.advised_study().to_toml()}"

    def sentence(self) -> str:
        """Return the recommendation in one sentence."""
        best = self.best
        if best.time is None or not best.reached:
            return f"{self._nobody}; the best so far, {best.label}: {self.time_text(best)}"
        found = f"{best.time.text()} of simulated time ({counted(best.seeds, 'seed')})"
        text = f"{best.label} reaches {self.target_text} in {self.time_text(best) if best.missed else found}"
        return f"{text}{self._cheaper()}"

    def _cheaper(self) -> str:
        """Return the candidate that is as good for all the seeds say and sends the fewest bytes, for the sentence."""
        most = FEWER_BYTES * (self.best.bytes or 0.0)
        close = [each for each in self.ranking if each.close and each.bytes is not None and each.bytes <= most]
        if not close:
            return ""
        least = min(close, key=lambda each: each.bytes or 0.0)
        share = (least.bytes or 0.0) / (self.best.bytes or 1.0)
        return f"; {least.label} is not separated from it and sends {share:.2f} times the bytes"


def single_value(value: Any) -> Any:
    """Return the first value of an axis, or a setting that is none."""
    return value[0] if isinstance(value, tuple) else value
