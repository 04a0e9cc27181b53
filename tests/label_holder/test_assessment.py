"""Figures of a model equal scikit-learn's, and 95 % intervals have the figure 95 % of the time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest, spearmanr
from sklearn import metrics
from sklearn.calibration import calibration_curve

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options.data import AssessmentConfig, Rule
from vfl_flower.data.bins import MISSING, segments
from vfl_flower.label_holder.assessment import numbers, several_classes, threshold, two_classes
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.intervals import Figure, Z, difference, wilson
from vfl_flower.label_holder.assessment.of_model import largest_difference, of_columns

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
NEAR = 1e-9


def two(generator: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Probabilities of the second class, which are too sure, and labels."""
    z = generator.normal(-1, 1.3, rows)
    chance = 1 / (1 + np.exp(-z))
    return chance, generator.random(rows) < 1 / (1 + np.exp(-0.7 * z))


def four(generator: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Probabilities of four classes, which are too sure, and labels."""
    z = generator.normal(0, 1.2, (rows, 4))
    sure, true = (np.exp(by * z) / np.exp(by * z).sum(1, keepdims=True) for by in (1, 0.7))
    return sure, (true.cumsum(1) > generator.random((rows, 1))).argmax(1)


def amounts(generator: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Predictions of numbers, and labels with heavy tails."""
    said = generator.normal(size=rows)
    return said, 0.2 + 0.8 * said + 0.7 * generator.standard_t(6, rows)


def drawn(draw: Draw, rows: int, seed: int = 0) -> tuple[Array, Array]:
    return draw(np.random.default_rng(seed), rows)


def values(figures: dict[str, Figure]) -> dict[str, float]:
    return {name: each["value"] for name, each in figures.items()}


# --- equal to scikit-learn ----------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rows", [57, 5000])
def test_figures_and_curves_of_two_classes_equal_scikit_learns(rows: int, ties: bool) -> None:
    chance, true = drawn(two, rows)
    chance = chance.round(1) if ties else chance
    figures, curves = two_classes.assessed(chance, true, 0.4)
    flagged = chance > 0.4
    false_rate, true_rate, _ = metrics.roc_curve(true, chance, drop_intermediate=False)
    due = {
        "auc": metrics.roc_auc_score(true, chance),
        "gini": 2 * metrics.roc_auc_score(true, chance) - 1,
        "ks": (true_rate - false_rate).max(),
        "average_precision": metrics.average_precision_score(true, chance),
        "brier": metrics.brier_score_loss(true, chance),
        "accuracy": metrics.accuracy_score(true, flagged),
        "precision": metrics.precision_score(true, flagged),
        "recall": metrics.recall_score(true, flagged),
        "f1": metrics.f1_score(true, flagged),
        "flagged": flagged.mean(),
    }
    of_bin, said = calibration_curve(true, chance, n_bins=10, strategy="quantile")
    bins = curves["calibration"]
    due["ece"] = np.abs(of_bin - said) @ bins["rows"] / rows
    assert values(figures) == pytest.approx(due, abs=NEAR)
    assert bins["x"] == pytest.approx(said, abs=NEAR)
    assert bins["y"] == pytest.approx(of_bin, abs=NEAR)
    assert sum(bins["rows"]) == rows
    matrix = two_classes.counts(chance, true, 0.4)
    assert matrix == metrics.confusion_matrix(true, flagged).tolist()
    # Each point of a curve is one of scikit-learn's, and the ends are there.
    precision, recall, _ = metrics.precision_recall_curve(true, chance)
    for name, all_points in (
        ("roc", np.stack([false_rate, true_rate], 1)),
        ("precision_recall", np.stack([recall, precision], 1)),
    ):
        points = np.stack([curves[name]["x"], curves[name]["y"]], 1)
        apart = np.abs(points[:, None] - all_points[None]).max(2).min(1)
        assert apart.max() < NEAR and len(points) <= two_classes.POINTS
        assert points[-1, 0] == 1
    area = metrics.auc(curves["roc"]["x"], curves["roc"]["y"])
    assert area == pytest.approx(due["auc"], abs=0.01)
    # Gain: the positives among the first tenths, where equal probabilities count in proportion.
    share = (true_rate * true.sum() + false_rate * (~true).sum()) / rows
    gain = np.interp(np.arange(1, 11) / 10, share, true_rate)
    assert curves["gain"]["y"] == pytest.approx(gain, abs=NEAR)
    assert curves["lift"]["y"] == pytest.approx(np.diff(gain, prepend=0) * 10, abs=NEAR)


def test_figures_of_several_classes_equal_scikit_learns() -> None:
    chance, true = drawn(four, 3000)
    said = chance.argmax(1)
    figures, curves = several_classes.assessed(chance, true)
    right, top = said == true, chance.max(1)
    of_bin, said_in = calibration_curve(right, top, n_bins=10, strategy="quantile")
    bins = curves["calibration"]
    assert bins["y"] == pytest.approx(of_bin, abs=NEAR)
    due = {
        "accuracy": metrics.accuracy_score(true, said),
        "macro_f1": metrics.f1_score(true, said, average="macro"),
        "log_loss": metrics.log_loss(true, chance),
        "macro_auc": metrics.roc_auc_score(true, chance, multi_class="ovr"),
        "brier": np.square(chance - np.eye(4)[true]).sum(1).mean(),
        "ece": np.abs(of_bin - said_in) @ bins["rows"] / 3000,
    }
    assert values(figures) == pytest.approx(due, abs=NEAR)
    assert several_classes.counts(chance, true) == metrics.confusion_matrix(true, said).tolist()
    # A class without rows is in no mean of areas, and in the mean of F1 only if it is predicted.
    some = true != 2
    areas = [metrics.roc_auc_score(true[some] == k, chance[some, k]) for k in (0, 1, 3)]
    found = several_classes.figures(chance[some], true[some])
    assert found["macro_auc"]["value"] == pytest.approx(np.mean(areas), abs=NEAR)


def test_figures_of_numbers_equal_scikit_learns() -> None:
    said, true = drawn(amounts, 3000)
    figures, curves = numbers.assessed(said, true)
    due = {
        "rmse": metrics.root_mean_squared_error(true, said),
        "mae": metrics.mean_absolute_error(true, said),
        "r2": metrics.r2_score(true, said),
        "spearman": spearmanr(said, true).statistic,
        "bias": (said - true).mean(),
    }
    assert values(figures) == pytest.approx(due, abs=NEAR)
    order = np.argsort(said).reshape(10, 300)
    assert curves["calibration"]["x"] == pytest.approx(said[order].mean(1), abs=NEAR)
    assert curves["calibration"]["y"] == pytest.approx(true[order].mean(1), abs=NEAR)
    assert sum(curves["residuals"]["y"]) == 3000


# --- intervals ----------------------------------------------------------------------------------


def test_intervals_of_shares_equal_the_papers() -> None:
    for number, of in ((0, 20), (3, 20), (20, 20), (500, 1000)):
        due = binomtest(number, of).proportion_ci(0.95, "wilson")
        assert np.array(wilson(number, of)) == pytest.approx(np.array(due), abs=NEAR)
    assert np.array(wilson(0, 0)).tolist() == [0, 1]
    found = difference((56, 70), (48, 80))  # Newcombe (1998), table II, method 10
    assert (found["low"], found["high"]) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_area_has_the_variance_of_delong() -> None:
    chance, true = drawn(two, 80)
    chance = chance.round(1)  # with ties
    above = np.sign(chance[true][:, None] - chance[~true][None]) / 2 + 0.5  # [positives, negatives]
    variance = above.mean(1).var(ddof=1) / true.sum() + above.mean(0).var(ddof=1) / (~true).sum()
    area = two_classes.figures(chance, true, 0.5)["auc"]
    value = above.mean()
    middle, half = np.log(value / (1 - value)), Z * np.sqrt(variance) / (value * (1 - value))
    due = [1 / (1 + np.exp(-end)) for end in (middle - half, middle + half)]
    assert [area["low"], area["high"]] == pytest.approx(due, abs=NEAR)


def test_a_perfect_model_of_few_rows_is_not_said_to_be_certain() -> None:
    chance = np.linspace(0.01, 0.99, 40)
    figures, _ = two_classes.assessed(chance, chance > 0.5, 0.5)
    for name in ("auc", "average_precision", "ks", "recall", "f1", "accuracy"):
        assert figures[name]["value"] == figures[name]["high"] == 1
        assert 0.6 < figures[name]["low"] < 0.95


def covered(
    figures: Callable[..., dict[str, Figure]], draw: Draw, rows: int, samples: int
) -> tuple[dict[str, float], dict[str, float]]:
    """How often intervals, and intervals of half the width, have the figure of many rows."""
    generator = np.random.default_rng(5)
    truth = values(figures(*draw(generator, 100_000)))
    hits, of_half = (dict.fromkeys(truth, 0.0) for _ in range(2))
    for _ in range(samples):
        for name, found in figures(*draw(generator, rows)).items():
            hits[name] += (found["low"] <= truth[name] <= found["high"]) / samples
            low, high = ((found[end] + found["value"]) / 2 for end in ("low", "high"))
            of_half[name] += (low <= truth[name] <= high) / samples
    return hits, of_half


def by_threshold(chance: Array, true: Array) -> dict[str, Figure]:
    return two_classes.figures(chance, true, 0.4)


COVERED: dict[str, tuple[Callable[..., dict[str, Figure]], Draw, int, int]] = {
    "two classes": (by_threshold, two, 200, 60),
    "four classes": (several_classes.figures, four, 200, 60),
    "numbers": (numbers.figures, amounts, 300, 150),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", COVERED)
def test_intervals_of_95_percent_have_the_figure_about_95_percent_of_the_time(name: str) -> None:
    hits, of_half = covered(*COVERED[name])
    assert min(hits.values()) > 0.88, hits
    assert np.mean(list(hits.values())) == pytest.approx(0.95, abs=0.02), hits
    assert np.mean(list(of_half.values())) < 0.75, of_half  # the control


def test_a_calibrated_model_may_have_no_calibration_error() -> None:
    generator, lows = np.random.default_rng(3), []
    for _ in range(25):
        chance = generator.random(200)
        found = two_classes.figures(chance, generator.random(200) < chance, 0.5)["ece"]
        lows.append(found["low"])
        assert found["value"] > 0.01
    assert np.mean(np.array(lows) == 0) >= 0.9


# --- threshold ----------------------------------------------------------------------------------


def test_rules_choose_the_threshold_that_they_name() -> None:
    chance, true = drawn(two, 400)
    precision, recall, _ = metrics.precision_recall_curve(true, chance)
    best = (2 * precision * recall / (precision + recall)).max()
    said = chance > threshold.chosen(Rule("f1"), chance, true)
    assert metrics.f1_score(true, said) == pytest.approx(best, abs=NEAR)

    def cost(at: float) -> float:
        return float(5 * (true & (chance <= at)).sum() + (~true & (chance > at)).sum())

    chosen = threshold.chosen(Rule("cost", 5), chance, true)
    assert cost(chosen) == min(map(cost, [-1, *chance]))
    assert cost(chosen) < cost(0.5)
    assert (chance > threshold.chosen(Rule("rate", 0.1), chance, true)).sum() == 40
    assert threshold.chosen(Rule("number", 0.3), chance, true) == 0.3
    # It lies between two probabilities, also among equal ones.
    ties = chance.round(1)
    assert threshold.chosen(Rule("f1"), ties, true) not in ties
    assert threshold.chosen(Rule("rate", 0.999), ties, true) >= 0


@pytest.mark.parametrize("rule", [Rule("f1"), Rule("cost", 5)])
def test_noisy_labels_choose_nearly_the_threshold_that_true_labels_do(rule: Rule) -> None:
    kept = 0.73
    losses: dict[bool, list[float]] = {True: [], False: []}
    chance, true = drawn(two, 100_000)

    def loss(at: float) -> float:
        said = chance > at
        if rule.kind == "f1":
            return -float(metrics.f1_score(true, said))
        return float((5 * (true & ~said).sum() + (~true & said).sum()) / len(true))

    least = loss(threshold.chosen(rule, chance, true))
    generator = np.random.default_rng(1)
    for _ in range(8):
        rows = generator.integers(0, len(true), 3000)
        noisy = np.where(generator.random(3000) < kept, true[rows], ~true[rows])
        for corrected, lost in losses.items():
            at = threshold.chosen(rule, chance[rows], noisy, kept if corrected else 1.0)
            lost.append(loss(at) - least)
    assert np.mean(losses[True]) < 0.015
    assert np.mean(losses[False]) > 0.04  # the control reads noisy labels as if true


@pytest.mark.parametrize(
    "text", ["f2", "cost", "cost:", "cost:-1", "rate:0", "rate:1", "0", "1", "-0.5", "nan", ""]
)
def test_another_threshold_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a threshold\. Give a number between 0 and 1"):
        _ = AssessmentConfig(text).rule


# --- segments -----------------------------------------------------------------------------------


def test_segments_have_the_figures_of_their_rows() -> None:
    chance, true = drawn(two, 900)
    region = np.array(["north", "south", "west"], object)[np.arange(900) % 3]
    scored = Scored(np.stack([1 - chance, chance], 1), true.astype(np.int64), ("no", "yes"), 0.4)
    found = of_columns(scored, {"region": region}, 50)["region"]
    assert found["rows"] == {"north": 300, "south": 300, "west": 300} and not found["left_out"]
    flagged, recalled = {}, {}
    for name in ("north", "south", "west"):
        rows = region == name
        assert found["figures"][name] == two_classes.figures(chance[rows], true[rows], 0.4)
        flagged[name] = (chance[rows] > 0.4).mean()
        recalled[name] = (chance[rows & true] > 0.4).mean()
    for name, due in (("demographic_parity", flagged), ("equal_opportunity", recalled)):
        apart = found["differences"][name]
        assert apart["value"] == pytest.approx(max(due.values()) - min(due.values()), abs=NEAR)
        assert due[apart["highest"]] - due[apart["lowest"]] == pytest.approx(apart["value"])
        assert 0 <= apart["low"] <= apart["value"] <= apart["high"]


def test_segments_with_few_rows_or_one_class_get_a_sentence() -> None:
    chance, true = drawn(two, 300)
    scored = Scored(np.stack([1 - chance, chance], 1), true.astype(np.int64), ("no", "yes"))
    kind = np.where(true, "one", "other").astype(object)
    kind[:100] = "both"
    kind[100:105] = None
    found = of_columns(scored, {"kind": kind}, 50)["kind"]
    assert list(found["figures"]) == ["both"] and "differences" not in found
    assert found["left_out"] == {
        "one": "has rows of one class only",
        "other": "has rows of one class only",
        MISSING: "has 5 rows, fewer than min-segment = 50",
    }
    assert found["rows"] == {**{k: (kind == k).sum() for k in ("both", "one", "other")}, MISSING: 5}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("groups", [2, 5])
def test_differences_between_segments_are_covered_95_percent_of_the_time(
    groups: int, equal: bool
) -> None:
    generator, hits = np.random.default_rng(0), 0
    rates = np.full(groups, 0.3) if equal else np.linspace(0.2, 0.4, groups)
    for _ in range(100):
        flagged = generator.binomial(200, rates).tolist()
        found = largest_difference({str(at): (each, 200) for at, each in enumerate(flagged)})
        hits += found["low"] <= np.ptp(rates) <= found["high"]
    assert hits >= 91


def test_values_of_a_column_become_segments() -> None:
    names, numbers_of = segments("x", np.array([2.0, np.nan, 10.0, 2.0, 1.5]))
    assert names == ["1.5", "2", "10", MISSING] and numbers_of.tolist() == [1, 3, 2, 1, 0]
    names, numbers_of = segments("x", np.array(["b", None, "a", "", MISSING], object))
    assert sorted(names) == ["a", "b", MISSING]
    assert [names[at] for at in numbers_of] == ["b", MISSING, "a", MISSING, MISSING]
    assert segments("x", np.array([True, False]))[0] == ["False", "True"]
    near = 1_700_000_000 + np.arange(100)  # ranges that differ in their ninth digit
    names, numbers_of = segments("second", near)
    assert len(names) == 5 and np.bincount(numbers_of).tolist() == [20] * 5
    names, numbers_of = segments("age", np.arange(100))
    assert names == ["<= 19", "(19, 39]", "(39, 59]", "(59, 79]", "> 79"]
    assert np.bincount(numbers_of).tolist() == [20] * 5
    with pytest.raises(ConfigError, match=r"Column 'name' has more than 100 values"):
        segments("name", np.arange(101).astype(str).astype(object))
