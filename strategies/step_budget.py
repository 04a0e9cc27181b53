"""Step budget, due evaluations, and the quorums of uploads."""

from collections.abc import Iterator, Sequence
from typing import Any

from strategies.party_record import PartyRecord
from vfl_flower.protocol.ends import Arrival
from vfl_flower.transport.messages import TrainOrder

_SAVED = ("planned", "ordered", "answered", "stopped")


class StepBudget:
    """Steps over all parties; each party gets ``epochs`` passes over its rows, of K steps.

    ``abreast``: all parties must get the same steps, or none. ``eval_every`` may be parts of an
    epoch.
    """

    def __init__(
        self,
        epochs: int,
        per_epoch: int,
        parties: int,
        abreast: bool = False,
        eval_every: float = 1.0,
        eval_first: bool = False,
    ) -> None:
        self._eval_every = eval_every
        self._eval_first = eval_first
        self._abreast = parties if abreast else 1
        self._asked = 0  # windows, over all parties
        self.per_epoch = per_epoch
        self.of_epoch = per_epoch * max(1, parties)
        self._of_party = epochs * per_epoch
        self.planned = epochs * self.of_epoch
        self.allowed = self.planned  # by the privacy budget
        self.ordered = 0
        self.answered = 0
        self.stopped = False  # before all were ordered

    @property
    def left(self) -> int:
        """Steps still to order, as far as the privacy budget allows."""
        if self.stopped:
            return 0
        return min(self.planned, self.allowed) // self._abreast * self._abreast - self.ordered

    @property
    def limit(self) -> int:
        """All steps, ordered or still to order."""
        return self.ordered + self.left

    @property
    def epochs(self) -> float:
        """Epochs completed, on average over the parties."""
        return self.answered / self.of_epoch

    @property
    def evaluation(self) -> int:
        """Number of the last evaluation that the answered steps call for."""
        epochs = self.answered / self.of_epoch
        return int(epochs / self._eval_every * (1 + 1e-12)) + self._eval_first

    def evaluates_after(self, epoch: int, last: int) -> bool:
        """Return whether to evaluate after this epoch, where training is by whole epochs."""
        before, now = (int(each / self._eval_every * (1 + 1e-12)) for each in (epoch - 1, epoch))
        return now > before or epoch == last or self.stopped

    def window(self, done: int, longest: int) -> tuple[int, int, int]:
        """Order a party's next window after ``done`` steps; return epoch, first step and number."""
        epoch, first = divmod(done, self.per_epoch)
        share = self._abreast - self._asked % self._abreast
        steps = min(longest, self.per_epoch - first, self.left // share)
        self.ordered += steps
        self._asked += 1
        return epoch, first, steps

    def without(self, done: int) -> None:
        """Remove a failed party's remaining steps; ``done`` were ordered from it."""
        self.planned -= max(0, self._of_party - done)

    def with_again(self, done: int) -> None:
        """Add a returned party's remaining steps; ``done`` were ordered from it."""
        self.planned += max(0, self._of_party - done)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in _SAVED:
            setattr(self, name, state[name])


class UnansweredUploads:
    """Arrivals in their order, which await a quorum. It blocks nothing: `Messenger.gather` does."""

    def __init__(self, quorum: int, records: Sequence[PartyRecord], budget: StepBudget) -> None:
        self.arrivals: list[Arrival] = []
        self.held = False  # whether to answer none for now
        self.draining = False  # whether parties wait for their next turns
        self._quorum = quorum
        self._records = records
        self._budget = budget
        self._group: list[Arrival] = []  # the quorum that is being answered

    def drop(self, party: int) -> None:
        """Drop the window of a party that has lost the state for its feedback."""
        for arrivals in (self.arrivals, self._group):
            arrivals[:] = [arrival for arrival in arrivals if arrival.party != party]

    def groups(self) -> Iterator[list[Arrival]]:
        """Yield each quorum of arrivals, sorted by party.

        Near the end or after failures, fewer arrivals can still come: these are then enough.
        """
        while not self.held and self.arrivals:
            count = len(self.arrivals)  # while draining, answer all that are in
            if not self.draining:
                any_left = self._budget.left > 0
                count = sum(
                    record.alive
                    and (any_left or record.awaits_quorum or isinstance(record.order, TrainOrder))
                    for record in self._records
                )
            count = max(1, min(self._quorum, count))
            if len(self.arrivals) < count:
                break
            self._group, self.arrivals = self.arrivals[:count], self.arrivals[count:]
            self._group.sort(key=lambda arrival: arrival.party)
            yield self._group
            self._group = []
