"""How many jobs of one run can be trained at once: a limit that its plan sets, whatever the machine.

A job is ready when the version it starts from has been merged. An executor that trains all ready jobs in one batch and
then merges all complete rounds needs the least number of batches, because every job is trained in the earliest batch
possible. That batch follows from the plan alone: it is the one after the last batch that the start version needs.
"""

from __future__ import annotations

from .records import Round

KEEP = 64  # counts of batches that can grow no more are removed when there are this many


class ReadyJobs:
    """Collects the rounds of a plan in order.

    ``batches`` is the least number of batches, one after the other, that train all merged jobs; ``most`` is the number
    of jobs in the largest of them. Jobs without local steps are not trained.
    """

    def __init__(self) -> None:
        self.jobs = self.batches = self.most = 0
        self._batches_before = {0: 0}  # version -> batches that must be trained before it exists
        self._sizes: dict[int, int] = {}

    @property
    def mean(self) -> float:
        """The mean number of jobs in a batch."""
        return self.jobs / self.batches if self.batches else 0.0

    def add(self, record: Round) -> None:
        """Count the jobs of the next round."""
        before, sizes = self._batches_before, self._sizes
        for update, _ in record.merge.updates:
            if update.steps:
                batch = before[update.version] + 1
                size = sizes[batch] = sizes.get(batch, 0) + 1
                self.jobs += 1
                self.batches = max(self.batches, batch)
                self.most = max(self.most, size)
        before[record.merge.version] = self.batches
        for version in record.freed:
            del before[version]
        if len(sizes) >= KEEP:
            least = before[min(before)]  # later versions need no fewer batches
            self._sizes = {batch: size for batch, size in sizes.items() if batch > least}
