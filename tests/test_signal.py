"""A run says before it starts when its rows cannot carry the noise on their labels."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.conftest import Start
from vfl_flower.protocol.privacy.labels import LEAST, epsilon_for, rows_left

SHORT = {"dataset": "digits", "privacy": "labels", "noise-seed": 0, "epochs": 1, "window": 64}


@pytest.mark.parametrize(
    ("rows", "classes", "epsilon", "carries"),
    [  # by runs with default options: docs/explanation/what-leaks.md
        (1222, 10, 1.0, False),  # digits
        (1222, 10, 1.5, True),
        (387, 2, 0.5, False),  # breast-cancer
        (387, 2, 1.0, True),
        (51000, 10, 0.5, True),  # MNIST
        (51000, 10, 0.2, False),
        (20400, 2, 0.5, True),  # credit default
    ],
)
def test_rows_carry_the_noise_or_do_not(
    rows: int, classes: int, epsilon: float, carries: bool
) -> None:
    assert (rows_left(rows, classes, epsilon) >= LEAST) is carries
    enough = epsilon_for(rows, classes)
    assert enough is not None and (epsilon >= enough) is carries
    assert rows_left(rows, classes, enough) == pytest.approx(LEAST)


def test_noisy_rows_tell_two_shares_apart_as_well_as_fewer_clean_ones() -> None:
    rows, classes, epsilon, times = 4000, 4, 1.0, 4000
    generator = np.random.default_rng(0)
    p = np.exp(epsilon) / (np.exp(epsilon) + classes - 1)
    q = (1 - p) / (classes - 1)
    few = round(rows_left(rows, classes, epsilon))
    share = 1 / classes  # of a class among the rows; its noisy share is the same, and so its spread
    noisy = generator.binomial(rows, q + (p - q) * share, times) / rows
    clean = generator.binomial(few, share, times) / few
    estimated = (noisy - q) / (p - q)
    assert estimated.mean() == pytest.approx(share, abs=0.005)
    assert estimated.std() == pytest.approx(clean.std(), rel=0.1)
    fewer = generator.binomial(few // 4, share, times) / (few // 4)  # the control
    assert estimated.std() < 0.7 * fewer.std()


def test_a_run_says_so_with_the_epsilon_that_would_do(run: Start, own_log: list[str]) -> None:
    def said() -> list[str]:
        found = [line for line in own_log if "is too small for" in line]
        own_log.clear()
        return found

    run(4, {**SHORT, "epsilon": 1.0})
    (line,) = said()
    assert line.startswith("epsilon = 1 is too small for 1222 training rows of 10 classes: they ")
    enough = re.search(r"Set epsilon to ([\d.]+) or more", line)
    assert enough is not None
    run(4, {**SHORT, "epsilon": float(enough[1])})
    assert not said()  # the control
    run(4, {**SHORT, "privacy": "none"})
    assert not said()


def test_so_few_rows_that_no_epsilon_would_do_are_not_warned_of() -> None:
    assert epsilon_for(30, 2) is None
