"""Limits of a party's own rules, and the counts that they need.

Counts lie in files beside the party's states. The party writes a count to disk before it computes
what it counts. So a count is never too low, even if the process is killed or the party continues
from an older state. Only the loss of the folder loses the counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import alone_in, make_folder, unsealed, write_sealed
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import state_file
from vfl_flower.transport.node import refused

log = logging.getLogger("flwr")

Counts = NDArray[np.uint64]
"""Counted numbers, ascending, and their counts: [2, n]."""


class Limits:
    """Limits of a party's rules ``max-epochs`` and ``max-uploads`` in a run.

    Parameters
    ----------
    refuse : builds the error from the refused action and the reason.
    path : file that counts the uploads of each row of the party. It covers a run, all runs that
        continue it, and predictions with their models.
    """

    def __init__(
        self, rules: Rules, refuse: Callable[[str], ConfigError] = ConfigError, path: Path = Path()
    ) -> None:
        self.epochs, self.uploads = rules.max_epochs, rules.max_uploads
        self._refuse = refuse
        self._path = path

    def begin(self) -> None:
        """Start the count at zero, unless the file has counts of this run's uploads."""
        if self.uploads is not None and not self._path.exists():
            add(self._path, np.zeros(0, np.uint64), 0, self.uploads)

    def go_on(self) -> None:
        """Raise `ConfigError` if earlier uploads were not counted."""
        if self.uploads is not None and not self._path.exists():
            raise self._refuse(
                "to continue, since it has no count of its earlier uploads: its rule is "
                f"max-uploads = {self.uploads}"
            )

    def check_steps(self, steps: int, of_epoch: int) -> None:
        """Raise `ConfigError` if the model may not train on so many mini-batches."""
        if self.epochs is not None and steps > self.epochs * of_epoch:
            raise self._refuse(
                f"step {steps}, of {of_epoch} an epoch: its rule is max-epochs = {self.epochs}"
            )

    def count(self, rows: NDArray[Any], places: Any = slice(None), times: int = 1) -> None:
        """Count uploads of ``rows[places]``, each ``times`` times.

        Raises
        ------
        ConfigError
            If a row has too many uploads. Then no row is counted.
        """
        if self.uploads is not None and not add(self._path, rows[places], times, self.uploads):
            raise self.too_often

    def count_each(self, rows: NDArray[Any], together: bool) -> NDArray[np.bool_]:
        """Return which rows may be uploaded once more, [n]. Count one upload of each.

        Parameters
        ----------
        together : whether to count nothing unless all rows may be uploaded.
        """
        if self.uploads is None:
            return np.ones(len(rows), bool)
        return add_each(self._path, rows, self.uploads, together)

    @property
    def too_often(self) -> ConfigError:
        """The refusal of a row that was uploaded as often as the rule allows."""
        return self._refuse(
            f"to upload a row more often than it allows: its rule is max-uploads = {self.uploads}"
        )


class PredictionBudget:
    """Counts the rows that a party embeds for predictions, over all its models and runs.

    Its rules ``max-predictions`` and ``max-predictions-per-day`` limit them. A service asks for few
    rows at a time, so the party writes counts of `_AHEAD` rows ahead to the disk. `close` gives the
    rest back. After a crash, the count may be too high by that many.
    """

    def __init__(self, context: Context, rules: Rules) -> None:
        self._context = context
        party = context.node_config.get("partition-id")
        path = state_file.place(context).with_name(f"party-{party}.predictions")
        self._limits = [
            (path, rules.max_predictions, "max-predictions", False),
            (
                path.with_name(f"{path.name}-by-day"),
                rules.max_predictions_per_day,
                "max-predictions-per-day",
                True,
            ),
        ]
        # name -> day, rows left. A clock that is set back must not start a new day.
        self._ahead = {
            name: (_last(path) if daily and most is not None else 0, 0)
            for path, most, name, daily in self._limits
        }

    def take(self, rows: int) -> None:
        """Count rows before they are embedded.

        Raises
        ------
        ConfigError
            If a rule leaves fewer rows. The sentence names the rule. Then no row is counted.
        """
        allowed, why = self.take_some(rows)
        if why:
            self.give_back(allowed)
            raise ConfigError(why)

    def take_some(self, rows: int) -> tuple[int, str]:
        """Count rows before they are embedded, as far as the rules allow.

        Returns
        -------
        the number of rows that were counted, and the sentence that refuses the others, if any.
        """
        allowed, why = rows, ""
        for path, most, name, daily in self._limits:
            if most is None:
                continue
            then, left = self._ahead[name]
            day = max(then, int(time.time()) // 86400) if daily else 0
            left = left if then == day else 0
            if allowed > left:
                left += add_ahead(path, day, allowed - left, min(_AHEAD, most // 100), most)
            self._ahead[name] = day, left
            if left < allowed:
                allowed, why = left, f"to predict {rows} rows: its rule is {name} = {most}"
        self._use(allowed)
        return allowed, str(refused(self._context, why)) if why else ""

    def give_back(self, rows: int) -> None:
        """Take back rows that `take` has just counted, since they are not embedded."""
        self._use(-rows)

    def _use(self, rows: int) -> None:
        for _, most, name, _ in self._limits:
            day, left = self._ahead[name]
            self._ahead[name] = day, left - rows * (most is not None)

    def close(self) -> None:
        """Give back the rows that were counted ahead, to the day on which they were counted."""
        for path, most, name, _ in self._limits:
            day, left = self._ahead[name]
            if most is not None and left:
                add(path, np.full(1, day, np.uint64), -left, most)
            self._ahead[name] = day, 0


_AHEAD = 1000


@contextmanager
def counted_predictions(context: Context, rules: Rules, rows: int) -> Iterator[None]:
    """Count the rows of one prediction, as `PredictionBudget` does.

    The block counts what else the prediction spends. If it fails, the rows are given back.
    """
    budget = PredictionBudget(context, rules)
    try:
        budget.take(rows)
        try:
            yield
        except BaseException:
            budget.give_back(rows)
            raise
    finally:
        budget.close()


def refused_rows(
    limits: Limits | None,
    budget: PredictionBudget,
    rows: NDArray[Any],
    places: NDArray[Any],
    there: NDArray[np.bool_],
    together: bool,
) -> tuple[NDArray[np.int64], str]:
    """Count the rows of a service's order before they are embedded.

    Rules forbid single rows, so that nobody's rows cost others their scores.

    Parameters
    ----------
    rows, places : the aligned rows of the order are ``rows[places]``, [n].
    there : whether the data have a row, [n + k]. The last rows are outside the alignment.
    together : whether nothing is embedded if a rule forbids a row, as under masked sums.

    Returns
    -------
    positions of the rows that a rule forbids, and its sentence.

    Raises
    ------
    ConfigError
        If a rule allows no row at all, unless sums are masked.
    VflError
        If the party cannot keep its counts.
    """
    wanted = np.flatnonzero(there)
    number, why = len(wanted), ""
    if together:
        budget.take(number)
    else:
        number, why = budget.take_some(number)
    by_row = limits is not None and limits.uploads is not None
    if number == len(wanted) and not by_row:  # no rule forbids a row
        return np.zeros(0, np.int64), ""
    allowed = there.copy()
    allowed[wanted[number:]] = False
    if limits and by_row:
        if allowed[len(places) :].any():
            why = "It scores only aligned rows: its rule max-uploads counts them by row."
            allowed[len(places) :] = False
        mine = np.flatnonzero(allowed)
        often = ~limits.count_each(rows[places[mine]], together)
        if often.any():
            why = str(limits.too_often)
            allowed[mine[often]] = False
        budget.give_back(number - (0 if together and why else int(allowed.sum())))
    refused = np.flatnonzero(there & ~allowed)
    if len(refused) == len(wanted) > 0 and not together:
        raise ConfigError(why)
    return refused, why


# --- counts on disk -----------------------------------------------------------------------------


def add(path: Path, things: NDArray[Any], times: int, most: int) -> bool:
    """Add to counts, unless a count would exceed ``most``. Return whether it added.

    Parameters
    ----------
    things : numbers of 64 bits to count. A number may occur several times.
    times : how often to count each. A negative number gives back what was counted ahead.

    Raises
    ------
    VflError
        If the file is damaged or cannot be written.
    """
    with _opened(path, things) as found:
        after = (found.before + found.often * times).clip(0)
        if times > 0 and after.max(initial=0) > most:
            return False
        found.after = after
    return True


def add_each(
    path: Path, things: NDArray[Any], most: int, together: bool = False
) -> NDArray[np.bool_]:
    """Add to the counts that ``most`` permits, as `add` does. Return which these are, [n].

    Parameters
    ----------
    together : whether to add nothing unless ``most`` permits all.
    """
    with _opened(path, things) as found:
        fits = found.before + found.often <= most
        if fits.all() or not together:
            found.after = found.before + found.often * fits
    allowed: NDArray[np.bool_] = fits[np.searchsorted(found.things, things.astype(np.uint64))]
    return allowed


def add_ahead(path: Path, thing: int, lacks: int, few: int, most: int) -> int:
    """Add ``lacks`` to one count, or the rest up to ``most``. Return how much it added.

    It adds ``few`` instead, if that is more and ``most`` permits it.
    """
    with _opened(path, np.full(1, thing, np.uint64)) as found:
        left = max(0, most - int(found.before[0]))
        more = few if lacks <= few <= left else min(lacks, left)
        found.after = found.before + more
    return more


def _last(path: Path) -> int:
    """Return the largest number that was counted, or 0."""
    with _opened(path, np.zeros(0, np.uint64)) as found:
        return found.last


@dataclass
class _Open:
    """Counts in a file that is locked: different numbers, and how often they are to be counted.

    before, after : their counts, int64. Without ``after``, the file stays as it was.
    last : the largest number in the file, or 0.
    """

    things: NDArray[np.uint64]
    often: NDArray[np.int64]
    before: NDArray[np.int64]
    last: int
    after: NDArray[np.int64] | None = None


@contextmanager
def _opened(path: Path, things: NDArray[Any]) -> Iterator[_Open]:
    """Yield the counts of these numbers under a lock; write them at the end."""
    try:
        make_folder(path.parent)
        with alone_in(path.parent):
            kept = np.frombuffer(unsealed(path) if path.exists() else b"", "<u8")
            counts: Counts = kept.reshape(2, -1).astype(np.uint64)
            last = int(counts[0, -1]) if counts.size else 0
            new, often = np.unique(things.astype(np.uint64), return_counts=True)
            places = np.searchsorted(counts[0], new)
            there = places < counts.shape[1]
            there[there] = counts[0, places[there]] == new[there]
            if not there.all():
                first = np.stack([new[~there], np.zeros_like(new[~there])])
                counts = np.insert(counts, places[~there], first, axis=1)
            changed = np.searchsorted(counts[0], new)
            found = _Open(new, often, counts[1, changed].astype(np.int64), last)
            yield found
            if found.after is not None:
                counts[1, changed] = found.after
                write_sealed(path, counts.astype("<u8").tobytes())
    except (OSError, ValueError, VflError) as error:
        log.warning("The party's counts in %s cannot be kept: %s", path, error)
        raise VflError("cannot count what it releases. See its own log.") from None
