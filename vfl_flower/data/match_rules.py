"""Rules that match people without a common id: the option ``match``.

A rule is a sum of columns, such as ``surname+date(birthdate)+postcode``. `data.keys` makes its
keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from vfl_flower.config.errors import ConfigError, asked, shown

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
    """Return the rules of an option ``match``: rules, or named lists, between semicolons.

    Raise `ConfigError` if a rule is empty or repeated, has an unknown function, repeats a column,
    or joins the id to other columns; or if there are too many rules.
    """
    if len(match) > _LONGEST:
        raise ConfigError(f"match has {len(match)} letters. Write at most {_LONGEST}.")
    texts = [text.strip() for text in match.split(";")]
    texts = texts[:-1] if len(texts) > 1 and not texts[-1] else texts
    texts = [each for text in texts for each in (_named(text) if text in NAMED else [text])]
    rules = tuple(map(_rule, texts))
    for number, rule in enumerate(rules):
        if rule in rules[:number]:
            raise ConfigError(f"match has the rule {str(rule)!r} twice. Write it once.")
    if len(rules) > MOST_RULES:
        raise ConfigError(f"match has {len(rules)} rules. Write at most {MOST_RULES}.")
    return rules


def _named(name: str) -> list[str]:
    return [text.strip() for text in NAMED[name].split(";")]


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
