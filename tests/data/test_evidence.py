"""Weight of evidence and information value of bins, from exact and from noisy labels."""

import numpy as np
import pytest

from vfl_flower.data.bins import Bins
from vfl_flower.data.evidence import (
    ColumnEvidence,
    Evidence,
    _derivatives,
    _value,
    least_rows,
    merged,
    value_of,
)
from vfl_flower.protocol.privacy.labels import kept_share

RATES = np.linspace(0.1, 0.4, 10)


def counted(rates: np.ndarray, rows: int, generator: np.random.Generator) -> Evidence:
    """Bins of equal size, whose rows have an event with these probabilities."""
    each = np.full(len(rates), rows // len(rates))
    return Evidence(each, generator.binomial(each, rates).astype(float))


def noisy(exact: Evidence, epsilon: float, generator: np.random.Generator) -> Evidence:
    """Estimate the same bins from labels with noise."""
    kept, events = kept_share(epsilon, 2), exact.events.astype(int)
    seen = generator.binomial(events, kept) + generator.binomial(exact.rows - events, 1 - kept)
    return Evidence(exact.rows, (seen - (1 - kept) * exact.rows) / (2 * kept - 1), kept)


def uncorrected(evidence: Evidence) -> float:
    return _value(*evidence._filled)


def test_the_value_of_two_bins_by_hand() -> None:
    # Shares of others 30/50 and 20/50, of events 10/40 and 30/40.
    evidence = Evidence(np.array([40, 50]), np.array([10.0, 30.0]))
    weights = [np.log(0.6 / 0.25), np.log(0.4 / 0.75)]
    assert evidence.weights == pytest.approx(weights, abs=1e-12)
    value = (0.6 - 0.25) * weights[0] + (0.4 - 0.75) * weights[1]
    assert evidence.information().value == pytest.approx(value, abs=1e-12)
    # A class without rows in a bin counts as half a row.
    evidence = Evidence(np.array([20, 20]), np.array([0.0, 10.0]))
    assert evidence.weights[0] == pytest.approx(np.log((20 / 30) / (0.5 / 10.5)), abs=1e-12)


def test_the_derivatives_are_equal_to_differences() -> None:
    generator = np.random.default_rng(0)
    events, others = generator.uniform(20, 90, 4), generator.uniform(50, 300, 4)

    def slope(by: np.ndarray) -> np.ndarray:
        return _derivatives(events + by, others - by)[0]

    found, curve = _derivatives(events, others)
    for at, unit in enumerate(1e-4 * np.eye(4)):
        between = _value(events + unit, others - unit) - _value(events - unit, others + unit)
        assert found[at] == pytest.approx(between / 2e-4, rel=1e-6)
        assert curve[at] == pytest.approx((slope(unit) - slope(-unit)) / 2e-4, rel=1e-5)


@pytest.mark.parametrize(("rows", "epsilon"), [(20_000, 1.0), (4_000, 2.0)])
def test_a_useless_column_has_no_value_under_noise(rows: int, epsilon: float) -> None:
    generator = np.random.default_rng(1)
    found, plain, exact = [], [], []
    for _ in range(200):
        true = counted(np.full(10, 0.22), rows, generator)
        evidence = noisy(true, epsilon, generator)
        exact.append(true.information().value)
        found.append(evidence.information().value)
        plain.append(uncorrected(evidence))
    by_noise = np.mean(plain) - np.mean(exact)
    # The control: without the correction, noise alone makes a value.
    assert by_noise > 0.8 * np.mean(exact)
    assert np.mean(found) - np.mean(exact) < 0.2 * by_noise + 1e-4  # never below 0, so not equal


def test_the_corrected_value_is_right_on_average_and_the_other_one_is_not() -> None:
    generator = np.random.default_rng(2)
    exact = counted(RATES, 20_000, generator)
    draws = [noisy(exact, 1.0, generator) for _ in range(400)]
    found = [each.information().value for each in draws]
    true, error = exact.information().value, np.std(found) / np.sqrt(len(found))
    assert np.mean(found) == pytest.approx(true, abs=4 * error)
    assert np.mean([uncorrected(each) for each in draws]) > true + 6 * error


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 30.0])
def test_intervals_cover_noise_and_sampling(epsilon: float) -> None:
    generator = np.random.default_rng(3)
    population = Evidence(np.full(10, 2000), 2000 * RATES)
    true, weights = population.information().value, population.weights
    inside, of_weights = [], []
    for _ in range(300):
        evidence = noisy(counted(RATES, 20_000, generator), epsilon, generator)
        value = evidence.information()
        inside.append(value.low <= true <= value.high)
        low, high = evidence.weight_intervals()
        of_weights.append((low <= weights) & (weights <= high))
    assert 0.92 <= np.mean(inside) <= 1.0
    assert 0.92 <= np.mean(of_weights) <= 0.98


def test_noise_that_hides_whether_a_bin_is_pure_widens_the_interval() -> None:
    generator = np.random.default_rng(4)
    exact = counted(np.array([0.002] * 5 + [0.45] * 5), 20_000, generator)
    value = noisy(exact, 1.0, generator).information()
    assert value.value < exact.information().value < value.high


# --- merging ------------------------------------------------------------------------------------


def test_merged_bins_have_enough_rows_of_each_class() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        rows = generator.integers(0, 120, 11)
        evidence = Evidence(rows, generator.binomial(rows, 0.3).astype(float))
        groups = merged(evidence, 15)
        of_groups = evidence.grouped(groups)
        assert (np.diff(groups) >= 0).all() and groups[0] == 0
        assert np.array_equal(np.unique(groups), np.arange(groups.max() + 1))
        assert of_groups.rows.sum() == rows.sum()
        assert of_groups.events.sum() == pytest.approx(evidence.events.sum())
        assert min(of_groups.events.min(), (of_groups.rows - of_groups.events).min()) >= 15


def test_missing_values_stay_alone_if_they_are_many_and_noise_needs_larger_bins() -> None:
    rows = np.array([100, 30, 200])
    assert merged(Evidence(rows, 0.3 * rows), 20).tolist() == [0, 0, 1]
    rows = np.array([100, 100, 30])  # they join the last group
    assert merged(Evidence(rows, 0.3 * rows), 20).tolist() == [0, 1, 1]
    rows = np.full(10, 100)
    assert len(set(merged(Evidence(rows, 0.3 * rows), 20).tolist())) == 10
    under_noise = Evidence(rows, 0.3 * rows, kept_share(1.0, 2))
    assert 100 < least_rows(under_noise, 20) < 500
    assert len(set(merged(under_noise, 20).tolist())) < 10


def test_a_constant_column_has_no_information_and_a_merged_one_has_no_value() -> None:
    evidence = Evidence(np.array([50]), np.array([20.0]))
    constant = value_of(np.array([50, 0]), evidence)
    assert constant is not None and constant.value == constant.low == constant.high == 0
    assert value_of(np.array([25, 25, 0]), evidence) is None


def test_groups_have_names_and_edges() -> None:
    bins = Bins.learn(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
    rows = bins.counts(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
    groups = np.array([0, 0, 1, 1, 1], np.uint8)
    evidence = Evidence(np.array([2, 3]), np.array([1.0, 1.0]))
    column = ColumnEvidence.of("age", bins, rows.tolist(), groups, evidence)
    assert column.names == ["<= 2", "> 2 or missing"]
    assert column.edges == [(-np.inf, 2.0), (2.0, np.inf)]
    texts = Bins.learn(np.array(["a", "a", "b", None], object))
    evidence = Evidence(np.array([3, 1]), np.array([1.0, 0.0]))
    column = ColumnEvidence.of(
        "region", texts, [2, 1, 0, 1], np.array([0, 0, 0, 1], np.uint8), evidence
    )
    assert column.names == ["a or b", "missing"]
    assert column.edges == [None, None]
