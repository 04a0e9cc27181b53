"""Accountants agree with dp-accounting and Flower about Gaussian releases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from inspect import signature
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
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import (
    GaussianPrivacyEvent,
    PrivacyAccountant,
    PrivacySpent,
    RdpAccountant,
)
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from tests.conftest import nightly
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import expected_rows
from vfl_flower.protocol.privacy import gaussian
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.gaussian import (
    GdpAccountant,
    PldAccountant,
    calibrated,
    most_steps,
)
from vfl_flower.protocol.privacy.paper import calibrated_by_theorem_vi5, epsilon_of_theorem_vi5
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid


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


# --- by Flower's protocol -------------------------------------------------------------------------

POPULATION, DELTA = 1000, 1e-5
SOME = [
    (GaussianPrivacyEvent(0.8, 50, POPULATION), 30),
    (GaussianPrivacyEvent(3.0, POPULATION, POPULATION), 7),
    (GaussianPrivacyEvent(0.8, 50, POPULATION), 4),
]


def fresh(kind: str, budget: float | None = None) -> GdpAccountant | PldAccountant:
    """An accountant of ours; that Flower knows it is checked by mypy too, in `with_some`."""
    if kind == "pld":
        return PldAccountant.over(DELTA, POPULATION, budget)
    return GdpAccountant.over(DELTA, POPULATION, budget)


def with_some(kind: str, budget: float | None = None) -> PrivacyAccountant:
    accountant = fresh(kind, budget)
    for release, count in SOME:
        accountant.compose(release, count)
    return accountant


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_an_accountant_takes_what_flowers_protocol_says(kind: str) -> None:
    accountant = fresh(kind)
    names = [name for name in vars(PrivacyAccountant) if not name.startswith("_")]
    assert {"config", "compose", "get_epsilon", "would_exceed", "load_state_dict"} < set(names)
    for name in names:
        protocol, ours = getattr(PrivacyAccountant, name), getattr(type(accountant), name)
        assert isinstance(ours, property) == isinstance(protocol, property), name
        if not isinstance(protocol, property):
            found, asked = (signature(each, eval_str=True) for each in (ours, protocol))
            assert found == asked, name


@pytest.mark.nightly
def test_releases_of_several_kinds_are_what_dp_accounting_says_of_them_together() -> None:
    theirs = of_dp_accounting()
    for release, count in SOME:
        rate = release.sample_size / POPULATION
        theirs.compose(event(rate, release.noise_multiplier, count))
    found = with_some("pld").get_epsilon(DELTA)
    assert found == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)


def test_known_releases_of_several_kinds_are_one_gaussian_mechanism() -> None:
    mu = math.sqrt((30 + 4) / 0.8**2 + 7 / 3.0**2)  # known sampling amplifies nothing
    accountant = with_some("gdp")
    assert delta_of_gaussian(accountant.get_epsilon(DELTA), mu) == pytest.approx(DELTA, rel=1e-6)
    for eps in (0.0, 1.0, 20.0, 60.0):
        assert accountant.get_delta(eps) == pytest.approx(delta_of_gaussian(eps, mu), rel=1e-6)


def test_an_accountant_spends_less_than_flowers_own_and_not_much() -> None:
    ours = with_some("gdp")
    bound = RdpAccountant(ours.config)  # by Renyi divergences, which lose a little
    for release, count in SOME:
        bound.compose(release, count)
    assert ours.num_releases == bound.num_releases == 41
    ratio = ours.get_epsilon(DELTA) / bound.get_epsilon(DELTA)
    assert 0.8 < ratio <= 1


@pytest.mark.one_by_day
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2, 0.3])
@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_delta_is_the_inverse_of_epsilon(kind: str, delta: float) -> None:
    accountant = with_some(kind)
    assert accountant.get_delta(accountant.get_epsilon(delta)) == pytest.approx(delta, rel=1e-4)


def test_delta_is_the_inverse_of_an_epsilon_whose_exponential_is_no_number() -> None:
    accountant = GdpAccountant.over(DELTA, POPULATION)
    accountant.compose(GaussianPrivacyEvent(0.02, 1, POPULATION))
    spent = accountant.get_epsilon(DELTA)
    assert spent > 1000
    assert accountant.get_delta(spent) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_nothing_released_is_nothing_spent(kind: str) -> None:
    accountant = fresh(kind)
    assert (accountant.num_releases, accountant.get_epsilon(DELTA)) == (0, 0.0)
    assert accountant.get_delta(0.5) == 0.0
    assert accountant.get_privacy_spent() == PrivacySpent(0.0, DELTA, 0, kind)


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_what_is_spent_is_at_the_configured_delta_unless_another_is_given(kind: str) -> None:
    accountant = with_some(kind)
    spent = PrivacySpent(accountant.get_epsilon(DELTA), DELTA, 41, kind)
    assert accountant.get_privacy_spent() == spent
    at_another = accountant.get_privacy_spent(0.01)
    assert at_another == PrivacySpent(accountant.get_epsilon(0.01), 0.01, 41, kind)
    assert 0 < at_another.epsilon < spent.epsilon


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_an_accountant_goes_on_from_its_state_as_json(kind: str) -> None:
    accountant, again = with_some(kind), fresh(kind)
    state = json.loads(json.dumps(accountant.state_dict()))
    again.compose(GaussianPrivacyEvent(0.1, 1, POPULATION))  # which is forgotten
    again.load_state_dict(state)
    assert again.get_privacy_spent() == accountant.get_privacy_spent()
    assert again.state_dict() == accountant.state_dict()
    again.compose(*SOME[1])
    assert again.num_releases == accountant.num_releases + 7
    assert again.get_epsilon(DELTA) > accountant.get_epsilon(DELTA)
    accountant.compose(*SOME[1])
    assert again.get_privacy_spent() == accountant.get_privacy_spent()


@pytest.mark.parametrize(("kind", "other"), [("pld", "gdp"), ("gdp", "pld")])
def test_an_accountant_refuses_the_state_of_another(kind: str, other: str) -> None:
    with pytest.raises(ValueError, match="another accountant"):
        fresh(kind).load_state_dict(with_some(other).state_dict())
    with pytest.raises(ValueError, match="another accountant"):
        fresh(kind).load_state_dict({"method": kind})
    of_others = type(fresh(kind)).over(DELTA, 2 * POPULATION)
    with pytest.raises(ValueError, match="another accountant"):
        of_others.load_state_dict(with_some(kind).state_dict())


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_a_release_is_of_the_population_and_counted_at_least_once(kind: str) -> None:
    accountant = fresh(kind)
    for release, count in ((GaussianPrivacyEvent(1.0, 1, 2), 1), (SOME[0][0], 0), (SOME[0][0], -1)):
        with pytest.raises(ValueError, match=r"count = .* not valid"):
            accountant.compose(release, count)
    assert accountant.num_releases == 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_asking_whether_a_budget_would_be_exceeded_spends_nothing(kind: str) -> None:
    (release, _), more = SOME[0], with_some(kind)
    more.compose(release, 5)
    after = more.get_epsilon(DELTA)
    accountant = with_some(kind, budget=after)
    before, spent = accountant.state_dict(), accountant.get_privacy_spent()
    assert spent.epsilon < after
    answers = [accountant.would_exceed(release, count=count) for count in (1, 5, 6, 50)]
    assert answers == [False, False, True, True]  # exactly the budget is not beyond it
    assert accountant.would_exceed(release, max_epsilon=0.99 * after, count=5)
    assert not accountant.would_exceed(release, max_epsilon=1.01 * after, count=5)
    assert accountant.state_dict() == before
    assert accountant.get_privacy_spent() == spent
    with pytest.raises(ValueError, match="is not a budget"):
        fresh(kind).would_exceed(release)


def in_flowers_strategy(
    accountant: PrivacyAccountant,
) -> DifferentialPrivacyServerSideFixedClipping:
    plain = FedAvg(fraction_evaluate=0.0)
    return DifferentialPrivacyServerSideFixedClipping(plain, 2.0, 1.0, 2, accountant=accountant)


def test_flowers_own_strategy_stops_at_the_budget_that_our_accountant_keeps() -> None:
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        learnt = [
            array + 1 for array in message.content.array_records["arrays"].to_numpy_ndarrays()
        ]
        content = RecordDict(
            {"arrays": ArrayRecord(learnt), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    budget = 6.0
    accountant = GdpAccountant.over(DELTA, 2, budget)
    strategy = in_flowers_strategy(accountant)
    grid = LocalGrid(client, 2, {}, resolve({}))
    with pytest.raises(PrivacyBudgetExhausted, match="would exceed max_epsilon"):
        strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), num_rounds=100)
    rounds = accountant.num_releases
    assert 1 < rounds < 100
    deltas = [delta_of_gaussian(budget, math.sqrt(many) / 2.0) for many in (rounds, rounds + 1)]
    assert deltas[0] <= DELTA < deltas[1]
    spent = strategy.privacy_spent()
    assert spent == accountant.get_privacy_spent() and 0 < spent.epsilon <= budget


def test_flowers_own_strategy_refuses_an_accountant_that_relies_on_secret_sampling() -> None:
    with pytest.raises(ValueError, match="no-amplification"):
        in_flowers_strategy(PldAccountant.over(DELTA, 2))


# --- releases over secret samples -----------------------------------------------------------------


def budget_of(eps: float, delta: float, batch: int, **more: Any) -> RunConfig:
    """Of a run that accounts as if its mini-batches were secret."""
    keys = {"strategy": "dpzv", "epsilon": eps, "delta": delta, "batch-size": batch, **more}
    return resolve({"sampling": "poisson", "calibration": "secret", **keys})


def epsilon_of_scalars(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Epsilon of so many noisy scalars of a run on so many training rows."""
    delta = delta_of(config, rows)
    accountant = PldAccountant.over(delta, rows)
    if steps:
        release = GaussianPrivacyEvent(multiplier, expected_rows(config, rows), rows)
        accountant.compose(release, steps)
    return accountant.get_epsilon(delta)


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


def test_no_scalar_costs_nothing_and_each_costs_more() -> None:
    config = budget_of(1.0, 1e-3, 50)
    costs = [epsilon_of_scalars(config, 1000, 2.0, steps) for steps in (0, 1, 10, 100)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("eps", "delta", "rows", "batch", "steps"),
    [
        nightly(1.0, 1e-3, 60_000, 64, 93_700),
        (0.1, 1e-3, 1437, 32, 540),
        (0.3, 1e-6, 455, 455, 10),
    ],
)
def test_calibrated_noise_spends_the_budget_and_hardly_less(
    eps: float, delta: float, rows: int, batch: int, steps: int
) -> None:
    multiplier = calibrated(eps, delta, batch, rows, steps)
    theirs = of_dp_accounting().compose(event(batch / rows, multiplier, steps)).get_epsilon(delta)
    assert 0.995 * eps <= theirs <= eps


def test_calibrated_noise_is_that_of_dp_accounting() -> None:
    theirs = calibrate_dp_mechanism(
        of_dp_accounting, lambda sigma: event(32 / 1437, sigma, 540), 0.1, 1e-4, tol=1e-3
    )
    ours = calibrated(0.1, 1e-4, 32, 1437, 540)
    assert ours == pytest.approx(theirs, rel=2e-3)


Density = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def in_sample(rate: float, multiplier: float, adds: float) -> Density:
    """Return the density of a release that contains a record by chance, which then adds this."""

    def density(x: NDArray[np.float64]) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = norm.pdf(x, scale=multiplier)
        shifted: NDArray[np.float64] = norm.pdf(x, adds, multiplier)
        return (1 - rate) * drawn + rate * shifted

    return density


def composed(one: Density, other: Density, multiplier: float, steps: int, delta: float) -> float:
    """Epsilon at delta of so many releases, by adding up losses numerically."""
    width, half = 2e-4, 2**18
    x = np.linspace(-14 * multiplier, 14 * multiplier, 200_001)
    mass = one(x) / one(x).sum()
    places = np.rint((np.log(one(x)) - np.log(other(x))) / width).astype(int)
    losses = np.bincount(places.clip(-half, half - 1) + half, mass, 2 * half)
    all_losses = np.fft.ifft(np.fft.fft(np.fft.ifftshift(losses)) ** steps).real
    chances, values = np.fft.fftshift(all_losses).clip(0), width * np.arange(-half, half)

    def excess(eps: float) -> float:
        above = values > eps
        return float((chances[above] * -np.expm1(eps - values[above])).sum()) - delta

    return float(brentq(excess, 0, 20))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("eps", "rows", "batch", "steps"), [(1.0, 2000, 32, 100), (4.0, 2000, 32, 630), (2.0, 90, 9, 9)]
)
def test_noise_for_secret_batches_holds_for_a_label_that_is_changed(
    eps: float, rows: int, batch: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spent() -> float:
        multiplier = calibrated(eps, DELTA, batch, rows, steps)
        worlds = [in_sample(batch / rows, multiplier, adds) for adds in (1.0, -1.0)]
        return composed(worlds[0], worlds[1], multiplier, steps, DELTA)

    assert 0.99 * eps < spent() <= eps

    def of_added(*of: float) -> Any:
        return from_gaussian_mechanism(
            of[0], value_discretization_interval=of[2], sampling_prob=of[1]
        )

    monkeypatch.setattr(gaussian, "_losses", of_added)  # the control: a record added or removed
    assert spent() > 1.2 * eps


def divergence(a: complex, b: complex, eps: float, rate: float, multiplier: float) -> float:
    """How well a record that adds ``a`` in a plane is told from one that adds ``b``, at epsilon."""
    x = np.linspace(-7 * multiplier, 7 * multiplier, 161)
    plane = x[:, None] + 1j * x

    def density(adds: complex) -> NDArray[np.float64]:
        shifted = np.exp(-(abs(plane - adds) ** 2) / (2 * multiplier**2))
        drawn = np.exp(-(abs(plane) ** 2) / (2 * multiplier**2))
        both = (1 - rate) * drawn + rate * shifted
        one: NDArray[np.float64] = both / both.sum()
        return one

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


def test_without_noise_no_step_fits() -> None:
    assert most_steps(1.0, 1e-3, 0.0, 50, 1000, 10) == 0


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
