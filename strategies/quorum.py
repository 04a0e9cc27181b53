"""Uploads that await their quorum, and when they have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from strategies.party_record import PartyRecord
from strategies.step_budget import StepBudget
from vfl_flower.protocol.uploads import Arrival
from vfl_flower.transport.messages import TrainOrder


class Waiting:
    """Arrivals in the order in which they came, to be answered a quorum at a time."""

    def __init__(self, quorum: int, records: Sequence[PartyRecord], budget: StepBudget) -> None:
        self.draining = False  # whether parties wait for their next turns
        self._quorum = quorum
        self._records = records
        self._budget = budget
        self._arrivals: list[Arrival] = []
        self._group: list[Arrival] = []  # which is to be answered now

    def add(self, arrival: Arrival) -> None:
        """One more."""
        self._arrivals.append(arrival)

    def drop(self, party: int) -> None:
        """A party has lost its state, and with it what its window's answer would be for."""
        for arrivals in (self._arrivals, self._group):
            arrivals[:] = [arrival for arrival in arrivals if arrival.party != party]

    def groups(self, refresh: Callable[[Sequence[Arrival]], None]) -> Iterator[list[Arrival]]:
        """Those that have their quorum, by party; what their rows need is fetched before."""
        while self._arrivals and len(self._arrivals) >= self._now():
            count = self._now()
            self._group, self._arrivals = self._arrivals[:count], self._arrivals[count:]
            self._group.sort(key=lambda arrival: arrival.party)
            refresh(self._group)
            if self._group:
                yield self._group
            self._group = []

    def _now(self) -> int:
        """The quorum, or as many as can still come: fewer near the end, or after failures."""
        if self.draining:  # as many as there are
            return max(1, min(self._quorum, len(self._arrivals)))
        training = [
            record
            for record in self._records
            if record.alive
            and (
                record.awaits_quorum
                or isinstance(record.order, TrainOrder)
                or not self._budget.all_ordered
            )
        ]
        return max(1, min(self._quorum, len(training)))
