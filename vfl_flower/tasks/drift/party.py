"""Drift of a party's columns, computed at the party.

When a run begins, the party learns bins of its raw columns, and their shares among its training
rows. At a prediction it counts the rows in the same bins. It writes a table with the names
of its columns beside its states. The label holder gets two numbers: how many columns drift
moderately, and how many largely.

The label holder chooses the rows, so it could ask about groups that differ in one person. So a
report covers at least 200 rows, or ``min-rows``. A random factor hides each index, and a prediction
or a service reports only on rows that no other has reported on that day. Both are left out if all
parties have one owner. The rule ``refuse='drift'`` forbids reports. A run with noise on embeddings
has none.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import unsealed
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules, refused_tasks
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.drift import LEAST, Columns, Window, columns_of, sampled
from vfl_flower.data.source import Source
from vfl_flower.party import state_file
from vfl_flower.party.state_file import Saved, load_shares
from vfl_flower.records.ledger import Value, no_file, opened, today
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import simulated

Places = NDArray[np.int64]
Names = NDArray[np.uint64]
Read = Callable[[Places, list[str]], Columns]
"""Yields raw columns, by their names, of the rows at some places."""
_DAY = "day"  # name in the ledger: person -> day of the last report

_AT_ONCE = 200_000  # values to count while a request waits


def of_block(block: FeatureBlock) -> Read:
    """Return what reads the columns of a partitioned data set's test rows."""
    test = block.test
    return lambda places, names: columns_of(np.asarray(test[places]))


class DriftReports:
    """Reports of a model's drift; none if its run ``perturbs``, as the epsilon covers no report."""

    def __init__(self, context: Context, saved: Saved, run: str, perturbs: bool = False) -> None:
        self._watch, self._context = load_shares(saved.state), context
        rules, one_owner = Rules.of(context.node_config), simulated(context)
        asked = not one_owner or "min-rows" in context.node_config
        self._least = max(LEAST, rules.min_rows if asked else 0)
        self._refuses = perturbs or "drift" in refused_tasks(rules.refuse)
        party = context.node_config.get("partition-id")
        self._table = state_file.place(context, run=run).with_suffix(".drift.csv")
        self._days = None if one_owner else self._table.with_name(f"party-{party}.drift-rows")
        self._window = Window()
        self._waiting: list[tuple[Names, Places]] = []
        self._people: Names = np.zeros(0, np.uint64)  # numbers of the aligned people
        self._told = (0, 0)

    def of_prediction(self, names: Names, places: Places, read: Read) -> Arrays:
        """Write the table of a prediction's rows; return the arrays of the report, if any."""
        if self._watch is None or len(places) < LEAST:
            return {}
        self._count(places, read)
        self._write()
        if self._refuses:
            return {}
        fresh = self._fresh(names)
        if fresh.any() and not fresh.all():
            self._watch.clear()
            self._count(places[fresh], read)
        return self._report(fresh)

    def of_scores(
        self,
        block: FeatureBlock,
        own: Source | None,
        asked: Places,
        at: Places,
        places: Places,
        singles: Places,
    ) -> Arrays:
        """Count rows that a service has embedded; return the arrays of a report that is due.

        The aligned rows ``asked`` lie at ``at`` in the block; ``places`` and ``singles`` lie in
        ``own``. Missing rows have -1.
        """
        if self._watch is None or (own and own.lazy):
            return {}
        if not len(self._people):
            self._people = block.test_rows[block.tested].astype(np.uint64)
        there = at >= 0  # the party's data may have lost a row
        people = self._people[asked][there]
        if own is None:
            return self._of_service(people, at[there], of_block(block))
        mine = places[asked][there]
        if len(singles):
            others = singles[singles >= 0]
            people = np.concatenate([people, own.names(others)])
            mine = np.concatenate([mine, others])
        assert block.preparation is not None
        read = partial(own.raw_columns, dates=block.preparation.dates)
        return self._of_service(people, mine, read)

    def _of_service(self, names: Names, places: Places, read: Read) -> Arrays:
        assert self._watch is not None
        if new := self._window.new(names.tolist()):
            self._waiting.append((names[new], places[new]))
        if not self._window.is_due or self._window.waiting < self._least:
            return {}
        names, places = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        if self._window.step():
            self._watch.clear()
        fresh = np.ones(len(names), bool) if self._refuses else self._fresh(names)
        self._count(places[fresh], read, _AT_ONCE)
        self._write()
        return {} if self._refuses else self._report(fresh)

    def forget_waiting(self) -> None:
        """Drop rows that wait to be counted, since their places have changed."""
        self._waiting, self._window.waiting = [], 0

    def _count(self, places: Places, read: Read, most: int | None = None) -> None:
        """Count rows, or a sample with at most so many values."""
        assert self._watch is not None
        few = places[sampled(len(places), len(self._watch.names), most)]
        if len(few):
            self._watch.add(read(few, self._watch.names))

    def _report(self, fresh: NDArray[np.bool_]) -> Arrays:
        assert self._watch is not None
        if not fresh.any():
            log.info("The party reports no drift: fewer than %d new rows today.", self._least)
            return {}
        return {"drift": np.array(self._watch.levels(self._days is not None), np.int32)}

    def _fresh(self, names: Names) -> NDArray[np.bool_]:
        """Return the rows that no report of this day has covered, and count them, if enough."""
        none = np.zeros(len(names), bool)
        if self._days is None:
            return ~none if len(names) >= self._least else none
        try:
            with opened(self._days, _earlier_rows) as ledger:
                last = int(ledger.table(_DAY)[1].max(initial=0))
                day = max(today(), last)  # a clock that is set back starts no new day
                fresh: NDArray[np.bool_] = ledger.numbers(_DAY, names) < day
                if fresh.sum() < self._least:
                    return none
                ledger.put(_DAY, names, day)
        except VflError as error:
            log.warning("The party's reports of drift cannot be counted: %s", error)
            return none
        return fresh

    def _write(self) -> None:
        """Write the table, and warn of drift once a level."""
        assert self._watch is not None
        if self._watch.rows < LEAST:
            return
        try:
            self._watch.write(self._table)
        except VflError as error:
            log.warning("The party's table of drift cannot be written: %s", error)
        moderate, large = self._watch.levels()
        if large > self._told[1] or moderate + large > sum(self._told):
            self._told = moderate, large
            log.warning(
                "Of the %d columns of this party, %d drift moderately and %d largely from their "
                "training rows. Their names are in %s.",
                *(len(self._watch.names), moderate, large, self._table.name),
            )


def _earlier_rows(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the last day's file of an earlier version: the numbers of its people."""
    yield from no_file(path)
    for last in sorted(path.parent.glob(f"{path.name}-?????"))[-1:]:
        names = np.frombuffer(unsealed(last), "<u8")
        yield _DAY, 0, np.stack([names, np.full_like(names, int(last.name[-5:]))]).tobytes()
