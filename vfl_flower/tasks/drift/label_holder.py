"""Drift at the label holder: scores, and the embeddings of each party.

The shares to compare with come from the held-out rows, as the final model embeds them. Embeddings
of training rows come from earlier models, and the scores fit these rows too well: both can look
like drift. Shares and indices are functions of what the label holder has got, so they reveal
nothing more about labels or rows that noise hides.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import notice
from vfl_flower.data.drift import LARGE, LEAST, MODERATE, Watch, Window, columns_of, sampled
from vfl_flower.data.tables import Table
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.transport.messages import Arrays

SUM = "sum"
"""Name of the embeddings of all parties, if only their sum is known."""
OWN = "own"
"""Name of the label holder's own columns."""
_SCORES = "scores"
_NAMED = {_SCORES: "the scores", SUM: "the sum of the embeddings"}
_ABOVE = {"large": LARGE, "moderate": MODERATE}

Columns = Mapping[int, slice]


class ColumnDrift(NamedTuple):
    """How many columns of a party drift moderately, and how many largely."""

    moderate: int
    large: int


@torch.no_grad()
def shares(holder: LabelHolder, own: Watch | None) -> dict[str, Any]:
    """Return the shares of scores, embeddings and own columns at the held-out rows, as JSON."""
    table, top = holder.held_out.table, holder.top
    columns, width = _groups(table.columns), table.rows.shape[1]
    rows = torch.from_numpy(sampled(len(table.rows), width)).to(table.rows.device)
    blocks = table.rows[rows]
    top.eval()
    outputs = top(blocks).cpu()
    top.train()
    parties = len(table.columns)
    present = np.ones((len(rows), parties), bool)
    for at, held in enumerate(table.present.values()):
        present[:, at] = True if held is None else held[rows.cpu().numpy()]
    masks = parties * any(each is not None for each in table.present.values())
    own_columns = width - table.received - masks
    own_part = np.zeros((len(rows), own_columns), np.float32)
    parts = _values(columns, ScoredRows(blocks.cpu(), own_part, present, outputs))
    found = {name: Watch.learn(columns_of(part)).as_json() for name, part in parts if len(part)}
    return found | ({OWN: own.as_json()} if own else {})


def _groups(columns: Columns) -> dict[str, tuple[int, slice]]:
    """Return the blocks of embeddings by name, each with its party and its columns."""
    places = [(each.start, each.stop) for each in columns.values()]
    if len(set(places)) < len(places):
        return {SUM: (0, next(iter(columns.values())))}
    return {str(party): (party, each) for party, each in columns.items()}


def _values(
    groups: Mapping[str, tuple[int, slice]], rows: ScoredRows
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield scores and embeddings by name, [rows, columns], of the rows that have them."""
    scores = rows.outputs if rows.outputs.shape[1] == 1 else rows.outputs.softmax(1)
    yield _SCORES, scores.numpy()[rows.known]
    for name, (party, columns) in groups.items():
        yield name, rows.blocks[:, columns].numpy()[rows.given[:, party]]


class DriftWatch:
    """Drift between the held-out rows of training and new rows.

    ``is_known`` is false for checkpoints of older versions, which have no shares.
    """

    def __init__(self, found: Checkpoint, columns: Columns) -> None:
        kept = found.strategy.get("drift") or {}
        self.is_known = bool(kept)
        self._watches = {name: Watch.from_json(each) for name, each in kept.items()}
        self._own = self._watches.pop(OWN, None)
        self._dates = (found.about_labels.get("preparation") or {}).get("dates", {})
        self._groups = _groups(columns)
        self._parties = list(columns)
        self._rows = 0
        self._told: set[tuple[str, str]] = set()
        self.columns: dict[int, ColumnDrift] = {}
        self._window = Window()
        self._waiting: list[ScoredRows] = []
        self._reported = False
        self.latest = self.figures()
        if not self.is_known:
            notice.info(
                "There is no drift of scores and embeddings, since the checkpoint has no shares to "
                "compare with: it is unfinished, or an earlier version wrote it."
            )

    def count(self, rows: ScoredRows) -> None:
        """Count new rows."""
        self._rows += len(rows.blocks)
        some = rows.at(sampled(*rows.blocks.shape))
        for name, part in _values(self._groups, some):
            if name in self._watches and len(part):
                self._watches[name].add(columns_of(part))

    def count_own(self, table: Table | None, places: NDArray[np.int64] | None) -> None:
        """Count the label holder's own columns at new rows, if it has a file."""
        if self._own and table and places is not None and len(places) >= LEAST:
            few = places[sampled(len(places), len(self._own.names))]
            self._own.add(table.raw_columns(few, self._own.names, self._dates))

    def write_own(self, path: Path) -> None:
        """Write a table of the label holder's own columns, if it has counted rows."""
        if self._own and self._own.rows:
            self._own.write(path)

    def take(self, party: int, arrays: Arrays) -> None:
        """Take a party's report of its columns, if its answer has one. An error ends a sentence."""
        if "drift" not in arrays:
            return
        report = arrays["drift"]
        if report.dtype != np.int32 or report.shape != (2,) or (report < 0).any():
            raise VflError("'drift' is not two numbers of columns.")
        self.columns[party] = ColumnDrift(*report.tolist())
        self._reported = True

    def figures(self) -> dict[str, Any] | None:
        """Return the indices, and how many columns of each party drift, in JSON types."""
        if not self.is_known and not self.columns:
            return None
        found = {name: each.largest() for name, each in self._watches.items()}
        indices = {name: each and round(each.value, 6) for name, each in found.items()}
        columns: dict[Any, Any] = {party: self.columns.get(party) for party in self._parties}
        columns |= {OWN: ColumnDrift(*self._own.levels())} if self._own and self._own.rows else {}
        return {
            "rows": self._rows,
            "scores": indices.get(_SCORES),
            "embeddings": {name: indices.get(name) for name in self._groups},
            "columns": {str(party): each and each._asdict() for party, each in columns.items()},
        }

    def warn(self) -> None:
        """Warn of drift, once for each level of a thing."""
        found: list[tuple[str, str, str]] = []
        for name, watch in self._watches.items():
            drift = watch.largest()
            if drift and (level := drift.level()):
                thing = _NAMED.get(name, f"the embeddings of party {name}")
                found.append((level, name, f"{thing} ({drift.value:.3g})"))
        counts = {f"of party {party}": each for party, each in sorted(self.columns.items())}
        counts |= {"of the label holder": ColumnDrift(*self._own.levels())} if self._own else {}
        for whose, numbers in counts.items():
            for level, number in zip(ColumnDrift._fields, numbers, strict=True):
                if number:
                    columns = "column" if number == 1 else "columns"
                    found.append((level, whose, f"{number} {columns} {whose}"))
        for level, above in _ABOVE.items():
            new = [said for of, name, said in found if of == level and (name, of) not in self._told]
            self._told |= {(name, of) for of, name, _ in found if of == level}
            if new:
                notice.warning(
                    "Drift is %s (population stability index above %g): %s.",
                    *(level, above, ", ".join(new)),
                )

    # --- a service ------------------------------------------------------------------------------

    def watch(self, keys: Sequence[Hashable], rows: ScoredRows) -> bool:
        """Count rows that a service has scored, each key once. Return whether `latest` is new."""
        new = self._window.new(keys) if self.is_known else []
        if new:
            self._waiting.append(rows if len(new) == len(keys) else rows.at(new))
        is_due = self._window.is_due
        if is_due:
            if self._window.step():
                self._rows = 0
                for each in self._watches.values():
                    each.clear()
            waiting, self._waiting = self._waiting, []
            self.count(ScoredRows.together(waiting))
        changed, self._reported = is_due or self._reported, False
        if changed:
            self.latest = self.figures()
            self.warn()
        return changed
