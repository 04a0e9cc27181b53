"""The sections of the page about features of parties, which have numbers and no names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from vfl_flower.results.terminal import on_terminal

_SHOWN = 20  # features; the others unfold
_STRENGTHS = ((0.02, "none"), (0.1, "weak"), (0.3, "medium"), (0.5, "strong"))
_OWN = "own"  # the label holder, among the parties


def importance(runs: Sequence[Shown]) -> Section | None:
    """Show how much worse the model gets if the values of a feature are permuted."""

    def said(of: Mapping[str, Any]) -> str:
        name = text(of.get("metric"))
        metric, _ = ASSESSED.get(name, (name, ""))
        rows, base = shown(number(of, "rows"), ",.0f"), shown(number(of, "baseline"), ".4f")
        times = counted(number(of, "repeats"), "permutation", "permutations")
        metric = f"{metric[:1].upper()}{metric[1:]}"
        return f"{metric} is {base} on {rows} rows; each feature had {times}."

    note = (
        "Importance: what the figure loses if the feature's values are permuted. Features with the "
        "same information share it. A party's own table of this explanation has the names of its "
        "features. Information values number the same features differently."
    )
    return _section("Importance of features", runs, "explanation", "importance", said, note)


def information(runs: Sequence[Shown]) -> Section | None:
    """Show the information value of each feature."""

    def said(of: Mapping[str, Any]) -> str:
        how = "exact counts of labels"
        if text(of.get("mode")) == "noisy":
            spent = f" (all draws of these labels: {shown(number(of, 'spent'))})"
            how = f"labels with noise, epsilon {shown(number(of, 'epsilon'))}"
            how += " (repeatable)" if of.get("spent") is None else spent
            if "label holder" in mapping(of.get("parties")):
                how += ". The label holder's own columns have values by its true labels"
        return f"{shown(number(of, 'rows'), ',.0f')} rows, {how}."

    note = (
        "Strength is a rule of thumb: none below 0.02, weak below 0.1, medium below 0.3, strong "
        "below 0.5. More is too good: check whether the feature knows the label."
    )
    title, called = "Information value of features", "information value"
    return _section(title, runs, "information", called, said, note)


def _written(runs: Sequence[Shown], command: str) -> list[tuple[Shown, dict[str, Any]]]:
    """Return the runs that a command has written about, and what it has written."""
    return [(run, of) for run in runs if (of := run.beside(command))]


def in_terminal(folder: Path, what: str) -> str:
    """Return the section of ``information`` or ``explanation`` for a terminal, from a folder."""
    of = json_of(folder / f"{what}.json")
    named = [{"party": n, "name": each} for n, each in from_json(of.get("names")).items()]
    run = Shown("", folder, {"by_party": named})
    section = (information if what == "information" else importance)([run])
    if not section:
        return ""
    more = [f"The page of `vfl report {folder}` has {title}." for title in section.more]
    told = _refused(run, of) if on_terminal() else []  # where notices say it too
    notes = [*(each for each in section.notes if each not in told), *more]
    return replace(section, notes=notes).in_terminal()


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
    title: str,
    runs: Sequence[Shown],
    command: str,
    called: str,
    said: Callable[[Mapping[str, Any]], str],
    note: str,
) -> Section | None:
    """Show the features of each run, the greatest first, and what is said of what was written."""
    tables, more, notes = [], {}, list[str]()
    for run, of in _written(runs, command):
        notes += [run.among(runs, ": ") + each for each in (said(of), *_refused(run, of))]
        rows = _rows(run, of, called == "information value")
        bins = ["bins", "strength"] if called == "information value" else []
        head = ["feature", called, "95 % interval", *bins, "drawn"]
        title_of_run = run.among(runs)
        tables.append(Table(head, [rows[:_SHOWN]], 1, title_of_run))
        if rest := rows[_SHOWN:]:
            which = f"{len(rest)} more features" + (f" of {title_of_run}" if title_of_run else "")
            more[which] = Table(head, [rest])
    return Section(title, tables, [*notes, note], more=more) if tables else None


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
    tables, notes = [], []
    for run, predicted in _written(runs, "predictions"):
        if not (of := mapping(predicted.get("drift"))):
            continue
        embeddings, columns = mapping(of.get("embeddings")), mapping(of.get("columns"))
        names = {party: f"embeddings of {run.called(party)}" for party in embeddings}
        names |= {"sum": "sum of all embeddings"}
        rows = [_index("scores", number(of, "scores"))]
        rows += [_index(names[party], number(embeddings, party)) for party in embeddings]
        counts: list[Row] = [
            [
                "label holder" if party == _OWN else run.called(party),
                *(shown(number(columns, party, key), ".0f") for key in ("moderate", "large")),
            ]
            for party in columns
            if mapping(columns[party])
        ]
        head = ["columns of", "moderate drift", "large drift"]
        tables.append(Table(_HEAD, [rows], caption=run.among(runs)))
        tables.append(Table(head, [counts], caption=run.among(runs, ": columns")))
        missing = "" if number(of, "scores") is not None else " There is no index of their scores."
        said = [f"{shown(number(of, 'rows'), ',.0f')} predicted rows.{missing}"]
        flagged = mapping(predicted.get("inconsistent"))
        said += [
            f"{run.called(each)} does not fit the others in {n:,.0f} scores."
            for each in flagged
            if (n := number(flagged, each))
        ]
        said += [
            run.in_words(f"Party {each} tells nothing of its columns.")
            for each in columns
            if each != _OWN and not mapping(columns[each])
        ]
        notes += [run.among(runs, ": ") + each for each in said]
    return Section("Drift since training", tables, [SCALE, *notes, MEANING]) if tables else None


SCALE = Cell("0.25: drift above it is large", line="mark")
MEANING = (
    f"Population stability index: above {MODERATE:g} moderate, above {LARGE:g} large. On few rows, "
    "chance alone can exceed that. A prediction warns only of more than chance."
)
"""A note of a table of `drifts`: the meaning of an index."""
_MOST = 0.5  # right end of the scale of drift
_HEAD = "what", "index", "drift", f"0 to {_MOST:g}"


def drifts(found: Mapping[str, Any], caption: str) -> Table:
    """Return the table of the indices of some columns (`data.drift.between`)."""
    rows = []
    for name in found:
        raw, value, chance = (number(found, name, key) for key in Drift._fields)
        rows.append(_index(name, value, (raw or 0.0) <= (chance or 0.0)))
    return Table(_HEAD, [rows], caption=caption)


def _index(what: str, value: float | None, or_chance: bool = False) -> Row:
    if value is None:
        return [what, shown(None), "", ""]
    word = "large" if value > LARGE else "moderate" if value > MODERATE else "small"
    word += ", or chance" * (or_chance and value > MODERATE)
    return [what, f"{value:z.4f}", word, Cell(bar=Bar([min(value, _MOST)], _MOST, LARGE))]
