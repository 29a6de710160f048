"""The state of a search for rates as JSON: its grid, and where every run stands. What is read is not trusted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..jsonio import is_count, is_whole
from ..runstore.metrics import number
from ..training import Status
from .tune import PairOutcome, Standing, Tuning

TIMES = ("hit_seconds", "first_hit_seconds", "sustained_seconds", "seconds")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options that must be the same to continue a search."""

    global_rates: tuple[float, ...]
    local_rates: tuple[float, ...]
    rungs: tuple[float, ...]

    @classmethod
    def of(cls, tuning: Tuning) -> SearchOptions:
        """Return the options of a search; a rate that no algorithm uses does not count."""
        global_rates = dict.fromkeys(pair.global_lr for pair in tuning.pairs if pair.global_lr is not None)
        local_rates = dict.fromkeys(pair.local_lr for pair in tuning.pairs if pair.local_lr is not None)
        return cls(tuple(global_rates), tuple(local_rates), tuning.rungs)

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def from_json(cls, stored: Any) -> SearchOptions:
        """Return the stored options, or raise KeyError, TypeError or ValueError if these are not some."""
        values = [stored[each.name] for each in fields(cls)]
        if not all(isinstance(own, list) and None not in map(_time, own) for own in values):
            raise TypeError("not lists of numbers")
        return cls(*map(tuple, values))

    def differences(self, now: SearchOptions) -> str:
        """Return the options that differ from those of ``now``, with both values; empty if they are the same."""
        rates = (
            ("--global-rates", self.global_rates, now.global_rates),
            ("--local-rates", self.local_rates, now.local_rates),
        )
        differences = [f"{option} {_listed(old)} → {_listed(new)}" for option, old, new in rates if old != new]
        if self.rungs != now.rungs:
            old, new = (f"pairs dropped {_rungs_text(each.rungs)}" for each in (self, now))
            differences.append(f"{old} → {new}")
        return "; ".join(differences)


def _listed(rates: Sequence[float]) -> str:
    return ",".join(map(str, rates)) or "not used"


def _rungs_text(rungs: Sequence[float]) -> str:
    return f"at shares {_listed([round(rung, 3) for rung in rungs])} of the limit" if rungs else "never (--keep-all)"


def batch_jobs_of(search: Mapping[str, Any]) -> int | None:
    """Return --max-batch-jobs of the first session, or raise KeyError or TypeError if this is not said."""
    jobs = search["max_batch_jobs"]
    if jobs is not None and not (is_whole(jobs) and jobs > 0):
        raise TypeError("not a number of jobs")
    return None if jobs is None else int(jobs)


def outcome_of(record: Mapping[str, Any]) -> PairOutcome:
    """Return the outcome in a record, or raise KeyError, TypeError or ValueError if it has none."""
    values = {each.name: record[each.name] for each in fields(PairOutcome)}
    times = {name: _optional_time(values[name]) for name in TIMES}
    accuracy, diverged_at = values["best_accuracy"], values["diverged_at"]
    status = Status(values["status"])
    valid = (
        times["seconds"] is not None
        and (times["hit_seconds"] is not None) == (status is Status.TARGET)
        and (accuracy is None or number(accuracy) is not None)
        and (status is not Status.DIVERGED if diverged_at is None else is_count(diverged_at))
        and is_count(values["rounds"])
    )
    if not valid:
        raise ValueError("not an outcome")
    return PairOutcome(**values)


def _time(value: Any) -> float | None:
    found = number(value)
    return None if found is None or found < 0 else found


def _optional_time(value: Any) -> float | None:
    if value is not None and _time(value) is None:
        raise ValueError("not a time")
    return _time(value)


def standing_to_json(standing: Standing) -> dict[str, Any]:
    """Return where a run stands as JSON values."""
    own = {"passed": standing.passed, "held": standing.held, "last_miss": standing.last_miss}
    return {**asdict(standing.outcome), **own}


def standings_of(stored: Any, search: Tuning, in_progress: Collection[int]) -> list[Standing]:
    """Return where the runs of a search stand, or raise KeyError, TypeError or ValueError if this is not said.

    ``in_progress`` are the positions of the runs that have a state.
    """
    if not isinstance(stored, list) or len(stored) != len(search.specs):
        raise ValueError("not one entry per run")
    standings = [_standing(record, len(search.rungs)) for record in stored]
    for position, standing in enumerate(standings):
        running = standing.outcome.status == Status.RUNNING
        if position in in_progress:
            if not running:
                raise ValueError("a run that ended has a state")
        elif running and standing != Standing(PairOutcome()):
            raise ValueError("a run that began has no state")
    return standings


def _standing(record: Any, rungs: int) -> Standing:
    passed, held, last_miss = record["passed"], record["held"], _optional_time(record["last_miss"])
    outcome = outcome_of(record)
    if not is_count(passed) or passed > rungs or not isinstance(held, bool):
        raise ValueError("not a number of rungs")
    if outcome.status == Status.INTERRUPTED or (held and (outcome.status != Status.RUNNING or passed == rungs)):
        raise ValueError("a status that no run has at a checkpoint")
    return Standing(outcome, passed, held, last_miss)


def finished_outcomes(records: Sequence[Any], expected: Iterable[Mapping[str, Any]]) -> list[Standing]:
    """Return the outcomes of a finished search, or raise KeyError, TypeError or ValueError.

    The records must be those of the pairs and seeds ``expected``, in their order.
    """
    names = {each.name for each in fields(PairOutcome)}
    standings = []
    for record, other in zip(records, expected, strict=True):
        if any(record[name] != value for name, value in other.items() if name not in names):
            raise ValueError("another run")
        outcome = outcome_of(record)
        if outcome.status in (Status.RUNNING, Status.INTERRUPTED):
            raise ValueError("a run that has not ended")
        standings.append(Standing(outcome))
    return standings
