"""Our scikit-learn estimators are what scikit-learn expects, as far as they can be."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator
from sklearn.utils.parallel import Parallel, delayed

from strategies.papers.vafl import VAFL
from tests import towers
from vfl_flower.api.own_code import KEYWORDS
from vfl_flower.api.scikit import EXPECTED_FAILED_CHECKS, VerticalClassifier, VerticalRegressor
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import KEYS

TELLING = {  # of scikit-learn's checks; all run at night
    "check_estimator_cloneable",
    "check_no_attributes_set_in_init",
    "check_dont_overwrite_parameters",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_estimators_unfitted",
    "check_set_params",
    "check_fit2d_1sample",
}


@pytest.mark.parametrize("kind", [VerticalClassifier, VerticalRegressor])
def test_the_most_telling_of_scikit_learns_checks(kind: Any) -> None:
    ran = set()
    for estimator, check in estimator_checks_generator(kind(epochs=1), legacy=True):
        name = getattr(check, "func", check).__name__
        if name in TELLING:
            check(estimator)
            ran.add(name)
    assert ran == TELLING


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [VerticalClassifier, VerticalRegressor])
def test_check_estimator_passes_but_for_what_is_listed(kind: Any) -> None:
    found = check_estimator(
        kind(epochs=15), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_fail=None
    )
    failed = [each["check_name"] for each in found if each["status"] == "failed"]
    xfailed = {each["check_name"] for each in found if each["status"] == "xfail"}
    assert failed == [] and xfailed <= EXPECTED_FAILED_CHECKS.keys() and len(found) > 40
    assert all(name in kind.__doc__ + str(VerticalClassifier.__doc__) for name in xfailed)


def test_parameters_are_options_of_train_and_at_most_thirty() -> None:
    names = VerticalClassifier().get_params().keys()
    assert names == VerticalRegressor().get_params().keys() and len(names) <= 30
    settings = {name.replace("-", "_") for name, each in KEYS.items() if each.expert}
    assert names - {"parties", "config", "random_state"} <= {*KEYWORDS, *settings}


def test_a_parameter_that_config_has_too_is_a_sentence() -> None:
    vertical = VerticalClassifier(config={"epochs": 1}).set_params(epochs=2)
    with pytest.raises(ConfigError, match="epochs is given twice: 1 in config"):
        vertical.fit([[0, 1], [1, 0], [2, 2]], [0, 1, 0])


def test_cloning_keeps_parameters_and_fitting_does_not_change_them() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    parties = np.array([[0, 5], [1, 2]])
    vertical = VerticalClassifier(VAFL, parties=parties, epochs=1, bottom_model=towers.plain)
    before = vertical.get_params()
    again = clone(vertical.fit(x, y))
    assert again.bottom_model is towers.plain and not hasattr(again, "model_")
    for one in (again, vertical):
        assert all(np.array_equal(each, before[name]) for name, each in one.get_params().items())
    found = vertical.model_.summary["config"]
    assert (found["strategy"], found["bottom-model"]) == ("vafl", "tests.towers:plain")
    assert vertical.columns_ == [[0, 5], [1, 2]]


def test_classes_keep_their_names_and_equal_states_give_equal_models() -> None:
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    names, vertical = y.map({0: "benign", 1: "malignant"}), VerticalClassifier(random_state=3)
    of_frame, of_array = (
        clone(vertical).set_params(epochs=2).fit(*given)
        for given in ((x, names), (x.to_numpy(), names.to_numpy()))
    )
    assert set(of_frame.predict(x)) == {"benign", "malignant"}
    chances = of_frame.predict_proba(x), of_array.predict_proba(x.to_numpy())
    np.testing.assert_allclose(*chances, atol=1e-6)


def test_numbers_are_predicted_in_their_own_units() -> None:
    x, y = load_diabetes(return_X_y=True)
    vertical = VerticalRegressor(epochs=10, party_lr=0.05, server_lr=0.05)
    assert vertical.fit(x, y).score(x, y) > 0.45
    assert 100 < vertical.predict(x).mean() < 200


@pytest.mark.parametrize(
    ("parties", "said"),
    [
        (0, "parties = 0 must be"),
        (-1, "parties = -1 must be"),
        (1.5, "parties = 1.5 must be"),
        ("x", "parties = 'x' must be"),
        ({}, "parties = <dict of length 0> must be"),
        ({"a": 1}, "parties = .* must be"),
        ({"a": [0], "b": [9]}, "parties names column 9, and X has 2"),
        (None, "parties = None must be"),
        ([], "parties = <list of length 0> must be"),
        ([[0], []], "parties = <list of length 2> must be"),
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


def messy() -> tuple[pd.DataFrame, pd.Series]:
    """Breast cancer with names, texts, missing values, and rows in no order."""
    found = load_breast_cancer(as_frame=True)
    x = found.data.sample(240, random_state=0)
    grade = pd.cut(x["mean radius"], 3, labels=["small", "medium", "large"])
    x["grade"] = grade.astype(object).where(np.arange(len(x)) % 7 > 0)
    x["site"] = np.where(x["mean texture"] > 19, "left", "right")
    x.loc[x.index[::5], "mean area"] = np.nan
    return x, found.target.loc[x.index].map({0: "malignant", 1: "benign"})


BY_NAME = {"clinic": ["mean radius", "mean area", "grade"], "lab": ["worst texture", "site"]}


def test_a_frame_may_have_texts_and_missing_values_and_parties_have_names() -> None:
    x, y = messy()
    rates: dict[str, Any] = {"optimizer": "adam", "party_lr": 0.02, "server_lr": 0.02}
    vertical = VerticalClassifier(parties=BY_NAME, epochs=6, random_state=0, **rates).fit(x, y)
    assert vertical.score(x, y) > 0.8 and set(vertical.predict(x)) == {"benign", "malignant"}
    assert [each["name"] for each in vertical.model_.summary["by_party"]] == ["clinic", "lab"]
    assert [x.columns[part].tolist() for part in vertical.columns_] == [*BY_NAME.values()]
    assert vertical.feature_names_in_.tolist() == x.columns.tolist()
    new = x.head(3).assign(grade="never seen", site=None, **{"worst texture": np.nan})
    assert np.isfinite(vertical.predict_proba(new)).all()


def test_texts_and_missing_values_of_an_array_are_refused_as_before() -> None:
    x, y = messy()
    for values in (x.to_numpy(), x[["mean area", "mean radius"]].to_numpy()):
        with pytest.raises(ValueError, match=r"could not convert|contains NaN"):
            VerticalClassifier().fit(values, y)


def test_options_decide_over_what_a_frame_gets_by_itself() -> None:
    x, y = messy()
    strict = VerticalClassifier(parties=BY_NAME, config={"missing": "refuse"})
    with pytest.raises(VflError, match=r"Party clinic's frame:\n  missing values"):
        strict.fit(x, y)


@pytest.mark.nightly
def test_frames_stand_in_cross_validation_searches_and_pipelines() -> None:
    x, y = messy()
    by_name = VerticalClassifier(parties=BY_NAME, epochs=2, random_state=0)
    assert cross_val_score(by_name, x, y, cv=2).min() > 0.6
    numbers = ["mean radius", "worst texture"]
    columns = ColumnTransformer(
        [("scaled", StandardScaler(), numbers)], remainder="passthrough"
    ).set_output(transform="pandas")
    parties = {"clinic": ["scaled__mean radius", "remainder__grade"], "lab": ["remainder__site"]}
    whole = make_pipeline(columns, VerticalClassifier(epochs=2, random_state=0))
    search = GridSearchCV(whole, {"verticalclassifier__parties": [parties, 3]}, cv=2).fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert set(search.predict(x)) <= {"benign", "malignant"}


def test_weights_of_classes_are_a_mapping() -> None:
    x, y = messy()
    x, weights = x[["mean radius", "worst texture"]], {"malignant": 50.0}
    plain = VerticalClassifier(epochs=2, random_state=0)
    fitted = clone(plain).set_params(class_weights=weights).fit(x, y)
    of_array = clone(fitted).fit(x.to_numpy(), y)
    for each in (fitted, of_array):
        assert each.model_.summary["config"]["class-weights"] == "1.0,50.0"
    many, few = ((each.predict(x) == "malignant").mean() for each in (fitted, plain.fit(x, y)))
    assert many > few
    assert clone(fitted).get_params()["class_weights"] == weights


def test_what_a_frame_lacks_is_a_sentence() -> None:
    x, y = messy()
    with pytest.raises(ValueError, match="no such column: did you mean 'mean radius'"):
        VerticalClassifier(parties={"a": ["mean radus"], "b": ["site"]}).fit(x, y)
    with pytest.raises(ValueError, match="class_weights names class 'no'"):
        VerticalClassifier(class_weights={"no": 2}).fit(x, y)
    with pytest.raises(ConfigError, match="names a party 'a b'"):
        VerticalClassifier(parties={"a b": ["grade"], "b": ["site"]}).fit(x, y)
    vertical = VerticalClassifier(parties=BY_NAME, epochs=1).fit(x, y)
    with pytest.raises(ValueError, match="feature names"):
        vertical.predict(x[x.columns[::-1]])


@pytest.mark.slow
@pytest.mark.nightly
def test_what_other_processes_have_fitted_predicts_here() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    vertical = VerticalClassifier(config={"epochs": 2})
    fitted = Parallel(n_jobs=2)(delayed(clone(vertical).fit)(x, y) for _ in range(2))
    here = vertical.fit(x, y).predict(x)
    for each in fitted:
        np.testing.assert_array_equal(each.predict(x), here)
