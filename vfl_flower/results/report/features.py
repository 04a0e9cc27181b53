"""The sections of the page about features of parties, which have numbers and no names."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl_flower.config.names import from_json
from vfl_flower.data.drift import LARGE, MODERATE, Drift
from vfl_flower.results.figures import ASSESSED
from vfl_flower.results.page import Bar, Cell, Row, Section, Table
from vfl_flower.results.report.assessment import Estimate, scale
from vfl_flower.results.report.read import (
    Shown,
    counted,
    json_of,
    mapping,
    mappings,
    number,
    shown,
    text,
)

_SHOWN = 20  # features; the others unfold
_STRENGTHS = ((0.02, "none"), (0.1, "weak"), (0.3, "medium"), (0.5, "strong"))
_OWN = "own"  # the label holder, among the parties


def importance(runs: Sequence[Shown]) -> Section | None:
    """Show how much worse the model gets if the values of a feature are permuted."""
    notes = []
    for run in (run for run in runs if run.explanation):
        of, named = run.explanation, f"{run.title}: " if len(runs) > 1 else ""
        metric = _metric(of)
        rows, repeats = shown(number(of, "rows"), ",.0f"), number(of, "repeats")
        times = counted(repeats, "permutation", "permutations")
        base = shown(number(of, "baseline"), ".4f")
        said = (
            f"{metric[:1].upper()}{metric[1:]} is {base} on {rows} rows; each feature had {times}."
        )
        notes += [named + said, *(named + each for each in _refused(run, of))]
    notes.append(
        "Importance: what the figure loses if the feature's values are permuted. Features with the "
        "same information share it. A party's own table of this explanation has the names of its "
        "features. Information values number the same features differently."
    )
    found = [(run, mapping(run.explanation)) for run in runs]
    return _section("Importance of features", found, "importance", notes)


def information(runs: Sequence[Shown]) -> Section | None:
    """Show the information value of each feature."""
    notes = []
    for run in (run for run in runs if run.information):
        of, named = run.information, f"{run.title}: " if len(runs) > 1 else ""
        how = "exact counts of labels"
        if text(of.get("mode")) == "noisy":
            spent = f" (all draws of these labels: {shown(number(of, 'spent'))})"
            how = f"labels with noise, epsilon {shown(number(of, 'epsilon'))}"
            how += " (repeatable)" if of.get("spent") is None else spent
            if "label holder" in mapping(of.get("parties")):
                how += ". The label holder's own columns have values by its true labels"
        rows = shown(number(of, "rows"), ",.0f")
        notes += [f"{named}{rows} rows, {how}.", *(named + each for each in _refused(run, of))]
    notes.append(
        "Strength is a rule of thumb: none below 0.02, weak below 0.1, medium below 0.3, strong "
        "below 0.5. More is too good: check whether the feature knows the label."
    )
    found = [(run, mapping(run.information)) for run in runs]
    return _section("Information value of features", found, "information value", notes)


def in_terminal(folder: Path, what: str) -> str:
    """Return the section of ``information`` or ``explanation`` for a terminal, from a folder."""
    of = json_of(folder / f"{what}.json")
    named = [{"party": n, "name": each} for n, each in from_json(of.get("names")).items()]
    run = Shown("", folder, {"by_party": named}, explanation=of, information=of)
    section = information([run]) if what == "information" else importance([run])
    return section.in_terminal() if section else ""


def _metric(of: Mapping[str, Any]) -> str:
    name = text(of.get("metric"))
    return ASSESSED.get(name, (name, ""))[0]


def _refused(run: Shown, of: Mapping[str, Any]) -> list[str]:
    said = {who: mapping(each).get("refused") for who, each in mapping(of.get("parties")).items()}
    return [
        run.in_words(
            f"Without figures: {text(why)}"
            if text(why).startswith("Party ")
            else f"Party {who} has no figures: {text(why)}"
        )
        for who, why in said.items()
        if why
    ]


def _section(
    title: str, found: Sequence[tuple[Shown, dict[str, Any]]], called: str, notes: Sequence[str]
) -> Section | None:
    """Show the features of each run, the greatest first."""
    tables, more, several = [], {}, len(found) > 1
    any_found = False
    for run, of in found:
        any_found |= bool(of)
        rows = _rows(run, of, called == "information value")
        bins = ["bins", "strength"] if called == "information value" else []
        head = ["feature", called, "95 % interval", *bins, "drawn"]
        tables.append(Table(head, [rows[:_SHOWN]], 1, run.title if several else ""))
        if rest := rows[_SHOWN:]:
            which = f"{len(rest)} more features" + (f" of {run.title}" if several else "")
            more[which] = Table(head, [rest])
    return Section(title, tables, notes, more=more) if any_found else None


def _rows(run: Shown, of: Mapping[str, Any], binned: bool) -> list[Row]:
    """Return a row for each feature; features without a value come last, with a note."""
    found = [
        (_called(run, who, each), each, Estimate.of(each))
        for who, party in mapping(of.get("parties")).items()
        for each in mappings(mapping(party).get("features"))
    ]
    found.sort(key=lambda each: -math.inf if each[2].value is None else each[2].value, reverse=True)
    least, most = scale([estimate for _, _, estimate in found])
    rows: list[Row] = []
    for name, each, estimate in found:
        value, strength = estimate.value, text(each.get("note", ""))
        drawn: str | Cell = ""
        if value is not None:
            bar = Bar([value], max(most, 0.0), None, min(least, 0.0), estimate.interval)
            strength = next((word for end, word in _STRENGTHS if value < end), "too good?")
            drawn = Cell(bar=bar)
        bins = [shown(number(each, "bins")), strength] if binned else []
        rows.append([name, *estimate.texts(), *bins, drawn])
    return rows


def _called(run: Shown, who: str, feature: Mapping[str, Any]) -> str:
    """Return the name of a feature. Only the label holder's own features have names."""
    if who == "label holder":
        return f"{who}, {text(feature.get('feature'))}"
    return f"{run.called(who)}, feature {shown(number(feature, 'feature'))}"


# --- drift --------------------------------------------------------------------------------------


def drift(runs: Sequence[Shown]) -> Section | None:
    """Show the population stability index of predicted rows, compared with the run's rows."""
    found = [(run, of) for run in runs if (of := mapping(run.predictions.get("drift")))]
    several = len(runs) > 1
    tables, notes = [], []
    for run, of in found:
        title = run.title if several else ""
        rows: list[Row] = [_index("scores", number(of, "scores"))]
        embeddings = mapping(of.get("embeddings"))
        for party in embeddings:
            called = (
                "sum of all embeddings" if party == "sum" else f"embeddings of {run.called(party)}"
            )
            rows.append(_index(called, number(embeddings, party)))
        tables.append(Table(["what", "index", "drift", f"0 to {_MOST:g}"], [rows], 1, title))
        columns = mapping(of.get("columns"))
        counts: list[Row] = [
            [
                "label holder" if party == _OWN else run.called(party),
                *(shown(number(columns, party, key), ".0f") for key in ("moderate", "large")),
            ]
            for party in columns
            if mapping(columns[party])
        ]
        tables.append(
            Table(
                ["columns of", "moderate drift", "large drift"],
                [counts],
                1,
                f"{run.title}: columns" if several else "",
            )
        )
        named = f"{run.title}: " if several else ""
        missing = "" if number(of, "scores") is not None else " There is no index of their scores."
        notes.append(f"{named}{shown(number(of, 'rows'), ',.0f')} predicted rows.{missing}")
        flagged = mapping(run.predictions.get("inconsistent"))
        said = ((run.called(each), number(flagged, each)) for each in flagged)
        notes += [
            f"{named}{who} does not fit the others in {n:,.0f} scores." for who, n in said if n
        ]
        unknown = [each for each in columns if each != _OWN and not mapping(columns[each])]
        if unknown:
            silent = [f"Party {each} tells nothing of its columns." for each in unknown]
            notes += [named + run.in_words(each) for each in silent]
    return Section("Drift since training", tables, [SCALE, *notes, MEANING]) if found else None


SCALE = Cell("0.25: drift above it is large", line="mark")
MEANING = (
    f"Population stability index: above {MODERATE:g} moderate, above {LARGE:g} large. On few rows, "
    "chance alone can exceed that. A prediction warns only of more than chance."
)
"""A note of a table of `drifts`: the meaning of an index."""
_MOST = 0.5  # right end of the scale of drift


def drifts(found: Mapping[str, Any], caption: str) -> Table:
    """Return the table of the indices of some columns (`data.drift.between`)."""
    rows = []
    for name in found:
        raw, value, chance = (number(found, name, key) for key in Drift._fields)
        rows.append(_index(name, value, (raw or 0.0) <= (chance or 0.0)))
    return Table(["what", "index", "drift", f"0 to {_MOST:g}"], [rows], 1, caption)


def _index(what: str, value: float | None, or_chance: bool = False) -> Row:
    if value is None:
        return [what, shown(None), "", ""]
    word = "large" if value > LARGE else "moderate" if value > MODERATE else "small"
    word += ", or chance" * (or_chance and value > MODERATE)
    return [what, f"{value:z.4f}", word, Cell(bar=Bar([min(value, _MOST)], _MOST, LARGE))]
