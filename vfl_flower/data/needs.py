"""Needs of a table, such as options for its texts and dates: all of them in one message."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vfl_flower.data import frames
from vfl_flower.data.own_columns import OwnColumns

MOST_VALUES = 100  # values of a text column; each becomes a column
EMPTY = "columns without any value"
OTHER_WORDS = "other words among numbers"
_SHOWN = 12  # columns of one kind in a message
_KINDS = {  # kind -> words for one column, and what to do
    "missing values": "missing values in its features. Fill them in, drop those rows, or set "
    "missing='median'.",
    "infinite values": "infinite values. Replace them.",
    EMPTY: "a column without any value in the training rows. Leave it out by `columns`.",
    "text columns of too many values": f"a text column with more than {MOST_VALUES} values. Leave "
    "it out by `columns`, or group its values.",
}
_HINTS = {
    "other dates": "Write dates as 2024-01-31, and set dates='days', to use them.",
    "commas between thousands": f"{frames.NO_COMMAS}, or write points if they are decimal commas, "
    "to use the numbers.",
    "decimal commas": f"{frames.POINTS}, to use the numbers.",
    "months": "Name the column in `time`: the report then has figures by month.",
    "infinite values": "Replace infinite values, to use the columns.",
    "words among numbers": "missing-words counts these words as missing values: correct them if "
    "they are none.",
    OTHER_WORDS: "Correct them, to use the numbers: missing-words cannot name them, or would "
    "change a text column too.",
}


class Need(NamedTuple):
    """Something that a table needs. Without options that help, the column must be left out."""

    kind: str
    column: str
    note: str = ""
    options: Mapping[str, str] = {}

    @property
    def words(self) -> set[str]:
        """Return the texts that the options make missing values."""
        return set(filter(None, self.options.get("missing-words", "").split(",")))

    def described(self, column: Any) -> tuple[str, str]:
        """Return what is wrong and what to do, and the detail, for a table's only need."""
        if self.kind in _KINDS:
            detail = f"column {self.column!r} has {self.note or 'none'}."
            return f"has {_KINDS[self.kind]}", detail
        why = frames.of_texts(column)
        if self.kind == OTHER_WORDS:
            why = f", since it has texts among its numbers. {_HINTS[self.kind]}"
        return f"has a column that is not numeric{why}", f"column {self.column!r} is not numeric."


def needs_of(own: OwnColumns, frame: Any, learns: bool = True) -> Iterator[Need]:
    """Yield what the columns of a frame need. If a model ``learns``, each needs a value."""
    for name, column in frame.items():
        missing = int(column.isna().sum())
        if column.dtype.kind in "biuf":
            if infinite := int(np.isinf(frames.floats(column)).sum()):
                yield Need("infinite values", name, f"{infinite} in {len(column)} rows")
        elif missing < len(column):
            yield from _of_texts(own, name, column)
        if learns and missing == len(column) and missing:
            yield Need(EMPTY, name)
        elif missing and own.missing == "refuse":
            note = f"{missing} in {len(column)} rows"
            yield Need("missing values", name, note, {"missing": "median"})


def _of_texts(own: OwnColumns, name: str, column: Any) -> Iterator[Need]:
    if own.dates == "days" and frames.days_of(column) is not None:
        return
    few = len(frequent(column)) > 0
    if own.text == "one-hot" and few:
        return
    content, words = frames.content_of(column)
    options: dict[str, str] = {}
    if content == "dates":
        options = {"dates": "days"}
    elif content == "words among numbers":
        options = {"missing-words": ",".join(dict.fromkeys([*own.words, *words]))}
        options["missing"] = "median"
        known = column[~column.astype(str).isin(words)]
        if frames.days_of(known) is not None:
            options["dates"] = "days"
        elif frames.content_of(known)[0] == "other dates":
            content, options = "other dates", {}
        elif not all(map(nameable, words)):
            content, options = OTHER_WORDS, {}
    elif own.party is None and not own.time and frames.periods_of(column) is not None:
        content, options = "months", {"time": name}
    elif content in ("codes", "texts") and few:
        options = {"text": "one-hot"}
    elif content in ("codes", "texts"):
        content = "text columns of too many values"
    note = f"{column.nunique()} values" if "text" in content or content == "codes" else ""
    yield Need(content, name, ", ".join(map(repr, words)) or note, options)


def spared(needs: Sequence[Need], categories: set[str]) -> list[Need]:
    """Return the needs, without options that make a category of a text column missing."""
    return [
        Need(OTHER_WORDS, each.column, each.note) if each.words & categories else each
        for each in needs
    ]


def frequent(column: Any) -> list[str]:
    """Return the values of a text column that get a 0/1 column, sorted, 100 at most.

    The list is empty if less than half of the rows have them, as with names of customers.
    """
    counts = Counter(frames.texts_of(column))
    if len(counts) <= MOST_VALUES:
        return sorted(counts)
    most = sorted(counts, key=lambda each: (-counts[each], each))[:MOST_VALUES]
    most = [each for each in most if counts[each] > 1]
    return sorted(most) if 2 * sum(map(counts.__getitem__, most)) >= len(column) else []


def told_of(column: Any, values: Sequence[str]) -> str:
    """Return what the owner should know of a column whose texts become columns: a predicate."""
    if (known := len(set(frames.texts_of(column)))) > len(values):
        return f"has {known} texts, and the {len(values)} most frequent ones become columns"
    content = frames.content_of(column)[0]
    return f"holds {content}, and is read as texts" * (content not in ("codes", "texts"))


def lacking(
    own: OwnColumns, needs: Sequence[Need], column_of: Callable[[str], Any]
) -> tuple[str, str, str]:
    """Return what `Table.wrong` says of these needs."""
    if len(needs) == 1:
        return *needs[0].described(column_of(needs[0].column)), ""
    *kinds, last = dict.fromkeys(each.kind for each in needs)
    what = "has " + ", ".join(kinds) + " and " * bool(kinds) + last
    columns = list(dict.fromkeys(each.column for each in needs))
    detail = f"columns {', '.join(map(repr, columns[:_SHOWN]))}{', ...' * (len(columns) > _SHOWN)}."
    advice = pasted(remedy(own, needs))
    return f"{what}.", detail, f"{what}.{listed(needs)}" + f"\nSet {advice}." * bool(advice)


def safe(text: str) -> bool:
    """Return whether a shell takes a text as it is, in double and in single quotes."""
    return text.isprintable() and not set(text) & set("'\"`$!\\")


def nameable(text: str) -> bool:
    """Return whether an option can name a text among others."""
    return safe(text) and "," not in text and text == text.strip()


def pasted(options: Mapping[str, Any]) -> str:
    """Return options as `-c` and `--node-config` take them, except those that are not `safe`."""
    return " ".join(
        f"{name}='{value}'" if isinstance(value, str) else f"{name}={value}"
        for name, value in options.items()
        if safe(f"{name}{value}")
    )


def listed(needs: Sequence[Need]) -> str:
    """Return a line for each kind of need, with its columns and with what to do."""
    lines = []
    for kind in dict.fromkeys(each.kind for each in needs):
        of_kind = list({each.column: each for each in needs if each.kind == kind}.values())
        both = ((each.column and repr(each.column), each.note) for each in of_kind[:_SHOWN])
        shown = [f"{name} ({note})" if name and note else name or note for name, note in both]
        more = f" and {len(of_kind) - _SHOWN} more" * (len(of_kind) > _SHOWN)
        hint = f". {_HINTS[kind]}" if kind in _HINTS else ""
        lines.append(f"\n  {kind}: {', '.join(shown)}{more}{hint}")
    return "".join(lines)


def remedy(own: OwnColumns, needs: Sequence[Need]) -> dict[str, str]:
    """Return the options that let a model learn from the table."""
    options: dict[str, str] = {}
    words = list(own.words)
    for need in needs:
        options |= need.options
        words += need.options.get("missing-words", "").split(",")
    if "missing-words" in options:
        options["missing-words"] = ",".join(filter(None, dict.fromkeys(words)))
    helpless = {each.column for each in needs if each.column and not each.options}
    names = own.feature_names
    if out := [name for name in names if name in helpless and nameable(name)]:
        if own.columns and not own.leaves_out:
            options["columns"] = ",".join(name for name in names if name not in helpless) or "none"
        else:
            left_out = [own.columns, *(f"-{name}" for name in out)]
            options["columns"] = ",".join(filter(None, left_out))
    return options
