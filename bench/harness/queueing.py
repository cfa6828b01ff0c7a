"""How long requests take in servers that answer several at once: a formula for one server, a simulation of many.

A server is described by what a closed loop measures: how long a request takes while n are there, T(n) (`Curve`). In
the model each request then is 1 / T(n) of itself further every second. Queueing theory calls this a flow-equivalent
server whose processor is shared. Two facts make it a good model here. The server does answer requests together, in
steps that they share. And the probability of n requests, hence the mean time, depends on the mean work of requests
alone and not on its distribution, so that answers need not be equally long.

Where requests of several kinds are there, each is the further by the mean of their times. For steps take prompts in
the order in which they came: a request about a known image waits for the new images before it.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

_MOST_AT_ONCE = 4096
"""The formula looks at no more requests in one server; a load that needs more counts as too high."""
_NEGLIGIBLE = 1e-6
_BISECTIONS = 18
QUANTILE = 0.99
"""The share of the requests that has to be in time."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How long a request takes, by the number of requests that are in the server.

    Between two measurements the time is interpolated. Above the last, the rate of answers stays as it is there.
    """

    at_once: tuple[int, ...]
    """What was measured, ascending, beginning with 1."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascends = all(a < b for a, b in pairwise(self.at_once))
        if not self.at_once or self.at_once[0] != 1 or not ascends or len(self.seconds) != len(self.at_once):
            raise ValueError(f"a curve begins with one request and ascends, not {self.at_once}")
        if min(self.seconds) <= 0:
            raise ValueError(f"requests take time, not {min(self.seconds)} s")

    @classmethod
    def of_rates(cls, per_s: Mapping[int, float]) -> Self:
        """From requests per second by the number kept running."""
        at_once = tuple(sorted(per_s))
        return cls(at_once, tuple(count / per_s[count] for count in at_once))

    @property
    def most_per_s(self) -> float:
        """Requests per second of a server with as many as were measured at most."""
        return self.at_once[-1] / self.seconds[-1]

    def times(self, most: int) -> NDArray[np.float64]:
        """Seconds of a request with 1, 2 … `most` in the server."""
        count = np.arange(1, most + 1)
        return np.where(
            count <= self.at_once[-1], np.interp(count, self.at_once, self.seconds), count / self.most_per_s
        )

    def with_part_replaced(self, part: Curve, by: Curve) -> Curve:
        """The curve of requests of which a part takes another time, such as an image that is known."""
        at_once = tuple(sorted({*self.at_once, *part.at_once, *by.at_once}))
        own, old, new = (curve.times(at_once[-1])[np.array(at_once) - 1] for curve in (self, part, by))
        return Curve(at_once, tuple(float(value) for value in own - old + new))


@dataclass(frozen=True)
class Mix:
    """Requests of several kinds: the share of each, and its curve. Shares add up to 1."""

    parts: tuple[tuple[float, Curve], ...]

    @property
    def most_per_s(self) -> float:
        """The rate below which a server keeps up."""
        return _MOST_AT_ONCE / float(self._mean_s[-1])

    def at_once(self, rate_per_s: float) -> NDArray[np.float64] | None:
        """The probability of 0, 1, 2 … requests in a server that gets so many at random moments.

        None where the server does not keep up.
        """
        # The rate of arrivals over that of departures, n / T(n), from which follows how often n is met.
        steps = np.log(rate_per_s * self._mean_s / np.arange(1, _MOST_AT_ONCE + 1)) / self._variability
        logs = np.concatenate(([0.0], np.cumsum(steps)))
        found = np.exp(logs - logs.max())
        found /= found.sum()
        return None if found[-1] > _NEGLIGIBLE / _MOST_AT_ONCE else found

    def mean_s(self, rate_per_s: float) -> float:
        """The mean time of a request, by Little's law; infinite where the server does not keep up."""
        found = self.at_once(rate_per_s)
        return math.inf if found is None else float(found @ np.arange(len(found))) / rate_per_s

    def share_within(self, limit_s: float, rate_per_s: float) -> float:
        """The share of the requests that are answered within a limit; 0 where the server does not keep up.

        A request that finds n others is taken to have n + 1 in the server all the time. The simulation says what
        that comes to.
        """
        found = self.at_once(rate_per_s)
        return 0.0 if found is None else float(found[: np.searchsorted(self._mean_s, limit_s, side="right")].sum())

    def quantile_s(self, rate_per_s: float, share: float = QUANTILE) -> float:
        """The time within which a share of the requests is answered; infinite where the server does not keep up."""
        found = self.at_once(rate_per_s)
        return math.inf if found is None else float(self._mean_s[np.searchsorted(np.cumsum(found), share)])

    def rate_within(self, limit_s: float, share: float = QUANTILE) -> float:
        """The highest rate of requests per second at which that share is answered within a limit; 0 for none."""
        low, high = 0.0, self.most_per_s
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.share_within(limit_s, middle) >= share else (low, middle)
        return low

    @cached_property
    def _variability(self) -> float:
        """How much longer queues are than those of requests of one kind.

        In heavy traffic a queue grows with half the squared coefficient of variation of the work, by the formula of
        Pollaczek and Khinchine. What varies here is the time of a kind in a full server.
        """
        times = np.array([1 / curve.most_per_s for _, curve in self.parts])
        shares = np.array([share for share, _ in self.parts])
        mean = shares @ times
        return 1 + float(shares @ (times - mean) ** 2 / mean**2) / 2

    @cached_property
    def _mean_s(self) -> NDArray[np.float64]:
        return np.sum([share * curve.times(_MOST_AT_ONCE) for share, curve in self.parts], axis=0)


def distinct_servers(questions: int, num_servers: int) -> float:
    """How many servers see an image, on average, of which each question goes to any of them."""
    return num_servers * (1 - (1 - 1 / num_servers) ** questions)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, and its image."""

    due_s: float
    image: int


@dataclass(slots=True)
class Served:
    """What became of a request."""

    server: int
    is_known: bool
    """Whether the server had the image."""
    total_s: float = 0.0


Route = Callable[[int, Sequence[int]], int]
"""The server for an image, given how many requests each server has."""


def at_random(seed: int) -> Route:
    """Any server."""
    chance = random.Random(seed)
    return lambda image, running: chance.randrange(len(running))


def least_requests(seed: int) -> Route:
    """Of two servers the one with fewer requests, as Envoy's LEAST_REQUEST does."""
    chance = random.Random(seed)

    def route(image: int, running: Sequence[int]) -> int:
        first, second = chance.randrange(len(running)), chance.randrange(len(running))
        return first if running[first] <= running[second] else second

    return route


def by_image(balance_factor: float | None, seed: int = 0) -> Route:
    """The server of the image; while that has more than so many times the average, the next one by the hash.

    As Envoy does with `hash_balance_factor`, here as a factor and not in percent; None is without a limit. The seed
    gives images other servers.
    """

    def route(image: int, running: Sequence[int]) -> int:
        num_servers = len(running)
        if balance_factor is None:
            return _home(image, num_servers, 0, seed)
        places = max(1, math.ceil(balance_factor * (sum(running) + 1) / num_servers))
        for attempt in range(4 * num_servers):
            if running[server := _home(image, num_servers, attempt, seed)] <= places:
                return server
        return min(range(num_servers), key=running.__getitem__)

    return route


def _home(image: int, num_servers: int, attempt: int, seed: int) -> int:
    """The server of an image, and the ones to try where that is too busy, evenly by a hash."""
    return zlib.crc32(f"{seed}/{image}/{attempt}".encode()) % num_servers


class _Server:
    """One server of the simulation.

    All its requests progress alike, so one number says how far any of them is: a request ends when that number has
    grown by the work of the request.
    """

    __slots__ = ("_images", "_kinds", "_max_images", "_now_s", "_progress", "_running", "_seconds", "num_running")

    def __init__(self, seconds: Sequence[Sequence[float]], max_images: int) -> None:
        self._seconds = seconds
        self._max_images = max_images
        self._images: dict[int, None] = {}
        self._now_s = self._progress = 0.0
        self._running: list[tuple[float, int, int]] = []
        self._kinds = [0] * len(seconds)
        self.num_running = 0

    def knows(self, image: int) -> bool:
        """Whether the image is cached. Makes it the one used last; the one unused for longest is forgotten."""
        is_known = image in self._images
        if is_known:
            del self._images[image]
        self._images[image] = None
        if len(self._images) > self._max_images:
            del self._images[next(iter(self._images))]
        return is_known

    def begin(self, now_s: float, kind: int, number: int, work: float) -> None:
        """A request comes."""
        if self.num_running:
            self._progress += (now_s - self._now_s) / self._time_s()
        self._now_s = now_s
        heapq.heappush(self._running, (self._progress + work, number, kind))
        self._kinds[kind] += 1
        self.num_running += 1

    def end(self, now_s: float) -> int:
        """The number of the request that ends now."""
        self._progress, number, kind = heapq.heappop(self._running)
        self._now_s = now_s
        self._kinds[kind] -= 1
        self.num_running -= 1
        return number

    def next_end_s(self) -> float:
        """When the next request ends if none comes before."""
        return self._now_s + (self._running[0][0] - self._progress) * self._time_s()

    def _time_s(self) -> float:
        """How long any request takes while these are here."""
        count = self.num_running
        return sum(kind * seconds[count] for kind, seconds in zip(self._kinds, self._seconds, strict=True)) / count


def simulate(
    arrivals: Iterable[Arrival],
    num_servers: int,
    new: Curve,
    known: Curve,
    route: Route,
    *,
    max_images: int,
    works: Iterator[float] | None = None,
) -> list[Served]:
    """What becomes of requests, in the order in which they come.

    `new` is the curve of requests about an image that the server does not have, `known` of those about one that it
    has; a server has the last `max_images`. `works` are how much of the curve's time each takes, in place of 1. All
    requests may be in one server at a time.
    """
    pending = list(arrivals)
    seconds = [[0.0, *curve.times(len(pending)).tolist()] for curve in (new, known)]
    servers = [_Server(seconds, max_images) for _ in range(num_servers)]
    running = [0] * num_servers
    served: list[Served] = []
    # A server's entry is out of date once its requests have changed; only the latest counts.
    ends: list[tuple[float, int, int]] = []
    versions = [0] * num_servers

    def schedule(index: int) -> None:
        running[index] = servers[index].num_running
        versions[index] += 1
        if running[index]:
            heapq.heappush(ends, (servers[index].next_end_s(), index, versions[index]))

    def end_until(now_s: float) -> None:
        while ends and ends[0][0] <= now_s:
            end_s, index, version = heapq.heappop(ends)
            if version == versions[index]:
                number = servers[index].end(end_s)
                served[number].total_s = end_s - pending[number].due_s
                schedule(index)

    for number, arrival in enumerate(pending):
        end_until(arrival.due_s)
        index = route(arrival.image, running)
        is_known = servers[index].knows(arrival.image)
        served.append(Served(index, is_known))
        servers[index].begin(arrival.due_s, int(is_known), number, 1.0 if works is None else next(works))
        schedule(index)
    end_until(math.inf)
    return served
