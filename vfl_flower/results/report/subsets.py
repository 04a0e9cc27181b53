"""The sections of the page about rows that parties lack, and about what each party is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vfl_flower.results.coverage import MEAN, lines
from vfl_flower.results.figures import percent
from vfl_flower.results.page import Bar, Cell, Row, Section, Table
from vfl_flower.results.report.read import (
    Shown,
    counted,
    mapping,
    mappings,
    measured,
    number,
    shown,
    text,
)

_KINDS = {"accuracy": "accuracy", "auc": "AUC", "r2": "R²"}
_MAPPINGS = "by_party", "left_out", "not_at"
_COUNTS = "matched", "ambiguous", "their_ambiguous"
_WHO = {"test_by_parties": "", "test_by_party": "{} alone"}


def people(runs: Sequence[Shown]) -> Section | None:
    """Show which people of the label holder's file were aligned and scored, and why not others."""
    tables, notes = [], []
    for run in runs:
        of = {"": run.figures, "predictions": run.predictions}
        for kind, covered in ((kind, mapping(each.get("coverage"))) for kind, each in of.items()):
            if not covered:
                continue
            rules, covered = mappings(covered.get("rules")), {**covered, "rules": ()}
            covered |= {each: mapping(covered.get(each)) for each in _MAPPINGS}
            names = {each: run.called(each) for each in covered["by_party"]}
            title = ", ".join(filter(None, (run.title if len(runs) > 1 else "", kind)))
            said = dict(lines(covered, names))
            rows: list[Row] = [(what, shown(number(said, what), ",.0f")) for what in said]
            tables.append(Table(["people", "number"], [rows], caption=title))
            tables.append(rates(covered))
            if rules:
                tables.append(_rules(run, rules, title))
            left_out = covered.get("left_out_parties")
            notes += [("", text(each)) for each in left_out] if isinstance(left_out, list) else []
    return Section("People", tables, notes) if tables else None


def rates(found: Mapping[str, Any]) -> Table:
    """Return the table of how labels differ between people who were aligned and others."""
    parts = mapping(found.get("labels"))
    names = dict.fromkeys(name for each in parts.values() for name in mapping(each))
    form = "{:.4g}".format if MEAN in names else percent
    rows: list[Row] = [[n, *(form(number(parts, who, n) or 0.0) for who in parts)] for n in names]
    return Table(["label", *(who.replace("_", " ") for who in parts)], [rows])


def _rules(run: Shown, rules: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Show by which rules people were matched, and why others were not used."""
    rows: list[Row] = []
    for each in rules:
        why, lacks = text(each.get("why")), each.get("lacks")
        if isinstance(lacks, list) and lacks:
            why = f"not used: {why} lacks {', '.join(map(text, lacks))}"
        party = run.called(shown(number(each, "party")))
        figures = [shown(number(each, key), ",.0f") for key in _COUNTS]
        false = shown(number(each, "false"), ".2g")
        rows.append([party, text(each.get("rule")), *figures, false, why])
    head = ["party", "rule", "matched", "ambiguous here", "ambiguous there", "expected false"]
    return Table([*head, "note"], [rows], texts=2, caption=title)


def subsets(runs: Sequence[Shown]) -> Section | None:
    """Show how models do by how many parties have a row, and by each party alone."""
    tables = [table for run in runs if (table := _by_subset(run, len(runs) > 1))]
    note = "A party alone is tested on the rows that it has."
    return Section("By who has a row", tables, [("", note)]) if tables else None


def _by_subset(run: Shown, named: bool) -> Table | None:
    found = {key: mapping(run.figures.get(key)) for key in _WHO}
    every = [mapping(each) for by in found.values() for each in by.values()]
    kinds = [kind for kind in _KINDS if any(number(each, kind) is not None for each in every)]
    bodies: list[list[Row]] = [
        [
            (
                _WHO[key].format(run.called(each)) or counted(int(each), "party", "parties"),
                shown(number(by, each, "rows"), ",.0f"),
                *(measured(by, each, kind, form=".4f") for kind in kinds),
                Cell(bar=Bar([number(by, each, kinds[0]) or 0])),
            )
            for each in by
            if each.isdecimal() and kinds
        ]
        for key, by in found.items()
    ]
    if not any(bodies):
        return None
    if unknown := number(run.figures, "unknown_rows"):
        blank = [""] * (len(kinds) + 1)
        bodies.append([("too few: in no figure", shown(unknown, ",.0f"), *blank)])
    head = ["who has a row", "rows", *(_KINDS[kind] for kind in kinds), "0 to 1"]
    return Table(head, [each for each in bodies if each], caption=run.title if named else "")


def worth(runs: Sequence[Shown]) -> Section | None:
    """Show the Shapley values of parties that `vfl contribution` has found."""
    found = [(run, table) for run in runs if (table := _values(run, len(runs) > 1))]
    notes = [("mark", "where the 95 % interval begins")]
    for run, table in found:
        ends = (measured(run.contribution, key, form=".4f") for key in ("all", "nobody"))
        total = sum(number(each, "value") or 0 for each in _parties(run))
        said = "all parties {}, nobody {}: the values add up to {:.4f}.".format(*ends, total)
        notes.append(("", f"{table.caption}: {said}" if table.caption else said.capitalize()))
    meaning = "A party is worth what it adds to the parties before it, on average over all orders."
    tables, notes = [table for _, table in found], [*notes, ("", meaning)]
    return Section("What each party is worth", tables, notes) if found else None


def _parties(run: Shown) -> list[dict[str, float]]:
    """Return the parties whose value and margin are numbers."""
    every = mappings(run.contribution.get("parties"))
    keys = ("value", "margin")
    return [each for each in every if all(number(each, key) is not None for key in keys)]


def _values(run: Shown, named: bool) -> Table | None:
    parties = _parties(run)
    most = max((abs(each["value"]) for each in parties), default=0.0)
    rows: list[Row] = []
    for each in parties:
        value, margin = each["value"], each["margin"]
        rows.append(
            (
                run.called(shown(number(each, "party"))),
                f"{value:.4f}",
                f"{value - margin:.4f} to {value + margin:.4f}",
                "" if value > margin else "not above zero",
                Cell(bar=Bar([value], most, max(0.0, value - margin))),
            )
        )
    metric = _KINDS.get(text(run.contribution.get("metric")), text(run.contribution.get("metric")))
    head = ["party", f"value ({metric})", "95 % interval", "", "value"]
    return Table(head, [rows], caption=run.title if named else "") if rows else None
