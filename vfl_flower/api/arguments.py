"""Arguments of `train` and of a model's methods: features and labels, checked and converted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError, shown
from vfl_flower.config.names import MUST, alike, is_name
from vfl_flower.config.options import DataConfig
from vfl_flower.data.keys import ID, parse
from vfl_flower.data.memory import NO_COLUMN, ArraySource, DataSetSource, Frame
from vfl_flower.data.own_columns import match_columns_of, signs_of
from vfl_flower.data.source import Source


def listed(
    features: Any, then: Mapping[int, str] | None = None, parties: int = 0
) -> tuple[list[Any], dict[int, str]]:
    """Return the features of each party as a list, and the names of the parties.

    The names of an earlier run (``then``) decide the order of a mapping, so each of its ``parties``
    must have one.
    """
    if isinstance(features, Mapping):
        for name in features:
            if not is_name(name):
                raise ConfigError(f"features names a party {name!r}, which {MUST}. Rename it.")
        before = [] if then is None else [name for _, name in sorted(then.items())]
        whole = len(before) == parties
        if then is not None and not (whole and set(before) <= set(features)):
            lacking = f"{'do not all have' if before else 'have no'} names, so give a list"
            known = f"are {', '.join(before)}" if whole else lacking
            raise ConfigError(
                f"features names the parties {', '.join(features)}, and the parties of that run "
                f"{known}. Give features of each."
            )
        order = dict.fromkeys((*before, *features))
        if two := alike(called := dict(enumerate(order))):
            raise ConfigError(
                f"features names two parties too alike, {called[two[0]]!r} and {called[two[1]]!r}. "
                "Rename one."
            )
        return [features[name] for name in order], called
    stacked = getattr(features, "ndim", 0) > 2  # one array with the parties' arrays
    if isinstance(features, str) or not (stacked or isinstance(features, Sequence)):
        raise ConfigError(
            f"features is of type {type(features).__name__}. Give a list with the features of "
            "each party."
        )
    return list(features), dict(then or {})


def handed_over(
    features: Sequence[Any], labels: Any, data: DataConfig, id: str
) -> tuple[Frame, list[Source]]:
    """Return the label holder's table and the parties' data, of the same rows.

    ``labels`` may be the label holder's own frame, or None. With align = 'any', its ids decide.
    """
    if not isinstance(id, str):
        raise ConfigError(
            f"id = {shown(id)} is not the name of one column. Join several columns in each frame: "
            "frame['id'] = frame['a'].astype(str) + '/' + frame['b'].astype(str). Then set id='id'."
        )
    for party, part in enumerate(features):
        _check_columns(part, f"The features of party {party}", "" if data.match else id)
        _check_no_labels(part, party, labels)
    if data.match:
        if not all(hasattr(each, "columns") for each in (labels, *features)):
            raise ConfigError(
                "match is for frames with columns that tell who a person is. Give frames of labels "
                "and of features."
            )
    elif id:
        labels, *features = _common(features, labels, data, id)
    elif data.align == "any":
        raise ConfigError("align = 'any' is for frames with ids. Name the column of ids by id.")
    sources = [_source(part, party, data, id) for party, part in enumerate(features)]
    table = _table(labels, data, len(sources[0].id_column))
    _check_columns(table, "The labels", id)
    if not len(sources[0].id_column):
        raise ConfigError("The features have no rows. Give at least one.")
    if not id and not data.match:
        _check_order(features, labels, [len(each.id_column) for each in sources], len(table))
    own = _frame("labels", table, data, id, label=data.label)
    named = {name for each in (table, *features) for name in getattr(each, "columns", ())}
    if absent := [name for name in signs_of(data.monotonic) if name not in named]:
        raise ConfigError(
            f"monotonic names {absent[0]!r}, which no frame has. Write 'income:+,debt:-'."
        )
    if data.match:
        for source in sources:
            assert isinstance(source, Frame)
            _check_match(own, source, data.match)
    own = replace(own, columns=data.columns, segments=data.segments, time=data.time)
    return own, sources


def _check_match(own: Frame, source: Frame, match: str) -> None:
    """Raise `ConfigError` if no rule has all its columns in both frames."""
    rules = parse(match)
    common = {ID, *own.matching} & {ID, *source.matching}
    if any(common.issuperset(rule.columns) for rule in rules):
        return
    mine, theirs = (", ".join(map(str, each.frame.columns)) for each in (own, source))
    names = ", ".join(dict.fromkeys(name for rule in rules for name in rule.columns))
    raise ConfigError(
        f"No rule of match has all its columns in both frames: rules name {names}. The label "
        f"holder's frame has {mine}, and party {source.party}'s frame has {theirs}. Rename columns."
    )


def _frame(path: str, frame: Any, data: DataConfig, id: str, **more: Any) -> Frame:
    """Return a table of a frame. All frames share the options of the run."""
    options = ("missing", "missing_words", "text", "dates")
    more |= {name: getattr(data, name) for name in options}
    signs = {k: v for k, v in signs_of(data.monotonic).items() if k in map(str, frame.columns)}
    more["monotonic"] = " ".join(f"{name}:{'-+'[sign > 0]}" for name, sign in signs.items())
    if data.match:
        known = match_columns_of(data.match, data.match_columns).split()
        there = [each for each in known if each.split("=")[-1].split(":")[0] in frame.columns]
        more["match_columns"] = " ".join(there)
    return Frame(path, id=id or NO_COLUMN, frame=frame, **more)


def _table(labels: Any, data: DataConfig, rows: int) -> Any:
    """Return the labels as a frame with so many rows."""
    import pandas as pd

    if labels is None:
        return pd.DataFrame(index=range(rows))
    if hasattr(labels, "columns"):
        return labels
    values = as_array(labels, "The labels")
    if values.ndim != 1:
        raise ConfigError(
            f"The labels have shape {values.shape}. Give one label for each row. For one-hot "
            "rows, give labels.argmax(1)."
        )
    return pd.DataFrame({data.label: values})


def _check_no_labels(part: Any, party: int, labels: Any) -> None:
    """Refuse a frame with a column of the labels' name, where labels are a Series."""
    name = None if hasattr(labels, "columns") else getattr(labels, "name", None)
    if name is not None and name in getattr(part, "columns", ()):
        raise ConfigError(
            f"Party {party}'s frame has a column of the labels' name, {name!r}, so the label would "
            "predict itself. Leave that column out, or rename it."
        )


def as_array(values: Any, whose: str) -> Array:
    """Convert an array, a tensor, a Series or lists to an array; refuse lists of other lengths."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError:
        raise ConfigError(
            f"{whose} are lists of different lengths. Give all rows the same number of values."
        ) from None


def _common(features: Sequence[Any], labels: Any, data: DataConfig, id: str) -> list[Any]:
    """Return labels and features of the rows that all have, or with align='any' some."""
    import pandas as pd

    if labels is None:
        every = [frame[[id]] for frame in features]
        labels = pd.concat(every).drop_duplicates() if data.align == "any" else every[0]
    if isinstance(labels, pd.Series):
        labels = labels.rename(data.label).rename_axis(id).reset_index()
    if id not in getattr(labels, "columns", ()):
        raise ConfigError(
            f"labels has no ids, and id = {id!r}. Give a frame with a column of ids, or a Series "
            "indexed by id."
        )
    _check_columns(labels, "The labels", id)
    if data.align == "any":
        return [labels, *features]
    if not (common := set(labels[id]).intersection(*(frame[id] for frame in features))):
        raise ConfigError(
            f"No {id!r} is in all frames. Use the same kind of id in all, written the same way."
        )
    return [frame[frame[id].isin(common)] for frame in (labels, *features)]


def _source(features: Any, party: int, data: DataConfig, id: str) -> Source:
    if hasattr(features, "columns"):
        id = id if id in features.columns else ""  # rules need no ids at parties
        return _frame("features", features, data, id, label=NO_COLUMN, party=party)
    lists = isinstance(features, list | tuple)
    if lists or hasattr(features, "shape") or not hasattr(features, "__getitem__"):
        return ArraySource(as_array(features, f"The features of party {party}"), party)
    if not hasattr(features, "__len__"):
        raise ConfigError(
            f"The features of party {party} are of type {type(features).__name__}, whose items "
            "cannot be counted. Give a data set with __len__ and __getitem__."
        )
    return DataSetSource(features, party)


def _check_columns(value: Any, whose: str, id: str) -> None:
    """Raise `ConfigError` if a frame has no id column, or a column twice."""
    names = [str(name) for name in getattr(value, "columns", ())]
    if id and id not in getattr(value, "columns", ()):
        raise ConfigError(
            f"{whose} are not a frame with a column {id!r} of ids. Give such a frame."
        )
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(f"{whose} have two columns {twice[0]!r}. Rename one, or drop it.")


def _check_order(
    features: Sequence[Any], labels: Any, counts: Sequence[int], expected: int
) -> None:
    """Refuse other numbers of rows, and other pandas indexes: rows are matched by position."""
    import pandas as pd

    theirs = f"party 0 {expected}" if labels is None else f"there are {expected} labels"
    for party, count in enumerate(counts):
        if count != expected:
            raise ConfigError(
                f"Party {party} has {count} rows, and {theirs}. Give all the same rows, or name "
                "the column of ids by id."
            )
    named = [("labels", labels)]
    named += [(f"the features of party {party}", part) for party, part in enumerate(features)]
    indexed = [(whose, v.index) for whose, v in named if isinstance(v, pd.Series | pd.DataFrame)]
    for whose, index in indexed[1:]:
        first, other = indexed[0]
        numbered = isinstance(index, pd.RangeIndex) and isinstance(other, pd.RangeIndex)
        if not (index.equals(other) or (numbered and index.step * other.step > 0)):
            raise ConfigError(
                f"The indexes of {first} and {whose} differ. Put the rows in the same order "
                "and reset_index(drop=True), or name a column of ids by id."
            )
