"""The cost of Gaussian releases, by dp-accounting.

Releases whose rows are known compose exactly to one Gaussian mechanism: mu is its sensitivity over
its noise. Releases over secret Poisson samples cost by their privacy loss distribution.

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
from functools import lru_cache
from typing import Any


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian mechanism; mu is its sensitivity over its noise."""
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian mechanism that spends epsilon at delta."""
    from dp_accounting import get_sigma_gaussian

    return 1 / float(get_sigma_gaussian(epsilon, delta))


def mu_of_releases(multiplier: float, count: int) -> float:
    """Return mu of so many releases of a record; the multiplier is deviation over change."""
    return math.sqrt(count / multiplier**2) if count else 0.0


def epsilon_of_samples(
    multiplier: float, sample: int, rows: int, count: int, delta: float
) -> float:
    """Return epsilon of so many releases over Poisson samples, for one row that is changed.

    The multiplier is a release's deviation over C, the most that a row adds to it.
    """
    if not count:
        return 0.0
    # Privacy losses grow as 1 / multiplier^2. Steps grow with them, so the work stays the same.
    losses = _losses(multiplier, sample / rows, 1e-4 * max(1, 2 * multiplier**-2))
    return float(losses.self_compose(count).get_epsilon_for_delta(delta))


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
    """Return the least noise multiplier, to 0.1 %, with which so many releases spend epsilon."""
    import dp_accounting as dp

    class Releases:
        """So many releases of one multiplier, as dp-accounting asks an accountant."""

        ledger = dp.NoOpDpEvent()
        multiplier = 0.0

        def compose(self, multiplier: float) -> Releases:
            self.multiplier = multiplier
            return self

        def get_epsilon(self, delta: float) -> float:
            return epsilon_of_samples(self.multiplier, sample, rows, steps, delta)

    least = 0.5  # accounting is slow at small multipliers, so approach them in small steps
    while epsilon_of_samples(least, sample, rows, steps, delta) <= epsilon:
        least /= 1.5
    bracket = dp.LowerEndpointAndGuess(least, 2 * least)
    found = dp.calibrate_dp_mechanism(Releases, float, epsilon, delta, bracket, tol=1e-3 * least)
    return float(found)


def most_steps(
    epsilon: float, delta: float, multiplier: float, sample: int, rows: int, planned: int
) -> int:
    """Return how many sampled releases, up to ``planned``, epsilon allows."""
    if multiplier == 0:
        return 0

    def exceeds(count: int) -> bool:
        return epsilon_of_samples(multiplier, sample, rows, count, delta) > epsilon

    return bisect_left(range(1, planned + 1), True, key=exceeds)
