"""Bins of a column."""

import json

import numpy as np
import pytest

from vfl_flower.data.bins import Bins


def test_number_bins_hold_equal_shares_of_the_rows_that_they_were_learnt_from() -> None:
    column = np.random.default_rng(0).normal(size=1000)
    bins = Bins.learn(column)
    assert bins.counts(column).tolist() == [100] * 10 + [0]
    assert len(bins.names) == bins.count == 11


def test_a_column_with_few_values_has_a_bin_for_each() -> None:
    column = np.array([0, 1, 1, 5, 5, 5])
    assert Bins.learn(column).counts(column).tolist() == [1, 2, 3, 0]


def test_missing_numbers_and_texts_are_in_the_last_bin() -> None:
    numbers = np.array([1.0, np.nan, 2.0])
    assert Bins.learn(numbers).of(numbers).tolist() == [0, 2, 1]
    texts = np.array(["a", None, "b", "a", ""], object)
    assert Bins.learn(texts).of(texts).tolist() == [0, 3, 1, 0, 3]


def test_texts_beyond_the_frequent_ones_share_a_bin() -> None:
    texts = np.array([str(n) for n in range(20) for _ in range(20 - n)], object)
    bins = Bins.learn(texts)
    assert bins.values == tuple(str(n) for n in range(9))
    assert bins.of(np.array(["15", "unseen", "3"], object)).tolist() == [9, 9, 3]


@pytest.mark.parametrize("column", [np.zeros(0), np.full(4, np.nan), np.ones(4)])
def test_a_column_without_two_values_has_one_bin(column: np.ndarray) -> None:
    bins = Bins.learn(column)
    assert (bins.count, bins.names) == (2, ["all", "missing"])
    assert bins.counts(column).sum() == len(column)


@pytest.mark.parametrize("column", [np.arange(30.0), np.array(["a", "b"], object)])
def test_bins_are_equal_after_json(column: np.ndarray) -> None:
    bins = Bins.learn(column)
    assert Bins.from_json(json.loads(json.dumps(bins.as_json()))) == bins
