"""Rows of a run: their split into training, validation and test rows, and parties' row masks.

Both sides derive the split from the number of rows alone, without a message. Validation rows come
first among the held-out rows. Held-out rows are called test rows where both are meant.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.options import DataConfig
from vfl_flower.config.run_config import RunConfig

Places = NDArray[np.int64]

_SHARE, _ENOUGH, _MOST = 0.15, 200, 20_000  # validation: share, least training rows, most rows


def divide(data: DataConfig, rows: int, held_out: int = 0) -> tuple[Array, Array, int]:
    """Return numbers of training and test rows, and the number of validation rows.

    By default, ``test-fraction`` says how many rows are ``held_out`` for testing.
    """
    order = np.random.default_rng(0).permutation(rows)
    held_out = held_out or math.ceil(data.test_fraction * rows)
    if held_out == rows:
        raise ConfigError(
            f"{data.called} has {rows} rows and test-fraction = {data.test_fraction} "
            "leaves none to train on. Use more rows or a smaller fraction."
        )
    test, rest = order[:held_out], order[held_out:]
    validation = _for_validation(data, len(rest))
    train = rest[validation:]
    test = np.concatenate([rest[:validation], test if held_out else train])
    return train, test, validation


def _for_validation(data: DataConfig, rows: int) -> int:
    """Return how many of the training rows are held out for validation."""
    if data.validation_fraction is None:
        return min(int(_SHARE * rows), _MOST) if rows >= _ENOUGH else 0
    chosen = math.ceil(data.validation_fraction * rows)
    if chosen == rows:
        raise ConfigError(
            f"{data.called} has {rows} training rows and validation-fraction = "
            f"{data.validation_fraction} leaves none to train on. Use a smaller fraction."
        )
    return chosen


def split(data: DataConfig, parts: list[Array]) -> tuple[Array, Array, tuple[Array, Array, int]]:
    """Split rows into training and test rows; return also the row numbers of both, as `divide`.

    One part is split at random. Two parts are the data set's own split.
    """
    if min(part.size for part in parts) == 0:
        raise ConfigError(f"{data.called} has no rows. Give it rows, or name other data.")
    if len(parts) == 2:
        rows, validation = len(parts[0]), _for_validation(data, len(parts[0]))
        chosen = np.zeros(rows, bool)
        chosen[np.random.default_rng(0).permutation(rows)[:validation]] = True
        train_ids, validation_ids = np.flatnonzero(~chosen), np.flatnonzero(chosen)
        test_ids = np.concatenate([validation_ids, rows + np.arange(len(parts[1]))])
        train, test = parts
        if validation:
            train, test = train[train_ids], np.concatenate([train[validation_ids], test])
    else:
        (rows_of_all,) = parts
        train_ids, test_ids, validation = divide(data, len(rows_of_all))
        train, test = rows_of_all[train_ids], rows_of_all[test_ids]
    return train, test, (train_ids, test_ids, validation)


def digest_of_rows(train_ids: Array, test_ids: Array) -> str:
    """Return a digest of sample ids, in their order."""
    digest = hashlib.sha256(train_ids.astype("<i8").tobytes() + b"|")
    digest.update(test_ids.astype("<i8").tobytes())
    return digest.hexdigest()


# --- out of time ------------------------------------------------------------------------------


def newest(data: DataConfig, periods: Array) -> tuple[Places, int]:
    """Return places [N] to take rows from, so that the newest whole periods are the test rows.

    Return also how many rows these are: as near to ``test-fraction`` as whole periods can.
    """
    names, number, counts = np.unique(periods, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ConfigError(
            f"Column {data.time!r} has one period in the common rows, and split = 'time' needs "
            "older rows to train on. Name another column by time, or leave split out."
        )
    by_last = counts[:0:-1].cumsum()  # rows of the newest period, of the newest two, ...
    held_out = int(by_last[np.abs(by_last - data.test_fraction * len(periods)).argmin()])
    at = np.arange(len(periods))
    _, places, validation = divide(data, len(periods), held_out)
    _exchange(at, places[validation:], -number)
    notice.info(
        "The test rows are the newest: %s from %s on, %.1f %% of the common rows.",
        *(data.time, names[-1 - np.searchsorted(by_last, held_out)], 100 * held_out / len(at)),
    )
    return at, held_out


# --- warm start ---------------------------------------------------------------------------------


def used_by(
    then: DataConfig, known: Places, before: tuple[Places, Places]
) -> tuple[Places, Places]:
    """Return rows that trained a model or its ancestors, and rows that chose them.

    ``before`` has both sets for the models that this run, of ``known`` rows, started from.
    """
    learnt, held, chose = divide(then, len(known))
    of_run = known[learnt], known[held[:chose]]
    return np.union1d(before[0], of_run[0]), np.union1d(before[1], of_run[1])


def held_out_again(
    data: DataConfig, known: Places, used: tuple[Places, Places], rows: Places
) -> NDArray[np.int64]:
    """Return places [N] to take rows from, so that held-out rows stay held out.

    A model does better on rows that it was trained on. So hold out the earlier run's held-out rows
    first, then new rows, and others only if these are too few. Among held-out rows, prefer for
    validation the rows that already chose the earlier model.

    known, used : rows of the earlier run, and the result of `used_by` for its model.
    rows : rows of this run, by the same numbers, in the order of their draw.
    """
    at = np.arange(len(rows))
    if not data.test_fraction:  # the test rows repeat the training rows
        return at
    _, held_out, validation = divide(data, len(rows))
    learnt, chose = used
    is_new = ~np.isin(rows, np.concatenate([known, learnt, chose]))
    by_learnt = np.isin(rows, learnt) + 0.5 * is_new
    _exchange(at, held_out, by_learnt)
    by_chosen = np.isin(rows, chose) + 0.5 * is_new + 2 * (by_learnt == 1)
    _exchange(at, held_out[validation:], by_chosen, held_out)
    return at


def _exchange(at: Places, into: Places, rank: Array, among: Array | None = None) -> None:
    """Move rows of least rank to the places ``into``; of equal rank, those that are there stay."""
    wanted, can = np.zeros(len(at), bool), np.zeros(len(at), bool)
    wanted[into] = True
    can[slice(None) if among is None else among] = True
    order = np.lexsort((~wanted, rank[at], ~can))
    chosen = np.zeros(len(at), bool)
    chosen[order[: len(into)]] = True
    out, come = np.flatnonzero(wanted & ~chosen), np.flatnonzero(chosen & ~wanted)
    at[out], at[come] = at[come].copy(), at[out].copy()


BACKGROUND = 1000  # number of held-out rows that stand for absent participants (`tasks.inference`)


def background_rows(rows: int, most: int = BACKGROUND) -> NDArray[np.int64]:
    """Return the places of ``most`` random held-out rows, or of all; always the same."""
    return np.sort(np.random.default_rng(0).permutation(rows)[:most])


@dataclass(frozen=True)
class RowMask:
    """A party's rows: their numbers ``ids``, ascending, of ``rows`` rows of the run."""

    rows: int
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, has: NDArray[np.bool_]) -> RowMask:
        """Build from a mask [rows]."""
        return cls(len(has), np.flatnonzero(has).astype(np.int32))

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Return the mask [rows]."""
        mask = np.zeros(self.rows, bool)
        mask[self.ids] = True
        return mask


@dataclass(frozen=True)
class Alignment:
    """A participant's rows of a run, in common order, and the name of their alignment.

    present : row mask [N, M] of all parties, known to the label holder alone; None if all parties
        have all rows.
    answers : proofs [parties, 32] that the label holder knows each party's ids. Nobody else has
        seen them.
    known : party -> number of the label holder's ids that it has, as far as this is known.
    rules : figures of each rule at each party (`alignment.by_rules.RuleFigures`), without ids.
    """

    name: str  # drawn by the label holder, so that it reveals nothing about the rows
    rows: NDArray[np.int64]  # places in the participant's data; -1 for a row that a party lacks
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)  # party that knows it -> its node
    answers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    known: Mapping[int, int] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()
    held_out: int = 0  # number of test rows; 0 if ``test-fraction`` says it (`split.newest`)


def row_masks_of(
    config: RunConfig, numbers: tuple[Array, Array], parties: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the drawn row masks of these training and test rows, each [rows, parties]."""
    has = draw_row_masks(config, 1 + max(int(part.max()) for part in numbers), parties)
    return has[numbers[0]], has[numbers[1]]


def draw_row_masks(config: RunConfig, rows: int, parties: int) -> NDArray[np.bool_]:
    """Draw the row masks of a partitioned data set, [rows, parties], by the seed.

    Each party has a row with probability ``presence``. A row without a party goes to a random one.
    """
    return _drawn(config.training.seed, config.data.presence, rows, parties)


@lru_cache(maxsize=2)  # the label holder and all parties call it, also those with other options
def _drawn(seed: int, presence: float, rows: int, parties: int) -> NDArray[np.bool_]:
    generator = np.random.default_rng([seed, 7])
    has = generator.random((rows, parties)) < presence
    nobody = np.flatnonzero(~has.any(1))
    has[nobody, generator.integers(0, parties, len(nobody))] = True
    has.flags.writeable = False
    return has
