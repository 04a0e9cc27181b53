"""Your own table: columns of numbers and texts, and how they become model input.

`own_files` has tables in files, `memory` tables from Python code.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError, UnfitError, first_of
from vfl_flower.config.logs import log
from vfl_flower.data.frames import (
    days_of,
    floats,
    matrix,
    medians_of,
    numeric,
    others,
    periods_of,
    raw_columns,
    texts_of,
)
from vfl_flower.data.ids import encoded, identities, written
from vfl_flower.data.keys import ID, KeyTable, row_keys
from vfl_flower.data.later import pd
from vfl_flower.data.needs import (
    EMPTY,
    Need,
    frequent,
    lacking,
    nameable,
    needs_of,
    spared,
    told_of,
)
from vfl_flower.data.normalised import VERSION
from vfl_flower.data.own_columns import OwnColumns, signs_of
from vfl_flower.data.source import Named, Names, Preparation, scaled, scaling

_AT_ONCE = 2**24  # bytes of columns in double precision at a time
_ROWS = 65536  # rows to prepare at a time
_SHORT = 12  # columns in an option to paste
_FEW = 4096  # rows: a service asks for no more at a time


@dataclass(frozen=True)
class Table(OwnColumns):
    """Rows of columns by name.

    Each method raises `ConfigError` if the table is wrong. It names no column of a party.
    """

    # --- ids, labels and segments ---------------------------------------------------------------

    @cached_property
    def id_column(self) -> Any:
        """Return the id column."""
        if self.id not in self._names and self.match_columns:
            return np.arange(1, 1 + self.count)
        if self.id not in self._names:
            raise self.wrong(
                "does not have the id column that `id` names. Correct `id`."
                + " Join several columns of ids to one." * ("," in self.id)
                + " Without a common id, set match and match-columns." * (self.id == "id"),
                f"id = {self.id!r}, and its columns are {first_of(self._names)}.",
            )
        return self._read_ids()

    @property
    def people_in_file(self) -> list[bytes]:
        """Return what a list of withdrawals knows each row's person by.

        It is the encoded id, or else the columns that rules match people by, normalised.
        """
        if self.id in self._names:
            ids = self._read_ids()
            ids = np.where(pd.isna(ids), "", np.asarray(ids, object)).tolist()
            texts = (one if isinstance(one, int) else str(one) for one in ids)
            return [encoded(one) if one != "" else b"" for one in texts]
        return row_keys(self._keyed, self.whose)

    @cached_property
    def ids(self) -> Sequence[bytes]:
        """Return the encoded ids; digests of the columns for matching, if there is no id column."""
        if self.match_columns and self.id not in self._names:
            return identities(self._keyed, self.whose)
        return super().ids

    def digest(self, rows: Array) -> str:
        """Return a digest of these rows' ids, and of what tells who their people are."""
        of_ids = super().digest(rows)
        if not self.match_columns:
            return of_ids
        keyed = self._keyed
        about = [VERSION, sorted(keyed), sorted(self.date_orders.items()), of_ids]
        digest = hashlib.sha256(repr(about).encode())
        for name in sorted(keyed):
            for texts in written(keyed[name].iloc[rows]):
                digest.update(repr(texts).encode())
        return digest.hexdigest()

    @cached_property
    def keys(self) -> KeyTable:
        """Return the keys of people without a common id."""
        return KeyTable(self._keyed, self.whose, self.date_orders)

    @cached_property
    def _keyed(self) -> dict[str, Any]:
        """Return the columns that tell who a person is, by their names in rules."""
        matching = self.matching
        frame = self._read([*dict.fromkeys(matching.values())], [*matching.values()])
        columns = {name: frame[own] for name, own in matching.items() if name != ID}
        of_label_holder = self.party is None and self.id in self._names
        has_id = of_label_holder or matching.get(ID) == self.id
        return columns | ({ID: pd.Series(self._read_ids())} if has_id else {})

    def forget_ids(self) -> None:
        """Drop the cached ids and keys."""
        super().forget_ids()
        for name in ("keys", "_keyed"):
            vars(self).pop(name, None)

    def labels(self, rows: Array) -> Array:
        """Return the label column of these rows."""
        self.check_labels()
        values = self.labels_with_gaps(rows)
        if pd.isna(values).any():
            raise UnfitError(
                f"Column {self.label!r} of {self.path} has missing labels. Drop those rows."
            )
        return values

    def labels_with_gaps(self, rows: Array) -> Array:
        """Return the label column of these rows, with missing labels."""
        return self._read([self.label])[self.label].iloc[rows].to_numpy()

    def segments_of(self, rows: Array) -> dict[str, Array]:
        """Return the segment columns of these rows, by name."""
        self.check_segments()
        names = self.segment_names
        frame = self._read(names).iloc[rows] if names else {}
        columns = {name: frame[name].to_numpy() for name in names}
        return columns | ({self.time: self.periods(rows)} if self.time else {})

    def periods(self, rows: Array) -> Array:
        """Return the period of each of these rows by the column `time` (`periods_of`)."""
        column = self._read([self.time])[self.time].iloc[rows]
        if (found := periods_of(column)) is None:
            raise self.wrong(
                "has a column `time` with other values than dates such as 2026-01-31, or whole "
                "numbers from 0. Correct them, or name another column.",
                f"it is column {self.time!r}.",
            )
        return found

    def check(self) -> None:
        """Refuse a table without its ids, labels or segments, before any slow step."""
        _ = self.ids
        self.check_labels()
        self.check_segments()
        if self.time:
            self.periods(np.arange(self.count))

    # --- features -------------------------------------------------------------------------------

    def learn(self, train: Array) -> Preparation:
        """Return medians, text values, means and deviations of the training rows."""
        self.check_features()
        groups = self._groups(self.feature_names, self.count)
        parts = [self._learn(self._some(group), train) for group in groups]

        def in_order(values: str) -> list[float]:  # numbers first
            firsts = [getattr(each, values)[: len(each.numbers)] for each in parts]
            others = [getattr(each, values)[len(each.numbers) :] for each in parts]
            return [value for part in (*firsts, *others) for value in part]

        def of_all(values: str) -> dict[str, Any]:
            return {name: value for each in parts for name, value in getattr(each, values).items()}

        numbers = of_all("numbers")
        return Preparation(
            numbers,
            of_all("texts"),
            in_order("mean"),
            in_order("deviation"),
            dates=of_all("dates"),
            monotone={k: s for k, s in signs_of(self.monotonic).items() if s and k in numbers},
        )

    def _groups(self, names: list[str], rows: int) -> Iterator[list[str]]:
        """Yield these columns in groups of bounded size, since double precision takes memory.

        A service asks for few rows, and often. These have one group, so that `_some` reads once.
        """
        rows = self.count if rows > _FEW else rows
        few = max(1, _AT_ONCE // (8 * max(1, rows)))
        return (names[at : at + few] for at in range(0, len(names), few))

    def _some(self, names: list[str], texts: Collection[str] = ()) -> Any:
        """Return a frame of these columns, as `_read`."""
        if not set(names) <= set(self.feature_names):
            return self._read(names, texts)
        frame = self._frame[names]
        anew = [name for name in numeric(frame) if name in texts]
        return frame.assign(**self._read(anew, texts)) if anew else frame

    def _learn(self, frame: Any, train: Array) -> Preparation:
        """Learn the preparation of some or all columns from the training rows of a frame."""
        learnt, days = frame.iloc[train], self._dates(frame)
        mixed = self._dates(learnt).keys() - days.keys()  # another row has no date
        if needs := [*needs_of(self, learnt), *needs_of(self, frame[sorted(mixed)])]:
            every = self.needs()
            columns = {each.column for each in every}
            new = [each for each in needs if each.kind == EMPTY or each.column not in columns]
            every += [each for each in new if each not in every]
            raise self.wrong(*lacking(self, every, lambda name: self._read([name])[name]))
        newest = {name: float(np.nanmax(each[train])) for name, each in days.items()}
        learnt = self._with_days(learnt, newest)
        numbers, texts = numeric(learnt), others(learnt)
        values = {name: frequent(learnt[name]) for name in texts}
        for name in texts:
            if told := told_of(learnt[name], values[name]):
                log.warning("Column %r of %s %s.", name, self.path, told)
        medians = dict(zip(numbers, medians_of(floats(learnt[numbers])), strict=True))
        rows = matrix(Preparation(medians, values, [], []), learnt)
        mean, deviation = scaling(rows, per_column=True)
        return Preparation(medians, values, mean.tolist(), deviation.tolist(), dates=newest)

    def _dates(self, frame: Any) -> dict[str, Array]:
        """Return the columns that are dates in all rows of a frame, as days since 1970."""
        names = [name for name in others(frame) if self.dates == "days"]
        dates = {name: days_of(frame[name]) for name in names if frame[name].notna().any()}
        return {name: days for name, days in dates.items() if days is not None}

    def _with_days(self, frame: Any, newest: Mapping[str, float]) -> Any:
        """Return a frame whose dates are days since the newest training date."""
        days_by_name = {}
        for name in newest:
            if (days := days_of(frame[name])) is None:
                raise self._changed(f"column {name!r} has values that are no dates.")
            days_by_name[name] = days - newest[name]
        return frame.assign(**days_by_name)

    def needs(self) -> list[Need]:
        """Return what the features need before a model can learn from them, in all rows."""
        groups = self._groups(self.feature_names, self.count)
        needs = [need for group in groups for need in needs_of(self, self._some(group))]
        words = {word for each in needs for word in each.words}
        return spared(needs, self.categories_among(words, needs))

    def categories_among(self, words: set[str], needs: Sequence[Need]) -> set[str]:
        """Return those words that a text column has, which is no column of numbers with words."""
        left_out = {each.column for each in needs if each.words or not each.options}
        names = [name for name in self.feature_names if words and name not in left_out]
        frames = map(self._some, self._groups(names, self.count))
        columns = (frame[name] for frame in frames for name in others(frame))
        return {word for each in columns for word in words.intersection(texts_of(each))}

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """Return these rows as float32 [rows, F], prepared as the training rows taught."""
        self._check_columns(preparation)
        prepared = np.empty((len(places), len(preparation.mean)), np.float32)
        for part, columns in self._parts(preparation, len(places)):
            frame = self._some([*part.numbers, *part.texts], part.texts)
            for at in range(0, max(1, len(places)), _ROWS):
                rows = slice(at, at + _ROWS)
                prepared[rows, columns] = self._prepare(frame.iloc[places[rows]], part)
        return prepared

    def _parts(self, preparation: Preparation, rows: int) -> Iterator[tuple[Preparation, slice]]:
        """Yield the preparation of a group of columns, and their places in the prepared rows."""
        names = [*preparation.numbers, *preparation.texts]
        if len(list(self._groups(names, rows))) == 1:
            yield preparation, slice(None)
            return
        mean, deviation, end = preparation.mean, preparation.deviation, 0
        for group in self._groups(list(preparation.numbers), rows):
            part = slice(end, end := end + len(group))
            medians = {name: preparation.numbers[name] for name in group}
            dates = {name: day for name, day in preparation.dates.items() if name in medians}
            yield Preparation(medians, {}, mean[part], deviation[part], dates=dates), part
        if preparation.texts:
            part = slice(end, None)
            yield Preparation({}, preparation.texts, mean[part], deviation[part]), part

    def raw_columns(self, places: Array, names: Names = None, dates: Names = None) -> Named:
        """Yield columns by name, as `Source.raw_columns`."""
        wanted = self.feature_names if names is None else list(names)
        for group in self._groups(wanted, len(places)):
            frame = self._some(group)
            yield from raw_columns(frame, places, self._dates(frame) if dates is None else dates)

    def check_columns(self, preparation: Preparation) -> None:
        """Refuse rows without the columns that a model's training rows had."""
        names = self._check_columns(preparation)
        for group in self._groups(names, self.count):
            self._typed(self._some(group, preparation.texts), preparation)

    def _check_columns(self, preparation: Preparation) -> list[str]:
        """Return the columns of the training rows, which the table must have."""
        names = [*preparation.numbers, *preparation.texts]
        there = set(self._names)
        if absent := next((name for name in names if name not in there), None):
            raise self._changed(f"column {absent!r} is missing.")
        new_ones = set(self.feature_names) - set(names)
        if (not self.columns or self.leaves_out) and new_ones:
            new = min(new_ones, key=self._names.index)
            earlier = f"columns='{','.join(names)}'"
            known = len(names) <= _SHORT and all(map(nameable, names))
            ask = f"Set {earlier if known else '`columns` as in training'}, to leave it out."
            raise self._changed(f"column {new!r} is new. {ask}")
        return names

    def _prepare(self, frame: Any, preparation: Preparation) -> Array:
        """Return rows as float32 [rows, F], from the columns that `preparation` knows."""
        frame = self._typed(frame, preparation)
        gaps = self.missing == "refuse" and frame.isna().any(axis=None)
        if gaps or np.isinf(floats(frame[list(preparation.numbers)])).any():
            known = replace(self, text="one-hot", dates="days")
            needs = needs_of(known, frame, learns=False)
            gaps = [each for each in needs if each.kind in ("missing values", "infinite values")]
            raise self.wrong(*lacking(known, gaps, frame.__getitem__))
        mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
        rows = scaled(matrix(preparation, frame), mean, deviation)
        if not (np.isfinite(rows).all() and np.isfinite(deviation).all()):
            raise self.too_large()
        return rows

    def _typed(self, frame: Any, preparation: Preparation) -> Any:
        """Return a frame whose dates are days; refuse texts where the training rows had numbers."""
        dates = {name: day for name, day in preparation.dates.items() if name in frame}
        frame = self._with_days(frame, dates)
        for name in others(frame):
            if name in preparation.numbers and not frame[name].isna().all():
                raise self._changed(
                    f"column {name!r} has texts, and it had numbers before. If they stand for "
                    "missing values, set missing-words='...' as in training. Else correct them."
                )
        return frame

    # --- access to columns, in subclasses -------------------------------------------------------

    @abstractmethod
    def _read(self, names: list[str], texts: Collection[str] = ()) -> Any:
        """Return a pandas frame of these columns. The columns ``texts`` stay texts.

        Others have types that hold for all rows (`column_types`).
        """

    @abstractmethod
    def _read_ids(self) -> Any:
        """Return the ids: numbers, or texts as they were written."""

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self._frame)

    @cached_property
    def _frame(self) -> Any:
        """Return all feature columns."""
        return self._read(self.feature_names)

    def _changed(self, detail: str) -> ConfigError:
        return self.wrong("has other columns than its model was trained with.", detail)

    def too_large(self) -> ConfigError:
        """Return an error about numbers beyond single precision."""
        what = "has numbers that are too large. Scale them."
        return self.wrong(what, "some are infinite in 32 bits.")
