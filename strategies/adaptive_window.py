"""How many steps a message carries: as configured, or as exchanges and steps are measured to last.

An exchange of w steps lasts a + b w seconds: a for the way there and back and all that is done once
a message, b for a step at both ends. Longer windows lose less of a, and are staler: their steps are
all of the parameters that the party had at the window's beginning. So the shortest is chosen by
which the ways take a twentieth of the steps' time, or the longest there may be.

It depends on what was measured, and so differs from run to run. Who wants a run again gives the
window that its summary tells.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from strategies.party_record import PartyRecord
from vfl_flower.protocol.schedule import Schedule

_PROBES = 1, 8  # steps of the windows that are measured
_SAMPLES = 4  # exchanges of each, of which the quickest counts: others had to wait for something
_SHARE = 0.05  # of the steps' time that ways may take


class AdaptiveWindow:
    """The window of each party's next turn.

    Parameters
    ----------
    per_epoch : K, steps of an epoch, which no window crosses.
    records : of all parties; those that have failed are not waited for.
    clock : seconds.
    """

    def __init__(
        self,
        schedule: Schedule,
        per_epoch: int,
        records: Sequence[PartyRecord],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window = schedule.window  # that was chosen, or is until then
        self.longest = schedule.longest
        self.measured: tuple[float, float] | None = None  # a and b, in seconds
        # Twice in a row a window is as long as the longer probe only if an epoch has room for both.
        self._measures = self.window < self.longest and per_epoch > 2 * _PROBES[1]
        self._coordinated = schedule.coordinated
        self._records = records
        self._clock = clock
        self._at: dict[int, int] = {}  # of coordinated windows, by their first step
        self._last: dict[int, tuple[int, float, int, bool]] = {}  # by party, of its last turn
        self._samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def next(self, record: PartyRecord) -> int:
        """Steps of a party's next window, at most; parties that go in step have the same."""
        if not self._measures:
            return self._at.get(record.steps, self.window)
        mine = self._samples[record.party]
        if record.party in self._last:
            exchange, began, steps, steady = self._last[record.party]
            if steady and record.exchange == exchange:  # no other message was between
                mine[steps].append(self._clock() - began)
        due = [probe for probe in _PROBES if len(mine[probe]) < _SAMPLES]
        found = due[0] if due else self._choose()
        return self._at.setdefault(record.steps, found) if self._coordinated else found

    def ordered(self, record: PartyRecord, steps: int) -> None:
        """A turn of so many steps is sent."""
        if self._measures:
            before = self._last.get(record.party)
            # A turn brings the answer to the window before, too.
            steady = before is not None and before[2] == steps
            self._last[record.party] = record.exchange + 1, self._clock(), steps, steady

    def _choose(self) -> int:
        """The window for all, once all that are there have been measured."""
        samples = [self._samples[record.party] for record in self._records if record.alive]
        if any(len(of[probe]) < _SAMPLES for of in samples for probe in _PROBES):
            return self.window
        measured = [tuple(min(of[probe]) for probe in _PROBES) for of in samples]
        short, long = (max(each) for each in zip(*measured, strict=True))  # of the slowest
        step = max(0.0, (long - short) / (_PROBES[1] - _PROBES[0]))
        way = max(0.0, short - step)
        self.window = 1
        while self.window < self.longest and way > _SHARE * step * self.window:
            self.window *= 2
        self.window = min(self.window, self.longest)
        self.measured, self._measures = (way, step), False
        return self.window

    def kept(self) -> dict[str, Any]:
        """What is needed to go on, in JSON."""
        return {"window": self.window, "measured": self.measured}

    def go_on_from(self, kept: dict[str, Any]) -> None:
        """Take over what `kept` gave: what was measured then holds."""
        if kept.get("measured"):
            self.window = min(kept["window"], self.longest)
            self.measured = tuple(kept["measured"])
            self._measures = False

    def figures(self) -> dict[str, Any]:
        """For a summary."""
        names = "exchange_seconds", "step_seconds"
        found = dict(zip(names, self.measured, strict=True)) if self.measured else None
        return {"window": self.window, "window_measured": found}
