"""The content of the pages of reports and evaluations: banner, headline, sections."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vfl_flower.results.figures import TRANSPORTS
from vfl_flower.results.page import NOTHING, Banner, Page, Section, Table
from vfl_flower.results.report import sections
from vfl_flower.results.report.assessment import assessment
from vfl_flower.results.report.curves import curves, frontier
from vfl_flower.results.report.features import (
    MEANING,
    SCALE,
    drift,
    drifts,
    importance,
    information,
)
from vfl_flower.results.report.read import MEASURES, Shown, counted, mapping, number, shown, text
from vfl_flower.results.report.segments import people, rates, segments, subsets, worth

_ENGINES = {"local": "in one process", "ray": "on Ray", "supernodes": "on SuperNodes"}
_SCHEDULES = {"sync": "synchronous", "async": "asynchronous", "t-sync": "t-synchronous"}
_SHADES = "The darkest cell of a column is its best figure. Costs have a logarithmic scale."
_WORDS = {"finished": "Finished: ", "open": "Not finished: ", "failed": "Failed "}


def page(runs: Sequence[Shown]) -> Page:
    """Return the page about runs."""
    datasets = ", ".join(dict.fromkeys(run.dataset for run in runs if run.summary))
    several = len(runs) > 1
    tiles = {} if several else sections.headlines(runs[0])
    names = f"{len(runs)} runs" if several else runs[0].title
    parts = [
        *([curves(runs), _compared(runs), frontier(runs)] if several else []),
        assessment(runs),
        sections.differences(runs),
        segments(runs),
        importance(runs),
        information(runs),
        drift(runs),
        None if several else curves(runs),
        people(runs),
        subsets(runs),
        worth(runs),
        sections.by_party(runs),
        sections.privacy(runs),
        sections.audits(runs),
        sections.settings(runs),
        sections.versions(runs),
    ]
    return Page(
        f"{names} on {datasets}" if datasets else names,
        parts,
        _banner_of_all(runs) if several else banner(runs[0]),
        {label: figure for label, figure in tiles.items() if figure != NOTHING},
    )


def _compared(runs: Sequence[Shown]) -> Section:
    """Return the comparison, with a table of how each run went to unfold."""
    found = sections.comparison(runs)
    each = [(run, banner(run)) for run in runs]
    rows = [(run.title, f"{of.word}{of.text}", of.about) for run, of in each]
    table = Table(["run", "how it went", "strategy"], [rows], 3)
    notes = list(found.notes)
    if target := next(filter(None, (number(run.figures, "target") for run in runs)), None):
        measure = MEASURES[runs[0].measure]
        of_test = not any("validation_loss" in entry for run in runs for entry in run.history)
        measure = measure if of_test else measure.replace("test", "validation")
        said = f"megabytes, up and down, until the {measure} reaches {target:g}."
        notes.append(f"MB to {target:g}: {said}")
    notes.append(_SHADES)
    return Section(found.title, found.tables, notes, more={"How each run went": table})


def _banner_of_all(runs: Sequence[Shown]) -> Banner:
    """Return one banner: how many runs finished, and how the others went."""
    found = {run.title: banner(run) for run in runs}
    others = {title: each for title, each in found.items() if each.kind != "finished"}
    if not others:
        return Banner("finished", "Finished: ", f"all {len(runs)} runs.")
    kind = "failed" if any(each.kind == "failed" for each in others.values()) else "open"
    said = [f"{title}: {each.word.lower()}{each.text}" for title, each in others.items()]
    word = f"{len(runs) - len(others)} of {len(runs)} runs have finished. "
    return Banner(kind, word, " ".join(said))


def banner(run: Shown) -> Banner:
    """Return what happened to a run."""
    of, failure = run.figures, run.summary.get("failure")
    about = run.system.about if run.system else ""
    done, planned = number(of, "epochs" if run.summary else "epoch"), number(run.config, "epochs")
    through = counted(done, "epoch", "epochs")
    if planned not in (None, done):
        through = f"{shown(done)} of {counted(planned, 'epoch', 'epochs')}"
    best = ""
    if not run.finished and run.best:
        best = f" The best evaluation so far was after epoch {shown(number(run.best, 'epoch'))}."
    if not run.summary:
        said = f"there is no summary.json; its last evaluation was after {through}.{best}"
        return Banner("open", _WORDS["open"], said, about)
    if failure is not None:
        when = f"after {through}" if "parties" in of else "before training began"
        return Banner("failed", _WORDS["failed"], f"{when}: {text(failure)}{best}", about)
    schedule = _SCHEDULES.get(text(of.get("schedule")), "")
    if of.get("schedule") == "t-sync":
        schedule += f" (quorum {shown(number(of, 'quorum'))})"
    transport = _ENGINES.get(text(of.get("engine")), "")
    transport += TRANSPORTS.get(text(of.get("transport")), "")
    parties = counted(number(of, "parties"), "party", "parties")
    said = f"{through} of {parties}, {schedule}, {transport}."
    if seeds := of.get("seeds"):
        seeds = counted(len(seeds) if isinstance(seeds, list) else None, "seed", "seeds")
        said += f" Figures are means of {seeds}, ± their standard deviation."
    gone = of.get("failed_parties")
    if gone and isinstance(gone, list):
        said += f" Without {', '.join(map(run.called, gone))} at the end, which had failed."
    return Banner("finished", _WORDS["finished"], said, about)


def evaluation(run: Shown, found: Mapping[str, Any]) -> Page:
    """Return the page about the figures of `vfl evaluate`, beside the run's test figures."""
    people, drift = mapping(found.get("people")), mapping(found.get("drift"))
    counts = [[what, shown(number(people, what), ",.0f")] for what in people]
    now = replace(run, title="outcomes", summary={**run.summary, **found})
    indices = drifts(drift, "From the test rows to all predictions")
    parts = [
        Section("People", [Table(["people", "number"], [counts]), rates(found)]),
        assessment([now, replace(run, title="test rows of training")], of="rows"),
        segments([now]),
        Section("Drift of the scores", [indices], [SCALE, MEANING]) if drift else None,
    ]
    return Page(f"Outcomes of predictions of {run.title}", parts)
