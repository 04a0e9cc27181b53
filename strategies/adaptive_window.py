"""Choose the window, the steps of a message, by time and by loss if none is configured.

**Time.** An exchange of w steps lasts a + b w seconds: a is the round trip of a message, b a step
at both ends. Longer windows waste less on round trips. So no window is longer than the smallest
whose round trip takes at most a twentieth of its steps' time.

**Loss.** All steps of a window use the party's parameters at its beginning, as one large mini-batch
would. With a long window, the sum of these steps can overshoot, and the loss jumps where the next
window begins. So windows start short: with one step, or with 8 where times are measured, since the
measurement tries such windows anyway. They grow by 7 % with each answer. A jump of the loss makes
them half as long.

Measured times differ from run to run, and so do windows that depend on them. To repeat a run, set
the window.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from strategies.turns import PartyRecord
from vfl_flower.protocol.schedule import Schedule

_PROBES = 1, 8  # steps of the measured windows
_SAMPLES = 2  # exchanges of each; the quickest counts, since the others waited for something
_SHARE = 0.05  # largest share of the round trip in the steps' time
_GROWTH, _SHRINKAGE = 1.07, 0.5  # of the longest window that the loss allows, with each answer
_DEVIATIONS = 2.5  # of the loss, for a jump: at 2, chance alone undoes the growth
_KEPT = 2048  # lengths of coordinated windows to keep


class LossJumps:
    """Detects that the loss jumps where a window begins, by more than its noise.

    Noise is the difference between successive losses of one window, whose parameters hardly differ.
    A jump lies between two windows, so it does not count as noise. Windows of one step have only
    the difference to the window before.
    """

    def __init__(self) -> None:
        self._mean = math.nan  # of about the last four losses
        self._variance, self._differences = 0.0, 0
        self._last = math.nan

    def jumps(self, losses: Sequence[float]) -> bool:
        """Return whether the first of a window's training losses is far above the losses before."""
        jumped = losses[0] > self._mean + _DEVIATIONS * math.sqrt(self._variance)
        before = [*losses[:-1]] if len(losses) > 1 else [self._last]
        for earlier, later in zip(before, losses[-len(before) :], strict=True):
            square = (later - earlier) ** 2 / 2
            if math.isfinite(square):
                self._differences += 1
                share = max(1 / self._differences, 1 / 32)
                self._variance += share * (square - self._variance)
        for loss in losses:
            if math.isfinite(loss):
                self._mean = (
                    loss if math.isnan(self._mean) else self._mean + (loss - self._mean) / 4
                )
                self._last = loss
        return jumped

    def state_dict(self) -> list[float | None]:
        """Return what is needed to resume, in JSON."""
        state = self._mean, self._variance, self._differences, self._last
        return [None if math.isnan(each) else each for each in state]

    def load_state_dict(self, state: Sequence[float | None]) -> None:
        """Restore what `state_dict` returned."""
        mean, variance, differences, last = (math.nan if each is None else each for each in state)
        self._mean, self._variance, self._last = mean, variance, last
        self._differences = int(differences)


class AdaptiveWindow:
    """Chooses the window of each party's next turn, by time in seconds, and by loss if permitted.

    Noise that hides labels forbids the loss. Failed parties are not measured.
    """

    def __init__(
        self,
        schedule: Schedule,
        records: Sequence[PartyRecord],
        by_loss: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.active = schedule.window < schedule.longest  # whether to choose windows
        self.measured: tuple[float, float] | None = None  # a and b, in seconds
        self._shortest, self._longest = schedule.window, schedule.longest
        self._by_time = schedule.longest  # the longest window that is worth its time
        fits = schedule.longest >= _PROBES[1]
        self._measures = schedule.measures and self.active and fits
        first = max(schedule.window, _PROBES[1] * self._measures)
        self._by_loss = float(first if by_loss else schedule.longest)
        self._jumps = LossJumps() if self.active and by_loss else None
        self._coordinated = schedule.coordinated
        self._records = records
        self._clock = clock
        self._at: dict[int, int] = {}  # first step -> length of a coordinated window
        self._last: dict[int, tuple[int, float, int, bool]] = {}  # party -> its last turn
        self._samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    @property
    def window(self) -> int:
        """The most steps of the next window."""
        return min(self._by_time, int(self._by_loss))

    def next(self, record: PartyRecord) -> int:
        """Return the most steps of a party's next window, equal for parties in step."""
        found = self._probe(record) if self._measures else self.window
        if not self._coordinated:
            return found
        if len(self._at) > _KEPT:
            self._at = {first: self._at[first] for first in list(self._at)[-_KEPT // 2 :]}
        return self._at.setdefault(record.steps, found)

    def ordered(self, record: PartyRecord, steps: int) -> None:
        """Note a turn of so many steps."""
        if self._measures:
            before = self._last.get(record.party)
            # A turn also carries the feedback for the window before.
            steady = before is not None and before[2] == steps
            self._last[record.party] = record.exchange + 1, self._clock(), steps, steady

    def answered(self, losses: Sequence[float]) -> None:
        """Let windows grow, or shrink if the loss of the answered steps jumped."""
        if self._jumps and losses:
            factor = 1.0 if self._measures else _GROWTH
            factor = _SHRINKAGE if self._jumps.jumps(losses) else factor
            self._by_loss = min(max(self._shortest, self._by_loss * factor), self._longest)

    def _probe(self, record: PartyRecord) -> int:
        """Note the time of a party's last turn; return the next window to measure."""
        mine = self._samples[record.party]
        if record.party in self._last:
            exchange, began, steps, steady = self._last[record.party]
            if steady and record.exchange == exchange:  # no other message came between
                mine[steps].append(self._clock() - began)
        due = [probe for probe in _PROBES if len(mine[probe]) < _SAMPLES]
        if not due:
            self._choose()
        return due[0] if due else self.window

    def _choose(self) -> None:
        """Choose the longest window by time, once all available parties are measured."""
        samples = [self._samples[record.party] for record in self._records if record.alive]
        if any(len(of[probe]) < _SAMPLES for of in samples for probe in _PROBES):
            return
        measured = [tuple(min(of[probe]) for probe in _PROBES) for of in samples]
        short, long = (max(each) for each in zip(*measured, strict=True))  # the slowest party
        step = max(0.0, (long - short) / (_PROBES[1] - _PROBES[0]))
        way = max(0.0, short - step)
        window = 1
        while window < self._longest and way > _SHARE * step * window:
            window *= 2
        self._by_time = min(max(window, self._shortest), self._longest)
        self.measured, self._measures = (way, step), False

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        return {
            "measured": self.measured,
            "by_time": self._by_time,
            "by_loss": self._by_loss,
            "jumps": self._jumps and self._jumps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, without measuring again."""
        if state.get("measured"):
            self._by_time = min(state.get("by_time", self._longest), self._longest)
            self.measured, self._measures = tuple(state["measured"]), False
        if self._jumps and state.get("jumps"):
            self._by_loss = min(state["by_loss"], float(self._longest))
            self._jumps.load_state_dict(state["jumps"])

    def figures(self) -> dict[str, Any]:
        """Return the last window and the measured times, for a summary."""
        names = "exchange_seconds", "step_seconds"
        found = dict(zip(names, self.measured, strict=True)) if self.measured else None
        return {"window": self.window, "window_measured": found}
