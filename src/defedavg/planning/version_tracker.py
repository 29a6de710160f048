"""Which version has reached whom, and which versions somebody may still need.

Both are bookkeeping of the timeline. A broadcast is one entry here, not N deliveries.
"""

from __future__ import annotations

from bisect import bisect_right


class Broadcasts:
    """When each version was broadcast; what has reached a client is looked up."""

    def __init__(self, down: list[float]) -> None:
        self._down = down  # by client
        self._slowest = max(down)
        self._times: list[float] = []
        self._joined: dict[int, float] = {}
        self._passed = 0

    def add(self, version: int, time: float) -> None:
        """Version ``version`` was sent to everyone."""
        if version != len(self._times):
            raise ValueError(f"version {version} was broadcast after {len(self._times)} others")
        self._times.append(time)

    def joined(self, client: int, time: float) -> None:
        """The client was away: nothing that was broadcast before reaches it."""
        self._joined[client] = time

    def _reached(self, client: int, now: float) -> int:
        """How many broadcasts have arrived at the client, or were missed, by now."""
        times, down = self._times, self._down[client]
        count = bisect_right(times, now - down)
        # now − down rounds; arrival is time + down, as the clock computes it.
        while count < len(times) and times[count] + down <= now:
            count += 1
        while count and times[count - 1] + down > now:
            count -= 1
        return count

    def newest(self, client: int, now: float) -> int:
        """The newest version that has reached the client by broadcast, or −1."""
        version = self._reached(client, now) - 1
        if version >= 0 and client in self._joined and self._times[version] < self._joined[client]:
            return -1
        return version

    def coming(self, client: int, now: float) -> float | None:
        """When the next broadcast that is on its way arrives, or None."""
        count = self._reached(client, now)
        joined = self._joined.get(client, 0.0)
        while count < len(self._times) and self._times[count] < joined:
            count += 1
        return self._times[count] + self._down[client] if count < len(self._times) else None

    def passed(self, now: float) -> int:
        """The oldest version that some client may still start from by broadcast."""
        times = self._times
        while self._passed + 1 < len(times) and times[self._passed + 1] + self._slowest <= now:
            self._passed += 1
        return self._passed


class Versions:
    """Counts who still needs a version: running jobs, updates not yet merged, models on their way to one client."""

    def __init__(self, broadcasts: Broadcasts, everyone: bool) -> None:
        self._broadcasts = broadcasts
        self._everyone = everyone  # versions are broadcast, so any client may start from one that is on its way
        self._users: dict[int, int] = {0: 0}
        self._mail: dict[int, int] = {}
        self._oldest = 0
        self._free: list[int] = []

    def hold(self, version: int, count: int = 1) -> None:
        """Somebody needs it, or so many do."""
        self._users[version] += count

    def release(self, version: int) -> None:
        """One of those who needed it does no longer."""
        self._users[version] -= 1
        if self._users[version] == 0 and version < self._oldest:
            self._free.append(version)

    def mailed(self, client: int, version: int) -> None:
        """A version sent to one client is in its receive buffer, in the place of what was there."""
        self.lost(client)
        self._mail[client] = version

    def lost(self, client: int) -> None:
        """The client's receive buffer is empty."""
        if client in self._mail:
            self.release(self._mail.pop(client))

    def started(self, client: int, version: int) -> None:
        """A job started from what was in the receive buffer."""
        self.hold(version)
        self.lost(client)

    def merged(self, version: int, now: float) -> tuple[int, ...]:
        """A version was made; gives those that nobody will need again."""
        self._users[version] = 0
        limit = self._broadcasts.passed(now) if self._everyone else version
        while self._oldest < limit:
            if self._users[self._oldest] == 0:
                self._free.append(self._oldest)
            self._oldest += 1
        freed = tuple(sorted(self._free))
        for old in freed:
            del self._users[old]
        self._free.clear()
        return freed
