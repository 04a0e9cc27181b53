"""The cost of Gaussian releases: Flower's accountants, over dp-accounting.

`PldAccountant` is for Poisson-sampled releases, and uses privacy loss distributions.
`GdpAccountant` is for releases whose rows are known. They compose exactly to one Gaussian
mechanism.

Sampled releases are counted for a record that is changed, not added or removed. In both worlds a
sample has the record with probability q. The record then adds a in one world, and b in the other,
each of norm at most C. So the two worlds are (1 - q) N(0) + q N(a) and (1 - q) N(0) + q N(b).

The worst case is a = -b. Two distances decide the divergence: N(a) to N(0), at most C, and N(a) to
N(b), at most 2 C. This is advanced joint convexity (Balle et al., 2018, Theorem 2). One half-space
is the best test for both where 0 lies between a and b. This pair dominates all others at every
epsilon. So its losses compose, even if releases depend on earlier releases.

Functions import dp-accounting, and the module does not. Parties start often, and do not need it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict
from functools import lru_cache
from typing import Any, ClassVar, Self

from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian mechanism; mu is its sensitivity over its noise."""
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian mechanism that spends epsilon at delta."""
    from dp_accounting import get_sigma_gaussian

    return 1 / float(get_sigma_gaussian(epsilon, delta))


class _Accountant:
    """The composed releases: Flower's `PrivacyAccountant`, without epsilon and delta.

    sampling : the sampling method for which the accountant is right.
    """

    method: ClassVar[str]
    sampling: ClassVar[SamplingMethod]

    def __init__(self, config: PrivacyConfig) -> None:
        if config.sampling_method is not self.sampling:
            raise ValueError(
                f"sampling_method = {config.sampling_method.value!r} does not suit the accountant "
                f"{self.method!r}. Use {self.sampling.value!r}."
            )
        self._config = config
        self._releases: dict[GaussianPrivacyEvent, int] = {}

    @classmethod
    def over(cls, delta: float, rows: int, budget: float | None = None) -> Self:
        """Return an accountant of releases over N rows.

        Flower allows one neighbouring relation for each kind of sampling.
        """
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
        return cls(PrivacyConfig(delta, rows, relation, cls.sampling, budget))

    @property
    def config(self) -> PrivacyConfig:
        """Return delta, population, and the assumed sampling and neighbours."""
        return self._config

    @property
    def num_releases(self) -> int:
        """Return the number of releases so far."""
        return sum(self._releases.values())

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Count ``count`` releases of one kind."""
        if event.population_size != self._config.population_size or count < 1:
            raise ValueError(
                f"population_size = {event.population_size} and count = {count} are not valid. Use "
                f"population_size = {self._config.population_size}, and a count of at least 1."
            )
        self._releases[event] = self._releases.get(event, 0) + count

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of all releases at a delta; 0 without releases."""
        raise NotImplementedError

    def get_delta(self, epsilon: float) -> float:
        """Return delta of all releases at an epsilon; 0 without releases."""
        raise NotImplementedError

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return the epsilon and the delta that are spent."""
        delta = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(delta), delta, self.num_releases, self.method)

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Return whether ``count`` more releases would spend more than a budget."""
        budget = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if budget is None:
            raise ValueError("max_epsilon = None is not a budget. Give max_epsilon.")
        after = type(self)(self._config)
        after._releases = dict(self._releases)
        after.compose(event, count)
        return after.get_epsilon(self._config.target_delta) > budget

    def state_dict(self) -> dict[str, object]:
        """Return the releases and their population, as values for JSON."""
        releases = [[asdict(event), count] for event, count in self._releases.items()]
        return {"method": self.method, "config": asdict(self._config), "releases": releases}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over a `state_dict` of such an accountant."""
        releases = state.get("releases")
        same = state.get("config") == asdict(self._config)
        if state.get("method") != self.method or not same or not isinstance(releases, list):
            raise ValueError(
                f"This is the state of another accountant: {state.get('method')!r}. Give a state "
                f"of {self.method!r}, with the same delta, population and budget."
            )
        restored = type(self)(self._config)
        for event, count in releases:
            restored.compose(GaussianPrivacyEvent(**event), count)
        self._releases = restored._releases


class PldAccountant(_Accountant):
    """Gaussian releases over secret Poisson samples, for one row that is changed.

    A release's noise multiplier is its deviation over C, the most that a row adds to it.
    """

    method = "pld"
    sampling = SamplingMethod.POISSON

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of all releases at a delta."""
        return float(self._composed().get_epsilon_for_delta(delta)) if self._releases else 0.0

    def get_delta(self, epsilon: float) -> float:
        """Return delta of all releases at an epsilon."""
        return float(self._composed().get_delta_for_epsilon(epsilon)) if self._releases else 0.0

    def _composed(self) -> Any:
        # Privacy losses grow as 1 / multiplier^2. Steps grow with them, so the work stays the same.
        least = min(event.noise_multiplier for event in self._releases)
        steps = 1e-4 * max(1, 2 * least**-2)
        composed: Any = None
        for event, count in self._releases.items():
            rate = event.sample_size / event.population_size
            releases = _losses(event.noise_multiplier, rate, steps).self_compose(count)
            composed = releases if composed is None else composed.compose(releases)
        return composed


class GdpAccountant(_Accountant):
    """Gaussian releases that are known to include a record: together exactly mu-GDP.

    A release's noise multiplier is its deviation over its sensitivity to a change of the record.
    For a changed row, that is half of the deviation over the most that the row adds.
    """

    method = "gdp"
    sampling = SamplingMethod.NO_AMPLIFICATION

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of all releases at a delta."""
        return epsilon_of(self.mu, delta)

    def get_delta(self, epsilon: float) -> float:
        """Return delta of all releases at an epsilon (Balle and Wang, 2018, Theorem 8)."""
        if not self._releases:
            return 0.0
        from scipy.stats import norm

        ratio = epsilon / self.mu
        there, back = norm.cdf(self.mu / 2 - ratio), norm.logcdf(-self.mu / 2 - ratio)
        return float(there - math.exp(epsilon + back))

    @property
    def mu(self) -> float:
        """Return mu of the Gaussian mechanism that all releases are; 0 without releases."""
        squares = [count / event.noise_multiplier**2 for event, count in self._releases.items()]
        return math.sqrt(sum(squares))


@lru_cache(maxsize=4)  # a run asks at each evaluation, and most of that time is spent here
def _losses(multiplier: float, rate: float, steps: float) -> Any:
    """Return the privacy losses of a sampled release, in multiples of ``steps``."""
    from dp_accounting import NeighboringRelation as Relation
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=steps,
        sampling_prob=rate,
        neighboring_relation=Relation.REPLACE_ONE,
    )


def calibrated(epsilon: float, delta: float, sample: int, rows: int, steps: int) -> float:
    """Return the least noise multiplier, to 0.1 %, with which so many releases spend epsilon.

    ``sample`` is the expected size of a Poisson sample of all ``rows``.
    """
    import dp_accounting as dp

    class Fresh:
        """An accountant that counts each event ``steps`` times, for dp-accounting."""

        ledger = dp.NoOpDpEvent()

        def compose(self, event: GaussianPrivacyEvent) -> PldAccountant:
            accountant = PldAccountant.over(delta, rows)
            accountant.compose(event, steps)
            return accountant

    def event(multiplier: float) -> GaussianPrivacyEvent:
        return GaussianPrivacyEvent(multiplier, sample, rows)

    least = 0.5  # accounting is slow at small multipliers, so approach them in small steps
    while Fresh().compose(event(least)).get_epsilon(delta) <= epsilon:
        least /= 1.5
    bracket = dp.LowerEndpointAndGuess(least, 2 * least)
    found = dp.calibrate_dp_mechanism(Fresh, event, epsilon, delta, bracket, tol=1e-3 * least)
    return float(found)


def most_steps(
    epsilon: float, delta: float, multiplier: float, sample: int, rows: int, planned: int
) -> int:
    """Return how many sampled releases, up to ``planned``, epsilon allows."""
    if multiplier == 0:
        return 0
    event = GaussianPrivacyEvent(multiplier, sample, rows)
    accountant = PldAccountant.over(delta, rows, epsilon)
    steps = range(1, planned + 1)
    return bisect_left(steps, True, key=lambda count: accountant.would_exceed(event, count=count))
