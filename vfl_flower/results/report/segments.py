"""The sections of the page with a model's figures by segment, and by subset of parties."""

from collections.abc import Mapping, Sequence
from typing import Any

from vfl_flower.results.figures import ASSESSED, MEAN, form_of, lines, percent
from vfl_flower.results.page import Bar, Cell, Row, Section, Table
from vfl_flower.results.report.assessment import Estimate, by_run, estimates, scale
from vfl_flower.results.report.curves import run_column
from vfl_flower.results.report.features import drifts
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

_MAIN = "auc", "macro_auc", "accuracy", "rmse", "recall"
"""Figures that may be drawn. The first that a run has is."""

_DIFFERENCES = {
    "demographic_parity": "share flagged (demographic parity)",
    "equal_opportunity": "recall (equal opportunity)",
}


_MOST_LEFT_OUT = 5  # segments that notes name; more unfold


def segments(runs: Sequence[Shown]) -> Section | None:
    """Show figures by segment, the differences between segments, and segments left out."""
    runs = [run for run in runs if _of(run)]
    columns = dict.fromkeys(column for run in runs for column in _of(run))
    tables, more, left_out = [], {}, [(run, _left_out(run)) for run in runs]
    for column in columns:
        found = [mapping(_of(run).get(column)) for run in runs]
        tables += [_main(column, runs, found), _differences(column, runs, found)]
        tables += [_drift(column, run, of) for run, of in zip(runs, found, strict=True)]
        more[f"All figures by {column}"] = _all(column, runs, found)
    notes = []
    if any(mapping(_of(run).get(each)).get("differences") for run in runs for each in columns):
        notes.append("Largest difference: between two segments. The mark is at 0, no difference.")
    if any(number(_of(run), column, "epsilon") for run in runs for column in columns):
        notes.append("Figures by a party's column are estimates. Intervals cover their noise.")
    said = [
        (run, [f"No figures of {name} in {column}: it {why}." for column, name, why in each])
        for run, each in left_out
    ]
    if all(len(each) <= _MOST_LEFT_OUT for _, each in left_out):
        notes += by_run(said)
    else:
        rows: list[Row] = [[run.title, *each] for run, every in left_out for each in every]
        more["Segments without figures"] = Table(["run", "column", "segment", "why"], [rows], 4)
    return Section("Segments", tables, notes, more=more) if columns else None


def _of(run: Shown) -> dict[str, Any]:
    return mapping(run.assessment.get("segments"))


def _left_out(run: Shown) -> list[tuple[str, str, str]]:
    """Return column, segment and reason of each segment without figures."""
    return [
        (column, name, text(why))
        for column, found in _of(run).items()
        for name, why in mapping(mapping(found).get("left_out")).items()
    ]


Found = Sequence[Mapping[str, Any]]  # a column's segments, of each run
Segment = tuple[int, str, dict[str, Estimate]]  # place of the run, rows, figures


def _by_segment(found: Found) -> dict[str, list[Segment]]:
    """Return each segment with the rows and figures that each run has of it."""
    names = dict.fromkeys(name for each in found for name in mapping(each.get("figures")))
    return {
        name: [
            (n, shown(number(each, "rows", name), ",.0f"), estimates(mapping(figures[name])))
            for n, each in enumerate(found)
            if name in (figures := mapping(each.get("figures")))
        ]
        for name in names
    }


def _main(column: str, runs: Sequence[Shown], found: Found) -> Table:
    by_segment, names = _by_segment(found), run_column(runs)
    every = [figures for each in by_segment.values() for _, _, figures in each]
    key = next((key for key in _MAIN if any(key in each for each in every)), "")
    ends = scale([each[key] for each in every if key in each])
    bodies: list[list[Row]] = [
        [
            [
                name,
                names[n],
                rows,
                percent(figures["flagged"].value or 0.0) if "flagged" in figures else "",
                *(estimate := figures.get(key, Estimate(None))).texts(form_of(key)),
                estimate.dot(*ends, n),
            ]
            for n, rows, figures in each
        ]
        for name, each in by_segment.items()
    ]
    called, _ = ASSESSED.get(key, (key, ""))
    drawn = "{:.3g} to {:.3g}".format(*ends)
    head = [column, "run", "rows", "flagged", called, "95 % interval", drawn]
    bodies = bodies if len(runs) > 1 else [[row for body in bodies for row in body]]
    return Table(head, bodies, 2, f"By {column}")


def _drift(column: str, run: Shown, found: Mapping[str, Any]) -> Table:
    """Return the drift of labels and scores from each period to the next."""
    drift = mapping(found.get("drift"))
    named = {
        f"{name}, {text(period)} against {text(mapping(of).get('since'))}": index
        for period, of in drift.items()
        for name, index in mapping(of).items()
        if name != "since"
    }
    return drifts(named, ", ".join(filter(None, [f"Drift by {column}", run.title])))


def _all(column: str, runs: Sequence[Shown], found: Found) -> Table:
    names = run_column(runs)
    rows: list[Row] = [
        [name, names[n], ASSESSED.get(key, (key, ""))[0], *texts]
        for name, each in _by_segment(found).items()
        for n, _, figures in each
        for key, estimate in figures.items()
        if (texts := estimate.texts(form_of(key)))
    ]
    return Table([column, "run", "figure", "value", "95 % interval"], [rows], 3)


def _differences(column: str, runs: Sequence[Shown], found: Found) -> Table:
    shares = (estimates(mapping(each.get("differences"))) for each in found)
    of_runs = [
        {key: Estimate(*(end and 100 * end for end in each)) for key, each in of.items()}
        for of in shares
    ]
    least, most = scale([each for every in of_runs for each in every.values()])
    ends, names = (min(least, 0.0), max(most, 0.0)), run_column(runs)
    rows: list[Row] = [
        [_called(key, found[n]), names[n], *every[key].texts(".1f"), every[key].dot(*ends, n, 0.0)]
        for key in dict.fromkeys(key for every in of_runs for key in every)
        for n, every in enumerate(of_runs)
        if key in every
    ]
    drawn = "{:.3g} to {:.3g}".format(*ends)
    head = ["largest difference", "run", "percentage points", "95 % interval", drawn]
    return Table(head, [rows], 2, f"Differences by {column}")


def _called(key: str, found: Mapping[str, Any]) -> str:
    """Return what differs, between which segments, and the ratio of their shares."""
    of = mapping(mapping(found.get("differences")).get(key))
    ends = [text(of[end]) for end in ("highest", "lowest") if of.get(end) is not None]
    between = f": {' above '.join(ends)}" if len(ends) == 2 else ""
    kind = "flagged" if key == "demographic_parity" else "recall"
    high, low = ([number(found, "figures", each, kind, "value") for each in ends] + [None] * 2)[:2]
    if high and low is not None:
        between += f", ratio {low / high:.2f}"
    return _DIFFERENCES.get(key, key) + between


_KINDS = {"accuracy": "accuracy", "auc": "AUC", "r2": "R²"}
_MAPPINGS = "by_party", "left_out", "not_at"
_COUNTS = "matched", "ambiguous", "their_ambiguous"
_WHO = {"test_by_parties": "", "test_by_party": "{} alone"}


def people(runs: Sequence[Shown]) -> Section | None:
    """Show which people of the label holder's file were aligned and scored, and why not others."""
    tables, notes = [], list[str | Cell]()
    for run in runs:
        of = {"": run.figures, "predictions": run.beside("predictions")}
        for kind, covered in ((kind, mapping(each.get("coverage"))) for kind, each in of.items()):
            if not covered:
                continue
            rules, covered = mappings(covered.get("rules")), {**covered, "rules": ()}
            covered |= {each: mapping(covered.get(each)) for each in _MAPPINGS}
            names = {each: run.called(each) for each in covered["by_party"]}
            title = ", ".join(filter(None, (run.among(runs), kind)))
            said = dict(lines(covered, names))
            rows: list[Row] = [(what, shown(number(said, what), ",.0f")) for what in said]
            tables.append(Table(["people", "number"], [rows], caption=title))
            tables.append(rates(covered))
            if rules:
                tables.append(_rules(run, rules, title))
            left_out = covered.get("left_out_parties")
            notes += map(text, left_out) if isinstance(left_out, list) else ()
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
    tables = [table for run in runs if (table := _by_subset(run, run.among(runs)))]
    note = "A party alone is tested on the rows that it has."
    return Section("By who has a row", tables, [note]) if tables else None


def _by_subset(run: Shown, caption: str) -> Table | None:
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
    return Table(head, [each for each in bodies if each], caption=caption)


def worth(runs: Sequence[Shown]) -> Section | None:
    """Show the Shapley values of parties that `vfl contribution` has found."""
    tables, notes = list[Table](), list[str | Cell]()
    for run in runs:
        of = run.beside("contribution")
        parties = [
            (each, value, margin)
            for each in mappings(of.get("parties"))
            if (value := number(each, "value")) is not None
            and (margin := number(each, "margin")) is not None
        ]
        most = max((abs(value) for _, value, _ in parties), default=0.0)
        rows: list[Row] = [
            (
                run.called(shown(number(each, "party"))),
                f"{value:.4f}",
                f"{value - margin:.4f} to {value + margin:.4f}",
                "" if value > margin else "not above zero",
                Cell(bar=Bar([value], most, max(0.0, value - margin))),
            )
            for each, value, margin in parties
        ]
        if not rows:
            continue
        metric = _KINDS.get(text(of.get("metric")), text(of.get("metric")))
        head = ["party", f"value ({metric})", "95 % interval", "", "value"]
        tables.append(Table(head, [rows], caption=run.among(runs)))
        ends = (measured(of, key, form=".4f") for key in ("all", "nobody"))
        total = sum(value for _, value, _ in parties)
        said = "all parties {}, nobody {}: the values add up to {:.4f}.".format(*ends, total)
        notes.append(run.among(runs, ": ") + said if len(runs) > 1 else said.capitalize())
    mark = Cell("where the 95 % interval begins", line="mark")
    meaning = "A party is worth what it adds to the parties before it, on average over all orders."
    return Section("What each party is worth", tables, [mark, *notes, meaning]) if tables else None
