"""Rules and keys of people without a common id, of normalised columns (`data.normalised`).

Rules (`Rule`) are tried in order on the people that no earlier rule has matched. A key
counts only if it is whole, and stands once at its side among these people. So ambiguous people
wait for a later rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, asked, shown
from vfl_flower.data.ids import encoded
from vfl_flower.data.later import jellyfish, pd
from vfl_flower.data.normalised import VERSION, Coded, as_written, dates, normalised, spelling

_SURE = 10  # pairs that share a key; fewer are too few to estimate a chance from
_UNSEEN = 0.5  # pairs that share a key, if the table has none: the mean by Jeffreys' prior

Rows = NDArray[np.int64]
Columns = Mapping[str, Any]  # NumPy or pandas columns [n] of one side by their names in rules


@dataclass
class KeyTable:
    """Columns of one side's n people, whose keys it makes. Each column is normalised once.

    columns : by their names in rules; ids by the name ``id``.
    whose : name of the table in errors: "The party's file".
    chances : text of a rule -> its `chance` in a larger table of such people, which is then used.
    orders : orders of dates by column, where its own dates do not tell (`data.normalised.ORDERS`).
    """

    columns: Columns
    whose: str
    orders: Mapping[str, str] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    _parts: dict[Part, Coded] = field(default_factory=dict, init=False, repr=False)
    _chances: dict[frozenset[Part], float] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def missing(self, rule: Rule) -> tuple[str, ...]:
        """Return the columns that a rule needs and this side lacks."""
        return tuple(name for name in rule.columns if name not in self.columns)

    def part(self, part: Part) -> Coded:
        """Return the texts of a part of a rule, one for each row."""
        if part not in self._parts:
            self._parts[part] = self._made(part)
        return self._parts[part]

    def _made(self, part: Part) -> Coded:
        name, function = part.column, part.function
        if part == Part(ID):  # as `data.ids` compares it: nothing is normalised
            ids = as_written(self.columns[name], name, self.whose)
            return ids.by(lambda id: id and encoded(id).decode("utf-8", "surrogatepass"))
        if function == "date":
            return dates(self.columns[name], name, self.whose, self.orders.get(name, ""))
        if not function:
            return normalised(self.columns[name], name, self.whose)
        if function in _OF_DATES:
            return self.part(Part(name, "date")).by(_OF_DATES[function])
        return self.part(Part(name)).by(_OF_TEXTS[function])

    def groups(self, parts: Iterable[Part]) -> Rows:
        """Return a number of each row's key, -1 where a part is missing, [n]."""
        numbers, size = np.zeros(len(self), np.int64), 1
        for part in parts:
            column = self.part(part)
            more = len(column.texts) + 1
            if size * more > 2**62:
                known, distinct = pd.factorize(np.where(numbers < 0, -1, numbers))
                numbers, size = np.where(numbers < 0, -1, known), len(distinct) + 1
            whole = (numbers >= 0) & (column.codes >= 0)
            numbers, size = np.where(whole, numbers * more + column.codes, -1), size * more
        return numbers

    def once(self, rule: Rule, rows: Rows | None = None) -> tuple[Rows, int]:
        """Return which rows have a whole key that stands once among them; count the ambiguous."""
        rows = np.arange(len(self)) if rows is None else rows
        numbers = self.groups(rule.parts)[rows]
        rows, numbers = rows[numbers >= 0], numbers[numbers >= 0]
        _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        alone = counts[places] == 1
        return rows[alone], int((~alone).sum())

    def keys(self, rule: Rule, rows: Rows | None = None) -> list[bytes | None]:
        """Return the key of each of these rows, None where a part is missing.

        A key is the version of normalisation, the rule and the parts, with a NUL between each two.
        No normalised text has a NUL, so that different people differ, and so do keys of two rules.
        """
        start = f"{VERSION}\0{rule}\0".encode()
        columns = [self.part(part) for part in rule.parts]
        codes = [each.codes if rows is None else each.codes[rows] for each in columns]
        whole = np.logical_and.reduce([each >= 0 for each in codes])
        parts = [
            map(each.texts.__getitem__, places[whole].tolist())
            for each, places in zip(columns, codes, strict=True)
        ]
        joined = map("\0".join, zip(*parts, strict=True))
        return [
            start + next(joined).encode("utf-8", "surrogatepass") if there else None
            for there in whole.tolist()
        ]

    def chance(self, rule: Rule) -> float:
        """Estimate the chance that two people, drawn as this table's people are, share the key.

        N people with a whole key make N(N-1)/2 pairs, and C pairs share the key. The estimate is
        C / pairs, with a relative error of about 1 / sqrt(C), if C is 10 or more. Else C may be 0
        although the chance is not. Then split the parts into A and B: if the two are independent,
        the chance is the product of both chances, each estimated in the same way. If A and B go
        together, as surname and address do in a family, the product is too small. So the estimate
        is the largest product over all splits, or C / pairs if that is larger. A single part that
        never repeats has the chance 0.5 / pairs: the mean by Jeffreys' prior.

        Each row must be another person, and the other side's people of the same population.
        """
        if str(rule) in self.chances:
            return self.chances[str(rule)]
        every = frozenset(rule.parts)  # a part that another decides tells nothing, as a date's year
        telling = frozenset(part for part in every if every.isdisjoint(part.wholes))
        return 0.0 if rule.parts == (Part(ID),) else self._chance(telling)

    def _chance(self, parts: frozenset[Part]) -> float:
        if parts not in self._chances:
            self._chances[parts] = self._estimate(parts)
        return self._chances[parts]

    def _estimate(self, parts: frozenset[Part]) -> float:
        numbers = self.groups(sorted(parts))
        counts = np.unique(numbers[numbers >= 0], return_counts=True)[1].astype(float)
        people = float(counts.sum())
        pairs, shared = people * (people - 1) / 2, float((counts * (counts - 1)).sum()) / 2
        if pairs == 0:
            return 1.0
        if shared >= _SURE:
            return shared / pairs
        if len(parts) == 1:
            return max(shared, _UNSEEN) / pairs
        first, *others = sorted(parts)
        splits = (
            frozenset({first, *some})
            for size in range(len(others))
            for some in combinations(others, size)
        )
        return max(
            shared / pairs, *(self._chance(some) * self._chance(parts - some) for some in splits)
        )

    def bits(self, rule: Rule) -> float:
        """Return how hard a key is to guess: -log2 of `chance`, the collision entropy.

        A side that asks G keys of people from the same population finds G * N / 2**bits of this
        table's N people by chance. If it asks the most frequent keys first, it finds at most
        G * N / 2**(bits / 2). Min-entropy would need shares below 1 / N, which N rows cannot tell.
        """
        chance = self.chance(rule)
        return -math.log2(chance) if chance else math.inf


def row_keys(columns: Columns, whose: str) -> list[bytes]:
    """Return what stands for the person of each row: all columns, normalised, by their names."""
    coded = [as_written(columns[name], name, whose).by(spelling) for name in sorted(columns)]
    texts = ([*each.texts, ""] for each in coded)  # the code -1 is a missing value
    parts = [map(t.__getitem__, each.codes.tolist()) for t, each in zip(texts, coded, strict=True)]
    rows = map("\0".join, zip(*parts, strict=True))
    return [f"r:{row}".encode("utf-8", "surrogatepass") for row in rows]


def expected_false(chance: float, left: int, right: int, matched: int = 0) -> float:
    """Return how many matches of a rule are false, as expected.

    ``left`` and ``right`` people have keys that stand once at their side, and each pair shares its
    key by ``chance`` (`KeyTable.chance`). Before the rule is tried (``matched`` = 0), anyone may
    lack a partner, so the mean is at most chance * left * right.

    Of the matches M, let F be false. The M - F people who have found themselves have keys that
    nobody else shares. So F = chance * (left - M + F) * (right - M + F). The smaller root is the
    estimate. If there is no root, then all matches may be false.
    """
    if not matched:
        return min(chance * left * right, float(left), float(right))
    a, b = left - matched, right - matched
    slope = 1 - chance * (a + b)
    root = slope**2 - 4 * chance**2 * a * b
    if slope <= 0 or root < 0:
        return float(matched)
    return min(float(matched), 2 * chance * a * b / (slope + math.sqrt(root)))


_OF_TEXTS: Mapping[str, Callable[[str], str]] = {
    "sound": lambda name: jellyfish.nysiis(name),  # equal in releases 1.1 to 1.3
    "prefix1": lambda text: text[:1],
    "prefix3": lambda text: text[:3],
}
_OF_DATES: Mapping[str, Callable[[str], str]] = {
    "year": lambda day: day[:4],
    "month": lambda day: day[5:7],
    "day": lambda day: day[8:],
}


FUNCTIONS = "sound", "date", "year", "month", "day", "prefix1", "prefix3"
"""Functions of a column: a name's NYSIIS code, a date or a part of it, a text's first letters."""

NAMED = {
    "person": """
        given_name+surname+date(birthdate);
        surname+date(birthdate)+postcode;
        given_name+date(birthdate)+postcode;
        sound(given_name)+sound(surname)+date(birthdate);
        given_name+surname+postcode;
        given_name+surname+suburb;
        date(birthdate)+postcode;
        day(birthdate)+postcode+address+street_number;
        sound(given_name)+date(birthdate)+street_number;
        sound(surname)+date(birthdate)+street_number;
        sound(given_name)+postcode+address;
        prefix3(given_name)+sound(suburb)+sound(address);
        prefix3(given_name)+postcode+sound(suburb);
        date(birthdate)+sound(address);
        prefix3(given_name)+sound(surname)+sound(address);
        date(birthdate)+sound(suburb);
        prefix3(given_name)+sound(address)+street_number;
        sound(surname)+year(birthdate)+address
    """
}
"""Named lists of rules. Each rule of people has a given name or a part of the date of birth.

Without one, a rule would match wife and husband: they share surname, address and postcode."""

ID = "id"
MOST_RULES = 36
MOST_PARTS = 8
_LONGEST, _LONGEST_RULE = 8000, 700

_PART = re.compile(r"(?:(\w+)\s*\(\s*([\w.-]+)\s*\)|([\w.-]+))")


@dataclass(frozen=True, order=True)
class Part:
    """A column of a rule, and its function, if any."""

    column: str
    function: str = ""

    def __str__(self) -> str:
        return f"{self.function}({self.column})" if self.function else self.column

    @property
    def wholes(self) -> set[Part]:
        """Return the parts that decide this one."""
        by = dict.fromkeys(_OF_DATES, "date") | {"prefix1": "prefix3"}
        functions = {"", by.get(self.function, "")} if self.function else set()
        return {Part(self.column, each) for each in functions}


@dataclass(frozen=True)
class Rule:
    """Columns that make a key together, in the order of their names.

    The text of a rule is equal at all sides, however its user has written it.
    """

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of its columns."""
        return tuple(dict.fromkeys(part.column for part in self.parts))


def parse(match: str) -> tuple[Rule, ...]:
    """Return the rules of an option ``match``: rules, or named lists, between semicolons."""
    if len(match) > _LONGEST:
        raise ConfigError(f"match has {len(match)} letters. Write at most {_LONGEST}.")
    texts = [text.strip() for text in match.split(";")]
    texts = texts[:-1] if len(texts) > 1 and not texts[-1] else texts
    texts = [each.strip() for text in texts for each in NAMED.get(text, text).split(";")]
    rules = tuple(map(_rule, texts))
    for number, rule in enumerate(rules):
        if rule in rules[:number]:
            raise ConfigError(f"match has the rule {str(rule)!r} twice. Write it once.")
    if len(rules) > MOST_RULES:
        raise ConfigError(f"match has {len(rules)} rules. Write at most {MOST_RULES}.")
    return rules


def _rule(text: str) -> Rule:
    if not text:
        raise ConfigError(
            "match has an empty rule. Write rules such as 'surname+date(birthdate); id', or "
            f"name a list: {', '.join(NAMED)}."
        )
    if len(text) > _LONGEST_RULE:
        raise ConfigError(
            f"A rule of match has {len(text)} letters. Write at most {_LONGEST_RULE}."
        )
    parts = tuple(sorted(_part(each.strip(), text) for each in text.split("+")))
    if get_close_matches(text.lower(), NAMED, 1, cutoff=0.9):
        raise ConfigError(f"match={text!r} is not a named list:{asked(text, NAMED, 'write')} it.")
    if len(set(parts)) < len(parts):
        raise ConfigError(f"The rule {shown(text)} has a column twice. Write it once.")
    if len(parts) > MOST_PARTS:
        raise ConfigError(
            f"The rule {shown(text)} has {len(parts)} columns. Write at most {MOST_PARTS}."
        )
    if Part(ID) in parts and len(parts) > 1:
        raise ConfigError(f"The rule {shown(text)} joins {ID} to other columns. Write {ID} alone.")
    return Rule(parts)


def _part(text: str, rule: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"The rule {shown(rule)} cannot be read at {text!r}. Join columns by +, such as "
            "'surname+date(birthdate)'; names have letters, digits, and _ . or - alone."
        )
    function, column, plain = found.groups()
    if function and function not in FUNCTIONS:
        raise ConfigError(
            f"The rule {shown(rule)} has an unknown function {function!r}:"
            f"{asked(function, FUNCTIONS, 'write')} one of {', '.join(FUNCTIONS)}."
        )
    if function and column == ID:
        raise ConfigError(f"The rule {shown(rule)} has a function of {ID}. Write {ID} alone.")
    return Part(column or plain, function or "")
