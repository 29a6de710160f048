"""The search: explore on one seed, confirm the best on a second one, refine around them, confirm further.

1. *Explore.* Every shape starts with its usual rates, and those that fall behind are dropped (``exploring.py``).
2. *Confirm.* The best candidates are run on a second seed: the first to reach the target may only have been lucky.
3. *Refine.* The neighbours of the best on the grid, and then further candidates, are raced against the leader. One is
   dropped when the leader had the same loss much earlier.
4. *Confirm.* The best candidates are run on further seeds. It ends when the leader has been run on three and is
   separated from the others, when all seeds are used, or when the budget is spent.
5. *Compare.* What is left of the budget trains the best of the others to the target. They show what the leader's time
   costs in bytes and in accuracy of the worst-served clients. Those that come near the leader are confirmed as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from ..errors import counted
from ..jsonio import three_digits
from .candidates import GridCell
from .exploring import explore_all
from .racing import BudgetSpentError
from .search_state import SearchState

LEAST_ROUNDS = 2
"""No candidate is dropped before its second round while the search refines."""
REFINE = 0.75
"""The share of the budget after which refining ends; the rest confirms the finalists on further seeds."""
CENTRES, FEW, FURTHER = 2, 6, 0.02
"""Leaders around which the search refines, and the number or the share of the rest of the budget for other groups."""
CHECKS = (1 / 8, 1 / 4, 1 / 2)
"""When candidates are compared with the leader while refining, as shares of its time to the target."""
LAG = 1.3
"""A candidate is dropped if the leader had its loss in less than 1/LAG of the time."""
FINALISTS = 6
NEAR = 1.3
"""A candidate whose time on the first seed is within this multiple of the leader's is a finalist."""
LEAST_SEEDS = 3
"""The leader is run on as many seeds before the search ends: two seeds agree by chance too often."""
INTERRUPTED, SPENT = "it was interrupted", "the budget is spent"
SEEDS = 5
"""Seeds of a finalist, at most."""
PATIENCE = 1.3
"""On further seeds, a finalist may take this multiple of the longest time of the leader."""
COMPARED = 2.0
"""At the end, others may take this multiple of the leader's time to the target."""
TIE = 1.02
"""Two candidates whose ratio of times is surely below this are equally good."""


class AdviceSearch(SearchState):
    """The phases of a search."""

    def search(self) -> None:
        """Run all phases until the leader is separated or the budget is spent."""
        try:
            explore_all(self)
            self._confirm(self.seeds[1:2])
            self._refine()
            self._confirm(self.seeds[1:])
            self._compare()
            self._confirm(self.seeds[1:])
            self.ended = self._verdict()
        except BudgetSpentError:
            self.ended = self._verdict()
        except KeyboardInterrupt:
            self.ended = INTERRUPTED

    def _refine(self) -> None:
        """Race the neighbours of the leaders until none of them is better, and then further candidates."""
        done: set[GridCell] = set()
        while self.race.spent_share < REFINE:
            leader = self.ranking()[0]
            if not self.reached(leader):
                return
            centre = next((each for each in self.ranking()[:CENTRES] if each not in done), None)
            if centre is None:
                new = self._further(leader)
                if not new:
                    return
            else:
                done.add(centre)
                near = (GridCell(centre.algorithm, p) for p in self.grids[centre.algorithm].neighbours(centre.position))
                new = [each for each in near if each not in self.tried and self._may_start(each)]
            if new:
                self.phase(f"refining: {self._refined(len(new), centre)} against {self.label(leader)}")
                self._race_against(leader, self.start(new))

    def _refined(self, number: int, centre: GridCell | None) -> str:
        if centre is None:
            return counted(number, "further candidate")
        return f"{counted(number, 'neighbour')} of {self.label(centre)}"

    def _further(self, leader: GridCell) -> list[GridCell]:
        """Return the next candidates, as many as a small share of the budget trains until they are first compared."""
        until = CHECKS[0] * self.times(leader)[self.first]
        new, left = self.next_arms(FEW), FURTHER * self.race.steps_left(1.0)
        while left > 0 and len(new) < len(self.screening.kept) and (more := self.next_arms(1)):
            new += more
            left -= self.cost(more[0], until)
        return new

    def _may_start(self, candidate: GridCell) -> bool:
        return candidate not in self.excluded and self.shape(candidate) in self.screening.kept

    def _race_against(self, leader: GridCell, new: Sequence[GridCell]) -> None:
        """Train candidates for as long as the leader took on the first seed, except those that fall behind it."""
        alive, best, limit = list(new), self.run(leader), self.times(leader)[self.first]
        assert best is not None
        for until in (*(share * limit for share in CHECKS), limit):
            self.race.advance([(each, self.first) for each in alive], until)
            for each in self.running(alive):
                run = self.run(each)
                if run is not None and run.rounds >= LEAST_ROUNDS and until > LAG * best.seconds_to_loss(run.loss()):
                    had = f"when {self.label(leader)} had {three_digits(best.loss(until))}"
                    self.drop(
                        each, f"had a test loss of {three_digits(run.loss())} after {three_digits(until)} s, {had}"
                    )
            alive = self.running(alive)

    def _confirm(self, seeds: Sequence[int]) -> None:
        """Run finalists on further seeds until the leader is separated."""
        for seed in seeds:
            finalists, leader = self._finalists(), self.ranking()[0]
            if not self.reached(leader):
                break
            if self._enough(leader) and all(self._decided(each, leader) for each in finalists[1:]):
                break
            finalists = self._affordable(finalists, seed)
            self.phase(f"confirming: {counted(len(finalists), 'finalist')} on seed {seed}")
            self._run_seed(finalists, seed, PATIENCE * max(self.times(leader).values()))

    def _verdict(self) -> str:
        """Return why the search ends, and what the seeds say of the leader."""
        leader, seeds, spent = self.ranking()[0], len(self.seeds), self.race.spent_share >= 1.0
        if not self.reached(leader):
            seeds_text = " on all its seeds" if math.isfinite(self.best_time) else ""
            return SPENT if spent else f"no candidate reached the target{seeds_text}"
        seen, close = len(self.times(leader)), self.close(leader)
        used = "the only seed is used" if seeds == 1 else f"all {counted(seeds, 'seed')} are used"
        end = f"{SPENT}, and " if spent else f"{used}, and " if seen == seeds else ""
        if seen == 1:
            return f"{end}the leader has a time on one seed, so no interval"
        once = self._once(leader)
        if close:
            return f"{end}{counted(len(close) + 1, 'candidate')} are not separated after {counted(seen, 'seed')}{once}"
        found = f"{self._lead(leader)}{once}"
        return f"{SPENT}; {found}" if spent and seen < LEAST_SEEDS else found

    def _lead(self, leader: GridCell) -> str:
        """Return from how many finalists the leader is separated; one with a single seed is not among them."""
        near, seen = self._finalists()[1:], counted(len(self.times(leader)), "seed")
        behind = sum(self._has_interval(each, leader) for each in near) + len(self.missed - {leader})
        if behind:
            return f"the leader is separated from {counted(behind, 'finalist')} after {seen}"
        return f"{'' if near else 'no other candidate was a finalist; '}the leader was run on {seen}"

    def _once(self, leader: GridCell) -> str:
        """Return how many finalists were run on one seed only, to be added to a verdict; empty if none was."""
        number = sum(not self._has_interval(each, leader) for each in self._finalists()[1:])
        verb = "was" if number == 1 else "were"
        return f"; {counted(number, 'more finalist')} {verb} run on one seed only" if number else ""

    def close(self, leader: GridCell) -> list[GridCell]:
        """Return the finalists whose interval does not separate them from the leader; one seed has no interval."""
        if not self.reached(leader):
            return []
        others = (each for each in self._finalists() if each != leader and self._has_interval(each, leader))
        return [each for each in others if not self.separated(each, leader)]

    def _has_interval(self, candidate: GridCell, leader: GridCell) -> bool:
        found = self.ratio(candidate, leader)
        return found is not None and found.low is not None

    def _finalists(self) -> list[GridCell]:
        """Return the best candidates whose times on the first seed are near the leader's, the leader first."""
        reached = [each for each in self.ranking() if self.reached(each) and each not in self.missed]
        if not reached:
            return self.ranking()[:1]
        limit = NEAR * self.times(reached[0])[self.first]
        near = [each for each in reached[1:] if self.times(each)[self.first] <= limit]
        return [reached[0], *sorted(near, key=lambda each: self._ratio_to(each, reached[0]))][:FINALISTS]

    def _ratio_to(self, candidate: GridCell, leader: GridCell) -> float:
        found = self.ratio(candidate, leader)
        return math.inf if found is None else found.mean

    def _affordable(self, finalists: Sequence[GridCell], seed: int) -> list[GridCell]:
        """Return the first finalists, as many as the rest of the budget trains on a seed, and at least two."""
        left, found = self.race.steps_left(1.0), list[GridCell]()
        for each in finalists:
            left -= 0.0 if seed in self.times(each) else self.cost(each, max(self.times(each).values()))
            if left < 0 and len(found) >= 2:
                break
            found.append(each)
        return found

    def _run_seed(self, finalists: Sequence[GridCell], seed: int, until: float) -> None:
        """Run finalists on one more seed; those that need much longer than the leader are not waited for."""
        entries = [(each, seed) for each in finalists]
        self.race.advance(entries, min(until, self.race.horizon))
        if not any(seed in self.times(each) for each in finalists):
            self.race.advance(entries, self.race.horizon)
        for each in finalists:
            if seed not in self.times(each):
                self.missed.add(each)
                self.lost[each] = f"missed the target on seed {seed} within {three_digits(until)} s"

    def _compare(self) -> None:
        """Train the best of the others to the target with the rest of the budget, for the Pareto front."""
        leader = self.ranking()[0]
        if not self.reached(leader):
            return
        until = min(COMPARED * max(self.times(leader).values()), self.race.horizon)
        others = sorted(self.running(self.tried), key=self._loss)[:FINALISTS]
        self.phase(f"comparing: {counted(len(others), 'candidate')} to {three_digits(until)} s")
        with suppress(BudgetSpentError):
            self.race.advance([(each, self.first) for each in others], until)

    def _loss(self, candidate: GridCell) -> float:
        run = self.run(candidate)
        return math.inf if run is None else run.loss()

    def separated(self, candidate: GridCell, leader: GridCell) -> bool:
        """Return whether a candidate is slower than the leader at the level of the intervals."""
        found = self.ratio(candidate, leader)
        return found is not None and found.low is not None and found.low > 1.0

    def _enough(self, candidate: GridCell) -> bool:
        """Return whether a candidate was run on the least number of seeds."""
        return len(self.times(candidate)) >= min(LEAST_SEEDS, len(self.seeds))

    def _decided(self, candidate: GridCell, leader: GridCell) -> bool:
        return self.separated(candidate, leader) or (self._enough(candidate) and self._equal(candidate, leader))

    def _equal(self, candidate: GridCell, leader: GridCell) -> bool:
        """Return whether a candidate is surely as good as the leader, so that further seeds add nothing."""
        found = self.ratio(candidate, leader)
        if found is None or found.low is None or found.high is None:
            return False
        return found.low > 1 / TIE and found.high < TIE
