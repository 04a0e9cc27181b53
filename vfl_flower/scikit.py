"""scikit-learn estimators: vertical training as `fit`, for pipelines and cross-validation.

The columns of X are divided among parties, who train as they would apart; so a score says what a
system reaches on a table before anyone is asked to take part.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from vfl_flower.api import Model, train

Array = NDArray[Any]


class _Vertical(BaseEstimator):  # type: ignore[misc]
    """What both estimators have in common."""

    def __init__(
        self,
        strategy: str = "split-nn",
        parties: int | Sequence[Sequence[int]] | Array = 2,
        config: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.strategy = strategy
        self.parties = parties
        self.config = config
        self.random_state = random_state

    def _fit(self, x: Array, y: Array, target: str) -> Self:
        if len(x) < 2:
            raise ValueError("n_samples = 1: nothing can be learnt from 1 sample.")
        seed = 0
        if self.random_state is not None:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
        # One evaluation, at the end, of the rows that were trained on: none are held out.
        keys = {"strategy": self.strategy, "seed": seed, "target": target, "test-fraction": 0.0}
        keys |= {"eval-every": float(2**20), **(self.config or {})}
        self.columns_ = self._columns()
        self.model_: Model = train(keys, self._parts(x), y, progress=False)  # it may be of many
        return self

    def _columns(self) -> list[list[int]]:
        """The columns of each party.

        Raises
        ------
        ValueError
            If ``parties`` is neither a number of them nor columns that there are.
        """
        parties: Any = self.parties
        there = self.n_features_in_
        if isinstance(parties, Integral) and int(parties) > 0:
            number = min(int(parties), there)
            return [part.tolist() for part in np.array_split(np.arange(there), number)]
        try:
            parts = [[operator.index(column) for column in part] for part in parties]
        except TypeError:
            parts = []
        if not (parts and all(parts)):
            raise ValueError(
                f"parties = {parties!r} must be how many there are, at least 1, or a list of "
                "the columns of each, at least one, by their numbers."
            )
        absent = [column for part in parts for column in part if not -there <= column < there]
        if absent:
            raise ValueError(
                f"parties names column {absent[0]}, and X has {there}, counted from 0."
            )
        return parts

    def _parts(self, x: Array) -> list[Array]:
        return [x[:, columns] for columns in self.columns_]

    def _checked(self, x: Any) -> Array:
        check_is_fitted(self, "model_")
        checked: Array = validate_data(self, x, reset=False, dtype=np.float64)
        return checked


class VerticalClassifier(ClassifierMixin, _Vertical):  # type: ignore[misc]
    """A classifier that parties with different columns train together.

    Parameters
    ----------
    strategy : system, as `vfl list` names them.
    parties : how many share the columns, evenly; or the columns of each, as lists of numbers.
    config : further keys of the run configuration.
    random_state : seed of models and batches.

    Attributes
    ----------
    model_ : the `vfl_flower.Model`.
    classes_ : the classes.
    columns_ : the columns of each party.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X [N, F] of these classes."""
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present: {self.classes_[0]!r}."
            )
        return self._fit(x, indices, "classification")

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """The probability of each class, [N, classes]."""
        parts = self._parts(self._checked(X))
        found: Array = self.model_.predict_proba(parts)
        return found

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The class of each row, [N]."""
        chances = self.predict_proba(X)
        found: Array = self.classes_[chances.argmax(1)]
        return found


class VerticalRegressor(RegressorMixin, _Vertical):  # type: ignore[misc]
    """A regression model that parties with different columns train together.

    Parameters and attributes are as for `VerticalClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X [N, F] of these numbers."""
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return self._fit(x, y, "regression")

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The number of each row, [N]."""
        parts = self._parts(self._checked(X))
        found: Array = self.model_.predict(parts)
        return found
