"""Files in which a person may have several rows, read as one row for each person.

The order of people is the order of their last rows. ``last`` reads these rows only, in pieces. So a
model sees what a file without the earlier rows has. ``mean`` and ``sequence`` read all rows, some
columns at a time. Then memory holds one row of each person, or all numbers of the columns.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.frames import floats
from vfl_flower.data.table_file import TableError, TableFile

People = NDArray[np.int64]  # the number of each row's person, [rows]

_ROWS = 65536  # rows to read at a time
_AT_ONCE = 2**26  # bytes of numbers to read at a time


def numbered(codes: Sequence[NDArray[np.int64]]) -> People:
    """Return the number of each row's person, in the order of their last rows, [rows].

    codes : columns [rows]. Rows that are equal in all of them are one person's.
    """
    import pandas as pd

    frame = pd.DataFrame(dict(enumerate(codes)))
    of_row = pd.Series(np.arange(len(frame)))
    last = of_row.groupby(frame.groupby([*frame], sort=False).ngroup()).transform("last")
    return np.unique(last, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class LastRows(TableFile):
    """A file with the last row of each person."""

    people: Any = None

    def pieces(self, names: Collection[str], rows: int | None = None) -> Iterator[Any]:
        """Yield Arrow batches as `TableFile.pieces`."""
        import pyarrow as pa

        last, start = np.zeros(len(self.people), bool), 0
        last[len(last) - 1 - np.unique(self.people[::-1], return_index=True)[1]] = True
        for piece in super().pieces(names, rows or _ROWS):
            yield piece.filter(pa.array(last[start : start + len(piece)]))
            start += len(piece)


@dataclass(frozen=True)
class Combined(TableFile):
    """A file in which each column combines the rows of a person.

    how : ``mean`` gives the mean of numbers, and the most frequent value of other columns: the
        first one, if there are several. Missing values do not count. ``sequence`` gives a list of
        a column's numbers.
    """

    people: Any = None
    how: str = "mean"

    def read(self, names: Collection[str], texts: Collection[str] = ()) -> Any:
        """Return a pandas frame as `TableFile.read`."""
        import pandas as pd

        left, few, columns = list(names), max(1, _AT_ONCE // (8 * len(self.people) + 1)), {}
        while left:
            some, left = left[:few], left[few:]
            for name, column in super().read(some, texts).items():
                columns[name] = self._one(column, name in texts)
        return pd.DataFrame(columns, columns=list(names))

    def frames(self, names: Collection[str], texts: Collection[str], rows: int) -> Iterator[Any]:
        """Yield pandas frames as `TableFile.frames`."""
        frame = self.read(names, texts)
        for at in range(0, len(frame), rows):
            yield frame.iloc[at : at + rows].reset_index(drop=True)

    def _one(self, column: Any, is_text: bool) -> Any:
        """Return a column [people] of a column [rows]."""
        import pandas as pd

        is_number = column.dtype.kind in "biuf"
        if is_text or (self.how == "mean" and not is_number):
            return self._frequent(column)
        if self.how == "mean":
            return pd.Series(floats(column)).groupby(self.people).mean()
        if not is_number or column.isna().any():
            raise TableError(
                "has texts, dates or missing values, and rows='sequence' makes sequences of "
                "numbers. Fill them in, or leave that column out by `columns`.",
                f"column {column.name!r}.",
            )
        values = floats(column)[np.argsort(self.people, kind="stable")]
        return pd.Series(np.split(values, np.cumsum(np.bincount(self.people))[:-1]), dtype=object)

    def _frequent(self, column: Any) -> Any:
        """Return the most frequent value of each person, [people]."""
        import pandas as pd

        try:
            codes, values = pd.factorize(column)
        except TypeError:
            raise TableError(
                "has a column of neither numbers, texts nor dates, and rows='mean' combines no "
                "others. Set rows='last'.",
                f"column {column.name!r}.",
            ) from None
        pairs = pd.DataFrame({"person": self.people, "value": codes})[codes >= 0]
        counts = pairs.groupby([*pairs], sort=False).size()
        counts = counts.sort_values(ascending=False, kind="stable").reset_index()
        most = counts.drop_duplicates("person").set_index("person")["value"]
        of_person = most.reindex(range(self.people.max(initial=-1) + 1), fill_value=-1)
        return pd.Series(values).reindex(of_person.to_numpy()).reset_index(drop=True)
