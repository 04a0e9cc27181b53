"""scikit-learn estimators: vertical training as `fit`, for pipelines and cross-validation.

The columns of X are divided among parties, which train as they would on their own machines. So a
score on data you already have estimates what a federation would reach.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from vfl_flower.api.keywords import Code
from vfl_flower.api.model import Model
from vfl_flower.api.own_code import KEYWORDS
from vfl_flower.api.training import train
from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import UnfitError, asked, shown
from vfl_flower.protocol.system import System

EXPECTED_FAILED_CHECKS = {
    "check_methods_subset_invariance": "models compute in 32 bits and round differently by batch"
}
"""Checks of scikit-learn that may fail, and why: pass it to `check_estimator` by this name."""


@dataclass(repr=False, eq=False)
class _Vertical(BaseEstimator):  # type: ignore[misc]
    """The shared part of both estimators."""

    strategy: str | System = "split-nn"
    parties: int | Sequence[Any] | Mapping[str, Any] | Array = 2
    config: Mapping[str, Any] | None = None
    random_state: Any = None
    _: KW_ONLY
    epochs: int | None = None
    patience: float | None = None
    validation_fraction: float | None = None
    batch_size: int | None = None
    party_lr: float | None = None
    server_lr: float | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    lr_schedule: str | None = None
    clip_gradient: float | None = None
    bottom_model: Code | None = None
    bottom_hidden: int | None = None
    embedding_size: int | None = None
    embedding_activation: str | None = None
    top_model: Code | None = None
    top_hidden: int | None = None
    combine: str | None = None
    aggregation: str | None = None
    loss: Code | None = None
    class_weights: str | Mapping[Any, float] | None = None
    mu: float | None = None
    window: int | None = None
    codec: Code | None = None
    privacy: Code | None = None
    epsilon: float | None = None
    delta: float | None = None

    def _fit(self, x: Any, y: Array, target: str) -> Self:
        if len(x) < 2:
            raise ValueError("n_samples = 1: nothing can be learnt from 1 sample.")
        seed = 0
        if self.random_state is not None:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
        # One evaluation, at the end, on the training rows: no rows are held out.
        keys = {"strategy": self.strategy, "seed": seed, "target": target, "test-fraction": 0.0}
        if _is_frame(x):
            keys |= {"missing": "median", "text": "one-hot"}
        keys |= {"eval-every": float(2**20), **(self.config or {})}
        own = ("strategy", "parties", "config", "random_state")
        options: Any = {k: v for k, v in self.get_params(False).items() if k not in own}
        settings = {name: options.pop(name) for name in options.keys() - KEYWORDS.keys()}
        given = {k.replace("_", "-"): v for k, v in settings.items() if v is not None}
        options |= {"class_weights": self._weights(), "expert": given or None}
        self.columns_ = self._columns()
        # A search trains many models, so none shows progress.
        try:
            self.model_: Model = train(self._parts(x), y, config=keys, progress=False, **options)
        except UnfitError as error:  # its code is for callers of `train`
            said = re.sub(r"features\[[^]]*\]", "X", str(error))
            raise UnfitError(re.sub(r"train\(\.\.\., (.*)\)", r"config=dict(\1)", said)) from error
        return self

    def _columns(self) -> list[list[int]]:
        """Return the columns of each party; raise `ValueError` if ``parties`` names none of X."""
        parties: Any = self.parties
        there = self.n_features_in_
        if isinstance(parties, Integral) and int(parties) > 0:
            number = min(int(parties), there)
            return [part.tolist() for part in np.array_split(np.arange(there), number)]
        try:
            every = parties.values() if isinstance(parties, Mapping) else parties
            parts = [[self._place(column) for column in part] for part in every]
        except TypeError:
            parts = []
        if isinstance(parties, str) or not (parts and all(parts)):
            raise ValueError(
                f"parties = {shown(parties)} must be a number, at least 1, or lists of columns, or "
                "a mapping from names of parties to such lists. Give columns by their numbers, or "
                "by their names if X is a frame."
            )
        if absent := [column for part in parts for column in part if not -there <= column < there]:
            raise ValueError(
                f"parties names column {absent[0]}, and X has {there}, counted from 0."
            )
        return parts

    def _place(self, column: Any) -> int:
        """Return the number of a column; raise `TypeError` if it is neither number nor name."""
        names = [] if isinstance(column, Integral) else list(getattr(self, "feature_names_in_", ()))
        if names and isinstance(column, str):
            if column not in names:
                raise ValueError(
                    f"parties names column {column!r}, and X has no such column:"
                    f"{asked(column, names, 'use')} one of its {len(names)} columns."
                )
            return names.index(column)
        return operator.index(column)

    def _parts(self, x: Any) -> Any:
        """Return the columns of each party, by the names of the parties if they have some."""
        parts = [x.iloc[:, of] if _is_frame(x) else x[:, of] for of in self.columns_]
        if isinstance(self.parties, Mapping):
            return dict(zip(self.parties, parts, strict=True))
        return parts

    def _weights(self) -> Any:
        return self.class_weights

    def _both(self, x: Any, y: Any, **how: Any) -> tuple[Any, Array]:
        """Return checked rows and labels: a pandas frame as it is, all else as numbers [N, F]."""
        if not _is_frame(x):
            return validate_data(self, x, y, dtype=np.float64, **how)
        _, y = check_X_y(np.zeros((len(x), 1)), y, **how)
        return validate_data(self, x, skip_check_array=True), y

    def _predict(self, x: Any, predict: Callable[[Model, Any], Array]) -> Array:
        """Return a method's predictions of rows, or raise `NotFittedError`."""
        check_is_fitted(self, "model_")
        how = {"skip_check_array": True} if _is_frame(x) else {"dtype": np.float64}
        return predict(self.model_, self._parts(validate_data(self, x, reset=False, **how)))


def _is_frame(x: Any) -> bool:
    """Return whether X is a pandas frame, whose texts and missing values training can use."""
    return hasattr(x, "columns") and hasattr(x, "iloc")


class VerticalClassifier(ClassifierMixin, _Vertical):  # type: ignore[misc]
    """A classifier that parties with different columns train together.

    Parameters
    ----------
    strategy : name of a strategy, as `vfl list` prints it, or a `System`.
    parties : number of parties that share the columns evenly; or a list of columns for each party;
        or a mapping from names of parties to such lists. Columns are numbers, or names of a frame.
    config : further options, such as ``{"lr-decay": 0.5}``.
    random_state : seed of models and batches.
    epochs, patience, ..., delta : options and expert settings. None stands for the default.
        `vfl list` explains each. Searches such as `GridSearchCV` can set them. ``class_weights``
        may also be a mapping from classes to weights; a class that it lacks has weight 1.

    Attributes
    ----------
    model_ : the `vfl_flower.Model`.
    classes_ : the classes.
    columns_ : the columns of each party.

    Raises
    ------
    ValueError
        By ``fit``, if X, y or ``parties`` cannot be used.
    ConfigError
        By ``fit``, if an option cannot have its value, or is given in ``config`` too.

    Notes
    -----
    X may be a pandas frame with texts and missing values. Each text value becomes a column, and a
    median replaces a missing number, unless ``config`` says otherwise.

    All checks of scikit-learn's `check_estimator` pass but one that may fail:
    `check_methods_subset_invariance`, since models compute in 32 bits and round differently by
    batch. Pass `EXPECTED_FAILED_CHECKS` as ``expected_failed_checks``.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.model_selection import GridSearchCV
    >>> from vfl_flower.api.scikit import VerticalClassifier
    >>> x, y = load_breast_cancer(return_X_y=True)
    >>> vertical = VerticalClassifier("vafl", parties=3, epochs=4)
    >>> search = GridSearchCV(vertical, {"party_lr": [1e-6, 0.1]}, cv=2).fit(x, y)
    >>> search.best_params_
    {'party_lr': 0.1}
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X [N, F] and classes y [N]."""
        x, y = self._both(X, y)
        check_classification_targets(y)
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present: {self.classes_[0]!r}."
            )
        return self._fit(x, indices, "classification")

    def _weights(self) -> Any:
        """Return the weights in the order of the classes, as option ``class-weights`` has them."""
        weights: Any = self.class_weights
        if not isinstance(weights, Mapping):
            return weights
        if unknown := [each for each in weights if each not in self.classes_]:
            raise ValueError(
                f"class_weights names class {unknown[0]!r}, and y has none such. Its classes are "
                f"{', '.join(map(str, self.classes_))}."
            )
        return ",".join(str(float(weights.get(each, 1))) for each in self.classes_.tolist())

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return the probability of each class, [N, classes]."""
        return self._predict(X, Model.predict_proba)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the class of each row, [N]."""
        indices = self._predict(X, Model.predict)  # before classes_, which comes by fitting
        return self.classes_[indices]


class VerticalRegressor(RegressorMixin, _Vertical):  # type: ignore[misc]
    """A regression model that parties with different columns train together.

    Parameters and attributes are as for `VerticalClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> import vfl_flower
    >>> x = np.random.default_rng(0).normal(size=(300, 4))
    >>> model = vfl_flower.VerticalRegressor(epochs=5).fit(x, x[:, 0] - x[:, 3])
    >>> model.predict(x).shape
    (300,)
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X [N, F] and numbers y [N]."""
        x, y = self._both(X, y, y_numeric=True)
        return self._fit(x, y, "regression")

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the number of each row, [N]."""
        return self._predict(X, Model.predict)
