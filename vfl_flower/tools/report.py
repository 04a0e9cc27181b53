"""One self-contained HTML page about the runs in results folders: `vfl report`.

Everything on it is what runs, comparisons and audits have left in their folders. Texts from there
become part of the page in `_tag` alone, which escapes them; numbers are read by `_number` alone.
The page loads nothing and runs nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from vfl_flower.config import KEYS
from vfl_flower.errors import VflError
from vfl_flower.holder.results import TRANSPORTS
from vfl_flower.registry import SYSTEMS
from vfl_flower.systems import System
from vfl_flower.tools.compare import folder_of, megabytes

_MEASURES = {"test_accuracy": "test accuracy", "test_r2": "test R²"}  # a run has one of them
_LOSSES = {"test_loss": "test loss", "train_loss": "training loss"}
_AGAINST = {
    "exchanges": "exchanges",
    "megabytes": "megabytes, up and down",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}
_ENGINES = {"local": "in one process", "ray": "on Ray", "supernodes": "on SuperNodes"}
_SCHEDULES = {"sync": "synchronous", "async": "asynchronous", "t-sync": "t-synchronous"}
_NOTHING = "–"
_COLOURS = 8  # of runs, in the style sheet
_WIDTH, _HEIGHT = 320, 200  # of a chart, with its margins
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 8, 36


# --- what is read -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A run on the page.

    ``summary`` is empty if the run has not finished, ``audit`` if it was not attacked.
    """

    title: str
    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    audit: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """The summary; of a run that has not finished, its last evaluation."""
        return self.summary or self.history[-1]

    @property
    def config(self) -> dict[str, Any]:
        """The run configuration, by key."""
        return _mapping(self.summary.get("config"))

    @property
    def system(self) -> System | None:
        """The system or baseline, if it is one of ours; a folder's text loads nothing else."""
        name = str(self.summary.get("strategy"))
        return SYSTEMS.load(name) if name in SYSTEMS.known else None

    @property
    def measure(self) -> str:
        """Which of accuracy and R2 it was measured by."""
        every = [self.summary, *self.history]
        has = (key for key in _MEASURES if any(_number(each, key) is not None for each in every))
        return next(has, "test_accuracy")

    @property
    def parties(self) -> list[dict[str, Any]]:
        """What was counted by party; nothing where no message was sent."""
        return _mappings(self.summary.get("by_party")) if _number(self.figures, "exchanges") else []

    def curve(self, against: str, measure: str) -> list[tuple[float, float]]:
        """The points of a curve."""
        points = []
        for entry in self.history:
            x = _megabytes(entry) if against == "megabytes" else _number(entry, against)
            y = _number(entry, measure)
            if x is not None and y is not None:
                points.append((x, y))
        return points


def read(folders: Sequence[Path]) -> list[Shown]:
    """The runs of results folders, in order; that of a comparison has several.

    Raises
    ------
    VflError
        If a folder holds no run, or one that has not finished and was never evaluated, or a file
        that cannot be read.
    """
    runs = []
    for folder in folders:
        if (folder / "compare.json").is_file():
            titles = {folder_of(title): title for title in _json(folder / "compare.json")}
            failed = (each.name for each in sorted(folder.iterdir()) if _is_run(each))
            titles |= {name: name for name in failed if name not in titles}
            runs += [_run(folder / name, title) for name, title in titles.items()]
        elif _is_run(folder):
            runs.append(_run(folder))
        else:
            raise VflError(
                f"{folder} is no results folder: name one that `vfl run`, `vfl compare` or "
                "`vfl audit` has left."
            )
    times = Counter(run.title for run in runs)
    return [
        run if times[run.title] == 1 else replace(run, title=f"{run.title}, {run.folder.name}")
        for run in runs
    ]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "history.jsonl"))


def _run(folder: Path, title: str = "") -> Shown:
    summary = _json(folder / "summary.json")
    path = folder / "history.jsonl"
    history = [_parsed(path, line) for line in _content(path).splitlines()]
    if not summary and not history:
        raise VflError(
            f"The run in {folder} has not finished, as it has no summary.json, and was not "
            "evaluated yet: wait for it."
        )
    title = title or str(summary.get("strategy", folder.name))
    return Shown(title, folder, summary, history, _json(folder / "audit.json"))


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, _content(path) or b"{}")


def _content(path: Path) -> bytes:
    """The bytes of a file; none if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise VflError(
            f"{path} cannot be read: {error.strerror}; see to its permissions."
        ) from error


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise VflError(f"{path} cannot be read: it is not as a run leaves it, so move it away.")
    return parsed


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [_mapping(each) for each in _list(value)]


def _number(of: Mapping[str, Any], *path: str) -> float | None:
    """The number that is found so, if it is one, and of a size that can be drawn."""
    value: Any = of
    for key in path:
        value = _mapping(value).get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and (value == 0 or 1e-100 < abs(value) < 1e100) else None


def _megabytes(of: Mapping[str, Any]) -> float | None:
    """Up and down together."""
    up, down = _number(of, "bytes_up"), _number(of, "bytes_down")
    return None if up is None or down is None else (up + down) / 1e6


# --- HTML ---------------------------------------------------------------------------------------


class Html(str):
    """Text that is HTML; any other text is escaped before it becomes part of the page."""


def _tag(name: str, *children: str, **attributes: object) -> Html:
    """An element; ``class_`` stands for class, ``stroke_width`` for stroke-width."""
    texts = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    inner = "".join(each if isinstance(each, Html) else escape(str(each)) for each in children)
    return Html(f"<{name}{texts}/>" if name == "meta" else f"<{name}{texts}>{inner}</{name}>")


def _table(
    head: Sequence[str], *bodies: Sequence[Sequence[str]], kind: str = "figures", caption: str = ""
) -> Html:
    """A table of figures or texts, with a header to each row; it scrolls where it is too wide."""
    rows = _tag("thead", _tag("tr", *(_tag("th", each, scope="col") for each in head)))
    for body in bodies:
        lines = [
            _tag("tr", _tag("th", first, scope="row"), *(_tag("td", cell) for cell in cells))
            for first, *cells in body
        ]
        rows = Html(rows + _tag("tbody", *lines))
    title = _tag("caption", caption) if caption else Html()
    table = _tag("table", title, rows, class_=kind)
    of = {"role": "group", "aria_label": ", ".join(head)}  # of what the keyboard can scroll
    return _tag("div", table, class_="scroll", tabindex=0, **of)


def _section(title: str, *children: str) -> Html:
    return _tag("section", _tag("h2", title), *children)


def _shown(number: float | None, form: str = ".4g") -> str:
    return _NOTHING if number is None else format(number, form)


def _shown_megabytes(of: Mapping[str, Any], key: str) -> str:
    number = _number(of, key)
    return _NOTHING if number is None else megabytes(number / 1e6)


# --- the page -----------------------------------------------------------------------------------


def report(folders: Sequence[Path]) -> str:
    """The page about the runs of results folders.

    Raises
    ------
    VflError
        As `read`.
    """
    runs = read(folders)
    dataset = ", ".join(dict.fromkeys(_dataset(run) for run in runs if run.summary))
    names = f"{len(runs)} runs" if len(runs) > 1 else runs[0].title
    title = f"{names} on {dataset}" if dataset else names
    head = _tag(
        "head",
        _tag("meta", charset="utf-8"),
        _tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        _tag("meta", name_="color-scheme", content="light dark"),
        _tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        _tag("title", title),
        _tag("style", Html(_STYLE)),
    )
    sections = [
        _tag("header", _tag("h1", title), *(_verdict(run, len(runs) > 1) for run in runs)),
        _comparison(runs) if len(runs) > 1 else _tiles(runs[0]),
        _curves(runs),
        _bytes(runs),
        _delays(runs),
        _privacy(runs),
        _audits(runs),
        _settings(runs),
        _provenance(runs),
    ]
    return f'<!DOCTYPE html>\n<html lang="en-GB">{head}{_tag("body", *sections)}</html>\n'


def _dataset(run: Shown) -> str:
    return str(run.summary.get("dataset", "")).rsplit("/", 1)[-1]


def _verdict(run: Shown, named: bool) -> Html:
    """One sentence that says what happened."""
    of, failure = run.figures, run.summary.get("failure")
    done, planned = _number(of, "epochs" if run.summary else "epoch"), _number(run.config, "epochs")
    through = _counted(done, "epoch", "epochs")
    if planned not in (None, done):
        through = f"{_shown(done)} of {_counted(planned, 'epoch', 'epochs')}"
    if not run.summary:
        kind, word = "open", "Not finished: "
        text = f"there is no summary.json; its last evaluation was after {through}."
    elif failure is not None:
        kind, word = "failed", "Failed"
        text = f" before training began: {failure}"
        if "parties" in of:
            text = f" after {through}: {failure}"
    else:
        kind, word = "finished", "Finished: "
        schedule = _SCHEDULES.get(str(of.get("schedule")), "")
        if of.get("schedule") == "t-sync":
            schedule += f" (quorum {_shown(_number(of, 'quorum'))})"
        carrier = _ENGINES.get(str(of.get("engine")), "")
        carrier += TRANSPORTS.get(str(of.get("transport")), "")
        parties = _counted(_number(of, "parties"), "party", "parties")
        text = f"{through} of {parties}, {schedule}, {carrier}."
        gone = [str(party) for party in _list(of.get("failed_parties"))]
        if gone:
            text += f" Without party {', '.join(gone)} at the end, which had failed."
    name = [_tag("b", f"{run.title}. ")] if named else []
    system = run.system
    about = system.about if system else ""
    note = _tag("span", about, class_="note")
    return _tag("p", *name, _tag("strong", word), f"{text} ", note, class_=f"verdict {kind}")


def _counted(number: float | None, one: str, several: str) -> str:
    return f"{_shown(number)} {one if number == 1 else several}"


def _headlines(run: Shown) -> dict[str, str]:
    """Label -> figure: what a run reached, and what it took."""
    of = run.figures
    found = {_MEASURES[run.measure]: _shown(_number(of, run.measure), ".4f")}
    for label, key in {"AUC": "test_auc", "RMSE": "test_rmse"}.items():
        if _number(of, key) is not None:
            found[label] = _shown(_number(of, key), ".4g")
    epsilon = _number(of, "epsilon")
    found |= {
        "exchanges": _shown(_number(of, "exchanges"), ",.0f"),
        "MB up": _shown_megabytes(of, "bytes_up"),
        "MB down": _shown_megabytes(of, "bytes_down"),
        "seconds": _shown(_number(of, "seconds"), ",.1f"),
    }
    if _number(of, "virtual_seconds"):
        found["virtual seconds"] = _shown(_number(of, "virtual_seconds"), ",.1f")
    found["epsilon"] = "none" if epsilon is None else f"{epsilon:.3g}"
    if epsilon is not None:
        found["delta"] = _shown(_number(of, "delta"))
    return found


def _tiles(run: Shown) -> Html:
    tiles = [
        _tag("div", _tag("dt", label), _tag("dd", figure))
        for label, figure in _headlines(run).items()
    ]
    return _tag("dl", *tiles, class_="tiles")


def _comparison(runs: Sequence[Shown]) -> Html:
    found = [_headlines(run) for run in runs]
    labels = list(dict.fromkeys(label for each in found for label in each))
    labels.sort(key=lambda label: label in ("epsilon", "delta"))
    rows = [
        (_name(run, number), *(each.get(label, _NOTHING) for label in labels))
        for number, (run, each) in enumerate(zip(runs, found, strict=True))
    ]
    return _section("Comparison", _table(["run", *labels], rows))


def _name(run: Shown, number: int) -> Html:
    """A run's title, beside the line that it has in the charts."""
    line = _tag("line", x1=1, x2=25, y1=6, y2=6, class_=_line_class(number))
    return _tag(
        "span",
        _tag("svg", line, viewBox="0 0 26 12", class_="key", aria_hidden="true"),
        run.title,
    )


def _line_class(number: int) -> str:
    return f"line s{number % _COLOURS}" + (" again" if number >= _COLOURS else "")


# --- curves -------------------------------------------------------------------------------------


def _curves(runs: Sequence[Shown]) -> Html:
    """Measure and loss, each against all that a run spends."""
    measures = list(dict.fromkeys(run.measure for run in runs if run.history))
    used = [
        against
        for against in _AGAINST
        if any(x for run in runs for x, _ in run.curve(against, run.measure))
    ]
    if not used:
        return Html()
    losses = list(_LOSSES) if len(runs) == 1 else ["test_loss"]
    charts = [
        _chart(runs, against, lines)
        for lines in (*([measure] for measure in measures), losses)
        for against in used
    ]
    parts = [_tag("div", *charts, class_="charts", style=f"--columns: {len(used)}")]
    if len(runs) > 1:
        names = [_tag("li", _name(run, number)) for number, run in enumerate(runs)]
        parts = [_tag("ul", *names, class_="legend"), *parts]
    else:
        parts.append(_tag("p", "Of the losses, the dashed one is that in training.", class_="note"))
    labels = {**_MEASURES, **_LOSSES}
    lines = [key for key in labels if any(run.curve("exchanges", key) for run in runs)]
    bodies = [
        [
            (
                run.title,
                _shown(_number(entry, "epoch")),
                *(
                    _shown(_megabytes(entry) if x == "megabytes" else _number(entry, x))
                    for x in used
                ),
                *(_shown(_number(entry, key), ".4f") for key in lines),
            )
            for entry in run.history
        ]
        for run in runs
    ]
    head = ["run", "epoch", *(_AGAINST[key] for key in used), *(labels[key] for key in lines)]
    summary = _tag("summary", "These figures as a table")
    return _section("Curves", *parts, _tag("details", summary, _table(head, *bodies)))


def _chart(runs: Sequence[Shown], against: str, measures: Sequence[str]) -> Html:
    """Lines of one measure or two; a run that spends nothing of x is a level."""
    curves = [
        (number, key, points)
        for number, run in enumerate(runs)
        for key in measures
        if (points := run.curve(against, key))
    ]
    labels = {**_MEASURES, **_LOSSES}
    title = f"{labels[measures[0]]} against {against.replace('_', ' ')}"
    moving = [points for _, _, points in curves if _moves(points)]
    xs = [x for points in moving for x, _ in points if x > 0]
    ys = [y for _, _, points in curves for _, y in points]
    if not xs:
        return Html()
    ends = [points[-1][0] for points in moving]
    logarithmic = max(ends) > 4 * min(ends)
    low, high = min(xs) if logarithmic else 0.0, max(xs)
    x_ticks = _powers(low, high) if logarithmic else _ticks(low, high)
    y_ticks = _ticks(min(ys), max(ys))
    bottom, top = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (
            math.log(max(x, low) / low) / (math.log(high / low) or 1)
            if logarithmic
            else (x - low) / (high - low)
        )
        right = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        return right, _TOP + (top - y) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        _, y = place(low, tick)
        parts.append(
            _tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_at(y), y2=_at(y), class_="grid")
        )
        parts.append(_tag("text", f"{tick:g}", x=_LEFT - 6, y=_at(y + 4), text_anchor="end"))
    floor = _HEIGHT - _BOTTOM
    for tick in (each for each in x_ticks if low <= each <= high):
        x, _ = place(tick, bottom)
        parts.append(_tag("line", x1=_at(x), x2=_at(x), y1=floor, y2=floor + 4, class_="tick"))
        text = f"{tick:,.10g}" if tick >= 1 else f"{tick:g}"
        parts.append(_tag("text", text, x=_at(x), y=floor + 16, text_anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    scale = ", logarithmic" if logarithmic else ""
    parts.append(
        _tag("text", _AGAINST[against] + scale, x=middle, y=_HEIGHT - 4, text_anchor="middle")
    )
    said = []
    for number, key, points in curves:
        of_run = _line_class(number) + (" training" if key != measures[0] else "")
        last = f"{runs[number].title}: {labels[key]} {points[-1][1]:.4g} at the end"
        said.append(last)
        if not _moves(points):
            _, y = place(low, points[-1][1])
            ends_of = {"x1": _LEFT, "x2": _WIDTH - _RIGHT, "y1": _at(y), "y2": _at(y)}
            parts.append(_tag("line", _tag("title", last), class_=f"{of_run} level", **ends_of))
            continue
        path = " ".join(",".join(map(_at, place(*point))) for point in points)
        parts.append(_tag("polyline", _tag("title", last), points=path, class_=of_run))
        if len(points) <= 30 and key == measures[0]:
            for x, y in points:
                right, down = place(x, y)
                tip = _tag("title", f"{runs[number].title}: {y:.4g} at {x:.4g}")
                parts.append(
                    _tag("circle", tip, cx=_at(right), cy=_at(down), r=2, class_=of_run + " dot")
                )
    svg = _tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title}. {'; '.join(said)}.",
    )
    return _tag("figure", _tag("figcaption", title), svg)


def _moves(points: Sequence[tuple[float, float]]) -> bool:
    """Whether a curve has a course: baselines send nothing, or all of it before they train."""
    return points[-1][0] > 0 and (len(points) == 1 or points[0][0] < points[-1][0])


def _at(number: float) -> str:
    return f"{number:.1f}"


def _ticks(low: float, high: float) -> list[float]:
    """Five or so round numbers, of which the outer two enclose what is shown."""
    span = (high - low) or abs(high) or 1.0
    power: float = 10 ** math.floor(math.log10(span / 5))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= span / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten around what is shown, six or fewer; where there are few, 2 and 5 times too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**power for power in range(first, last + 1, 1 + (last - first) // 6)]
    if last - first < 3:
        powers = [factor * power for power in powers for factor in (1, 2, 5)]
    return powers


# --- parties ------------------------------------------------------------------------------------


def _bytes(runs: Sequence[Shown]) -> Html:
    """Bytes by party and direction: a table in which the bars stand."""
    most = max((_megabytes(each) or 0.0 for run in runs for each in run.parties), default=0.0)
    directions = "bytes_up", "bytes_down"
    bodies = [
        [
            (
                _party(run, each, len(runs) > 1),
                _shown(_number(each, "exchanges"), ",.0f"),
                *(_shown_megabytes(each, key) for key in (*directions, "evaluation_bytes")),
                _bar([(_number(each, key) or 0.0) / 1e6 for key in directions], most),
            )
            for each in run.parties
        ]
        for run in runs
        if run.parties
    ]
    if not bodies:
        return Html()
    head = ["party", "exchanges", "MB up", "MB down", "MB of evaluations", "up and down"]
    key = _tag(
        "p",
        _tag("span", class_="swatch up"),
        "up: to the label holder. ",
        _tag("span", class_="swatch down"),
        "down: to the party. Uploads for evaluations are counted apart.",
        class_="note",
    )
    return _section("Bytes by party", _table(head, *bodies), key)


def _delays(runs: Sequence[Shown]) -> Html:
    """How long replies took, and how many steps the label holder had taken meanwhile."""
    kinds = {
        "reply_seconds": "seconds",
        "reply_virtual_seconds": "virtual seconds",
        "staleness": "staleness",
    }
    kinds = {
        kind: label
        for kind, label in kinds.items()
        if kind != "reply_virtual_seconds"
        or any(_number(each, kind, "most") for run in runs for each in run.parties)
    }
    bodies = [
        [
            (
                _party(run, each, len(runs) > 1),
                *(
                    _shown(_number(each, kind, of), ".3g")
                    for kind in kinds
                    for of in ("mean", "most")
                ),
            )
            for each in run.parties
        ]
        for run in runs
        if run.parties
    ]
    if not bodies:
        return Html()
    head = ["party", *(f"{label}, {of}" for label in kinds.values() for of in ("mean", "most"))]
    note = (
        "Seconds are from sending an order to reading its reply. Staleness is how many steps the "
        "label holder took between giving an order and answering what came of it."
    )
    return _section("Delays by party", _table(head, *bodies), _tag("p", note, class_="note"))


def _party(run: Shown, party: Mapping[str, Any], named: bool) -> str:
    name = f"party {_shown(_number(party, 'party'))}"
    return f"{run.title}, {name}" if named else name


def _bar(parts: Sequence[float], most: float, mark: float | None = None) -> Html:
    """A bar of parts, as long as their share of the most; a mark for what to compare it with."""
    drawn, left = [], 0.0
    for part, name in zip(parts, ("up", "down"), strict=False):
        width = 200 * max(0.0, part) / (most or 1)
        drawn.append(_tag("rect", x=_at(left), y=1, width=_at(width), height=10, class_=name))
        left += width
    if mark is not None:
        x = _at(200 * mark / (most or 1))
        drawn.append(_tag("line", x1=x, x2=x, y1=0, y2=12, class_="mark"))
    return _tag(
        "svg",
        *drawn,
        viewBox="-1 0 202 12",
        class_="bar",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


# --- privacy ------------------------------------------------------------------------------------


def _privacy(runs: Sequence[Shown]) -> Html:
    """What was spent, what it protects and from whom; or plainly that nothing is claimed."""
    rows = []
    for run in (run for run in runs if run.summary):
        figures = ("epsilon", "delta", "epsilon_known_batches", "epsilon_of_paper")
        epsilon, *others = (_shown(_number(run.summary, key)) for key in figures)
        protects = str(run.summary.get("epsilon_protects", _NOTHING))
        if epsilon == _NOTHING:
            epsilon = "none"
            protects = (
                "nothing: no noise was added to what was sent"
                if run.config.get("privacy") == "none"
                else "nothing is claimed: the noise can be repeated (noise-seed), or was none, or "
                "the run failed before it was added"
            )
        rows.append((run.title, epsilon, *others, protects))
    if not rows:
        return Html()
    head = ["run", "epsilon", "delta", "epsilon to who knows the mini-batches"]
    head += ["epsilon by the paper's formula", "what it protects, and from whom"]
    return _section("Privacy spent", _table(head, rows, kind="texts"))


def _audits(runs: Sequence[Shown]) -> Html:
    """What published attacks made of the messages; their picture, which shows rows, stays out."""
    parts: list[Html] = []
    for run in runs:
        attacks = _mappings(run.audit.get("attacks"))
        if not attacks:
            continue
        rows = [
            (
                str(each.get("attack")),
                str(each.get("attacker")),
                str(each.get("measure")),
                _shown(success := _number(each, "success"), ".4f"),
                _shown(guessing := _number(each, "guessing"), ".4f"),
                _bar([min(success or 0.0, 1.0)], 1.0, guessing),
            )
            for each in attacks
        ]
        head = ["attack", "attacker: what it has", "measure", "success", "guessing", "0 to 1"]
        parts.append(_table(head, rows, kind="texts", caption=run.title if len(runs) > 1 else ""))
    if not parts:
        return Html()
    note = (
        "The upright mark is guessing. A success near it says that this attack found nothing, not "
        "that none would; those with * are on one epoch of two parties whose embeddings are summed."
    )
    return _section("Audit", *parts, _tag("p", note, class_="note"))


# --- settings -----------------------------------------------------------------------------------


def _settings(runs: Sequence[Shown]) -> Html:
    """All configuration keys: first those that are not everywhere at their default."""
    runs = [run for run in runs if run.config]
    if not runs:
        return Html()
    specs = KEYS
    default = {key: spec.default for key, spec in specs.items()}
    every = dict.fromkeys(key for run in runs for key in run.config)
    changed = [
        key
        for key in every
        if any(key not in default or run.config.get(key) != default[key] for run in runs)
    ]
    rows = [
        (
            _tag("code", key),
            *(_setting(run, key) for run in runs),
            _text(default[key]) if key in default else _NOTHING,
        )
        for key in changed
    ]
    rest = [
        (_tag("code", key), _text(default[key]), specs[key].help)
        for key in every
        if key not in changed
    ]
    titles = [run.title for run in runs] if len(runs) > 1 else ["value"]
    return _section(
        "Settings",
        _table(["key", *titles, "default"], rows, kind="texts"),
        _tag("p", "With °: as the system has it, unless it is told otherwise.", class_="note"),
        _tag(
            "details",
            _tag("summary", f"{len(rest)} more, at their defaults"),
            _table(["key", "default", "meaning"], rest, kind="texts"),
        ),
    )


def _setting(run: Shown, key: str) -> str:
    value, system = run.config.get(key), run.system
    own = system.defaults.get(key) if system else None
    return _text(value) + ("°" if own is not None and value == own else "")


def _text(value: Any) -> str:
    return "auto" if value is None else "empty" if value == "" else str(value)


def _provenance(runs: Sequence[Shown]) -> Html:
    """Versions, digest of the code, and where the results are."""
    finished = [run for run in runs if run.summary]
    if not finished:
        return Html()
    names = dict.fromkeys(
        name for run in finished for name in _mapping(run.summary.get("versions"))
    )
    rows = [
        (name, *(str(_mapping(run.summary.get("versions")).get(name)) for run in finished))
        for name in names
    ]
    rows += [
        ("code", *(_tag("code", str(run.summary.get("code"))[:16]) for run in finished)),
        ("peak memory, MB", *(_shown(_number(run.summary, "peak_memory_mb")) for run in finished)),
    ]
    rows.append(("folder", *(_tag("code", str(run.folder)) for run in finished)))
    return _section(
        "Versions", _table(["what", *(run.title for run in finished)], rows, kind="texts")
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root {
  --paper: #ffffff; --panel: #f5f7f9; --ink: #1a1f26; --soft: #58626e; --rule: #d9dfe5;
  --good: #0a7a50; --bad: #b3261e; --open: #8a5a00;
  --s0: #0b62c4; --s1: #d1480a; --s2: #0a8a5f; --s3: #8d3fa8;
  --s4: #a87400; --s5: #00809c; --s6: #c2185b; --s7: #5f6b76;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #12161b; --panel: #1c222a; --ink: #e7eaee; --soft: #9fa9b5; --rule: #343c46;
    --good: #5ad1a0; --bad: #ff8f85; --open: #f0c04c;
    --s0: #6cb0ff; --s1: #ff9a62; --s2: #4fd1a1; --s3: #d29bea;
    --s4: #f0c04c; --s5: #5fd3ea; --s6: #ff86b3; --s7: #aeb8c2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1200px; padding: 24px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
h1 { margin: 0 0 8px; font-size: 28px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 36px 0 12px; font-size: 19px; }
h3 { margin: 16px 0 4px; font-size: 15px; overflow-wrap: anywhere; }
p { margin: 6px 0; }
code { font: 13px ui-monospace, "Liberation Mono", monospace; }
.verdict {
  padding: 6px 12px; border-left: 4px solid; background: var(--panel); overflow-wrap: anywhere;
}
.finished { border-color: var(--good); } .finished strong { color: var(--good); }
.failed { border-color: var(--bad); } .failed strong { color: var(--bad); }
.open { border-color: var(--open); } .open strong { color: var(--open); }
.note { color: var(--soft); font-size: 13px; }
dl { margin: 0; } dd { margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 18px; }
.tiles div { flex: 1 1 130px; padding: 10px 14px; border-radius: 6px; background: var(--panel); }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { padding: 8px 0; text-align: left; font-weight: 600; }
th, td { padding: 4px 14px 4px 0; text-align: right; vertical-align: top; }
th { font-weight: 400; } thead th { color: var(--soft); border-bottom: 1px solid var(--ink); }
th:first-child, .texts th, .texts td { text-align: left; }
.figures th, .figures td, tbody th { white-space: nowrap; }
.texts th, .texts td { max-width: 420px; overflow-wrap: break-word; }
.texts td:last-child { min-width: 200px; }
tbody tr { border-bottom: 1px solid var(--rule); }
tbody + tbody { border-top: 2px solid var(--soft); }
.charts { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 20px 16px; }
figure { margin: 0; } figcaption { font-size: 13px; color: var(--soft); }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.again { stroke-dasharray: 6 2; } .training { stroke-dasharray: 2 3; }
.level { stroke-dasharray: 8 4; stroke-width: 1.2; } .dot { stroke: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 12px; padding: 0; }
.legend li { list-style: none; }
.key { width: 26px; height: 12px; margin-right: 6px; }
.bar { display: block; width: 200px; height: 12px; margin-top: 5px; }
.up { fill: var(--s0); background: var(--s0); } .down { fill: var(--s1); background: var(--s1); }
.mark { stroke: var(--ink); stroke-width: 2; }
.swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 900px) { .charts { grid-template-columns: repeat(2, 1fr); } }
@media (max-width: 600px) {
  body { padding: 14px; } h1 { font-size: 23px; }
  .charts { grid-template-columns: 1fr; }
}
@page { margin: 14mm; }
@media print {
  body { padding: 0; max-width: none; font-size: 12px; print-color-adjust: exact; }
  table, .note, figcaption { font-size: 11px; }
  .scroll { overflow: visible; } .figures th, .figures td { white-space: normal; }
  .bar { width: 120px; } th, td { padding-right: 8px; }
  figure, tr, .verdict, .tiles div { break-inside: avoid; } h2 { break-after: avoid; }
}
""" + "".join(
    f".s{n} {{ stroke: var(--s{n}); }} .s{n}.dot {{ fill: var(--s{n}); }}\n"
    for n in range(_COLOURS)
)
