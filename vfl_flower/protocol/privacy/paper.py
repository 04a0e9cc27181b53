"""What the papers' own formulas would claim, to stand beside what holds."""

from __future__ import annotations

import math

from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import expected_rows


def delta_of(config: RunConfig, rows: int) -> float:
    """The delta at which epsilons are meant: well below one over the N training rows."""
    return min(1e-5, 0.1 / rows) if config.privacy.delta is None else config.privacy.delta


def epsilon_of_theorem_6(config: RunConfig, rows: int, samples: int) -> float:
    """What VAFL's Theorem 6 would claim, with its unstated constant taken as 1.

    Eq. (15): mu = N_m sqrt(K) / (c N) for batch size N_m, N rows and K samples processed, and
    embeddings of norm 1, in place of which the bound R stands here; a mu-GDP mechanism is as
    private as a Gaussian one of deviation 1 / mu.
    """
    noise = config.privacy.embedding_noise / config.privacy.embedding_bound
    mu = expected_rows(config, rows) * math.sqrt(samples) / (noise * rows)
    return _epsilon(config, rows, mu)


def epsilon_of_theorem_vi5(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """What DPZV's Theorem VI.5 would claim for so many scalars.

    Its sigma = 2 C sqrt(T) / (D mu) treats sub-sampling as if it scaled the mechanism's mu.
    """
    mu = 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * multiplier)
    return _epsilon(config, rows, mu)


def calibrated_by_theorem_vi5(config: RunConfig, rows: int, steps: int) -> float:
    """The multiplier that DPZV's Theorem VI.5 gives for epsilon, which can be far too small."""
    from dp_accounting import get_sigma_gaussian

    mu = 1 / float(get_sigma_gaussian(config.privacy.epsilon, delta_of(config, rows)))
    return 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * mu)


def _epsilon(config: RunConfig, rows: int, mu: float) -> float:
    from dp_accounting import get_epsilon_gaussian  # here, since parties start often and need none

    return float(get_epsilon_gaussian(1 / mu, delta_of(config, rows))) if mu > 0 else 0.0
