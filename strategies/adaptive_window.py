"""Choose the window, the steps of a message, by measurement if none is configured.

An exchange of w steps lasts a + b w seconds: a is the round trip of a message, b a step at both
ends. Longer windows waste less on round trips. They are also staler: all their steps use the
parameters at the window's beginning. So use the smallest window whose round trip takes at most a
twentieth of its steps' time, or the longest window allowed.

The choice depends on measured times, and so differs from run to run. To repeat a run, set the
window that its summary shows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from strategies.party_record import PartyRecord
from vfl_flower.protocol.schedule import Schedule

_PROBES = 1, 8  # steps of the measured windows
_SAMPLES = 4  # exchanges of each; the quickest counts, since the others waited for something
_SHARE = 0.05  # largest share of the round trip in the steps' time


class AdaptiveWindow:
    """Chooses the window of each party's next turn.

    Parameters
    ----------
    per_epoch : K, steps of an epoch. No window crosses its end.
    records : records of all parties; failed ones are not measured.
    clock : returns seconds.
    """

    def __init__(
        self,
        schedule: Schedule,
        per_epoch: int,
        records: Sequence[PartyRecord],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window = schedule.window  # the chosen window, or until then the initial one
        self.longest = schedule.longest
        self.measured: tuple[float, float] | None = None  # a and b, in seconds
        self.active = self.window < self.longest  # whether to choose windows
        # Only an epoch with room for both has two windows in a row of the longer probe.
        self._measures = self.active and per_epoch > 2 * _PROBES[1]
        self._coordinated = schedule.coordinated
        self._records = records
        self._clock = clock
        self._at: dict[int, int] = {}  # first step -> length of a coordinated window
        self._last: dict[int, tuple[int, float, int, bool]] = {}  # party -> its last turn
        self._samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def next(self, record: PartyRecord) -> int:
        """Return the most steps of a party's next window, equal for parties in step."""
        if not self._measures:
            return self._at.get(record.steps, self.window)
        mine = self._samples[record.party]
        if record.party in self._last:
            exchange, began, steps, steady = self._last[record.party]
            if steady and record.exchange == exchange:  # no other message came between
                mine[steps].append(self._clock() - began)
        due = [probe for probe in _PROBES if len(mine[probe]) < _SAMPLES]
        found = due[0] if due else self._choose()
        return self._at.setdefault(record.steps, found) if self._coordinated else found

    def ordered(self, record: PartyRecord, steps: int) -> None:
        """Note a turn of so many steps."""
        if self._measures:
            before = self._last.get(record.party)
            # A turn also carries the feedback for the window before.
            steady = before is not None and before[2] == steps
            self._last[record.party] = record.exchange + 1, self._clock(), steps, steady

    def _choose(self) -> int:
        """Choose the window of all parties, once all available ones are measured."""
        samples = [self._samples[record.party] for record in self._records if record.alive]
        if any(len(of[probe]) < _SAMPLES for of in samples for probe in _PROBES):
            return self.window
        measured = [tuple(min(of[probe]) for probe in _PROBES) for of in samples]
        short, long = (max(each) for each in zip(*measured, strict=True))  # the slowest party
        step = max(0.0, (long - short) / (_PROBES[1] - _PROBES[0]))
        way = max(0.0, short - step)
        self.window = 1
        while self.window < self.longest and way > _SHARE * step * self.window:
            self.window *= 2
        self.window = min(self.window, self.longest)
        self.measured, self._measures = (way, step), False
        return self.window

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        return {"window": self.window, "measured": self.measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, without measuring again."""
        if state.get("measured"):
            self.window = min(state["window"], self.longest)
            self.measured = tuple(state["measured"])
            self._measures = False

    def figures(self) -> dict[str, Any]:
        """Return the window and the measured times, for a summary."""
        names = "exchange_seconds", "step_seconds"
        found = dict(zip(names, self.measured, strict=True)) if self.measured else None
        return {"window": self.window, "window_measured": found}
