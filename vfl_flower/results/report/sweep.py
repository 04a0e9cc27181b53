"""Results of a sweep, for the page and a terminal: best trials and importance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl_flower.results.charts import Line
from vfl_flower.results.figures import VALIDATED
from vfl_flower.results.page import NOTHING, Banner, Bar, Cell, Page, Row, Section, Table
from vfl_flower.results.report.curves import drawn
from vfl_flower.results.report.read import (
    counted,
    json_of,
    mapping,
    mappings,
    measured,
    number,
    shown,
    text,
)

FILE = "sweep.json"
_STATES = {"finished": "finished", "stopped": "stopped early", "failed": "failed"}
_SHOWN = 10  # trials; the others unfold


class Swept:
    """The content of the ``sweep.json`` in a folder, which may say anything."""

    def __init__(self, folder: Path) -> None:
        self.found = found = json_of(folder / FILE)
        self.keys = mapping(found.get("keys"))
        self.trials = mappings(found.get("trials"))
        self.metric = VALIDATED.get(text(found.get("metric")), "figure")

    def page(self) -> Page:
        """Return the page about the sweep."""
        dataset = text(self.keys.get("dataset", "digits")).rsplit("/", 1)[-1]
        about = f"Chosen by {self.metric}; test rows have no say."
        row = [Cell(text(self.found.get("line")), code=True)]
        best = Section("Best configuration", [Table(["command to paste"], [[row]], 2)])
        sections = [best, self.best_trials(), self._importance(), self._course()]
        title = f"Sweep of {text(self.keys.get('strategy'))} on {dataset}"
        return Page(title, sections, Banner("finished", "Swept: ", self.sentence, about))

    @property
    def sentence(self) -> str:
        """How many trials there were, and how they ended."""
        of = {state: sum(each.get("state") == state for each in self.trials) for state in _STATES}
        said = ", ".join(f"{count} {_STATES[state]}" for state, count in of.items() if count)
        seeds = number(self.found, "seeds")
        by = f"; each by {counted(seeds, 'seed', 'seeds')}" if seeds and seeds > 1 else ""
        return f"{counted(len(self.trials), 'trial', 'trials')}: {said}{by}."

    @property
    def shares(self) -> dict[str, float | None]:
        """Option -> its share of the variance of the metric."""
        shares = mapping(self.found.get("importance"))
        return {key: number(shares, key) for key in shares}

    def best_trials(self) -> Section:
        """Return the trials, the best first."""
        keys = list(dict.fromkeys(key for each in self.trials for key in mapping(each.get("keys"))))
        head = ["trial", *keys, self.metric, "seconds", "end"]
        best_first = sorted(
            self.trials,
            key=lambda each: (each.get("state") != "finished", -(number(each, "figure") or 0.0)),
        )
        rows = [self._row(each, keys) for each in best_first]
        notes = []
        if any(each.get("state") == "stopped" for each in self.trials):
            notes.append("A trial that was stopped early counts with the last figure of its curve.")
        for each in mappings(self.found.get("together")):
            runs, epsilon, delta = (
                shown(number(each, key), ".3g") for key in ("runs", "epsilon", "delta")
            )
            protects = f"it protects {text(each.get('protects'))}."
            notes.append(f"{runs} runs together: epsilon {epsilon} at delta {delta}; {protects}")
        rest = rows[_SHOWN:]
        more = {f"{len(rest)} more trials": Table(head, [rest])} if rest else {}
        return Section("Trials", [Table(head, [rows[:_SHOWN]])], notes, more=more)

    def _row(self, trial: Mapping[str, Any], keys: list[str]) -> Row:
        own = mapping(trial.get("keys"))
        deviation = {"deviation": {"figure": trial.get("deviation")}}
        return (
            shown(number(trial, "number")),
            *(text(own.get(key)) for key in keys),
            measured({**trial, **deviation}, "figure", form=".4f"),
            shown(number(trial, "seconds"), ".1f"),
            text(trial.get("failure")) or _STATES.get(text(trial.get("state")), NOTHING),
        )

    def _importance(self) -> Section | None:
        rows: list[Row] = [
            (Cell(key, code=True), shown(share, ".2f"), Cell(bar=Bar([min(share or 0.0, 1.0)])))
            for key, share in self.shares.items()
        ]
        note = (
            f"Shares of the variance of {self.metric} over all trials, by fANOVA. An option that "
            "is chosen well already, or searched narrowly, matters little here."
        )
        table = Table(["option", "importance", "0 to 1"], [rows])
        return Section("Importance of each option", [table], [note]) if rows else None

    def _course(self) -> Section | None:
        points: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for each in self.trials:
            n, figure = number(each, "number"), number(each, "figure")
            if n is not None and figure is not None:
                points[each.get("state") == "finished"].append((n + 1, figure))
        finished = points[True]
        best = [(x, max(y for _, y in finished[: n + 1])) for n, (x, _) in enumerate(finished)]
        lines = [
            Line("best so far", 0, best),
            Line("finished", 2, finished, joined=False),
            Line("stopped early", 7, points[False], joined=False),
        ]
        lines = [each for each in lines if each.points]
        chart = drawn(f"{self.metric} by trial", lines, "trials so far")
        cells = [
            Cell(each.name, line=f"{'line' if each.joined else 'dot'} s{each.number}")
            for each in lines
        ]
        return Section("Course", legend=cells, charts={"": [chart]}) if chart else None
