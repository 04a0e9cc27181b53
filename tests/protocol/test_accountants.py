"""The cost of Gaussian releases agrees with dp-accounting."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
)
from dp_accounting.pld import PLDAccountant
from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp import NeighboringRelation as Relation
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import expected_rows
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.gaussian import (
    calibrated,
    epsilon_of,
    epsilon_of_samples,
    most_steps,
    mu_of,
    mu_of_releases,
)
from vfl_flower.protocol.privacy.scalars import calibrated_by_theorem_vi5, epsilon_of_theorem_vi5
from vfl_flower.protocol.systems import resolve


def delta_of_gaussian(eps: float, mu: float) -> float:
    """Balle and Wang (2018): delta of a mu-GDP mechanism at epsilon."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)


def of_dp_accounting() -> PLDAccountant:
    """Theirs, for one record that is changed."""
    return PLDAccountant(NeighboringRelation.REPLACE_ONE)


def event(rate: float, multiplier: float, steps: int) -> DpEvent:
    one = PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))
    return SelfComposedDpEvent(one, steps)


# --- known releases -------------------------------------------------------------------------------

DELTA = 1e-5


@pytest.mark.parametrize(("multiplier", "count"), [(0.8, 34), (3.0, 7), (0.1, 1)])
def test_known_releases_are_one_gaussian_mechanism(multiplier: float, count: int) -> None:
    mu = mu_of_releases(multiplier, count)
    assert mu == pytest.approx(math.sqrt(count) / multiplier)
    spent = epsilon_of(mu, DELTA)
    assert delta_of_gaussian(spent, mu) == pytest.approx(DELTA, rel=1e-6)
    assert mu_of(spent, DELTA) == pytest.approx(mu, rel=1e-6)


def test_nothing_released_is_nothing_spent() -> None:
    assert epsilon_of(mu_of_releases(1.0, 0), DELTA) == 0.0
    assert epsilon_of_samples(1.0, 50, 1000, 0, DELTA) == 0.0


# --- releases over secret samples -----------------------------------------------------------------


def budget_of(eps: float, delta: float, batch: int, **more: Any) -> RunConfig:
    """Of a run that accounts as if its mini-batches were secret."""
    keys = {"strategy": "dpzv", "epsilon": eps, "delta": delta, "batch-size": batch, **more}
    return resolve({"sampling": "poisson", "calibration": "secret", **keys})


def epsilon_of_scalars(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Epsilon of so many noisy scalars of a run on so many training rows."""
    sample, delta = expected_rows(config, rows), delta_of(config, rows)
    return epsilon_of_samples(multiplier, sample, rows, steps, delta)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("rows", "batch", "multiplier", "steps", "delta"),
    [(1000, 50, 1.5, 300, 1e-4), (1000, 10, 0.8, 1000, 1e-5), (60_000, 64, 1.07, 93_700, 1e-3)],
)
def test_epsilon_of_scalars_is_that_of_dp_accounting(
    rows: int, batch: int, multiplier: float, steps: int, delta: float
) -> None:
    theirs = of_dp_accounting().compose(event(batch / rows, multiplier, steps)).get_epsilon(delta)
    config = budget_of(1.0, delta, batch)
    # Its losses lie on a wider grid, so its bound is slightly larger over many steps.
    ours = epsilon_of_scalars(config, rows, multiplier, steps)
    assert -1e-4 <= ours / theirs - 1 <= 1e-3


@pytest.mark.parametrize("batch", [100, 500])
def test_scalars_over_all_rows_are_composed_gaussian_mechanisms(batch: int) -> None:
    eps = epsilon_of_scalars(budget_of(1.0, 1e-5, batch), 100, 30.0, 400)
    assert delta_of_gaussian(eps, 2 * 20 / 30) == pytest.approx(1e-5, rel=0.02)


def test_calibrated_noise_is_that_of_dp_accounting() -> None:
    theirs = calibrate_dp_mechanism(
        of_dp_accounting, lambda sigma: event(32 / 1437, sigma, 100), 0.5, 1e-4, tol=1e-3
    )
    ours = calibrated(0.5, 1e-4, 32, 1437, 100)
    assert ours == pytest.approx(theirs, rel=2e-3)


def divergence(a: complex, b: complex, eps: float, rate: float, multiplier: float) -> float:
    """How well a record that adds ``a`` in a plane is told from one that adds ``b``, at epsilon."""
    x = np.linspace(-7 * multiplier, 7 * multiplier, 161)
    plane = x[:, None] + 1j * x

    def density(adds: complex) -> NDArray[np.float64]:
        shifted = np.exp(-(abs(plane - adds) ** 2) / (2 * multiplier**2))
        drawn = np.exp(-(abs(plane) ** 2) / (2 * multiplier**2))
        both = (1 - rate) * drawn + rate * shifted
        return both / both.sum()

    return float((density(a) - math.exp(eps) * density(b)).clip(0).sum())


@pytest.mark.parametrize("eps", [0.0, 0.2, 1.0])
def test_no_change_of_a_label_is_told_better_than_from_one_end_to_the_other(eps: float) -> None:
    # A record's effect lies in a ball: of one number, or of a gradient.
    generator = np.random.default_rng(0)
    worst = divergence(1, -1, eps, 0.3, 0.8)
    for _ in range(60):
        a, b = generator.uniform(0, 1, 2) * np.exp(2j * np.pi * generator.uniform(0, 1, 2))
        for one, other in ((a, b), (a / abs(a), b / abs(b)), (1, b)):
            assert divergence(one, other, eps, 0.3, 0.8) <= 1.001 * worst
    assert divergence(1, 0, eps, 0.3, 0.8) < 0.9 * worst  # a record that is removed


@pytest.mark.parametrize(("eps", "multiplier"), [(0.1, 8.0), (0.3, 4.0)])
def test_most_steps_is_the_most_that_fit(eps: float, multiplier: float) -> None:
    config = budget_of(eps, 1e-3, 50)
    steps = most_steps(eps, 1e-3, multiplier, 50, 1000, 2000)
    assert 0 < steps < 2000
    spent = [epsilon_of_scalars(config, 1000, multiplier, steps + more) for more in (0, 1)]
    assert spent[0] <= eps < spent[1]
    assert most_steps(eps, 1e-3, multiplier, 50, 1000, steps // 2) == steps // 2
    assert most_steps(eps, 1e-3, 0.0, 50, 1000, 10) == 0


@pytest.mark.parametrize(
    ("claimed", "spent", "digits"), [(0.5, 0.50, 2), (1.0, 1.01, 2), (5.0, 21.4, 1), (10.0, 279, 0)]
)
def test_what_the_noise_of_the_paper_is_worth(claimed: float, spent: float, digits: int) -> None:
    config = budget_of(claimed, 1e-3, 64)
    multiplier = calibrated_by_theorem_vi5(config, 60_000, 93_700)
    assert round(epsilon_of_scalars(config, 60_000, multiplier, 93_700), digits) == spent
    claim = epsilon_of_theorem_vi5(config, 60_000, multiplier, 93_700)
    assert claim == pytest.approx(claimed, rel=1e-6)


def test_noise_of_the_paper_is_its_formula() -> None:
    # sigma = 2 C sqrt(T) / (D mu) on a mean over B rows, where mu-GDP is (epsilon, delta)-DP.
    config = budget_of(2.0, 1e-4, 50, clip=0.3)
    sigma = calibrated_by_theorem_vi5(config, 1000, 400) * 0.3 / 50
    mu = 2 * 0.3 * 20 / (1000 * sigma)
    assert delta_of_gaussian(2.0, mu) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "delta"), [(10, 1e-5), (10_000, 1e-5), (100_000, 1e-6), (10_000_000, 1e-8)]
)
def test_a_delta_that_is_not_given_is_well_below_one_over_the_rows(rows: int, delta: float) -> None:
    assert delta_of(resolve({"strategy": "dpzv"}), rows) == pytest.approx(delta)
    assert delta_of(resolve({"delta": 1e-3}), rows) == 1e-3


def test_known_releases_spend_less_than_by_renyi_divergences_and_not_much() -> None:
    config = PrivacyConfig(
        DELTA, 1000, Relation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION, None
    )
    bound = RdpAccountant(config)
    bound.compose(GaussianPrivacyEvent(0.8, 50, 1000), 34)
    assert 0.8 < epsilon_of(mu_of_releases(0.8, 34), DELTA) / bound.get_epsilon(DELTA) <= 1


def test_without_noise_no_step_fits() -> None:
    assert most_steps(1.0, 1e-3, 0.0, 50, 1000, 10) == 0
