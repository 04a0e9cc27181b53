"""Charts: lines on axes of matplotlib, SVG of them for the report, and bars of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from vfl_flower.config.files import whole

if TYPE_CHECKING:  # matplotlib imports slowly, and most processes of a run draw nothing
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COLOURS = ("#0a56dd", "#c83c00", "#08a667", "#803ea3", "#bb8a00", "#00789a", "#a81450", "#637273")
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (4, 1.5, 1, 1.5)))  # for colours in use
_TEXT, _GRID = "#58626e", "#d9dfe5"
_VARIABLES = {_TEXT: "var(--soft)", _GRID: "var(--rule)"}  # CSS variables, light or dark
_VARIABLES |= {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS)}
WIDTH, HEIGHT = 403.2, 205.92  # of a chart on a page, in points: layout.toml has them too
_DOT, _RING = 3.5, 9.0  # points
_DOTS = 30  # a line with more points has no dots
_BAND: dict[str, Any] = {"alpha": 0.15, "linewidth": 0}
_THIN: dict[str, Any] = {"linestyle": (0, (8, 4)), "linewidth": 1}  # levels and references
_BROAD: dict[str, Any] = {"where": "post", "linewidth": 6, "alpha": 0.35, "zorder": 1}
_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Line:
    """The points of one run. Its number among the lines decides its colour."""

    name: str
    number: int
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()  # lower and upper edge at each point
    joined: bool = True
    best: tuple[float, float] | None = None  # point with a ring
    kept: float | None = None  # figure of the model that the run keeps, by default the last
    reference: bool = False  # thin, and without dots
    broad: bool = False  # rises in steps

    @property
    def level(self) -> float:
        """Return the figure of the run's model."""
        return self.points[-1][1] if self.kept is None else self.kept

    @property
    def when(self) -> str:
        """Return when a run had that figure; empty for a mean over seeds."""
        at_end = " at the end" if self.level == self.points[-1][1] else ""
        return " at the best epoch" if self.best else at_end

    @property
    def moves(self) -> bool:
        """Return whether x varies. A baseline may send nothing, or all before training."""
        (first, _), (last, _) = self.points[0], self.points[-1]
        return first < last or (last > 0 and len(self.points) == 1)

    @property
    def dots(self) -> bool:
        """Return whether to draw each point as a dot."""
        many = self.joined and len(self.points) > _DOTS
        return self.moves and not many and not self.reference and not self.broad


def look(number: int) -> tuple[int, int]:
    """Return the indices of a run's colour and dash pattern."""
    return number % len(COLOURS), number // len(COLOURS) % len(_DASHES)


def chart(
    axes: Axes, lines: Sequence[Line], x_label: str, y_label: str = "", linear: bool = False
) -> dict[str, Line2D]:
    """Draw lines, and a level for each line without a course. Return artists by name.

    Unless it is ``linear``, the x-axis begins at 0, or is logarithmic if some lines go much further
    than others.
    """
    drawn = {}
    for line in lines:
        number, dashes = look(line.number)
        colour = COLOURS[number]
        if not line.moves:
            drawn[line.name] = axes.axhline(line.level, color=colour, **_THIN)
            continue
        if line.band:  # its upper edge to the right, its lower edge back
            xs, (low, high) = [x for x, _ in line.points], zip(*line.band, strict=True)
            axes.fill([*xs, *xs[::-1]], [*high, *low[::-1]], color=colour, **_BAND)
        if line.broad:
            (drawn[line.name],) = axes.step(*zip(*line.points, strict=True), color=colour, **_BROAD)
            continue
        style = _DASHES[dashes] if line.joined else "none"
        (drawn[line.name],) = axes.plot(
            *zip(*line.points, strict=True),
            color=colour,
            marker="o" if line.dots else "",
            markersize=_DOT,
            **(_THIN if line.reference else {"linestyle": style, "linewidth": 1.5}),
        )
        if line.best:
            axes.plot(*line.best, "o", color=colour, fillstyle="none", markersize=_RING)
    logarithmic = _scale(axes, lines, linear)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.7g}")
    axes.set_xlabel(x_label + (", logarithmic" if logarithmic else ""), color=_TEXT)
    axes.set_ylabel(y_label, color=_TEXT)
    axes.tick_params(which="both", bottom=False, left=False, labelcolor=_TEXT)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_frame_on(False)
    return drawn


def _scale(axes: Axes, lines: Sequence[Line], linear: bool) -> bool:
    """Scale the x-axis, and return whether it is logarithmic; see `chart`."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    xs = [x for line in lines if line.moves for x, _ in line.points]
    ends = [line.points[-1][0] for line in lines if line.moves]
    logarithmic = not linear and bool(ends) and max(ends) > 4 * min(ends)
    if logarithmic:
        times = max(xs) / min(x for x in xs if x > 0)
        subs = next(s for t, s in ((30, (1, 2, 5)), (1000, (1, 3)), (inf, (1,))) if times <= t)
        axes.set_xscale("log", nonpositive="mask")
        axes.xaxis.set_major_locator(LogLocator(subs=subs))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        if not linear:
            axes.set_xlim(left=min(0.0, *xs, 0.0))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return logarithmic


def bars(
    path: Path,
    names: Sequence[str],
    values: Sequence[float],
    margins: Sequence[float],
    colours: Sequence[str],
    label: str,
) -> None:
    """Draw a bar for each feature, the first one at the bottom, with its margin on both sides."""
    from matplotlib.figure import Figure

    figure, places = Figure(figsize=(6.4, 1.2 + 0.24 * len(names))), range(len(names))
    axes = figure.subplots()
    axes.barh(places, values, xerr=margins, color=colours, ecolor="#637273")
    axes.set_yticks(places, names)
    axes.set_xlabel(label)
    axes.locator_params("x", nbins=5)
    axes.axvline(0, color="#58626e", linewidth=0.8)
    with whole(path) as file:
        figure.savefig(file, format="png", dpi=120, bbox_inches="tight")


# --- SVG ----------------------------------------------------------------------------------------


def svg(
    lines: Sequence[Line], x_label: str, linear: bool = False
) -> tuple[Markup, list[list[tuple[float, float]]]]:
    """Draw a `chart` of size `WIDTH` and `HEIGHT`; return its elements, and each line's points.

    They contain no names. The page's style sheet defines the colours.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot: it works in any thread

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    chart(axes, lines, x_label, linear=linear)
    file = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # keep texts as text, not as outlines
        figure.savefig(file, format="svg")
    places = []
    for line in lines:
        at = axes.transData.transform(line.points)
        if not line.moves:  # the right end of the level
            at = axes.get_yaxis_transform().transform([(1, line.level)])
        places.append([(float(x), HEIGHT - float(y)) for x, y in at])
    return Markup(_elements(file.getvalue())), places


def _elements(drawn: bytes) -> str:
    """Return the lines, dots and texts of matplotlib's SVG, with CSS colours."""
    elements = []
    for each in ElementTree.fromstring(drawn).iter():
        x, y, text = each.get("x", ""), each.get("y", ""), None
        if each.tag == f"{_SVG}use":
            size = _RING if "fill-opacity" in each.get("style", "") else _DOT
            tag, place = "circle", {"cx": x, "cy": y, "r": str(size / 2)}
        elif each.tag == f"{_SVG}path" and each.get("id") is None:  # an id marks a marker's shape
            tag, place = "path", {"d": " ".join(each.get("d", "").split())}
        elif each.tag == f"{_SVG}text":
            tag, place, text = "text", {"x": x, "y": y}, each.text
        else:
            continue
        rules = (rule.split(":") for rule in each.get("style", "").split(";") if ":" in rule)
        style = {key.strip(): _VARIABLES.get(value.strip(), value.strip()) for key, value in rules}
        style = {key: value for key, value in style.items() if not key.startswith("font")}
        element = ElementTree.Element(tag, place | style)
        element.text = text
        elements.append(ElementTree.tostring(element, encoding="unicode"))
    return "\n".join(elements)
