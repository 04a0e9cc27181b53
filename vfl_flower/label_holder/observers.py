"""Observers: who is told what happens in a run.

`results.Results` writes files, and `progress.Progress` says where a run stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vfl_flower.config.errors import VflError


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
