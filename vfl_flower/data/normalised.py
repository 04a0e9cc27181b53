"""Normalised values: one text for all spellings of a value, the same at every side.

Sides match people by these texts. So any change that alters a text must raise `VERSION`.

- **Texts**: Unicode NFKC, no case, no accents, and only letters and digits: "O'Brien-Müller " is
  ``obrienmuller``. Letters such as ø and ł become Latin letters without marks. "ü" is not "ue".
- **Numbers**, and texts that are numbers: their digits. 2000, 2000.0, "2000.0" and "02000" are
  ``2000``, since a side that reads postcodes as numbers has lost their zeros. Ids keep theirs
  (`data.ids`).
- **Dates**, where a rule says ``date(x)``: ``2024-01-31``. All values of a column are read in one
  order of year, month and day, which each side finds for itself. The rule says which columns are
  dates, so that sides never differ in that. A plain ``x`` compares a date's digits: 2024-01-31
  and 20240131 are equal, and 31.01.2024 is not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any
from unicodedata import category, decimal, normalize

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, unknown
from vfl_flower.data.column_types import text_of
from vfl_flower.data.later import pd

VERSION = 1
"""Version of all that follows. Keys of two versions never match."""

_NUMBER = re.compile(r"(-?[0-9]+)(?:\.([0-9]*))?", re.ASCII)
_OTHERS = re.compile(r"[^0-9a-z]+", re.ASCII)
_PLAIN = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i"}
    | dict.fromkeys(map(chr, range(0x0300, 0x0370)))  # accents of Latin, Greek, Cyrillic letters
    | dict.fromkeys(map(chr, range(0x02B0, 0x0300)))  # letters that names use as apostrophes
)

ORDERS = ("year-month-day", "day-month-year", "month-day-year")  # orders of the parts of a date

_YEAR_FIRST = re.compile(r"([0-9]{4})([-/. ])([0-9]{1,2})\2([0-9]{1,2})(?:[T ].*)?")
_YEAR_LAST = re.compile(r"([0-9]{1,2})([-/. ])([0-9]{1,2})\2([0-9]{4})(?:[T ].*)?")
_EIGHT = re.compile(r"[0-9]{8}")
_YEARS = range(1850, 2101)  # else many numbers of eight digits could be read in two orders
_SO = "as in birthdate=dob:day-month-year"
_ENOUGH = 0.9  # share of a column's dates that its order must read; others are missing values


@dataclass(frozen=True)
class Coded:
    """A column of n texts in which few are distinct."""

    codes: NDArray[np.int64]  # place of each row's text in ``texts``, -1 where it is missing, [n]
    texts: list[str]

    def by(self, function: Callable[[str], str]) -> Coded:
        """Return the column with a function of each text. An empty text is a missing value."""
        return _coded(self.codes, [function(text) for text in self.texts])


def normal_text(text: str) -> str:
    """Return a text's letters and digits without case and accents, or a number's digits."""
    if not text.isascii():
        text = normalize("NFKD", normalize("NFKD", text).casefold()).translate(_PLAIN)
        if not text.isascii():  # digits of other scripts become ASCII's
            text = normalize("NFKC", "".join(str(decimal(each, each)) for each in text))
    if number := _NUMBER.fullmatch(text.strip()):
        whole, rest = number[1].lstrip("0") or "0", (number[2] or "").rstrip("0")
        return f"{whole}.{rest}" if rest else whole
    if text.isascii():
        text = _OTHERS.sub("", text.lower())
    else:
        text = "".join(letter for letter in text if category(letter)[0] in "LMN")
    return text.lstrip("0") or "0" if text.isdecimal() else text


def spelling(text: str) -> str:
    """Return what tells the person of a row from others of its table.

    A date keeps its form, since 1.12.2024 and 11.2.2024 have the same digits.
    """
    return text.strip() if _readings(text.strip()) else normal_text(text)


def normalised(column: Any, name: str, whose: str) -> Coded:
    """Return the normalised texts of a NumPy or pandas column [n] with this name in rules."""
    return _with_values(as_written(column, name, whose).by(normal_text), name, whose)


def dates(column: Any, name: str, whose: str, order: str = "") -> Coded:
    """Return the dates of a NumPy or pandas column [n] as ``2024-01-31``.

    A value that the column's order cannot read, such as 31 February, is a missing value.

    order : one of `ORDERS`; by default, the only one that reads all values. If no order does, as
        where some days are in no calendar, it is the only one that reads 90 % of them. Dates such
        as 2024-01-31 are read whatever the order.
    """
    if order and order not in ORDERS:
        raise unknown(f"order of {name}", order, ORDERS)
    raw, read = _read(column, name, whose)
    if order:  # a date such as 2024-01-31 is sure, whatever order the others have
        for text, each in zip(raw.texts, read, strict=True):
            if not text.isdecimal():
                each.setdefault(order, each.get(ORDERS[0], ""))
    elif raw.texts:
        order = _order_of(raw, read, f"{whose} has a column {name!r}")
    return _with_values(_coded(raw.codes, [each.get(order, "") for each in read]), name, whose)


def order_of(column: Any, name: str, whose: str) -> str:
    """Return the order in which `dates` reads a column that has dates."""
    return _order_of(*_read(column, name, whose), f"{whose} has a column {name!r}")


def _read(column: Any, name: str, whose: str) -> tuple[Coded, list[dict[str, str]]]:
    raw = as_written(column, name, whose).by(lambda text: normalize("NFKC", text).strip())
    return raw, list(map(_readings, raw.texts))


def _order_of(raw: Coded, read: list[dict[str, str]], column: str) -> str:
    """Return the order of a column's dates from the readings of its distinct texts."""
    rows = np.bincount(raw.codes[raw.codes >= 0], minlength=len(read)).tolist()
    total, by_order = sum(rows), Counter[str]()
    for each, count in zip(read, rows, strict=True):
        by_order.update(dict.fromkeys(each, count))
    fitting = [each for each in ORDERS if by_order[each] == total]
    fitting = fitting or [each for each in ORDERS if by_order[each] >= _ENOUGH * total]
    if len(fitting) > 1:
        raise ConfigError(
            f"{column} of dates that can be read in two ways: {' and '.join(fitting)}. Name its "
            f"order in match-columns, {_SO}, or write its dates as 2024-01-31."
        )
    undated = sum(count for each, count in zip(read, rows, strict=True) if not each)
    if not fitting and undated > (1 - _ENOUGH) * total:
        raise ConfigError(
            f"{column} that a rule uses as dates, but {undated} of {total} values are no dates. "
            "Write dates with four digits of the year, as 2024-01-31, or change the rule."
        )
    if not fitting or any(
        each and fitting[0] not in each and not text.isdecimal()
        for text, each in zip(raw.texts, read, strict=True)
    ):
        raise ConfigError(
            f"{column} of dates in two forms: no order reads all {total} dates. Write them all as "
            f"2024-01-31, or name the right order in match-columns, {_SO}."
        )
    return fitting[0]


def _readings(text: str) -> dict[str, str]:
    """Return a date by each order that reads it. Digits alone may be read by several orders."""
    if parts := _YEAR_FIRST.fullmatch(text):
        triples = {ORDERS[0]: (parts[1], parts[3], parts[4])}
    elif parts := _YEAR_LAST.fullmatch(text):
        triples = {ORDERS[1]: (parts[4], parts[3], parts[1])}
        if parts[2] != ".":  # with points, the day comes first
            triples[ORDERS[2]] = (parts[4], parts[1], parts[3])
    elif _EIGHT.fullmatch(text):
        triples = {
            ORDERS[0]: (text[:4], text[4:6], text[6:]),
            ORDERS[1]: (text[4:], text[2:4], text[:2]),
            ORDERS[2]: (text[4:], text[:2], text[2:4]),
        }
    else:
        return {}
    read: dict[str, str] = {}
    for order, triple in triples.items():
        with suppress(ValueError):  # no such day
            day = date(*map(int, triple))
            read |= {order: day.isoformat()} if day.year in _YEARS else {}
    return read


def as_written(column: Any, name: str, whose: str) -> Coded:
    """Return the texts of a column's values, as a csv file has them (`column_types.text_of`)."""
    values = pd.Series(column)
    if values.dtype == "category":
        values = values.astype(object)
    try:
        codes, distinct = pd.factorize(values)
    except TypeError:
        raise ConfigError(
            f"{whose} has a column {name!r} with values that are neither texts, numbers nor "
            "dates. Store them as one of these."
        ) from None
    return Coded(codes.astype(np.int64), list(map(text_of, distinct)))


def _coded(codes: NDArray[np.int64], texts: list[str]) -> Coded:
    """Return a column whose texts may repeat, or be empty, as one of distinct texts."""
    known = np.array([text or None for text in texts], object)
    places, distinct = pd.factorize(known)
    return Coded(np.append(places, -1)[codes], list(distinct))  # -1: the last place is missing too


def _with_values(column: Coded, name: str, whose: str) -> Coded:
    if len(column.codes) and not column.texts:
        raise ConfigError(
            f"{whose} has a column {name!r} without a value that can be compared. Correct it, or "
            "leave its rules out."
        )
    return column
