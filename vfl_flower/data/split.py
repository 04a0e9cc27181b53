"""Which rows train, which choose the model, and which test it.

Both sides derive it from the number of rows alone, so that nobody has to tell. Rows for validation
stand first among those held out, which are called test rows where both are meant.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig

Array = NDArray[Any]
Places = NDArray[np.int64]

_SHARE, _ENOUGH, _MOST = 0.15, 200, 20_000  # of training rows: for validation, where so many are


def divide(data: DataConfig, rows: int) -> tuple[Array, Array, int]:
    """Numbers of the training and test rows, by a permutation that depends on ``rows`` alone.

    The first of the test rows are for validation; how many comes last.
    """
    order = np.random.default_rng(0).permutation(rows)
    held_out = math.ceil(data.test_fraction * rows)
    if held_out == rows:
        raise ConfigError(
            f"{data.called} has {rows} rows and test-fraction = {data.test_fraction} "
            "leaves none to train on: use more rows or a smaller fraction."
        )
    test, rest = order[:held_out], order[held_out:]
    validation = _for_validation(data, len(rest))
    train = rest[validation:]
    test = np.concatenate([rest[:validation], test if held_out else train])
    return train, test, validation


def _for_validation(data: DataConfig, rows: int) -> int:
    """How many of so many training rows are held out to choose the model by."""
    if data.validation_fraction is None:
        return min(int(_SHARE * rows), _MOST) if rows >= _ENOUGH else 0
    chosen = math.ceil(data.validation_fraction * rows)
    if chosen == rows:
        raise ConfigError(
            f"{data.called} has {rows} training rows and validation-fraction = "
            f"{data.validation_fraction} leaves none to train on: use a smaller fraction."
        )
    return chosen


def split(data: DataConfig, parts: list[Array]) -> tuple[Array, Array, tuple[Array, Array, int]]:
    """Training and test rows, their sample ids, which are row numbers, and how many validate.

    One part is divided at random; two parts are the data set's own division.
    """
    if min(part.size for part in parts) == 0:
        raise ConfigError(f"{data.called} has no rows.")
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
    """Digest of sample ids, in their order."""
    digest = hashlib.sha256(train_ids.astype("<i8").tobytes() + b"|")
    digest.update(test_ids.astype("<i8").tobytes())
    return digest.hexdigest()


# --- a run that begins by the models of an earlier one ------------------------------------------


def used_by(
    then: DataConfig, known: Places, before: tuple[Places, Places]
) -> tuple[Places, Places]:
    """Rows that a model has learnt from, and those by which it was chosen, as its forebears were.

    Parameters
    ----------
    then, known : the data keys of its run, and its rows, in its order.
    before : these rows of the models by which that run began.
    """
    learnt, held, chose = divide(then, len(known))
    of_run = known[learnt], known[held[:chose]]
    return np.union1d(before[0], of_run[0]), np.union1d(before[1], of_run[1])


def held_out_again(
    data: DataConfig, known: Places, used: tuple[Places, Places], rows: Places
) -> NDArray[np.int64]:
    """Where rows are to be taken from, so that those are held out that were, [N].

    A model that has learnt from a row would do better on it than on others. So the rows that are
    held out are first those of then, then new ones, and others only where these are too few; and
    of them, those by which the model of then was chosen are rather for validation again.

    Parameters
    ----------
    known, used : rows of the earlier run, and what `used_by` says of its model.
    rows : of this run, by the same numbers, in the order that was drawn for them.
    """
    at = np.arange(len(rows))
    if not data.test_fraction:  # rows are held out from training, and trained on
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
    """Have the rows of least rank, of all or those ``among`` which, taken to the places ``into``.

    Of equal ones those that are there stay.
    """
    wanted, can = np.zeros(len(at), bool), np.zeros(len(at), bool)
    wanted[into] = True
    can[slice(None) if among is None else among] = True
    order = np.lexsort((~wanted, rank[at], ~can))
    chosen = np.zeros(len(at), bool)
    chosen[order[: len(into)]] = True
    out, come = np.flatnonzero(wanted & ~chosen), np.flatnonzero(chosen & ~wanted)
    at[out], at[come] = at[come].copy(), at[out].copy()
