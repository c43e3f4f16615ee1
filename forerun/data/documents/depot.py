"""A parcel depot: belts bring parcels in, a sorter assigns them to vans, and vans leave when full or when time is up.

The simulation is driven by events in order of time, so that a run with the same seed is always the same run. Times are
minutes since the depot opened, weights are grams and money is cents; nothing in here uses floating point for either.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

VAN_LIMIT_GRAMS = 900_000
VAN_LIMIT_PARCELS = 120
MAX_WAIT_MINUTES = 45
FRAGILE_SURCHARGE_CENTS = 150
OVERNIGHT_CUTOFF = 18 * 60


class Service(Enum):
    """How quickly the sender wants the parcel to arrive."""

    ECONOMY = "economy"
    STANDARD = "standard"
    OVERNIGHT = "overnight"

    @property
    def base_cents(self) -> int:
        return {Service.ECONOMY: 290, Service.STANDARD: 450, Service.OVERNIGHT: 980}[self]


@dataclass(frozen=True)
class Parcel:
    """One parcel as the scanner sees it."""

    number: int
    district: str
    grams: int
    service: Service = Service.STANDARD
    fragile: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.grams <= 31_500:
            raise ValueError(f"parcel {self.number} weighs {self.grams} g, allowed is 1 to 31500")
        if not self.district:
            raise ValueError(f"parcel {self.number} has no district")

    def price(self) -> int:
        """Base price, 20 cents for every started kilogram above two, and the surcharge for fragile goods."""
        started = max(0, -(-self.grams // 1000) - 2)
        surcharge = FRAGILE_SURCHARGE_CENTS if self.fragile else 0
        return self.service.base_cents + 20 * started + surcharge


@dataclass
class Van:
    """A van that is being loaded for one district."""

    plate: str
    district: str
    opened_at: int
    parcels: list[Parcel] = field(default_factory=list)
    departed_at: int | None = None

    @property
    def grams(self) -> int:
        return sum(parcel.grams for parcel in self.parcels)

    @property
    def full(self) -> bool:
        return len(self.parcels) >= VAN_LIMIT_PARCELS or self.grams >= VAN_LIMIT_GRAMS

    def fits(self, parcel: Parcel) -> bool:
        if self.departed_at is not None or parcel.district != self.district:
            return False
        return len(self.parcels) < VAN_LIMIT_PARCELS and self.grams + parcel.grams <= VAN_LIMIT_GRAMS

    def load(self, parcel: Parcel) -> None:
        if not self.fits(parcel):
            raise ValueError(f"parcel {parcel.number} does not fit into van {self.plate}")
        self.parcels.append(parcel)

    def unload_order(self) -> list[Parcel]:
        """Fragile parcels lie on top and come out first; heavy ones lie at the bottom."""
        return sorted(self.parcels, key=lambda parcel: (not parcel.fragile, parcel.grams, parcel.number))


@dataclass(order=True)
class Event:
    """Something that happens at a minute; `turn` keeps events of the same minute in the order they were made."""

    minute: int
    turn: int
    action: Callable[[], None] = field(compare=False)


class Clock:
    """Runs events in order of time."""

    def __init__(self) -> None:
        self.now = 0
        self._queue: list[Event] = []
        self._turns = itertools.count()

    def at(self, minute: int, action: Callable[[], None]) -> None:
        if minute < self.now:
            raise ValueError(f"minute {minute} is in the past, it is {self.now}")
        heapq.heappush(self._queue, Event(minute, next(self._turns), action))

    def after(self, minutes: int, action: Callable[[], None]) -> None:
        self.at(self.now + minutes, action)

    def run(self, until: int) -> None:
        while self._queue and self._queue[0].minute <= until:
            event = heapq.heappop(self._queue)
            self.now = event.minute
            event.action()
        self.now = max(self.now, until)


class Fleet:
    """Hands out vans and takes them back."""

    def __init__(self, plates: Iterable[str]) -> None:
        self._free = sorted(plates)
        if len(set(self._free)) != len(self._free):
            raise ValueError("two vans have the same plate")

    def __len__(self) -> int:
        return len(self._free)

    def take(self, district: str, minute: int) -> Van | None:
        return Van(self._free.pop(0), district, minute) if self._free else None

    def give_back(self, van: Van) -> None:
        if van.plate in self._free:
            raise ValueError(f"van {van.plate} was not out")
        self._free.append(van.plate)
        self._free.sort()


@dataclass
class Report:
    """What a day looked like."""

    parcels: int = 0
    revenue_cents: int = 0
    departures: int = 0
    rejected: list[int] = field(default_factory=list)
    waiting: int = 0
    by_district: Counter[str] = field(default_factory=Counter)

    @property
    def parcels_per_van(self) -> float:
        return sum(self.by_district.values()) / self.departures if self.departures else 0.0

    def lines(self) -> Iterator[str]:
        yield f"{self.parcels} parcels, {self.revenue_cents / 100:.2f} taken"
        yield f"{self.departures} departures, {self.parcels_per_van:.1f} parcels per van"
        for district, count in self.by_district.most_common():
            yield f"  {district}: {count}"
        if self.rejected:
            yield f"  rejected: {', '.join(map(str, self.rejected))}"


class Depot:
    """The rules: which van a parcel goes to, and when a van leaves."""

    def __init__(self, clock: Clock, fleet: Fleet, districts: Iterable[str]) -> None:
        self.clock, self.fleet = clock, fleet
        self.districts = frozenset(districts)
        self.loading: dict[str, Van] = {}
        self.waiting: dict[str, list[Parcel]] = defaultdict(list)
        self.report = Report()

    def receive(self, parcel: Parcel) -> None:
        """Scan a parcel; an unknown district or an overnight parcel after the cutoff is rejected, not guessed at."""
        late = parcel.service is Service.OVERNIGHT and self.clock.now > OVERNIGHT_CUTOFF
        if parcel.district not in self.districts or late:
            self.report.rejected.append(parcel.number)
            return
        self.report.parcels += 1
        self.report.revenue_cents += parcel.price()
        self._place(parcel)

    def _place(self, parcel: Parcel) -> None:
        van = self.loading.get(parcel.district)
        if van is not None and not van.fits(parcel):
            self.depart(van)
            van = None
        if van is None:
            van = self._open(parcel.district)
        if van is None:
            self.waiting[parcel.district].append(parcel)
            return
        van.load(parcel)
        if van.full:
            self.depart(van)

    def _open(self, district: str) -> Van | None:
        van = self.fleet.take(district, self.clock.now)
        if van is not None:
            self.loading[district] = van
            self.clock.after(MAX_WAIT_MINUTES, lambda: self._time_up(van))
        return van

    def _time_up(self, van: Van) -> None:
        if van.departed_at is None:
            self.depart(van)

    def depart(self, van: Van) -> None:
        """Send a van off; it is back after half an hour and a minute for every second parcel."""
        van.departed_at = self.clock.now
        self.loading.pop(van.district, None)
        self.report.departures += 1
        self.report.by_district[van.district] += len(van.parcels)
        self.clock.after(30 + len(van.parcels) // 2, lambda: self._returned(van))

    def _returned(self, van: Van) -> None:
        self.fleet.give_back(van)
        longest = max(self.waiting, key=lambda district: len(self.waiting[district]), default=None)
        if longest is not None:
            for parcel in self.waiting.pop(longest):
                self._place(parcel)

    def close(self) -> Report:
        """Send every van that is still loading and count what was left behind."""
        for van in list(self.loading.values()):
            self.depart(van)
        self.report.waiting = sum(len(parcels) for parcels in self.waiting.values())
        return self.report


def arrivals(seed: int, count: int, districts: list[str], minutes: int) -> list[tuple[int, Parcel]]:
    """Parcels of a made-up day with their minute of arrival, busiest around noon."""
    chance = random.Random(seed)
    services = [Service.ECONOMY] * 3 + [Service.STANDARD] * 5 + [Service.OVERNIGHT] * 2
    day = []
    for number in range(1, count + 1):
        minute = round(chance.triangular(0, minutes - 1, minutes / 2))
        grams = min(31_500, 200 + round(chance.expovariate(1 / 3_000)))
        parcel = Parcel(number, chance.choice(districts), grams, chance.choice(services), chance.random() < 0.1)
        day.append((minute, parcel))
    return sorted(day, key=lambda pair: (pair[0], pair[1].number))


def simulate(seed: int = 1, count: int = 2_000, vans: int = 9, minutes: int = 14 * 60) -> Report:
    """One day from opening to closing."""
    districts = ["harbour", "hill", "mill lane", "old town", "station", "university"]
    clock = Clock()
    depot = Depot(clock, Fleet(f"DP-{n:03d}" for n in range(1, vans + 1)), districts)
    for minute, parcel in arrivals(seed, count, districts, minutes):
        clock.at(minute, lambda parcel=parcel: depot.receive(parcel))
    clock.run(until=minutes)
    return depot.close()


if __name__ == "__main__":
    for line in simulate().lines():
        print(line)
