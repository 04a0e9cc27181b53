"""The files of an explanation in the results folder: figures, a table and a picture."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from vfl_flower.config import names
from vfl_flower.config.files import write_json
from vfl_flower.results.charts import COLOURS, bars

FILE = "explanation.json"
PICTURE = "explanation.png"
LABEL_HOLDER = "label holder"
"""Key of the label holder's own columns among the parties. Only these features have names."""
METRICS = {"auc": "AUC", "accuracy": "accuracy", "r2": "R2"}
_DRAWN = 30


def write(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write `FILE` and `PICTURE`. They replace an earlier explanation."""
    write_json(folder / FILE, figures)
    if features := ranked(figures):
        _draw(figures, features[:_DRAWN], folder / PICTURE)
    else:
        (folder / PICTURE).unlink(missing_ok=True)


def ranked(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of all features with their ``party``, the most important first."""
    found = [
        {"party": party, **feature}
        for party, of_party in figures["parties"].items()
        for feature in of_party.get("features", ())
    ]
    return sorted(found, key=lambda each: -each["value"])


def _called(feature: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Return what a feature is called: by number at a party, by name at the label holder."""
    if feature["party"] == LABEL_HOLDER:
        return f"{LABEL_HOLDER}, {feature['feature']}"
    said = f"party {feature['party']}, feature {feature['feature']}"
    return names.in_words(said, names.from_json(figures.get("names")))


def _draw(figures: Mapping[str, Any], features: list[dict[str, Any]], path: Path) -> None:
    """Draw features as bars with intervals, a colour for each party."""
    features = features[::-1]
    colours = dict(zip(figures["parties"], cycle(COLOURS), strict=False))
    bars(
        path,
        [_called(feature, figures) for feature in features],
        [feature["value"] for feature in features],
        [(feature["high"] - feature["low"]) / 2 for feature in features],
        [colours[feature["party"]] for feature in features],
        f"fall of {METRICS[figures['metric']]} (of {figures['baseline']:.4g}) if permuted",
    )
