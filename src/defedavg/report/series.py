"""Series: a setting with its seeds. How the report names, ranks, compares and draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..jsonio import about
from ..runstore.metrics import number
from ..runstore.reader import RunEntry, RunFolder, flat_settings
from .palette import looks, page_look
from .plan_digest import Digest
from .seed_figures import accuracy_text, mean, of_seeds, spread, values


class Series:
    """A setting of one folder, with its runs."""

    def __init__(self, folder: RunFolder, label: str, runs: Sequence[RunEntry]) -> None:
        self.folder, self.label, self.runs = folder, label, runs
        self.digests: dict[int, Digest] = {}  # by seed
        self.notes: list[str] = []
        self.algorithm, self.metric = runs[0].algorithm, runs[0].metric
        settings = folder.settings(label)  # None where the configuration cannot be read
        self.settings = {"algorithm": self.algorithm} if settings is None else flat_settings(settings)
        self.numbers = [run.numbers for run in runs]
        target = next((t for numbers in self.numbers if (t := numbers["target_accuracy"])), None)
        self.target = target or number(self.settings.get("stop.target_accuracy"))
        self.hits = len(values(self.numbers, "first_hit_seconds"))
        self.misses = len(runs) - self.hits
        seconds = mean(self.numbers, "first_hit_seconds")  # of the seeds that reached the target
        self.seconds_to_target = math.inf if seconds is None else seconds
        self.running = not folder.finished and any(run.status == "running" for run in runs)
        self.clock = folder.clock

    def key(self) -> tuple[Any, ...]:
        """Return the values that must be equal for two series to be compared: the task, the target and the metric."""
        task = [(name, value) for name, value in self.settings.items() if name.startswith("task.")]
        return (*(task or [("folder", str(self.folder.path))]), self.target or 0.0, self.metric)

    def rank(self) -> tuple[float, float, float]:
        """Return a sort key, lower is better: seeds that missed the target, mean time to it, negative metric."""
        best = mean(self.numbers, "best_accuracy")
        return self.misses, self.seconds_to_target, math.inf if best is None else -best

    def goal(self) -> str:
        """Return the target as text."""
        target = self.target or 0.0
        return f"{100 * target:g} %" if self.metric == "accuracy" else f"a {self.metric} of {target:g}"


def shorten(text: str, limit: int = 60) -> str:
    """Shorten a name so that it fits into a sentence."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def names_of(group: Sequence[Series]) -> list[str]:
    """Return the labels, with the study's name in front where two labels are equal."""
    labels = [series.label for series in group]
    return [f"{s.folder.name}: {s.label}" if labels.count(s.label) > 1 else s.label for s in group]


def looks_of(group: Sequence[Series]) -> list[dict[str, str]]:
    """Return the look of every series, as in every other figure."""
    return [page_look(style) for style in looks((each.algorithm, str(i)) for i, each in enumerate(group)).values()]


def has_result(best: Series, target: float | None) -> bool:
    """Return whether the best series of a group reached the target, or was evaluated where no target is set."""
    return best.hits > 0 if target else mean(best.numbers, "best_accuracy") is not None


def clock_of(group: Sequence[Series]) -> str:
    """Return which seconds the times of a group are."""
    clocks = {series.clock for series in group}
    return clocks.pop() if len(clocks) == 1 else "seconds"


def conclusion(ranked: Sequence[tuple[str, Series]], target: float | None) -> str:
    """Return the result of a group, in a sentence or two."""
    name, best = ranked[0]
    if not has_result(best, target):
        running = any(series.running for _, series in ranked)
        return f"No run reached {best.goal() if target else f'any {best.metric}'}{' yet' if running else ''}."
    if not target:
        value = accuracy_text(best.numbers, metric=best.metric)
        return (
            f"{name} had the highest best {best.metric}: {value}. No target {best.metric} was set, so times are not "
            "compared."
        )
    return _comparison(name, best, ranked[1:])


def _comparison(name: str, best: Series, others: Sequence[tuple[str, Series]]) -> str:
    reached = [(other, series) for other, series in others if series.hits]
    missed = [other for other, series in others if not series.hits and not series.running]
    clock = clock_of([best, *(series for _, series in others)])
    faster = _faster(best, reached)
    seeds = f" in {of_seeds(best.hits, len(best.runs))}" if best.misses or faster else ""
    how = "in the most seeds" if faster else "first"
    sentence = f"{name} reached {best.goal()} {how}: after {best.seconds_to_target:.3g} {clock}{seeds}"
    if reached:
        sentence += _lead(best, *reached[0])
    sentence += faster
    if missed:
        sentence += f". {_listed(missed)} did not reach it"
    return f"{sentence}. {_caveat(best, reached[0][1]) if reached else ''}".strip()


def _faster(best: Series, reached: Sequence[tuple[str, Series]]) -> str:
    """Return which setting is faster than the best; it is ranked lower, since fewer of its seeds reached the target."""
    name, fastest = min(reached, key=lambda pair: pair[1].seconds_to_target, default=("", best))
    if fastest.seconds_to_target >= best.seconds_to_target:
        return ""
    return f". {name} was faster, but only in {of_seeds(fastest.hits, len(fastest.runs))}"


def _listed(names: Sequence[str], limit: int = 3) -> str:
    """Return names as words of a sentence, with the number of those beyond a limit."""
    shown = [*names[:limit], *([f"{len(names) - limit} more"] if len(names) > limit else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _lead(best: Series, name: str, second: Series) -> str:
    """Return how much faster the best was than the second, or in how many seeds a slower second reached the target."""
    if best.seconds_to_target <= 0 or second.seconds_to_target < best.seconds_to_target:
        return ""
    if second.misses != best.misses:
        return f"; {name} reached it in {of_seeds(second.hits, len(second.runs))}"
    ratio = second.seconds_to_target / best.seconds_to_target
    return f", {about(ratio)} times as fast as {name}" if ratio >= 1.05 else f", just ahead of {name}"


def _caveat(best: Series, second: Series) -> str:
    """Return why the ranking may be chance, if it may."""
    if min(len(best.runs), len(second.runs)) == 1:
        return "This is one seed only; other seeds may rank differently."
    if second.misses != best.misses:
        return ""  # the number of seeds decides, and the sentence states it
    deviations = [spread(series.numbers, "first_hit_seconds") for series in (best, second)]
    lead = second.seconds_to_target - best.seconds_to_target
    if any(deviation is not None and lead < deviation for deviation in deviations):
        return "The lead over the second is smaller than the spread over seeds, so it may be chance."
    return ""
