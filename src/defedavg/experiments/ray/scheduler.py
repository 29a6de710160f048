"""Whoever drives a cluster: hands out runs, hears of them, and hands them out again where a worker was lost.

Every run is mirrored here, with what was measured of it and where it stood last. A run that is begun a second time
measures again what is known already, to the same numbers; that is not told twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config.study import Settings
from ...errors import UserError
from ...tasks import Task
from ...training import CheckpointHook, EvalCounters, RunProgress, RunState, Status
from ..simulation import Simulation
from ..sweep import ComputeConfig, Event, RunEvaluated, RunFinished, RunSpec
from .connection import Place, connect, places, versions
from .worker import RayWorker, RunAssignment, WorkerConfig

EVERY = 30.0  # seconds from one report of where runs stand to the next
START = 120.0  # seconds for a worker to come up
GRACE = 60.0  # seconds to wait for a node where all are lost
LISTEN = 2.0  # seconds to wait for news
THREADS = 16  # of calls to a worker at once: its news, its orders, and those who ask it to help


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as it is seen from here."""

    handle: Any
    place: Place
    pid: int = 0  # on its node
    open: dict[RunSpec, None] = field(default_factory=dict)
    hungry: bool = True
    helpers: tuple[Any, ...] = ()


@dataclass(eq=False)
class RemoteRun:
    """A run under way somewhere; stands for its lane."""

    number: int
    run: Simulation
    hand: WorkerHandle | None = None
    released: int = 0  # pauses that it was let go from
    passed: int = 0  # those of them that its worker was told of
    _held: bool = False

    @property
    def held(self) -> bool:
        """Whether it is let wait; perhaps only for a moment."""
        return self._held

    @held.setter
    def held(self, held: bool) -> None:
        self.released += self._held and not held
        self._held = held

    @property
    def progress(self) -> RunProgress:
        """Of the run."""
        return self.run.progress


class RayScheduler:
    """The workers of a cluster; ``stood`` is where each run under way stood last."""

    def __init__(self, means: ComputeConfig, pauses: Sequence[float], notes: list[str]) -> None:
        self._means = means
        self._pauses = tuple(pauses)
        self._notes = notes
        self.stood: dict[RunSpec, RunState] = {}
        self._hands: list[WorkerHandle] = []
        self._calls: dict[Any, WorkerHandle] = {}
        self._mirrors: dict[RunSpec, RemoteRun] = {}
        self._items: dict[int, RunSpec] = {}
        self._waiting: deque[RunSpec] = deque()
        self._kept: dict[int, tuple[Any, Any]] = {}  # what is in the object store, by id of what is kept with it
        self.lost = 0  # workers
        self.helped = 0  # jobs of one worker's runs that another trained

    def events(
        self,
        items: Sequence[RunSpec],
        started: Mapping[RunSpec, RunState],
        begin: Callable[[RunSpec], Simulation],
        group_of: Callable[[Settings], Hashable],
        rest: CheckpointHook,
    ) -> Iterator[Event]:
        """Everything that is measured, and every run that ends; ``started`` are those that go on from somewhere."""
        connect(self._means.ray_address)
        self._begin, self._group_of = begin, group_of
        self._items = dict(enumerate(items))
        self._numbers = {item: number for number, item in self._items.items()}
        self._waiting = deque([*started, *(item for item in items if item not in started)])
        self.stood = dict(started)
        left = len(items)
        try:
            self._staff(first=True)
            while left:
                self._hand_out(left)
                for event in self._hear():
                    left -= isinstance(event, RunFinished)
                    yield event
                self._answer()
                rest()
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """Let all workers go."""
        import ray

        for hand in self._hands:
            ray.kill(hand.handle)
        self._hands.clear()
        self._calls.clear()

    # Workers.

    def _staff(self, first: bool = False) -> None:
        """A worker wherever there is room for one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        means = self._means
        found = places(means.device)
        if first and not found:
            raise UserError(
                f"the cluster has no node for a worker on {means.device}; add nodes, or use another --device"
            )
        hired = []
        for place in found:
            terms = WorkerConfig(
                means.device, means.precision, means.width, means.memory, place.cores, self._pauses, EVERY
            )
            for _ in range(place.workers - sum(hand.place.node == place.node for hand in self._hands)):
                actor: Any = ray.remote(RayWorker).options(
                    num_cpus=place.cores,
                    num_gpus=1 if means.device == "cuda" else 0,
                    max_concurrency=THREADS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
                )
                handle = actor.remote(terms)
                hired.append((WorkerHandle(handle, place), handle.about.remote()))
        limit = time.monotonic() + START
        for hand, about in hired:
            try:
                hand.pid, theirs = ray.get(about, timeout=max(0.1, limit - time.monotonic()))
                self._check(hand.place, theirs)
            except ray.exceptions.RayError as error:
                ray.kill(hand.handle)
                if first and isinstance(error, ray.exceptions.GetTimeoutError):
                    self._notes.append(f"a worker on {hand.place.name} did not come up; are its cores in use?")
                elif first:
                    said = " ".join(str(error).split())
                    raise UserError(f"a worker cannot start on {hand.place.name}: {said[-300:]}") from None
                continue
            self._hands.append(hand)
            self._listen(hand)
        if first and not self._hands:
            raise UserError(f"no worker came up within {START:.0f} s; is the cluster busy? `ray status` tells")

    def _check(self, place: Place, theirs: Mapping[str, str]) -> None:
        other = [
            f"{name} {theirs.get(name)} there, {own} here"
            for name, own in versions().items()
            if theirs.get(name) != own
        ]
        if other:
            raise UserError(f"{place.name} has other versions ({'; '.join(other)}); install the same on every node")

    def _listen(self, hand: WorkerHandle) -> None:
        self._calls[hand.handle.news.remote()] = hand

    def _lose(self, hand: WorkerHandle) -> None:
        """A worker is gone: what it had is to be done again."""
        self.lost += 1
        self._hands.remove(hand)
        for item in reversed(hand.open):
            self._mirrors[item].hand = None
            self._waiting.appendleft(item)
        limit = time.monotonic() + GRACE
        self._staff()
        while not self._hands:
            if time.monotonic() > limit:
                raise UserError("every worker of the cluster is lost; start nodes, then go on with --resume")
            time.sleep(1.0)
            self._staff()

    # Runs.

    def _hand_out(self, left: int) -> None:
        """A run to every worker that asks for one, up to its share; those without any help the others."""
        fair = -(-left // len(self._hands))
        for hand in sorted(self._hands, key=lambda hand: len(hand.open)):
            if hand.hungry and self._waiting and len(hand.open) < fair:
                self._give(hand, self._waiting.popleft())
        idle = [hand for hand in self._hands if not hand.open]
        owners = [hand for hand in self._hands if hand.open]
        for place, owner in enumerate(owners):
            helpers = tuple(hand.handle for hand in idle[place :: len(owners)])
            if helpers != owner.helpers:
                owner.helpers = helpers
                owner.handle.help.remote(list(helpers))

    def _give(self, hand: WorkerHandle, item: RunSpec) -> None:
        if item not in self._mirrors:
            self._mirrors[item] = RemoteRun(self._numbers[item], self._begin(item))
        mirror = self._mirrors[item]
        if item not in self.stood:
            self.stood[item] = RunState(EvalCounters(), 0, None, None, dict(mirror.run.executor.versions))
        mirror.hand, hand.hungry, hand.open[item] = hand, False, None
        if mirror.progress.status is Status.DROPPED:
            mirror.passed -= 1  # its next worker is to be told, too
        standing = self.stood[item]
        known = tuple(e for e in mirror.progress.evaluations if e.round <= standing.counters.newest[0])
        task = self._task(mirror.run.task)
        group = self._group_of(item.settings)
        hand.handle.give.remote(
            RunAssignment(mirror.number, group, item.settings, item.seed, task, standing, known, mirror.passed)
        )

    def _task(self, task: Task) -> Any:
        """Into the object store, once; data that tasks share are there once, too."""
        parts = (tuple(self._put(t, t.numpy()) for t in (d.inputs, d.targets)) for d in (task.train, task.test))
        return self._put(task, (task.name, task.model, task.loss, *parts, task.clients, task.classes))

    def _put(self, kept: Any, value: Any) -> Any:
        import ray

        if id(kept) not in self._kept:
            self._kept[id(kept)] = kept, ray.put(value)
        return self._kept[id(kept)][1]

    def _hear(self) -> Iterator[Event]:
        import ray

        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=LISTEN)
        for call in ready:
            hand = self._calls.pop(call)
            try:
                news = ray.get(call)
            except ray.exceptions.RayError:
                self._lose(hand)
                continue
            self._listen(hand)
            for what, *rest in news:
                if what == "hungry":
                    hand.hungry = True
                elif what == "note":
                    if rest[0] not in self._notes:
                        self._notes.append(rest[0])
                elif what == "helped":
                    self.helped += rest[0]
                elif what == "failed":
                    raise UserError(rest[0])
                else:
                    yield from self._of_run(hand, what, *rest)

    def _of_run(self, hand: WorkerHandle, what: str, number: int, *rest: Any) -> Iterator[Event]:
        item = self._items[number]
        mirror = self._mirrors[item]
        progress, executor = mirror.progress, mirror.run.executor
        if what == "stands":
            (standing,) = rest
            self.stood[item] = standing
            newest = standing.counters.newest[0]
            executor.versions = {newest: standing.versions[newest]}
        elif what == "measured":
            evaluation, (progress.first_hit_seconds, progress.sustained_seconds) = rest
            dropped = progress.status is Status.DROPPED  # its worker may not have heard of it
            if not dropped and (not progress.evaluations or evaluation.round > progress.evaluations[-1].round):
                progress.evaluations.append(evaluation)
                progress.rounds, progress.seconds = evaluation.round, evaluation.seconds
                yield RunEvaluated(item, mirror.run, evaluation, mirror)
        else:
            done, executor.updates_trained, wall, weights = rest
            done.evaluations = progress.evaluations
            mirror.run.progress = done = progress if progress.status is Status.DROPPED else done
            executor.versions = {done.rounds: weights}
            del hand.open[item], self._mirrors[item], self.stood[item]
            yield RunFinished(item, mirror.run, wall)

    def _answer(self) -> None:
        """Tell the workers what became of runs that were let wait."""
        for mirror in self._mirrors.values():
            if mirror.hand is None:
                continue
            word = "drop" if mirror.progress.status is Status.DROPPED else "go"
            while mirror.passed < mirror.released:
                mirror.passed += 1
                mirror.hand.handle.tell.remote(mirror.number, word)
