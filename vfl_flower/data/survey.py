"""One message that lists what the tables of a run need, if one person has all of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError, UnfitError, VflError, label_asked
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.later import pd
from vfl_flower.data.memory import Frame
from vfl_flower.data.needs import Need, listed, nameable, pasted, remedy, safe, spared
from vfl_flower.data.on_disk import KeptFile, LargeTable
from vfl_flower.data.own_columns import LOGGED
from vfl_flower.data.sources import source_of
from vfl_flower.data.tables import Table

_OF_TABLES = re.compile(
    f"{LOGGED}| missing ids in | the id of an earlier row| has no label column "
)


@contextmanager
def surveyed(config: RunConfig, node_configs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Extend an error about a table by all that the tables need of the person who starts a run."""
    try:
        yield
    except VflError as error:
        in_memory = config.data.dataset.startswith("memory:")
        about_table = in_memory or isinstance(error, UnfitError) or _OF_TABLES.search(str(error))
        if not about_table or not config.data.own_data or config.task != "train":
            raise
        tables = _needs(config, node_configs)
        needs = [need for *_, some in tables for need in some]
        says_it_all = [need.kind for need in needs] in ([], ["ids"], ["no label column"], [_UNREAD])
        if says_it_all and not any(need.kind == "ids" and need.options for need in needs):
            raise
        raise UnfitError(_message(tables, node_configs), outside=error.outside) from error


_UNREAD = "cannot be used"
_Needing = tuple[Table | None, int | None, list[Need]]  # a table, its party, and what it needs


def _needs(config: RunConfig, node_configs: Sequence[Mapping[str, Any]]) -> list[_Needing]:
    """Return the tables that need something."""
    tables: list[_Needing] = []
    for party, node in ((None, {}), *enumerate(node_configs)):
        try:
            opened = own_table(config.data) if party is None else source_of(node, party)
        except ConfigError as error:
            tables.append((None, party, [Need(_UNREAD, "", str(error).rstrip("."))]))
            continue
        if isinstance(opened, Table):
            own = replace(opened, party=None)  # its errors name the columns
            elsewhere = None if party is None else config.data.id
            tables.append((own, party, _of_table(own, elsewhere)))
    # Frames share their options: a word of one may be a category of another.
    frames = [(own, needs) for own, _, needs in tables if isinstance(own, Frame)]
    words = {word for _, needs in frames for each in needs for word in each.words}
    taken = {word for own, needs in frames for word in own.categories_among(words, needs)}
    return [(own, party, spared(needs, taken)) for own, party, needs in tables if needs]


def _of_table(own: Table, elsewhere: str | None) -> list[Need]:
    """Return what ids, labels and features of a table need, in all its rows.

    ``elsewhere`` names the label holder's id column, for a party's table.
    """
    needs = []
    try:
        try:
            _ = own.ids
        except ConfigError as error:
            said = str(error).removeprefix(f"{own.whose} has ").removeprefix(f"{own.path} ")
            absent = "does not have the id column" in said
            known = not isinstance(own, Frame) and elsewhere in own.names_besides_ids
            offered = elsewhere if absent and known else None
            options = {"id": offered} if offered is not None else {}
            needs.append(Need("ids", "", said.rstrip("."), options))
            if offered is not None:
                return needs + _of_table(replace(own, id=offered), elsewhere)
            if absent:
                return needs  # the right id column would be a feature
        if own.has_labels:
            labels = own.labels_with_gaps(np.arange(own.count))
            if missing := int(pd.isna(labels).sum()):
                note = f"{missing} in {len(labels)} rows. Drop those rows"
                needs.append(Need("missing labels", own.label, note))
        elif elsewhere is None:
            names = own.names_besides_ids
            note = f"{own.label!r},{label_asked(own.label, names)}".rstrip(".")
            options = {"label": names[0]} if len(names) == 1 else {}
            return [*needs, Need("no label column", "", note, options)]  # it may be a feature
        if not isinstance(own, KeptFile) or isinstance(own, LargeTable):
            needs += own.needs()
    except ConfigError as error:  # the file cannot be read
        needs.append(Need(_UNREAD, "", str(error).rstrip(".")))
    return needs


def _message(tables: Sequence[_Needing], node_configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the message: what each table needs, and what to paste."""
    lines, to_paste = ["No model can learn from these tables yet."], list[str]()
    shared: dict[str, str] = {}
    for own, party, needs in tables:
        whose = "The label holder" if party is None else f"Party {party}"
        named = f"file {own.path}" if own and own.kind == "file" else own.kind if own else "table"
        lines.append(f"{whose}'s {named}:{listed(needs)}")
        options = remedy(own, needs) if own else {}
        given = {} if party is None else node_configs[party]
        unnamed = [each.column for each in needs if not each.options and not nameable(each.column)]
        if isinstance(own, Frame) and party is not None:
            options.pop("columns", None)
            to_paste += _code(f"features[{given.get('name', party)!r}]", own, needs)
        elif unnamed or not all(safe(str(each)) for each in given.values()):
            lines.append("  Rename columns and files with commas, quotes, $, `, ! or \\ first.")
        if isinstance(own, Frame):
            if "missing-words" in options and "missing-words" in shared:
                both = f"{shared['missing-words']},{options['missing-words']}".split(",")
                options["missing-words"] = ",".join(dict.fromkeys(both))
            shared |= options
        elif any(need.kind in ("ids", _UNREAD) and not need.options for need in needs):
            continue  # `id` may name another column, and the options would leave out the right one
        elif party is not None:
            to_paste.append(f'--node-config "{pasted({**given, **options})}"')
        elif options:
            to_paste.append(f"in -c: {pasted(options)}")
    if shared:
        words = {name.replace("-", "_"): value for name, value in shared.items()}
        to_paste.append(f"train(..., {', '.join(f'{n}={v!r}' for n, v in words.items())})")
    return "\n  ".join(["\n".join([*lines, "Use:" * bool(to_paste)]).rstrip(), *to_paste])


def _code(name: str, own: Frame, needs: Sequence[Need]) -> list[str]:
    """Return code that removes rows without ids, and columns that no option helps."""
    drop = [each.column for each in needs if each.column and not each.options]
    ids = any(each.kind == "ids" for each in needs)
    rows = f".dropna(subset={own.id!r}).drop_duplicates({own.id!r})" * ids
    columns = f".drop(columns={list(dict.fromkeys(drop))})" * bool(drop)
    return [f"{name} = {name}{rows}{columns}"] if rows or columns else []
