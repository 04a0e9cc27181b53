"""How many steps a run has: planned, allowed by its privacy budget, ordered, and answered."""

from __future__ import annotations

from typing import Any

_KEPT = ("planned", "ordered", "answered", "stopped")


class StepBudget:
    """Steps over all parties; each is to have ``epochs`` passes over its rows.

    Parameters
    ----------
    per_epoch : K, the mini-batches of one pass over the training rows.
    parties : how many share the steps.
    abreast : whether all are to be ordered the same steps, one after the other, or none is.
    """

    def __init__(self, epochs: int, per_epoch: int, parties: int, abreast: bool = False) -> None:
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
    def limit(self) -> int:
        """Steps to order: those planned, as far as the privacy budget allows."""
        if self.stopped:
            return self.ordered
        return min(self.planned, self.allowed) // self._abreast * self._abreast

    @property
    def all_ordered(self) -> bool:
        """Whether no steps are left."""
        return self.ordered >= self.limit

    @property
    def epochs(self) -> float:
        """Epochs completed, on average over the parties."""
        return self.answered / self.of_epoch

    def window(self, done: int, longest: int) -> tuple[int, int, int]:
        """The next window of a party that was ordered so many steps: epoch, first step, steps."""
        epoch, first = divmod(done, self.per_epoch)
        share = self._abreast - self._asked % self._abreast
        steps = min(longest, self.per_epoch - first, (self.limit - self.ordered) // share)
        self.ordered += steps
        self._asked += 1
        return epoch, first, steps

    def stop(self) -> None:
        """Order no more steps."""
        self.stopped = True

    def without(self, done: int) -> None:
        """A party is gone that was ordered so many steps; nobody takes its others."""
        self.planned -= max(0, self._of_party - done)

    def with_again(self, done: int) -> None:
        """It is back."""
        self.planned += max(0, self._of_party - done)

    def kept(self) -> dict[str, Any]:
        """What is needed to go on, in JSON."""
        return {name: getattr(self, name) for name in _KEPT}

    def go_on_from(self, kept: dict[str, Any]) -> None:
        """Take over what `kept` gave."""
        for name in _KEPT:
            setattr(self, name, kept[name])
