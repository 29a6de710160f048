"""What the server machines share: checks, keyed draws, and the two ways to fill a round.

``DrawnRound`` waits for particular clients that it drew; ``OpenRound`` takes any n updates. An algorithm is one of the
two plus its own words: whom it invites, what an arrival is worth, whom it tells of the new version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UserError
from ..keyed import below, extend, key
from ..protocol import Discard, Merge, ProtocolError, Redraw, Rule, ServerAction, SetTimer, Update
from .pool import Pool

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


class Server:
    """A server machine: counts versions, checks events, remembers which clients did not answer."""

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    equation: ClassVar[str]
    rule: ClassVar[Rule]
    settings_type: ClassVar[type[Any]] = NoSettings
    broadcasts: ClassVar[bool] = False
    uses_global_lr: ClassVar[bool] = True
    uses_local_lr: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        self.setup = setup
        self.settings = self.settings_type() if settings is None else settings
        self.version = 0
        self.pool = Pool(setup.num_clients)  # clients that are not suspected to be gone
        self._seen: dict[int, int] = {}
        self._token = 0  # of the timer that matters
        self._check_setup()

    @classmethod
    def client_rule(cls, settings: Any) -> Rule:
        """How clients behave under these settings."""
        return cls.rule

    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:
        """How many local steps a whole job has."""
        return local_steps

    def _check_setup(self) -> None:
        for word, value in (
            ("num_clients", self.setup.num_clients),
            ("updates_per_round", self.setup.updates_per_round),
            ("local_steps", self.setup.local_steps),
        ):
            if value < 1:
                raise UserError(f"{word} is {value}; it must be at least 1")

    def _need_enough_clients(self, why: str) -> None:
        n, total = self.setup.updates_per_round, self.setup.num_clients
        if n > total:
            raise UserError(f"{self.name}: updates_per_round is {n} but there are {total} clients; {why}")

    # Events.

    def start(self) -> Actions:
        """The first actions, version 0 being there."""
        raise NotImplementedError

    def arrived(self, update: Update) -> Actions:
        """An update arrived."""
        self._known(update.client)
        if not 0 <= update.version <= self.version:
            raise ProtocolError(f"an update from version {update.version}, but the newest is {self.version}")
        if update.index <= self._seen.get(update.client, -1):
            raise ProtocolError(f"job {update.index} of client {update.client} arrived before")
        self._seen[update.client] = update.index
        self.pool.add(update.client)
        return self._arrived(update)

    def timer(self, token: int) -> Actions:
        """A timer fired; one that no longer matters is ignored."""
        return []

    def settled(self) -> Actions:
        """Everything of this moment has been seen."""
        return []

    def returned(self, client: int) -> Actions:
        """A client that was gone is back."""
        self._known(client)
        self.pool.add(client)
        return []

    def _arrived(self, update: Update) -> Actions:
        raise NotImplementedError

    def _known(self, client: int) -> None:
        if not 0 <= client < self.setup.num_clients:
            raise ProtocolError(f"client {client} is not one of the {self.setup.num_clients} clients")

    # Helpers.

    def _merge(self, updates: Iterable[tuple[Update, float]], past: Iterable[tuple[int, float]] | None = None) -> Merge:
        """Count the version up and give its record, in an order that does not depend on arrival."""
        totals: dict[int, float] = {}
        for version, weight in ((self.version, 1.0),) if past is None else past:
            totals[version] = totals.get(version, 0.0) + weight
        self.version += 1
        ordered = sorted(updates, key=lambda pair: (pair[0].client, pair[0].index))
        return Merge(self.version, tuple(sorted(totals.items())), tuple(ordered))

    def _suspect(self, clients: Iterable[int]) -> None:
        """Draw no more from these until they are heard of; if that leaves nobody, trust everybody again."""
        for client in clients:
            self.pool.remove(client)
        if not len(self.pool):
            self.pool = Pool(self.setup.num_clients)

    def _arm(self) -> Actions:
        """Start to wait, where waits have an end; timers from before no longer matter."""
        self._token += 1
        seconds = self.setup.timeout_seconds
        return [] if seconds is None else [SetTimer(self._token, seconds)]


class DrawnRound(Server):
    """A round that draws its clients and waits for them all; one drawn twice counts twice."""

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self._weights: Counter[int] = Counter()
        self._waiting: set[int] = set()
        self._got: dict[int, Update] = {}
        self._spare: dict[int, Update] = {}  # came too late, but count if their client is drawn again in this round
        self._draws = 0

    def _check_setup(self) -> None:
        super()._check_setup()
        if not self._replacement():
            self._need_enough_clients("clients are drawn without replacement, so lower it")

    # What an algorithm says.

    def _replacement(self) -> bool:
        return True

    def _invite(self, client: int) -> ServerAction:
        raise NotImplementedError

    def _accepts(self, update: Update) -> bool:
        return True

    def _combine(self, got: list[tuple[Update, int]]) -> Merge:
        n = self.setup.updates_per_round
        return self._merge((update, -count / n) for update, count in got)

    def _close(self) -> Actions:
        """What follows a merge; opens the next round."""
        return self._open()

    # The round.

    def _draw(self, count: int) -> list[int]:
        start = key(self.setup.seed, "draw", self.version, self._draws)
        self._draws += 1
        if self._replacement() or count > len(self.pool):
            return [self.pool[below(extend(start, slot), len(self.pool))] for slot in range(count)]
        return self.pool.sample(count, start)

    def _redraw(self, count: int) -> list[int]:
        """Draw again; without replacement, from those who have not answered yet, as long as there are any."""
        answered = [] if self._replacement() else [client for client in sorted(self._got) if client in self.pool]
        if len(answered) == len(self.pool):
            return self._draw(count)
        for client in answered:
            self.pool.remove(client)
        drawn = self._draw(count)
        for client in answered:
            self.pool.add(client)
        return drawn

    def _open(self) -> Actions:
        unused = [Discard(update) for update in self._spare.values()]
        self._draws = 0
        self._got, self._spare = {}, {}
        self._weights = Counter(self._draw(self.setup.updates_per_round))
        self._waiting = set(self._weights)
        return [*unused, *(self._invite(client) for client in sorted(self._waiting)), *self._arm()]

    def _arrived(self, update: Update) -> Actions:
        if not self._accepts(update):
            return [Discard(update)]
        if update.client not in self._waiting:
            older = self._spare.get(update.client)
            self._spare[update.client] = update
            return [] if older is None else [Discard(older)]
        self._waiting.remove(update.client)
        self._got[update.client] = update
        return self._finish() if not self._waiting else []

    def _finish(self) -> Actions:
        merge = self._combine([(update, self._weights[client]) for client, update in self._got.items()])
        self._token += 1  # a timer still running is now meaningless
        return [merge, *self._close()]

    def returned(self, client: int) -> Actions:
        """A client that is back and waited for is invited again: it has forgotten."""
        super().returned(client)
        return [self._invite(client)] if client in self._waiting else []

    def timer(self, token: int) -> Actions:
        """The wait ran out: others are drawn in the place of those that did not answer."""
        if token != self._token or not self._waiting:
            return []
        missing = sorted(self._waiting)
        count = sum(self._weights.pop(client) for client in missing)
        self._suspect(missing)
        drawn = self._redraw(count)
        self._weights.update(drawn)
        self._got |= {client: self._spare.pop(client) for client in set(drawn) & set(self._spare)}
        self._waiting = set(self._weights) - set(self._got)
        note = Redraw(tuple(missing), tuple(drawn))
        if not self._waiting:
            return [note, *self._finish()]
        return [note, *(self._invite(client) for client in sorted(self._waiting)), *self._arm()]


class OpenRound(Server):
    """A round that is full when any n updates have arrived."""

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self._buffer: list[Update] = []

    def _weight(self, update: Update) -> float:
        return 1.0

    def _opened(self) -> Actions:
        """What follows a merge."""
        raise NotImplementedError

    def _arrived(self, update: Update) -> Actions:
        self._buffer.append(update)
        return self._finish() if len(self._buffer) >= self.setup.updates_per_round else []

    def _finish(self) -> Actions:
        size = len(self._buffer)
        merge = self._merge([(update, -self._weight(update) / size) for update in self._buffer])
        self._buffer = []
        return [merge, *self._opened()]
