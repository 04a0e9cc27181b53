"""What the page says about runs: titles, texts and figures, for the template to lay out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vfl_flower.label_holder.charts import Line, look, svg
from vfl_flower.label_holder.figures import TRANSPORTS
from vfl_flower.tools.report.read import MEASURES, NOTHING, Shown, number, spent, text
from vfl_flower.tools.report.sections import (
    Cell,
    Chart,
    Row,
    Section,
    Table,
    audits,
    bytes_by_party,
    counted,
    delays,
    measured,
    privacy,
    settings,
    shown,
    shown_megabytes,
    versions,
)
from vfl_flower.tools.report.subsets import subsets

_LOSSES = {"test_loss": "test loss", "train_loss": "training loss"}
_LABELS = MEASURES | _LOSSES
_AGAINST = {
    "exchanges": "exchanges",
    "megabytes": "megabytes, up and down",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}
_ENGINES = {"local": "in one process", "ray": "on Ray", "supernodes": "on SuperNodes"}
_SCHEDULES = {"sync": "synchronous", "async": "asynchronous", "t-sync": "t-synchronous"}


@dataclass(frozen=True)
class Verdict:
    """One sentence that says what happened to a run."""

    name: str
    kind: str
    word: str
    text: str
    about: str


def page(runs: Sequence[Shown]) -> dict[str, Any]:
    """All that the template shows, by name."""
    datasets = ", ".join(dict.fromkeys(run.dataset for run in runs if run.summary))
    names = f"{len(runs)} runs" if len(runs) > 1 else runs[0].title
    parts = [
        _comparison(runs) if len(runs) > 1 else None,
        _curves(runs),
        subsets(runs),
        bytes_by_party(runs),
        delays(runs),
        privacy(runs),
        audits(runs),
        settings(runs),
        versions(runs),
    ]
    return {
        "title": f"{names} on {datasets}" if datasets else names,
        "verdicts": [_verdict(run, len(runs) > 1) for run in runs],
        "tiles": {} if len(runs) > 1 else _headlines(runs[0]),
        "sections": [part for part in parts if part],
    }


# --- what happened ------------------------------------------------------------------------------


def _verdict(run: Shown, named: bool) -> Verdict:
    of, failure = run.figures, run.summary.get("failure")
    done, planned = number(of, "epochs" if run.summary else "epoch"), number(run.config, "epochs")
    through = counted(done, "epoch", "epochs")
    if planned not in (None, done):
        through = f"{shown(done)} of {counted(planned, 'epoch', 'epochs')}"
    if not run.summary:
        kind, word = "open", "Not finished: "
        said = f"there is no summary.json; its last evaluation was after {through}."
    elif failure is not None:
        kind, word = "failed", "Failed"
        when = f"after {through}" if "parties" in of else "before training began"
        said = f" {when}: {text(failure)}"
    else:
        kind, word = "finished", "Finished: "
        schedule = _SCHEDULES.get(text(of.get("schedule")), "")
        if of.get("schedule") == "t-sync":
            schedule += f" (quorum {shown(number(of, 'quorum'))})"
        transport = _ENGINES.get(text(of.get("engine")), "")
        transport += TRANSPORTS.get(text(of.get("transport")), "")
        parties = counted(number(of, "parties"), "party", "parties")
        said = f"{through} of {parties}, {schedule}, {transport}."
        if seeds := of.get("seeds"):
            number_of = counted(len(seeds) if isinstance(seeds, list) else None, "seed", "seeds")
            said += f" Figures are means of {number_of}, ± their standard deviation."
        gone = of.get("failed_parties")
        if gone and isinstance(gone, list):
            said += f" Without party {', '.join(map(text, gone))} at the end, which had failed."
    about = run.system.about if run.system else ""
    return Verdict(run.title if named else "", kind, word, said, about)


def _headlines(run: Shown) -> dict[str, str]:
    """Label -> figure: what a run reached, and what it took."""
    of = run.figures
    found = {MEASURES[run.measure]: measured(of, run.measure, form=".4f")}
    for label, key in {"AUC": "test_auc", "RMSE": "test_rmse"}.items():
        if number(of, key) is not None:
            found[label] = measured(of, key)
    found |= {
        "exchanges": measured(of, "exchanges", form=",.0f"),
        "MB up": shown_megabytes(of, "bytes_up"),
        "MB down": shown_megabytes(of, "bytes_down"),
        "seconds": measured(of, "seconds", form=",.1f"),
    }
    if number(of, "virtual_seconds"):
        found["virtual seconds"] = measured(of, "virtual_seconds", form=",.1f")
    claimed = number(of, "epsilon") is not None
    found["epsilon"] = measured(of, "epsilon", form=".3g") if claimed else "none"
    if claimed:
        found["delta"] = measured(of, "delta")
    return found


def _comparison(runs: Sequence[Shown]) -> Section:
    found = [_headlines(run) for run in runs]
    labels = list(dict.fromkeys(label for each in found for label in each))
    labels.sort(key=lambda label: label in ("epsilon", "delta"))
    rows: list[Row] = [
        [name, *(each.get(label, NOTHING) for label in labels)]
        for name, each in zip(_names(runs), found, strict=True)
    ]
    return Section("Comparison", [Table(["run", *labels], [rows])])


def _names(runs: Sequence[Shown]) -> list[Cell]:
    """The runs' titles, each beside the line that the run has in the charts."""
    looks = (look(of_run) for of_run, _ in enumerate(runs))
    classes = (f"line s{colour} dashes-{dashes}" for colour, dashes in looks)
    return [Cell(run.title, line=line) for run, line in zip(runs, classes, strict=True)]


# --- curves -------------------------------------------------------------------------------------


def _curves(runs: Sequence[Shown]) -> Section | None:
    """Measure and loss, each against all that a run spends."""
    measures = list(dict.fromkeys(run.measure for run in runs if run.history))
    used = [
        against
        for against in _AGAINST
        if any(x for run in runs for x, _ in run.curve(against, run.measure))
    ]
    if not used:
        return None
    losses = list(_LOSSES) if len(runs) == 1 else ["test_loss"]
    charts = [
        [each for against in used if (each := _chart(runs, against, lines))]
        for lines in (*([measure] for measure in measures), losses)
    ]
    labels = [key for key in _LABELS if any(run.curve("exchanges", key) for run in runs)]
    bodies = [
        [
            (
                run.title,
                shown(number(entry, "epoch")),
                *(_spent(entry, against) for against in used),
                *(measured(entry, key, form=".4f") for key in labels),
            )
            for entry in run.history
        ]
        for run in runs
    ]
    head = ["run", "epoch", *(_AGAINST[key] for key in used), *(_LABELS[key] for key in labels)]
    more = ("These figures as a table", Table(head, bodies))
    notes = []
    if any("deviation" in entry for run in runs for entry in run.history):
        notes = [
            ("", "A band is one standard deviation of the seeds to either side of their mean.")
        ]
    if len(runs) > 1:
        return Section("Curves", legend=_names(runs), charts=charts, notes=notes, more=more)
    note = "Of the losses, the dotted one is that in training."
    if runs[0].config.get("privacy") == "labels":
        note += " It is by noisy labels and the test loss by true ones, so their levels differ."
    notes.append(("", note))
    return Section("Curves", charts=charts, notes=notes, more=more)


def _spent(entry: dict[str, Any], against: str) -> str:
    """How much had been spent; of several seeds, with the standard deviation."""
    if against != "megabytes":
        return measured(entry, against)
    text, deviation = shown(spent(entry, against)), number(entry, "deviation", "bytes")
    return text if deviation is None else f"{text} ± {deviation / 1e6:.4g}"


def _chart(runs: Sequence[Shown], against: str, measures: Sequence[str]) -> Chart | None:
    """Lines of one measure or two; a run that spends nothing of x is a level."""
    curves = [
        (key, Line(run.title, of_run, points, key != measures[0], run.band(against, key)))
        for of_run, run in enumerate(runs)
        for key in measures
        if (points := run.curve(against, key))
    ]
    if not any(line.moves for _, line in curves):
        return None
    drawing = svg([line for _, line in curves], _AGAINST[against])
    said, tips = [], []
    for (key, line), places in zip(curves, drawing.places, strict=True):
        said.append(f"{line.name}: {_LABELS[key]} {line.points[-1][1]:.4g} at the end")
        told = [f"{line.name}: {y:.4g} at {x:.4g}" for x, y in line.points]
        if not line.dots:
            places, told = places[-1:], said[-1:]
        tips += [(*at, tip) for at, tip in zip(places, told, strict=True)]
    title = f"{_LABELS[measures[0]]} against {against.replace('_', ' ')}"
    tips = [tip for tip in tips if math.isfinite(tip[0])]  # 0 has no place on a logarithmic axis
    elements = Markup(drawing.elements)  # from matplotlib, which was given numbers alone
    words = f"{title}. {'; '.join(said)}."
    return Chart(title, words, drawing.width, drawing.height, elements, tips)
