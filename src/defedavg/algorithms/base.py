"""What the server machines share: checks, keyed draws, and the two ways to fill a round.

``SampledRound`` waits for particular clients that it drew; ``BufferedRound`` takes any n updates. An algorithm is one of the
two plus its own words: whom it invites, what an arrival is worth, whom it tells of the new version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UserError
from ..rng import below, extend, key
from .client_pool import ClientPool
from .protocol import ClientPolicy, Discard, Merge, ProtocolError, Resample, ServerAction, SetTimer, Update

Actions = list[ServerAction]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every server machine is told; ``timeout_seconds`` None: it waits for ever."""

    num_clients: int
    updates_per_round: int
    local_steps: int
    seed: int = 0
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class NoSettings:
    """An algorithm without settings of its own."""


class ServerMachine:
    """A server machine: counts versions, checks events, remembers which clients did not answer."""

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    equation: ClassVar[str]
    policy: ClassVar[ClientPolicy]
    settings_type: ClassVar[type[Any]] = NoSettings
    broadcasts: ClassVar[bool] = False
    uses_global_lr: ClassVar[bool] = True
    uses_local_lr: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        self.setup = setup
        self.settings = self.settings_type() if settings is None else settings
        self.version = 0
        self.pool = ClientPool(setup.num_clients)  # clients that are not suspected to be gone
        self.last_jobs: dict[int, int] = {}
        self.timer_token = 0  # of the timer that matters
        self.check_setup()

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        """How clients behave under these settings."""
        return cls.policy

    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:
        """How many local steps a whole job has."""
        return local_steps

    def check_setup(self) -> None:
        for word, value in (
            ("num_clients", self.setup.num_clients),
            ("updates_per_round", self.setup.updates_per_round),
            ("local_steps", self.setup.local_steps),
        ):
            if value < 1:
                raise UserError(f"{word} is {value}; it must be at least 1")

    def require_enough_clients(self, why: str) -> None:
        n, total = self.setup.updates_per_round, self.setup.num_clients
        if n > total:
            raise UserError(f"{self.name}: updates_per_round is {n} but there are {total} clients; {why}")

    # Events.

    def start(self) -> Actions:
        """The first actions, version 0 being there."""
        raise NotImplementedError

    def arrived(self, update: Update) -> Actions:
        """An update arrived."""
        self.check_client(update.client)
        if not 0 <= update.version <= self.version:
            raise ProtocolError(f"an update from version {update.version}, but the newest is {self.version}")
        if update.index <= self.last_jobs.get(update.client, -1):
            raise ProtocolError(f"job {update.index} of client {update.client} arrived before")
        self.last_jobs[update.client] = update.index
        self.pool.add(update.client)
        return self.on_update(update)

    def timer(self, token: int) -> Actions:
        """A timer fired; one that no longer matters is ignored."""
        return []

    def end_of_instant(self) -> Actions:
        """Everything of this moment has been seen."""
        return []

    def returned(self, client: int) -> Actions:
        """A client that was gone is back."""
        self.check_client(client)
        self.pool.add(client)
        return []

    def on_update(self, update: Update) -> Actions:
        raise NotImplementedError

    def check_client(self, client: int) -> None:
        if not 0 <= client < self.setup.num_clients:
            raise ProtocolError(f"client {client} is not one of the {self.setup.num_clients} clients")

    # Helpers.

    def merge(self, updates: Iterable[tuple[Update, float]], past: Iterable[tuple[int, float]] | None = None) -> Merge:
        """Count the version up and give its record, in an order that does not depend on arrival."""
        totals: dict[int, float] = {}
        for version, weight in ((self.version, 1.0),) if past is None else past:
            totals[version] = totals.get(version, 0.0) + weight
        self.version += 1
        ordered = sorted(updates, key=lambda pair: (pair[0].client, pair[0].index))
        return Merge(self.version, tuple(sorted(totals.items())), tuple(ordered))

    def suspect(self, clients: Iterable[int]) -> None:
        """Draw no more from these until they are heard of; if that leaves nobody, trust everybody again."""
        for client in clients:
            self.pool.remove(client)
        if not len(self.pool):
            self.pool = ClientPool(self.setup.num_clients)

    def start_timeout(self) -> Actions:
        """Start to wait, where waits have an end; timers from before no longer matter."""
        self.timer_token += 1
        seconds = self.setup.timeout_seconds
        return [] if seconds is None else [SetTimer(self.timer_token, seconds)]


class SampledRound(ServerMachine):
    """A round that draws its clients and waits for them all; one drawn twice counts twice."""

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.multiplicity: Counter[int] = Counter()
        self.waiting: set[int] = set()
        self.received: dict[int, Update] = {}
        self.late: dict[int, Update] = {}  # came too late, but count if their client is drawn again in this round
        self.draws = 0

    def check_setup(self) -> None:
        super().check_setup()
        if not self.with_replacement():
            self.require_enough_clients("clients are drawn without replacement, so lower it")

    # What an algorithm says.

    def with_replacement(self) -> bool:
        return True

    def invite(self, client: int) -> ServerAction:
        raise NotImplementedError

    def accepts(self, update: Update) -> bool:
        return True

    def combine(self, got: list[tuple[Update, int]]) -> Merge:
        n = self.setup.updates_per_round
        return self.merge((update, -count / n) for update, count in got)

    def close_round(self) -> Actions:
        """What follows a merge; opens the next round."""
        return self.open_round()

    # The round.

    def draw(self, count: int) -> list[int]:
        start = key(self.setup.seed, "draw", self.version, self.draws)
        self.draws += 1
        if self.with_replacement() or count > len(self.pool):
            return [self.pool[below(extend(start, slot), len(self.pool))] for slot in range(count)]
        return self.pool.sample(count, start)

    def draw_again(self, count: int) -> list[int]:
        """Draw again; without replacement, from those who have not answered yet, as long as there are any."""
        answered = (
            [] if self.with_replacement() else [client for client in sorted(self.received) if client in self.pool]
        )
        if len(answered) == len(self.pool):
            return self.draw(count)
        for client in answered:
            self.pool.remove(client)
        drawn = self.draw(count)
        for client in answered:
            self.pool.add(client)
        return drawn

    def open_round(self) -> Actions:
        unused = [Discard(update) for update in self.late.values()]
        self.draws = 0
        self.received, self.late = {}, {}
        self.multiplicity = Counter(self.draw(self.setup.updates_per_round))
        self.waiting = set(self.multiplicity)
        return [*unused, *(self.invite(client) for client in sorted(self.waiting)), *self.start_timeout()]

    def on_update(self, update: Update) -> Actions:
        if not self.accepts(update):
            return [Discard(update)]
        if update.client not in self.waiting:
            older = self.late.get(update.client)
            self.late[update.client] = update
            return [] if older is None else [Discard(older)]
        self.waiting.remove(update.client)
        self.received[update.client] = update
        return self.finish_round() if not self.waiting else []

    def finish_round(self) -> Actions:
        merge = self.combine([(update, self.multiplicity[client]) for client, update in self.received.items()])
        self.timer_token += 1  # a timer still running is now meaningless
        return [merge, *self.close_round()]

    def returned(self, client: int) -> Actions:
        """A client that is back and waited for is invited again: it has forgotten."""
        super().returned(client)
        return [self.invite(client)] if client in self.waiting else []

    def timer(self, token: int) -> Actions:
        """The wait ran out: others are drawn in the place of those that did not answer."""
        if token != self.timer_token or not self.waiting:
            return []
        missing = sorted(self.waiting)
        count = sum(self.multiplicity.pop(client) for client in missing)
        self.suspect(missing)
        drawn = self.draw_again(count)
        self.multiplicity.update(drawn)
        self.received |= {client: self.late.pop(client) for client in set(drawn) & set(self.late)}
        self.waiting = set(self.multiplicity) - set(self.received)
        note = Resample(tuple(missing), tuple(drawn))
        if not self.waiting:
            return [note, *self.finish_round()]
        return [note, *(self.invite(client) for client in sorted(self.waiting)), *self.start_timeout()]


class BufferedRound(ServerMachine):
    """A round that is full when any n updates have arrived."""

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.buffer: list[Update] = []

    def weight(self, update: Update) -> float:
        return 1.0

    def after_merge(self) -> Actions:
        """What follows a merge."""
        raise NotImplementedError

    def on_update(self, update: Update) -> Actions:
        self.buffer.append(update)
        return self.finish_round() if len(self.buffer) >= self.setup.updates_per_round else []

    def finish_round(self) -> Actions:
        size = len(self.buffer)
        merge = self.merge([(update, -self.weight(update) / size) for update in self.buffer])
        self.buffer = []
        return [merge, *self.after_merge()]
