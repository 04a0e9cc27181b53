"""A party's own table and picture of what its features are worth, with their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.tasks.inference import bars
from vfl_flower.tasks.inference.party.features import Feature
from vfl_flower.transport.explain_messages import FiguresOrder

_SHOWN = 30  # features in the picture


def of(features: Sequence[Feature], figures: Mapping[str, NDArray[np.float64]]) -> Any:
    """Return a frame with a line for each feature, the most important first.

    ``feature`` is the number under which the label holder knows the feature. The figures are
    missing if labels are protected.
    """
    import pandas as pd

    table = pd.DataFrame(
        {"feature": np.arange(len(features)), "name": [each.name for each in features]}
    )
    if not figures:
        return table
    values, margins = figures["values"], figures["margins"]
    columns = {"value": values, "low": values - margins, "high": values + margins}
    return table.assign(**columns).sort_values("value", ascending=False, kind="stable")


def draw(table: Any, order: FiguresOrder, path: Path) -> None:
    """Draw the features with the largest figures as bars, with their intervals."""
    most = table.iloc[:_SHOWN][::-1]
    names = [text if len(text) <= 40 else f"{text[:39]}…" for text in map(str, most["name"])]
    metric = {"auc": "AUC", "r2": "R2"}.get(order.metric, order.metric)
    noise = f", with noise of deviation {order.grain:.2g}" if order.grain else ""
    bars.draw(
        path,
        [name.replace("$", r"\$") for name in names],
        most["value"],
        (most["high"] - most["low"]) / 2,
        ["#0a56dd"] * len(most),
        f"fall of {metric} on {order.rows} rows if permuted{noise}",
    )
