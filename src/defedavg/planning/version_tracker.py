"""Which version has reached which client, and which versions are still needed.

The simulator looks both up here: a broadcast is one entry, not N deliveries.
"""

from __future__ import annotations

from bisect import bisect_right


class Broadcasts:
    """The time of each broadcast; from it follows which versions have reached a client."""

    def __init__(self, down: list[float]) -> None:
        self._down = down  # seconds of a download, by client
        self._slowest = max(down)
        self._times: list[float] = []
        self._returned: dict[int, float] = {}
        self._oldest_startable = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, version: int, time: float) -> None:
        """Record that a version was broadcast."""
        if version != len(self._times):
            raise ValueError(f"version {version} was broadcast after {len(self._times)} others")
        self._times.append(time)

    def returned(self, client: int, time: float) -> None:
        """Record that a client was absent until ``time``: no earlier broadcast reaches it."""
        self._returned[client] = time

    def _count(self, client: int, now: float) -> int:
        """Return how many broadcasts have arrived at the client by now, missed ones included."""
        times, down = self._times, self._down[client]
        count = bisect_right(times, now - down)
        # now − down is rounded; an arrival is time + down, as the simulator computes it.
        while count < len(times) and times[count] + down <= now:
            count += 1
        while count and times[count - 1] + down > now:
            count -= 1
        return count

    def newest(self, client: int, now: float) -> int:
        """Return the newest version that has reached the client by broadcast, or −1."""
        version = self._count(client, now) - 1
        if version >= 0 and client in self._returned and self._times[version] < self._returned[client]:
            return -1
        return version

    def next_arrival(self, client: int, now: float) -> float | None:
        """Return when the next broadcast arrives at the client, or None if none is in transit."""
        count = self._count(client, now)
        returned = self._returned.get(client, 0.0)
        while count < len(self._times) and self._times[count] < returned:
            count += 1
        return self._times[count] + self._down[client] if count < len(self._times) else None

    def oldest_startable(self, now: float) -> int:
        """Return the oldest version that some client may still start from after a broadcast."""
        times = self._times
        while self._oldest_startable + 1 < len(times) and times[self._oldest_startable + 1] + self._slowest <= now:
            self._oldest_startable += 1
        return self._oldest_startable


class Versions:
    """Reference counts of versions: running jobs, updates not yet merged, models sent to a single client.

    The ``past_versions`` before the newest one are kept, because the next merge may use them.
    """

    def __init__(self, broadcasts: Broadcasts, any_client_may_start: bool, past_versions: int = 0) -> None:
        self._broadcasts = broadcasts
        self._any_client_may_start = any_client_may_start  # from a version that is in transit, since it was broadcast
        self._past_versions = past_versions
        self._users: dict[int, int] = {0: 0}
        self._received: dict[int, int] = {}  # client -> version in its receive buffer
        self._oldest = 0
        self._free: list[int] = []

    def __contains__(self, version: int) -> bool:
        """Whether the version exists and has not been freed."""
        return version in self._users

    def hold(self, version: int, count: int = 1) -> None:
        """Add references to a version."""
        self._users[version] += count

    def release(self, version: int, count: int = 1) -> None:
        """Drop references to a version."""
        self._users[version] -= count
        if self._users[version] == 0 and version < self._oldest:
            self._free.append(version)

    def received(self, client: int, version: int) -> None:
        """Record that a version sent to one client replaced what its receive buffer held."""
        self.clear_buffer(client)
        self._received[client] = version

    def clear_buffer(self, client: int) -> None:
        """Record that the client's receive buffer is empty."""
        if client in self._received:
            self.release(self._received.pop(client))

    def started(self, client: int, version: int) -> None:
        """Record that a job started from the version in the receive buffer."""
        self.hold(version)
        self.clear_buffer(client)

    def add(self, version: int, now: float) -> tuple[int, ...]:
        """Add a new version; return the versions that nothing will need again."""
        self._users[version] = 0
        limit = self._broadcasts.oldest_startable(now) if self._any_client_may_start else version
        limit = min(limit, version - self._past_versions)
        while self._oldest < limit:
            if self._users[self._oldest] == 0:
                self._free.append(self._oldest)
            self._oldest += 1
        freed = tuple(sorted(self._free))
        for old in freed:
            del self._users[old]
        self._free.clear()
        return freed
