"""The section of the page about rows that some parties lack, and what each party is worth."""

from __future__ import annotations

from collections.abc import Sequence

from vfl_flower.tools.report.read import Shown, mapping, mappings, number, text
from vfl_flower.tools.report.sections import (
    Bar,
    Cell,
    Row,
    Section,
    Table,
    counted,
    measured,
    shown,
)

_KINDS = {"accuracy": "accuracy", "auc": "AUC", "r2": "R2"}


def subsets(runs: Sequence[Shown]) -> Section | None:
    """How models do by how many parties have a row, by each alone, and Shapley values."""
    tables = [table for run in runs for table in (*_by_subset(run), *_worth(run))]
    note = (
        "Rows of parties that are alone are those that the party has. A party is worth what it "
        "adds to those before it, on average over all orders; the dash is where the interval of "
        "95 % begins."
    )
    return Section("By who has a row", tables, [("", note)]) if tables else None


def _by_subset(run: Shown) -> list[Table]:
    bodies: list[list[Row]] = []
    names = {"test_by_parties": lambda each: counted(int(each), "party", "parties")}
    names["test_by_party"] = lambda each: f"party {each} alone"
    kinds = [
        kind
        for kind in _KINDS
        if any(
            number(mapping(found), kind) is not None
            for key in names
            for found in mapping(run.figures.get(key)).values()
        )
    ]
    for key, name in names.items():
        found = mapping(run.figures.get(key))
        bodies.append(
            [
                (
                    name(each),
                    shown(number(found, each, "rows"), ",.0f"),
                    *(measured(found, each, kind, form=".4f") for kind in kinds),
                    Cell(bar=Bar.of([number(found, each, kinds[0]) or 0], 1.0)),
                )
                for each in found
                if each.isdecimal() and kinds
            ]
        )
    if not any(bodies):
        return []
    if unknown := number(run.figures, "unknown_rows"):
        blank = [""] * (len(kinds) + 1)
        bodies.append([("too few: in no figure", shown(unknown, ",.0f"), *blank)])
    head = ["who has a row", "rows", *(_KINDS[kind] for kind in kinds), "0 to 1"]
    return [Table(head, [each for each in bodies if each], caption=run.title)]


def _worth(run: Shown) -> list[Table]:
    parties = mappings(run.contribution.get("parties"))
    rows: list[Row] = []
    most = max((abs(number(each, "value") or 0) for each in parties), default=0)
    for each in parties:
        value, margin = number(each, "value"), number(each, "margin")
        if value is None or margin is None:
            continue
        said = f"{shown(value - margin, '.4f')} to {shown(value + margin, '.4f')}"
        bar = Bar.of([value], most, max(0.0, value - margin))
        who = f"party {shown(number(each, 'party'))}"
        above = "" if value > margin else "not above zero"
        rows.append((who, shown(value, ".4f"), said, above, Cell(bar=bar)))
    metric = text(run.contribution.get("metric"))
    head = ["what it is worth", metric, "95 % interval", "", "value"]
    return [Table(head, [rows], caption=run.title)] if rows else []
