"""People described by columns in a request, where people have no common id.

A person is a row of the label holder's table: the columns of the rules, and those that the model
reads. The row is normalised and prepared as the table was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, first_of
from vfl_flower.data.at_party import prepared
from vfl_flower.data.column_types import text_of
from vfl_flower.data.ids import encoded
from vfl_flower.data.keys import ID, KeyTable, Part, Rule
from vfl_flower.data.memory import Frame
from vfl_flower.data.normalised import order_of
from vfl_flower.data.own_columns import OwnColumns
from vfl_flower.data.source import Preparation
from vfl_flower.data.tables import Table

AMBIGUOUS, INCOMPLETE = "ambiguous", "incomplete"
"""Reasons why the label holder could not ask for a person by some rules, or by any rule."""
_OF_DATES = "date", "year", "month", "day"


@dataclass(frozen=True, eq=False)
class Person:
    """A person of a request.

    name : the id in the row, or the number of the row in the request.
    keys : text of a rule -> key, for rules whose key counts; else ``why`` there are fewer.
    own : the label holder's columns that the model reads, float32 [F].
    listed : what a list of withdrawals knows the person by.
    """

    name: int | str
    keys: Mapping[str, bytes]
    own: NDArray[np.float32]
    why: str = ""
    listed: bytes = b""


def who(one: int | str | Person) -> bytes:
    """Return what a list of withdrawals knows a person by."""
    return one.listed if isinstance(one, Person) else encoded(one)


def identity(one: int | str | Person) -> bytes:
    """Return what stands for a person in counts and the audit log: the id, or a hash of all keys.

    With fewer keys, a caller could ask about many people as one, by a key that all their rows have.
    """
    if isinstance(one, Person):
        return sha256(repr([*one.keys.items()]).encode()).digest()
    return encoded(one)


class People:
    """Makes people of the rows of requests, which must have ``columns``."""

    def __init__(
        self, table: Table, rules: Mapping[str, Rule], preparation: Mapping[str, Any] | None
    ) -> None:
        self._rules, keys = rules, table.keys
        self._preparation = Preparation(**preparation) if preparation else None
        columns = dict.fromkeys(name for rule in rules.values() for name in rule.columns)
        self._matching = {n: table.id if n == ID else table.matching[n] for n in columns}
        parts = [part for rule in rules.values() for part in rule.parts]
        self._parts = {Part(p.column, "date" * (p.function in _OF_DATES)) for p in parts}
        dates = [part.column for part in self._parts if part.function]
        self._orders = {name: order_of(keys.columns[name], name, keys.whose) for name in dates}
        self._orders |= keys.orders
        read = self._preparation
        features = [*read.numbers, *read.texts] if read else []
        self.columns = list(dict.fromkeys([*self._matching.values(), *features]))
        given = {field.name: getattr(table, field.name) for field in fields(OwnColumns)}
        self._words = given | {"path": "The request", "columns": ",".join(features) or "none"}
        self._ambiguous = {text: _twice(keys, rule) for text, rule in rules.items()}

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[Person]:
        """Return the people of a request, or raise `ConfigError` about one of its rows."""
        import pandas as pd

        named = {self._words["id"], *self.columns}
        for number, row in enumerate(rows):
            if lacks := next((name for name in self.columns if name not in row), None):
                raise ConfigError(
                    f"Row {number} of people lacks the column {lacks!r}. Give it, or null."
                )
            if not row.keys() <= named:
                raise ConfigError(
                    f"Row {number} of people has a column that the model does not use. It uses "
                    f"{first_of(self.columns, 100)}."
                )
        keys = self._keys(rows)
        made = {text: keys.keys(r) for text, r in self._rules.items() if not keys.missing(r)}
        own = np.zeros((len(rows), 0), np.float32)
        table = Frame(frame=pd.DataFrame(rows), **self._words)
        if self._preparation:
            own = np.asarray(prepared(table, np.arange(len(rows)), self._preparation)[:])
        people, listed = [], table.people_in_file
        for number, row in enumerate(rows):
            whole = {text: key for text, of_rule in made.items() if (key := of_rule[number])}
            mine = {text: k for text, k in whole.items() if k not in self._ambiguous[text]}
            why = AMBIGUOUS if len(mine) < len(whole) else "" if mine else INCOMPLETE
            name = row.get(self._words["id"])
            given = number if name is None else name
            people.append(Person(given, mine, own[number], why, listed[number]))
        return people

    def _keys(self, rows: Sequence[Mapping[str, Any]]) -> KeyTable:
        """Return the keys of rows, or raise `ConfigError`. A column without values is missing."""
        import pandas as pd

        texts = {
            n: pd.Series(map(_text, (r[own] for r in rows)), dtype=object)
            for n, own in self._matching.items()
        }
        given = {n: column for n, column in texts.items() if column.notna().any()}
        keys = KeyTable(given, "The request", self._orders)
        for part in self._parts:
            if part.column not in given:
                continue
            try:
                unread = given[part.column].notna().to_numpy() & (keys.part(part).codes < 0)
            except ConfigError:  # there is no value that can be compared
                unread = given[part.column].notna().to_numpy()
            if unread.any():
                order = self._orders.get(part.column, "")
                what = f"is no date in the order {order}. Write it so, or as 2024-01-31"
                what = what if part.function else "has no letter or digit. Correct it, or give null"
                column = self._matching[part.column]
                raise ConfigError(f"Row {unread.argmax()} of people: {column!r} {what}.")
        return keys


def _text(value: Any) -> str | None:
    """Return a value's text. pandas would make numbers inexact beside a missing value."""
    return None if value is None or value != value else text_of(value)


def _twice(keys: KeyTable, rule: Rule) -> frozenset[bytes | None]:
    """Return the keys that several people of a table have."""
    numbers = keys.groups(rule.parts)
    rows = np.flatnonzero(numbers >= 0)
    rows = np.setdiff1d(rows, keys.once(rule)[0], assume_unique=True)
    return frozenset(keys.keys(rule, rows))
