"""Csv files that a spreadsheet opens as data.

Spreadsheets run a text cell as a formula if it begins with ``=``, ``+``, ``-``, ``@``, a tab or a
line break. Ids and names of columns and classes may come from other people. So one apostrophe is
put before each such text, also if apostrophes precede that character already. So `'=1` becomes
`''=1`, and each text comes back by removing one apostrophe. Numbers stay as they are.

`restored` removes the apostrophe. The reader of ids does so in a file of predictions, which it
knows by its columns. In any other csv file `'=1` is an id as it was written. Parquet files need no
apostrophe.
"""

import csv
import re
from collections.abc import Sequence
from typing import Any

_FORMULA = r"^(?='*[=+\-@\t\r\n＝＋－＠])"  # spreadsheets know the wide signs too
_GUARDED = _FORMULA.replace("(?=", "'(?=")


def write_csv(file: Any, frame: Any) -> None:
    """Write a pandas frame without its index, in UTF-8. No cell or column name is a formula."""
    safe = frame.rename(columns=_guarded)
    texts = [at for at, kind in enumerate(frame.dtypes) if kind.kind == "O"]
    for at in texts:
        safe.isetitem(at, frame.iloc[:, at].astype(object).map(_guarded))
    # Python's writer leaves a carriage return bare, and a reader would begin a line there.
    bare = any(
        "\r" in str(each)
        for column in (safe, *(safe.iloc[:, at] for at in texts))
        for each in column
    )
    safe.to_csv(file, index=False, quoting=csv.QUOTE_NONNUMERIC if bare else csv.QUOTE_MINIMAL)


def restored(column: Any) -> Any:
    """Return a column of a pandas frame that was read from csv, with its texts as they were."""
    return column.replace(_GUARDED, "", regex=True) if column.dtype.kind == "O" else column


def are_predictions(names: Sequence[str], ids: str) -> bool:
    """Return whether these are the columns of a file of predictions, whose ids are guarded."""
    others = (each == "parties" or each.startswith("probability_") for each in names[2:])
    return [*names[:2]] == [ids, "prediction"] and all(others)


def count_guarded(ids: Sequence[str | None]) -> int:
    """Return how many ids look as if an apostrophe had been put before them."""
    return sum(bool(re.match(_GUARDED, each or "")) for each in ids)


def _guarded(value: Any) -> Any:
    return re.sub(_FORMULA, "'", value) if isinstance(value, str) else value
