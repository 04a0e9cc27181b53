"""Observers: who is told what happens in a run. `results.Results` is one that writes files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vfl_flower.errors import VflError
from vfl_flower.figures import reached


class Observer:
    """Hears of everything, and does nothing: override what is of interest."""

    def began(self, folder: Path) -> None:
        """The run begins, or goes on, whose results come into this folder."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """An evaluation gave this history entry."""

    def progressed(self, done: int, planned: int) -> None:
        """So many of the planned steps, over all parties, have been answered."""

    def failed(self, party: int, error: VflError) -> None:
        """A party has failed, and the run goes on without it."""

    def ended(self) -> None:
        """The run is over, whatever came of it."""


class ProgressBar(Observer):
    """A bar of steps on the terminal, with what the last evaluation found."""

    @cached_property
    def _bar(self) -> Any:
        return tqdm(unit="step", disable=None, leave=False)

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Show what was reached."""
        self._bar.set_postfix_str(reached(entry))

    def progressed(self, done: int, planned: int) -> None:
        """Move the bar."""
        self._bar.total = planned
        self._bar.update(done - self._bar.n)

    def ended(self) -> None:
        """Leave no bar."""
        self._bar.close()
