"""The section of the page with a model's figures on test rows: intervals, curves, confusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vfl_flower.results.charts import Line, look
from vfl_flower.results.figures import ASSESSED, IN_UNITS, chosen, form_of, percent
from vfl_flower.results.page import Bar, Cell, Chart, Row, Section, Table
from vfl_flower.results.report.curves import drawn, run_column, titles
from vfl_flower.results.report.read import Shown, mapping, number, numbers, shown, text

_MOST_CLASSES = 10  # of an open confusion matrix
_MOST_BANDS = 3  # runs whose curves have bands


class Estimate(NamedTuple):
    """A figure with its 95 % interval, as far as a file has them."""

    value: float | None
    low: float | None = None
    high: float | None = None
    deviation: float | None = None  # over the run's seeds

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Estimate:
        """Read an estimate from ``value``, ``low`` and ``high``, and a deviation of the value."""
        value, low, high = (number(found, key) for key in ("value", "low", "high"))
        return cls(value, low, high, number(found, "deviation", "value"))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the interval, if there are two."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def texts(self, form: str = ".4f") -> tuple[str, str]:
        """Return value and interval as texts, and never -0.0000."""
        ends, form = self.interval, f"z{form}"
        value = shown(self.value, form)
        value += "" if self.deviation is None else f" ± {self.deviation:{form}}"
        return value, f"{ends[0]:{form}} to {ends[1]:{form}}" if ends else ""

    def dot(
        self, least: float, most: float, place: int = 0, mark: float | None = None
    ) -> str | Cell:
        """Draw a run's estimate on a scale, in the colour of its place, if it has an interval."""
        if self.value is None or not self.interval:
            return ""
        dot = self.value, look(place)[0]
        return Cell(bar=Bar((), most, mark, least, self.interval, dot))


def estimates(found: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the figures of a mapping that have a value, by their keys."""
    every = {key: Estimate.of(mapping(each)) for key, each in found.items()}
    return {key: each for key, each in every.items() if each.value is not None}


def scale(found: Sequence[Estimate]) -> tuple[float, float]:
    """Return the least and the greatest end of intervals."""
    ends = [
        end for each in found for end in (*(each.interval or ()), each.value) if end is not None
    ]
    return min(ends, default=0.0), max(ends, default=1.0)


# --- the section --------------------------------------------------------------------------------


def assessment(runs: Sequence[Shown], charts: bool = True, of: str = "test rows") -> Section | None:
    """Show figures of some rows with intervals, curves with bands, and confusion matrices."""
    runs = [run for run in runs if run.assessment]
    if not runs:
        return None
    several = len(runs) > 1
    row = [chart for key in _CURVES if charts and (chart := _curve(runs, key))]
    legend = titles(runs) if several else []
    if row:
        ranked = any("roc" in mapping(run.assessment.get("curves")) for run in runs)
        reference = "random order, or perfect calibration" if ranked else "perfect calibration"
        legend.append(Cell(reference, line="line s7 dashes-1"))
    figures = [estimates(mapping(run.assessment.get("figures"))) for run in runs]
    tables = [_figures(run_column(runs), figures)]
    more = {}
    for run in runs:
        if matrix := _confusion(run, several):
            if len(matrix.head) <= _MOST_CLASSES + 1:
                tables.append(matrix)
            else:
                more["Confusion matrix" + (f" of {run.title}" if several else "")] = matrix
    every = dict.fromkeys(key for each in figures for key in each if key in ASSESSED)
    meanings: list[Row] = [ASSESSED[key] for key in every]
    more["What these figures mean"] = Table(["figure", "meaning"], [meanings], 2)
    notes = []
    if any(each.interval for found in figures for each in found.values()):
        notes.append(f"Intervals{' and bands' * bool(row)} are 95 % intervals.")
    if several:
        notes.append("Intervals may overlap although one run is better on the same rows.")
    on_top = charts and of == "test rows"
    notes += by_run([(run, _said(run, of) + (_on_top(run) if on_top else [])) for run in runs])
    charts_of = {"": row} if row else {}
    return Section(f"Assessment on {of}", tables, notes, legend, charts_of, more)


def by_run(said: Sequence[tuple[Shown, Sequence[str]]]) -> list[str]:
    """Return sentences about runs: each once, after the titles of its runs if not of all."""
    of: dict[str, list[str]] = {}
    for run, sentences in said:
        for each in sentences:
            of.setdefault(each, []).append(run.title)
    return [
        each if len(runs) == len(said) else f"{', '.join(runs)}: {each}"
        for each, runs in of.items()
    ]


def _figures(names: Sequence[Cell], figures: Sequence[Mapping[str, Estimate]]) -> Table:
    """Return all figures: of one run on one scale, of several on a scale for each figure."""
    several = len(figures) > 1
    bodies: list[list[Row]] = []
    for key in dict.fromkeys(key for found in figures for key in found):
        of_runs = [(n, found[key]) for n, found in enumerate(figures) if key in found]
        least, most = scale([each for _, each in of_runs])
        shares = least >= 0 and most <= 1 and key not in (*IN_UNITS, "log_loss")
        ends = (least, most) if several else (0.0, 1.0)
        bodies.append(
            [
                [
                    ASSESSED.get(key, (key, ""))[0],
                    names[n],
                    *each.texts(form_of(key)),
                    each.dot(*ends, n) if several or shares else "",
                ]
                for n, each in of_runs
            ]
        )
    if not several:
        bodies = [[row for rows in bodies for row in rows]]
    drawn = "each figure on its own scale" if several else "0 to 1"
    return Table(["figure", "run", "value", "95 % interval", drawn], bodies, 2)


def _said(run: Shown, kind: str) -> list[str]:
    """Return what a reader must know beside the figures of a run."""
    of = run.assessment
    rows, positives = number(of, "rows"), number(of, "positives")
    classes = _classes(run)
    found = [f"{shown(rows, ',.0f')} {kind}."]
    seeds = run.summary.get("seeds")
    if isinstance(seeds, list):
        found.append(f"All are means of {len(seeds)} seeds, ends of intervals too.")
    if rows and positives is not None:
        which = f" (class {classes[1]})" if len(classes) == 2 else ""
        share = f"{shown(positives, ',.0f')} ({percent(positives / rows)})"
        found[0] = f"{shown(rows, ',.0f')} {kind}. {share} are positive{which}."
    threshold = mapping(of.get("threshold"))
    if (value := number(threshold, "value")) is not None:
        which = f" to be of class {classes[1]}" if len(classes) == 2 else " positive"
        found.append(
            f"A row is predicted{which} if its probability is above {value:.4g}"
            f"{chosen(text(threshold.get('rule')))}. Accuracy, precision, recall, F1 and flagged "
            "depend on that threshold."
        )
    if calibrate := of.get("calibrate"):
        kept = text(calibrate)
        said = "as the model gives them" if kept == "none" else f"calibrated ({kept})"
        found.append(f"Probabilities are {said}.")
    return found


def _on_top(run: Shown) -> list[str]:
    """Return how figures elsewhere on the page differ: they use no threshold, no calibration."""
    value = number(mapping(run.assessment.get("threshold")), "value")
    calibrated = run.assessment.get("calibrate") or "none"
    said = ["with the threshold 0.5"] if value not in (None, 0.5) else []
    said += ["without calibration"] if calibrated != "none" else []
    where = "Figures on top of the page and in its curves by epoch are"
    return [f"{where} {', '.join(said)}."] if said else []


def _classes(run: Shown) -> list[str]:
    found = mapping(run.assessment.get("confusion")).get("classes")
    return [text(each) for each in found] if isinstance(found, list) else []


def _confusion(run: Shown, named: bool) -> Table | None:
    """Return the confusion matrix of a run, with shares of the rows of each true class."""
    counts = mapping(run.assessment.get("confusion")).get("counts")
    classes = _classes(run)
    rows: list[Row] = []
    for name, line in zip(classes, counts if isinstance(counts, list) else [], strict=False):
        cells = [count for (count,) in numbers({"": line}, "")]
        if len(cells) != len(classes):
            return None
        total = sum(cells)
        shares = [f" ({percent(each / total)})" if each else "" for each in cells]
        rows.append(
            [f"true {name}", *(shown(n, ",.0f") + s for n, s in zip(cells, shares, strict=True))]
        )
    caption = "Confusion matrix" + (f" of {run.title}" if named else "")
    head = ["class", *(f"predicted {name}" for name in classes)]
    return Table(head, [rows], 1, f"{caption}: rows, and shares of each true class")


# --- curves -------------------------------------------------------------------------------------


_SCORED = "share of rows, highest scores first"
_CURVES = {
    "roc": (
        "ROC: true positive rate against false positive rate",
        "false positive rate",
        "diagonal",
    ),
    "precision_recall": ("precision against recall", "recall", "rate"),
    "calibration": ("calibration: truth against prediction", "mean prediction", "diagonal"),
    "gain": ("gain: share of positives found against share of rows", _SCORED, "diagonal"),
    "lift": ("lift of each decile: positives over a random order", _SCORED, "one"),
    "residuals": ("residuals: rows by prediction error", "prediction minus label", ""),
}
"""Curve -> its title, the label of its x-axis, and the kind of its reference, if any."""


def _curve(runs: Sequence[Shown], key: str) -> Chart | None:
    lines: list[Line] = []
    for place, run in enumerate(runs):
        curve = mapping(mapping(run.assessment.get("curves")).get(key))
        banded = numbers(curve, "x", "y", "low", "high")
        points = banded or numbers(curve, "x", "y")
        if points and points[0][0] > points[-1][0]:
            points = points[::-1]
        if points:
            drawn_too = banded and len(runs) <= _MOST_BANDS  # more would cover each other
            band = [(each[2], each[3]) for each in points] if drawn_too else []
            lines.append(Line(run.title, place, [(each[0], each[1]) for each in points], band))
    title, x_label, kind = _CURVES[key]
    references = _reference(runs, lines, kind) if lines else []
    return drawn(title, lines, x_label, references, linear=True)


def _reference(runs: Sequence[Shown], lines: Sequence[Line], kind: str) -> list[Line]:
    """Return the line of a random order, or of perfect calibration."""
    points: list[list[tuple[float, float]]] = [[(0.0, 1.0)]] if kind == "one" else []
    if kind == "rate":
        rates = {
            positives / rows
            for run in runs
            if (positives := number(run.assessment, "positives")) is not None
            and (rows := number(run.assessment, "rows"))
        }
        points = [[(0.0, each)] for each in sorted(rates)]
    if kind == "diagonal":
        ends = [x for line in lines for x, _ in line.points]
        shares = min(ends) >= 0 and max(ends) <= 1
        points = [[(0.0, 0.0), (1.0, 1.0)] if shares else [(e, e) for e in (min(ends), max(ends))]]
    return [Line("reference", 7, each, reference=True) for each in points]
