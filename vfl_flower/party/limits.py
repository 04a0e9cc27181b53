"""Limits of a party's own rules, and the counts that they need.

Counts lie in ledgers beside the party's states (`records.ledger`), and the party counts before it
computes. So a count is never too low, even if the party continues from an older state. Only the
loss of the folder loses the counts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import unsealed
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import state_file
from vfl_flower.records.budget import Budget, limits_of
from vfl_flower.records.ledger import Ledger, Value, content_in_file, opened_by_party
from vfl_flower.transport.node import refused

_UNCOUNTED = "cannot count what it releases. See its own log."


class Limits:
    """Limits ``max-epochs`` and ``max-uploads``, in a run and whatever continues its model."""

    def __init__(
        self, rules: Rules, refuse: Callable[[str], ConfigError] = ConfigError, path: Path = Path()
    ) -> None:
        self.epochs, self.uploads = rules.max_epochs, rules.max_uploads
        self._refuse, self._path = refuse, path

    def begin(self) -> None:
        """Start the count at zero, unless the file has counts of this run's uploads."""
        if self.uploads is not None and not self._path.exists():
            with self._counts():
                pass

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
        """Count uploads of ``rows[places]``, ``times`` each, or none if a row has too many."""
        if self.uploads is not None and len(self._add(rows[places], times)):
            raise self.too_often

    def count_each(self, rows: NDArray[Any], together: bool) -> NDArray[np.bool_]:
        """Return which rows may be uploaded once more, [n]; count these, or all or none."""
        if self.uploads is None:
            return np.ones(len(rows), bool)
        return ~np.isin(rows, self._add(rows, 1, single=not together))

    def _add(self, rows: NDArray[Any], times: int, single: bool = False) -> NDArray[Any]:
        """Count uploads, return rows with too many, and then count none, or ``single`` others."""
        different, often = np.unique(rows, return_counts=True)
        with self._counts() as ledger:
            after = ledger.numbers("uploads", different) + often * times
            fits = after <= (self.uploads or 0)
            if single or fits.all():
                ledger.put("uploads", different[fits], after[fits])
        return different[~fits]

    def _counts(self) -> AbstractContextManager[Ledger]:
        return opened_by_party(self._path, _UNCOUNTED, content_in_file("uploads"))

    @property
    def too_often(self) -> ConfigError:
        """The refusal of a row that was uploaded as often as the rule allows."""
        return self._refuse(
            f"to upload a row more often than it allows: its rule is max-uploads = {self.uploads}"
        )


class PredictionBudget(Budget):
    """Counts the rows that a party embeds for predictions, over all its models and runs."""

    def __init__(self, context: Context, rules: Rules) -> None:
        self._context = context
        party = context.node_config.get("partition-id")
        path = state_file.place(context).with_name(f"party-{party}.predictions")
        most = rules.max_predictions, rules.max_predictions_per_day
        limits = limits_of("rows", "max-predictions", *most)
        super().__init__(partial(opened_by_party, path, _UNCOUNTED, _earlier_rows), limits)

    def take(self, rows: int) -> None:
        """Count rows before they are embedded, or none if a rule leaves fewer."""
        allowed, why = self.take_some(rows)
        if why:
            self.give_back(allowed)
            raise ConfigError(why)

    def take_some(self, wanted: int) -> tuple[int, str]:
        """Count as many rows as the rules allow, before they are embedded.

        Return their number, and the sentence that refuses the others, if any.
        """
        allowed, rule = super().take_some(wanted)
        why = f"to predict {wanted} rows: its rule is {rule}"
        return allowed, str(refused(self._context, why)) if rule else ""


def _earlier_rows(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the files of an earlier version: the total by key 0, and the rows of each day."""
    for each in (path, path.with_name(f"{path.name}-by-day")):
        content = unsealed(each) if each.exists() else b""
        for key, rows in np.frombuffer(content, "<i8").reshape(2, -1).T.tolist():
            yield "rows", key, rows


@contextmanager
def counted_predictions(context: Context, rules: Rules, rows: int) -> Iterator[None]:
    """Count the rows of one prediction, and give them back if the block fails."""
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
    """Count the rows of a service's order before they are embedded; return the forbidden ones.

    Rules forbid single rows, so that nobody's rows cost others their scores. The aligned rows are
    ``rows[places]``, [n]; ``there`` [n + k] also covers rows outside the alignment. Return
    positions, and the rule's sentence. Raise it if no row is allowed, but not for masked sums
    (``together``).
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
