"""A picture of features as bars with intervals, the most important one at the top."""

from collections.abc import Sequence
from pathlib import Path

from vfl_flower.config.files import whole


def draw(
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
