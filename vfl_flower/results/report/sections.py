"""The sections of the page that are tables."""

import math
from collections.abc import Sequence
from typing import Any

from vfl_flower.config.run_config import KEYS
from vfl_flower.protocol.privacy.together import in_words, of_several
from vfl_flower.protocol.system import BY_ROWS
from vfl_flower.results.figures import guarantee
from vfl_flower.results.page import NOTHING, Bar, Cell, Row, Section, Table
from vfl_flower.results.report.assessment import Estimate, by_run
from vfl_flower.results.report.curves import titles
from vfl_flower.results.report.read import (
    MEASURES,
    Shown,
    mapping,
    mappings,
    measured,
    megabytes,
    number,
    shown,
    text,
)

_COSTS = "RMSE", "exchanges", "MB", "seconds", "virtual seconds", "epsilon"
_UNSHADED = "best epoch", "delta"
_DIRECTIONS = ("bytes_up", "bytes_down")
_OTHERS = {  # epsilons under other assumptions
    "epsilon_of_paper": "epsilon as the paper counts",
    "epsilon_secret_batches": "epsilon with secret batches",
}
_NO_NOISE = "No epsilon: no noise was added to what was sent."
_NO_CLAIM = (
    "No epsilon is claimed. The noise can be repeated (noise-seed), was zero, did not cover all "
    "training data (calibration), or was not added before the run failed."
)


# --- results and costs --------------------------------------------------------------------------


def headlines(run: Shown, counts: Sequence[str] = ()) -> dict[str, str]:
    """Return label -> figure: what a run reached, also on rows of so many parties, and cost."""
    of, kind = run.figures, run.measure.removeprefix("test_")
    found = {label: measured(of, key, form=".4f") for key, label in MEASURES.items()}
    for count in counts:
        rows = mapping(mapping(of.get("test_by_parties")).get(count))
        found[f"of {count}"] = measured(rows, kind, form=".4f")
    best = measured(of, "best_epoch") if run.finished else measured(run.best, "epoch")
    last = number(of, "epochs" if run.summary else "epoch")
    if best != NOTHING and last is not None:
        best += f" of {shown(last)}"
    found |= {
        "AUC": measured(of, "test_auc", form=".4f"),
        "RMSE": measured(of, "test_rmse"),
        "best epoch": best,
        "exchanges": measured(of, "exchanges", form=",.0f"),
        "MB up": megabytes(of, "bytes_up"),
        "MB down": megabytes(of, "bytes_down"),
    }
    if target := number(of, "target"):
        reached = megabytes(of, "megabytes_to_target", 1)
        found[f"MB to {target:g}"] = "not reached" if reached == NOTHING else reached
    virtual = measured(of, "virtual_seconds", form=",.1f")
    return found | {
        "seconds": measured(of, "seconds", form=",.1f"),
        "virtual seconds": virtual if number(of, "virtual_seconds") else NOTHING,
        "epsilon": measured(of, "epsilon", form=".3g"),
        "delta": measured(of, "delta"),
    }


def comparison(runs: Sequence[Shown]) -> Section:
    """Compare what runs reached and took."""
    by_parties = (mapping(run.figures.get("test_by_parties")) for run in runs)
    every = sorted({int(each) for found in by_parties for each in found if each.isdecimal()})
    counts = list(dict.fromkeys(map(str, every[:1] + every[-1:])))  # the fewest, and the most
    found = [headlines(run, counts) for run in runs]
    for each in found:  # a table is narrow in a terminal
        each["best epoch"] = each["best epoch"].replace(" of ", "/")
    labels = dict.fromkeys(label for each in found for label in each)
    columns = [_shaded(label, [each.get(label, NOTHING) for each in found]) for label in labels]
    rows: list[Row] = [[title, *row] for title, *row in zip(titles(runs), *columns, strict=True)]
    notes = []
    if counts:
        notes.append("of 1, of 2, ...: the same measure on the rows that 1, 2, ... parties have.")
    seeds = runs[0].summary.get("seeds")
    if isinstance(seeds, list):
        notes.append(f"Figures are means of {len(seeds)} seeds ± standard deviations.")
        notes.append("A target is reached if every seed reaches it.")
    return Section("Comparison", [Table(["run", *labels], [rows])], notes)


def _shaded(label: str, figures: Sequence[str]) -> list[Cell]:
    """Return a column of figures, shaded by how far each is from the worst to the best of them."""
    values = [_number_in(each) for each in figures]
    if label.startswith(_COSTS):
        least = min((each for each in values if each), default=1.0)
        values = [None if each is None else -math.log(max(each, least)) for each in values]
    known = [each for each in values if each is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if label in _UNSHADED or low == high:
        return [Cell(each) for each in figures]
    return [
        Cell(text, shade=0 if each is None else round(4 * (each - low) / (high - low)))
        for text, each in zip(figures, values, strict=True)
    ]


def _number_in(figure: str) -> float | None:
    """Return the number that a text begins with, as `headlines` writes it."""
    try:
        return float(figure.partition(" ")[0].replace(",", ""))
    except ValueError:
        return None


def differences(runs: Sequence[Shown]) -> Section | None:
    """Show how a run differs from other models on the same people (`vfl compare`)."""
    rows: list[Row] = [
        [
            f"{run.folder.name} above {text(each.get('other'))}",
            shown(number(each, "pairs"), ",.0f"),
            text(each.get("metric")).upper(),
            *Estimate.of(each).texts(),
            shown(number(each, "p"), ".2g"),
            " : ".join(shown(number(each, key), ",.0f") for key in ("only_one", "only_other")),
            shown(number(each, "p_of_decisions"), ".2g"),
        ]
        for run in runs
        for each in mappings(run.beside("paired").get("tests"))
    ]
    notes = [
        "A model alone has the label holder's columns: what is above it is the federation's gain.",
        "p: probability of so large a difference between equally good models, each by itself.",
        "Right alone: how many people the first model alone gets right, and the second alone.",
    ]
    head = ["models", "people", "figure", "difference", "95 % interval", "p", "right alone"]
    table, title = Table([*head, "p of these"], [rows]), "Differences on the same people"
    return Section(title, [table], notes) if rows else None


# --- by party -----------------------------------------------------------------------------------


def by_party(runs: Sequence[Shown]) -> Section | None:
    """Show bytes by party and direction, reply times and staleness."""
    parties = [each for run in runs for each in run.parties]
    if not parties:
        return None
    delays = {
        "reply_seconds": "reply seconds",
        "reply_virtual_seconds": "virtual reply seconds",
        "staleness": "steps of staleness",
    }
    columns = [
        (kind, of)
        for kind in delays
        for of in ("mean", "most")
        if any(number(each, kind, "most") for each in parties)
    ]
    most = max(sum(number(each, key) or 0 for key in _DIRECTIONS) for each in parties)
    bodies: list[list[Row]] = [
        [
            (
                run.among(runs, ", ") + run.called(shown(number(each, "party"))),
                measured(each, "exchanges", form=",.0f"),
                *(megabytes(each, key) for key in (*_DIRECTIONS, "evaluation_bytes")),
                *(measured(each, *column, form=".3g") for column in columns),
                Cell(bar=Bar([number(each, key) or 0 for key in _DIRECTIONS], most)),
            )
            for each in run.parties
        ]
        for run in runs
        if run.parties
    ]
    head = ["party", "exchanges", "MB up", "MB down", "MB of evaluations"]
    head += [f"{delays[kind]}, {of}" for kind, of in columns]
    notes: list[str | Cell] = [
        Cell("up: to the label holder.", line="up"),
        Cell("down: to the party. Uploads for evaluations are counted apart.", line="down"),
        "Reply seconds: from sending an order to reading its reply.",
    ]
    if any(kind == "staleness" for kind, _ in columns):
        notes.append("Staleness: steps of the label holder between an order and its answer.")
    return Section("By party", [Table([*head, "MB up and down"], bodies)], notes)


# --- privacy ------------------------------------------------------------------------------------


def privacy(runs: Sequence[Shown]) -> Section | None:
    """Show the epsilon spent, what it protects and from whom; or why none is claimed."""
    runs = [run for run in runs if run.summary]
    keys = ("epsilon", "delta", *_OTHERS)
    rows = [(run.title, *(measured(run.summary, key) for key in keys)) for run in runs]
    notes = by_run([(run, _claims(run)) for run in runs])
    together = map(in_words, of_several(run.summary for run in runs))
    notes += [f"If all are of the same people: {each}" for each in together]
    table = Table(["run", "epsilon", "delta", *_OTHERS.values()], [rows])
    return Section("Privacy spent", [table], notes) if runs else None


def _claims(run: Shown) -> list[str]:
    """Return what a run's epsilon protects, or why it has none."""
    if number(run.summary, "epsilon") is None:
        return [_NO_NOISE if run.config.get("privacy") == "none" else _NO_CLAIM]
    return [each for each in [guarantee(run.summary)] if each]


def audits(runs: Sequence[Shown]) -> Section | None:
    """Show the findings of an audit, without its picture of a party's rows."""
    tables, claims, said = [], list[str](), dict[str, None]()
    for run in runs:
        audit = run.beside("audit")
        if not (attacks := mappings(audit.get("attacks"))):
            continue
        pair, words = _HOSTILE if audit.get("seeds") else _CURIOUS
        said |= dict.fromkeys([pair[1], *words])
        head = ["attack", "attacker: what it has", "measure", *pair, "0 to 1"]
        rows: list[Row] = [
            (
                *(text(each.get(key)) for key in ("attack", "attacker", "measure")),
                shown(success := number(each, "success"), ".4f"),
                shown(guessing := number(each, "guessing"), ".4f"),
                Cell(bar=Bar([min(success or 0, 1)], mark=guessing)),
            )
            for each in attacks
        ]
        tables.append(Table(head, [rows], 3, run.among(runs)))
        if claim := mapping(audit.get("epsilon")):
            most = measured(claim, "at_most", form=".3g")
            between = f" and at most {most}" if number(claim, "at_most") is not None else ""
            claims.append(
                "A game with canaries against this mechanism, with its own budget. Epsilon claimed "
                f"{measured(claim, 'claimed', form='.3g')}, shown at least "
                f"{measured(claim, 'shown', form='.3g')}{between}, at delta "
                f"{measured(claim, 'delta')} (97.5 %, {measured(claim, 'trials')} games)."
            )
    notes = [
        *claims,
        *(Cell(each, line="mark") if each in ("guessing", "honest") else each for each in said),
    ]
    return Section("Audit", tables, notes) if tables else None


_CURIOUS = (
    ("success", "guessing"),
    (
        "A success near guessing says that this attack found nothing, not that none would.",
        "Attacks with * are on one epoch of two parties whose embeddings are summed.",
    ),
)
_HOSTILE = (
    ("attacked", "honest"),
    ("Success: the share of test rows of other classes that get the attacker's class.",),
)


# --- settings -----------------------------------------------------------------------------------


def settings(runs: Sequence[Shown]) -> Section | None:
    """Show all options: first those that differ, then others not at a default."""
    runs = [run for run in runs if run.config]
    if not runs:
        return None
    default = {key: None if key in BY_ROWS else spec.default for key, spec in KEYS.items()}
    every = dict.fromkeys(key for run in runs for key in run.config)
    every.pop("out", None)  # the folder is in another table
    differ = [key for key in every if len({repr(run.config.get(key)) for run in runs}) > 1]
    changed = [
        key
        for key in every
        if key not in differ and (key not in default or runs[0].config[key] != default[key])
    ]
    rest: list[Row] = [
        (Cell(key, code=True), _value(default[key]), KEYS[key].help)
        for key in every
        if key not in (*differ, *changed)
    ]
    of_each = [(run.title, *(_setting(run, key) for key in differ)) for run in runs if differ]
    defaults = {key: _value(each) for key, each in default.items()}
    of_all: list[Row] = [
        (Cell(key, code=True), _setting(runs[0], key), defaults.get(key, NOTHING))
        for key in changed
    ]
    tables = [
        Table(["run", *differ], [of_each], len(differ) + 1),
        Table(["option", "value", "default"], [of_all], 3),
    ]
    cells = (cell for table in tables for body in table.bodies for row in body for cell in row)
    texts = {cell if isinstance(cell, str) else cell.text for cell in cells}
    notes = ["°: the default of this strategy."] if any("°" in each for each in texts) else []
    if "auto" in texts:
        notes.append("auto: the run chooses the value by its data and its other options.")
    head = ["option", "default", "meaning"]
    more = {f"{len(rest)} more options, at their defaults": Table(head, [rest], 3)}
    return Section("Settings", tables, notes, more=more)


def _setting(run: Shown, key: str) -> str:
    value, system = run.config.get(key), run.system
    own = system.default(key, run.config.get("optimizer", "")) if system else None
    return _value(value) + ("°" if own is not None and value == own else "")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else "empty" if value == "" else text(value)


def versions(runs: Sequence[Shown]) -> Section | None:
    """Show versions, the digest of the code, memory, and the folder of the results."""
    runs = [run for run in runs if run.summary]
    if not runs:
        return None
    of_runs = [mapping(run.summary.get("versions")) for run in runs]
    names = dict.fromkeys(name for of in of_runs for name in of)
    found = {name: [text(of.get(name)) for of in of_runs] for name in names}
    found["code digest"] = [text(run.summary.get("code"))[:16] for run in runs]
    found["peak memory, MB"] = [measured(run.summary, "peak_memory_mb") for run in runs]
    found["folder"] = [str(run.folder) for run in runs]
    same = [(name, each[0]) for name, each in found.items() if len(set(each)) == 1]
    differ = {name: each for name, each in found.items() if len(set(each)) > 1}
    tables = [Table(["item", "value"], [same], 2)] if same else []
    if differ:
        rows = zip([run.title for run in runs], *differ.values(), strict=True)
        tables.append(Table(["run", *differ], [list(rows)], len(differ) + 1))
    return Section("Environment", tables)
