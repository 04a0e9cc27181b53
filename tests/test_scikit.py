"""Our scikit-learn estimators are what scikit-learn expects, as far as they can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.parallel import Parallel, delayed

from vfl_flower.scikit import VerticalClassifier, VerticalRegressor

QUICK = {"epochs": 15}
EXPECTED = {  # check -> why it cannot pass
    "check_methods_subset_invariance": "models compute in 32 bits, and so round by batch",
}


@pytest.mark.one_by_day
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [VerticalClassifier(config=QUICK), VerticalRegressor(config=QUICK)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_it_stands_in_pipelines_cross_validation_and_searches() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    config = {"epochs": 8, "party-lr": 0.2, "server-lr": 0.2}
    vertical = VerticalClassifier(parties=3, config=config, random_state=1)
    scores = cross_val_score(make_pipeline(StandardScaler(), vertical), x, y, cv=2)
    assert scores.min() > 0.93
    search = GridSearchCV(vertical, {"strategy": ["split-nn", "vafl"]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.93


def test_cloning_keeps_parameters_and_fitting_does_not_change_them() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    vertical = VerticalClassifier("vafl", parties=[[0, 5], [1, 2]], config={"epochs": 1})
    before = vertical.get_params()
    again = clone(vertical.fit(x, y))
    assert again.get_params() == before == vertical.get_params()
    assert vertical.columns_ == [[0, 5], [1, 2]] and not hasattr(again, "model_")


def test_classes_keep_their_names_and_equal_states_give_equal_models() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    names = np.array(["benign", "malignant"])[y]
    one, other = (
        VerticalClassifier(config={"epochs": 2}, random_state=3).fit(x, names) for _ in range(2)
    )
    assert set(one.predict(x)) == {"benign", "malignant"}
    np.testing.assert_array_equal(one.predict_proba(x), other.predict_proba(x))


def test_numbers_are_predicted_in_their_own_units() -> None:
    x, y = load_diabetes(return_X_y=True)
    vertical = VerticalRegressor(config={"epochs": 10, "party-lr": 0.05, "server-lr": 0.05})
    assert vertical.fit(x, y).score(x, y) > 0.45
    assert 100 < vertical.predict(x).mean() < 200


@pytest.mark.parametrize(
    ("parties", "said"),
    [
        (0, "parties = 0 must be"),
        (-1, "parties = -1 must be"),
        (1.5, "parties = 1.5 must be"),
        ("x", "parties = 'x' must be"),
        (None, "parties = None must be"),
        ([], r"parties = \[\] must be"),
        ([[0], []], r"parties = \[\[0\], \[\]\] must be"),
        ([["a"]], "parties = .* must be"),
        (np.array([0, 1]), "parties = .* must be"),
        ([[0, 99]], "parties names column 99, and X has 2"),
        ([[0], [-3]], "parties names column -3, and X has 2"),
    ],
    ids=repr,
)
def test_parties_that_cannot_be_are_a_sentence(parties: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VerticalClassifier(parties=parties).fit([[0, 1], [1, 0], [2, 2]], [0, 1, 0])


def test_columns_may_be_numbered_by_an_array() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    vertical = VerticalClassifier(parties=np.array([[0, 5], [1, 2]]), config={"epochs": 1})
    assert vertical.fit(x, y).columns_ == [[0, 5], [1, 2]]


@pytest.mark.slow
@pytest.mark.nightly
def test_what_other_processes_have_fitted_predicts_here() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    vertical = VerticalClassifier(config={"epochs": 2})
    fitted = Parallel(n_jobs=2)(delayed(clone(vertical).fit)(x, y) for _ in range(2))
    here = vertical.fit(x, y).predict(x)
    for each in fitted:
        np.testing.assert_array_equal(each.predict(x), here)
