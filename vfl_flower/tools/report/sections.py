"""The sections of the page that are tables, and what a section consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from vfl_flower.config.run_config import KEYS
from vfl_flower.label_holder.figures import GUARANTEE
from vfl_flower.protocol.privacy.together import in_words, of_several
from vfl_flower.protocol.systems import BY_ROWS
from vfl_flower.tools.compare import megabytes
from vfl_flower.tools.report.read import NOTHING, Shown, number, spent, text

_DIRECTIONS = ("bytes_up", "bytes_down")


@dataclass(frozen=True)
class Bar:
    """Where its parts begin and how long they are, and a mark to compare them with."""

    parts: Sequence[tuple[float, float]]
    mark: float | None = None
    length: ClassVar = 200  # of the longest

    @classmethod
    def of(cls, parts: Sequence[float], most: float, mark: float | None = None) -> Bar:
        """A bar as long as its parts' share of the most."""
        scale = cls.length / (most or 1)
        lengths = [scale * max(0.0, part) for part in parts]
        starts = [sum(lengths[:before]) for before in range(len(lengths))]
        return cls(list(zip(starts, lengths, strict=True)), None if mark is None else scale * mark)


@dataclass(frozen=True)
class Cell:
    """A text, perhaps as code; or beside a line of these classes of the style sheet; or a bar."""

    text: str = ""
    code: bool = False
    line: str = ""
    bar: Bar | None = None


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows, in groups, under a head; each begins with what it is about."""

    head: Sequence[str]
    bodies: Sequence[Sequence[Row]]
    kind: str = "figures"
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """SVG elements in which nothing is from a folder; what they show; what to say at a place."""

    title: str
    said: str
    width: float
    height: float
    elements: Markup
    tips: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page: a legend and rows of charts; tables; notes; and a table to unfold.

    A note comes with the kind of bar part that it explains, if any.
    """

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[tuple[str, str]] = ()
    legend: Sequence[Cell] = ()
    charts: Sequence[Sequence[Chart]] = ()
    more: tuple[str, Table] | None = None


def shown(figure: float | None, form: str = ".4g") -> str:
    """A number as text, or that there is none."""
    return NOTHING if figure is None else format(figure, form)


def measured(of: Mapping[str, Any], *path: str, form: str = ".4g") -> str:
    """A number that is found so, as text; of several seeds with the standard deviation."""
    *above, key = path
    text, deviation = shown(number(of, *path), form), number(of, *above, "deviation", key)
    return text if deviation is None else f"{text} ± {deviation:{form}}"


def shown_megabytes(of: Mapping[str, Any], key: str) -> str:
    """A number of bytes as text, in megabytes, or that there is none."""
    figure, deviation = number(of, key), number(of, "deviation", key)
    text = NOTHING if figure is None else megabytes(figure / 1e6)
    return text if deviation is None else f"{text} ± {megabytes(deviation / 1e6)}"


def counted(figure: float | None, one: str, several: str) -> str:
    """A number of things as text."""
    return f"{shown(figure)} {one if figure == 1 else several}"


# --- by party -----------------------------------------------------------------------------------


def bytes_by_party(runs: Sequence[Shown]) -> Section | None:
    """Bytes by party and direction, as figures and as bars."""
    most = max((spent(each, "megabytes") or 0 for run in runs for each in run.parties), default=0)
    bodies: list[list[Row]] = [
        [
            (
                _party(run, each, len(runs) > 1),
                measured(each, "exchanges", form=",.0f"),
                *(shown_megabytes(each, key) for key in (*_DIRECTIONS, "evaluation_bytes")),
                Cell(bar=Bar.of([(number(each, key) or 0) / 1e6 for key in _DIRECTIONS], most)),
            )
            for each in run.parties
        ]
        for run in runs
        if run.parties
    ]
    if not bodies:
        return None
    head = ["party", "exchanges", "MB up", "MB down", "MB of evaluations", "up and down"]
    notes = [
        ("up", "up: to the label holder."),
        ("down", "down: to the party. Uploads for evaluations are counted apart."),
    ]
    return Section("Bytes by party", [Table(head, bodies)], notes)


def delays(runs: Sequence[Shown]) -> Section | None:
    """How long replies took, and how many steps the label holder had taken meanwhile."""
    kinds = {
        "reply_seconds": "seconds",
        "reply_virtual_seconds": "virtual seconds",
        "staleness": "staleness",
    }
    parties = [each for run in runs for each in run.parties]
    if not any(number(each, "reply_virtual_seconds", "most") for each in parties):
        del kinds["reply_virtual_seconds"]
    columns = [(kind, of) for kind in kinds for of in ("mean", "most")]
    bodies = [
        [
            (
                _party(run, each, len(runs) > 1),
                *(measured(each, *column, form=".3g") for column in columns),
            )
            for each in run.parties
        ]
        for run in runs
        if run.parties
    ]
    if not bodies:
        return None
    head = ["party", *(f"{kinds[kind]}, {of}" for kind, of in columns)]
    note = (
        "Seconds are from sending an order to reading its reply. Staleness is how many steps the "
        "label holder took between giving an order and answering what came of it."
    )
    return Section("Delays by party", [Table(head, bodies)], [("", note)])


def _party(run: Shown, party: Mapping[str, Any], named: bool) -> str:
    name = f"party {shown(number(party, 'party'))}"
    return f"{run.title}, {name}" if named else name


# --- privacy ------------------------------------------------------------------------------------


def privacy(runs: Sequence[Shown]) -> Section | None:
    """What was spent, what it protects and from whom; or plainly that nothing is claimed."""
    runs = [run for run in runs if run.summary]
    # Figures that hold by other assumptions, by their names, where there are any.
    others = [
        key
        for key in ("epsilon_of_paper", "epsilon_secret_batches")
        if any(number(run.summary, key) is not None for run in runs)
    ]
    rows = []
    for run in runs:
        epsilon, delta = (measured(run.summary, key) for key in ("epsilon", "delta"))
        said = [text(run.summary.get(key)) for key in GUARANTEE.values()]
        if epsilon == NOTHING:
            epsilon = "none"
            said[0] = (
                "nothing: no noise was added to what was sent"
                if run.config.get("privacy") == "none"
                else "nothing is claimed: the noise can be repeated (noise-seed), or was none, or "
                "not on all that was learned from (calibration), or the run failed before it was "
                "added"
            )
        figures = (measured(run.summary, key) for key in others)
        rows.append((run.title, epsilon, delta, *said, *figures))
    if not rows:
        return None
    head = ["run", "epsilon", "delta", *GUARANTEE, *others]
    notes = [("", f"If all are of the same people: {said}") for said in _together(runs)]
    return Section("Privacy spent", [Table(head, [rows], "texts")], notes)


def _together(runs: Sequence[Shown]) -> list[str]:
    """What several runs have spent together, in words."""
    return [in_words(claim) for claim in of_several(run.summary for run in runs)]


def audits(runs: Sequence[Shown]) -> Section | None:
    """What published attacks made of the messages; their picture, which shows rows, stays out."""
    head = ["attack", "attacker: what it has", "measure", "success", "guessing", "0 to 1"]
    tables = []
    for run in (run for run in runs if run.attacks):
        rows: list[Row] = [
            (
                *(text(each.get(key)) for key in ("attack", "attacker", "measure")),
                shown(success := number(each, "success"), ".4f"),
                shown(guessing := number(each, "guessing"), ".4f"),
                Cell(bar=Bar.of([min(success or 0, 1)], 1, guessing)),
            )
            for each in run.attacks
        ]
        tables.append(Table(head, [rows], "texts", run.title if len(runs) > 1 else ""))
    if not tables:
        return None
    note = (
        "The upright mark is guessing. A success near it says that this attack found nothing, not "
        "that none would; those with * are on one epoch of two parties whose embeddings are summed."
    )
    return Section("Audit", tables, [("", note)])


# --- settings -----------------------------------------------------------------------------------


def settings(runs: Sequence[Shown]) -> Section | None:
    """All configuration keys: first those that are not everywhere at their default."""
    runs = [run for run in runs if run.config]
    if not runs:
        return None
    default = {key: None if key in BY_ROWS else spec.default for key, spec in KEYS.items()}
    every = dict.fromkeys(key for run in runs for key in run.config)
    changed = [
        key
        for key in every
        if any(key not in default or run.config.get(key) != default[key] for run in runs)
    ]
    rows: list[Row] = [
        (
            Cell(key, code=True),
            *(_setting(run, key) for run in runs),
            _value(default[key]) if key in default else NOTHING,
        )
        for key in changed
    ]
    rest: list[Row] = [
        (Cell(key, code=True), _value(default[key]), KEYS[key].help)
        for key in every
        if key not in changed
    ]
    titles = [run.title for run in runs] if len(runs) > 1 else ["value"]
    return Section(
        "Settings",
        [Table(["key", *titles, "default"], [rows], "texts")],
        [("", "With °: as the system has it, unless it is told otherwise.")],
        more=(
            f"{len(rest)} more, at their defaults",
            Table(["key", "default", "meaning"], [rest], "texts"),
        ),
    )


def _setting(run: Shown, key: str) -> str:
    value, system = run.config.get(key), run.system
    own = system.default(key, run.config.get("optimizer", "")) if system else None
    return _value(value) + ("°" if own is not None and value == own else "")


def _value(value: Any) -> str:
    return "auto" if value is None else "empty" if value == "" else text(value)


def versions(runs: Sequence[Shown]) -> Section | None:
    """Versions, digest of the code, and where the results are."""
    runs = [run for run in runs if run.summary]
    if not runs:
        return None
    names = dict.fromkeys(name for run in runs for name in run.versions)
    memory = (measured(run.summary, "peak_memory_mb") for run in runs)
    rows: list[Row] = [
        *((name, *(text(run.versions.get(name)) for run in runs)) for name in names),
        ("code", *(Cell(text(run.summary.get("code"))[:16], code=True) for run in runs)),
        ("peak memory, MB", *memory),
        ("folder", *(Cell(str(run.folder), code=True) for run in runs)),
    ]
    return Section("Versions", [Table(["what", *(run.title for run in runs)], [rows], "texts")])
