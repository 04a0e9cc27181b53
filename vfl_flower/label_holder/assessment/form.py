"""The assessment of a model in JSON: figures, curves and segments of rows with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.label_holder.assessment import numbers, several_classes, two_classes
from vfl_flower.label_holder.assessment.intervals import Figure

Array = NDArray[Any]

NO_FIGURES = "has rows of one class only"
"""Why rows of two classes have no figures."""


@dataclass(frozen=True)
class Scored:
    """Rows with predictions and labels."""

    said: Array  # probabilities [R, classes]; or numbers [R], in units of the labels
    labels: Array  # class indices [R], or numbers [R]
    classes: Sequence[Any]  # names; empty for numbers
    threshold: float = 0.5  # probability above which the second of two classes is predicted

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def __getitem__(self, rows: Array) -> Scored:
        """Return some rows."""
        return replace(self, said=self.said[rows], labels=self.labels[rows])

    @property
    def lack(self) -> str:
        """Return why the rows have no figures; empty if they have."""
        if len(self.classes) == 2 and (self.labels[:1] == self.labels).all():
            return NO_FIGURES
        return ""

    @property
    def columns(self) -> dict[str, Array]:
        """Return label and predicted number, or probability of each class, by name: [R] each."""
        if not self.classes:
            return {"label": self.labels, "prediction": self.said}
        chances = {f"probability_{name}": self.said[:, n] for n, name in enumerate(self.classes)}
        return {"label": np.array(self.classes)[self.labels], **chances}

    @property
    def watched(self) -> dict[str, Array]:
        """Return `columns` that drift by themselves: of two classes, one probability."""
        other = f"probability_{self.classes[0]}" if len(self.classes) == 2 else ""
        return {name: column for name, column in self.columns.items() if name != other}

    @property
    def positive(self) -> NDArray[np.bool_]:
        """Return whether a row is of the second of two classes, [R]."""
        return self.labels == 1

    def figures(self) -> dict[str, Figure]:
        """Return the figures of rows that do not `lack` anything."""
        if not self.classes:
            return numbers.figures(self.said, self.labels)
        if len(self.classes) > 2:
            return several_classes.figures(self.said, self.labels)
        return two_classes.figures(self.said[:, 1], self.positive, self.threshold)

    def form(self, rule: str, calibration: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the assessment, by a rule ``threshold``, of rows that do not `lack` anything."""
        found: dict[str, Any] = {"rows": len(self)}
        matrix: list[list[int]] | None = None
        if len(self.classes) == 2:
            given = self.said[:, 1], self.positive, self.threshold
            found["positives"] = int(self.positive.sum())
            found["threshold"] = {"rule": rule, "value": self.threshold}
            matrix = two_classes.counts(*given)
            figures, curves = two_classes.assessed(*given)
        elif self.classes:
            matrix = several_classes.counts(self.said, self.labels)
            figures, curves = several_classes.assessed(self.said, self.labels)
        else:
            figures, curves = numbers.assessed(self.said, self.labels)
        if self.classes:
            found["calibrate"] = calibration["method"] if calibration else "none"
        found["figures"] = figures
        if matrix is not None:
            found["confusion"] = {"classes": list(map(str, self.classes)), "counts": matrix}
        return {**found, "curves": curves}
