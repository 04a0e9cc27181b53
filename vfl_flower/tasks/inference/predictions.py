"""Predictions file: turn outputs into labels, compute figures, and write both."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import locked, make_folder, told, whole, write_json
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.column_types import text_of
from vfl_flower.data.later import pd
from vfl_flower.label_holder.calibration import logits, probabilities
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.metrics import Metrics, metrics
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.models.losses import own_figures, own_loss

Array = NDArray[Any]


def predictions_file(config: RunConfig) -> Path:
    """Return a new file of predictions: ``out``, or one in the run's folder, dated if need be."""
    if not config.running.out:
        first = (Path(config.model) / "predictions.csv").expanduser().absolute()
        dated = first.with_stem(f"predictions-{time.strftime('%Y%m%d-%H%M%S')}")
        later = (dated.with_stem(f"{dated.stem}-{number}") for number in count(2))
        return next(each for each in chain((first, dated), later) if not any(_there(each)))
    path = Path(config.running.out).expanduser().absolute()
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigError(
            f"out = {config.running.out!r} is not a .csv or .parquet file. Name such a file."
        )
    _check_new(path)
    return path


def _there(path: Path) -> Iterator[Path]:
    """Yield the files of these predictions that exist."""
    return filter(Path.exists, (path, path.with_suffix(".json")))


def _check_new(path: Path) -> None:
    for each in _there(path):
        raise ConfigError(
            f"{each} already exists. Name another file by the option out, or move this one away."
        )


def frame_of(ids: Array, called: str, rows: ScoredRows, found: Checkpoint) -> Any:
    """Return the data frame to write, with the ids in the column ``called``."""
    predicted = predicted_columns(rows.outputs, found, rows.known)
    called = "id" if called in (*predicted, "parties", "inconsistent") else called
    return pd.DataFrame({called: ids, **predicted})


def predicted_columns(
    outputs: Tensor, found: Checkpoint, known: NDArray[np.bool_] | None = None
) -> dict[str, Any]:
    """Return columns by name: the prediction, and the probability of each class."""
    about, classes = found.about_labels, found.about_labels["classes"]
    if not classes:
        numbers = about["mean"] + about["deviation"] * outputs[:, 0].double()
        return {"prediction": numbers.numpy()}
    chances = probabilities(outputs, found.calibration, known)
    predicted = np.array(classes)[predicted_classes(chances, found.threshold)]
    of_classes = {f"probability_{name}": chances[:, n] for n, name in enumerate(classes)}
    return {"prediction": predicted, **of_classes}


def predicted_classes(chances: Array, threshold: float) -> NDArray[np.int64]:
    """Return each row's class, [R]: of two, the second above the threshold; else the likeliest."""
    if chances.shape[1] == 2:
        return (chances[:, 1] > threshold).astype(np.int64)
    return chances.argmax(1)


def labelled(labels: Array, known: NDArray[np.bool_], found: Checkpoint) -> tuple[Array, Array]:
    """Return the numbers of the known rows with labels, and these labels as in training."""
    if not found.config.data.own_data:
        return np.flatnonzero(known), labels[known]
    about, classes = found.about_labels, found.about_labels["classes"]
    rows = np.flatnonzero(known & ~pd.isna(labels))
    labels = labels[rows]
    if not len(rows):
        return rows, labels
    if classes:
        return rows, encoded(labels, classes)
    standardised = (numbers_of(labels) - about["mean"]) / about["deviation"]
    return rows, standardised.astype(np.float32)


def reached(outputs: Tensor, labels: Array, found: Checkpoint) -> Metrics:
    """Return figures of outputs with labels; with a calibration, of calibrated probabilities."""
    chances = None
    if found.about_labels["classes"]:
        chances = probabilities(outputs, found.calibration)
        outputs = logits(chances) if found.calibration else outputs
    models = found.config.models
    given = outputs, torch.from_numpy(labels), found.about_labels["deviation"]
    figures = metrics(*given, own_loss(models.loss), own_figures(models.metrics))
    if chances is None or found.threshold == 0.5:
        return figures
    right = predicted_classes(chances, found.threshold) == labels
    return replace(figures, accuracy=float(right.mean()))


def encoded(labels: Array, classes: list[Any]) -> NDArray[np.int64]:
    """Return class indices [R] of labels without gaps, which training must have had."""
    numbers = {name: number for number, name in enumerate(classes)}
    said = [_like(classes[0], label) for label in labels.tolist()]
    unknown = set(said) - numbers.keys()
    if unknown:
        raise ConfigError(
            f"The labels of the new rows have {len(unknown)} values that the model has never "
            "seen. Correct them, or leave that column out."
        )
    return np.array([numbers[each] for each in said], np.int64)


def _like(known: Any, label: Any) -> Any:
    """Convert a label to the classes' type: pandas reads a column with gaps otherwise."""
    if isinstance(known, str):
        return text_of(label)
    words = {"True": True, "False": False} if isinstance(known, bool) else {}
    try:
        return words[str(label)] if str(label) in words else float(label)
    except ValueError:
        return str(label)


def numbers_of(labels: Array) -> NDArray[np.float64]:
    """Return labels [R] of a regression as numbers, in their own units."""
    try:
        return labels.astype(np.float64)
    except ValueError:
        raise ConfigError(
            "The labels of the new rows are not numbers. Correct them, or leave that column out."
        ) from None


def in_words(values: Mapping[str, Any]) -> str:
    """Return figures as the end of a sentence; empty if there are none."""
    names = {"accuracy": "accuracy", "auc": "AUC", "gini": "Gini", "ks": "KS", "loss": "loss"}
    names |= {"rmse": "RMSE", "r2": "R2"}
    said = [f"{names[key]} {values[key]:.4f}" for key in names if values.get(key) is not None]
    return f": {', '.join(said)}" if said else ""


def write(path: Path, frame: Any, figures: dict[str, Any]) -> None:
    """Write predictions to a new file, and their figures as JSON beside them."""
    of_figures, lock = path.with_suffix(".json"), path.with_name(f"{path.name}.lock")
    with told(path):
        make_folder(path.parent)
    with locked(lock, f"Another process writes {path}. Name another file."), told(path):
        _check_new(path)  # another process may have written the file meanwhile
        write_json(of_figures, figures)
        try:
            with whole(path) as file:
                if path.suffix == ".csv":
                    write_csv(file, frame)
                else:
                    frame.to_parquet(file, index=False)
        except BaseException:
            of_figures.unlink()
            raise
