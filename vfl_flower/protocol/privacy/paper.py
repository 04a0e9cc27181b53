"""Epsilons by the papers' formulas, for comparison with the epsilon that holds."""

from __future__ import annotations

import math

from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import expected_rows
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.gaussian import epsilon_of, mu_of


def epsilon_of_theorem_6(config: RunConfig, rows: int, samples: int) -> float:
    """Return epsilon by VAFL's Theorem 6, with its unstated constant taken as 1.

    Eq. (15): mu = N_m sqrt(K) / (c N) for batch size N_m, N rows and K samples processed. It is for
    embeddings of norm 1. Here their bound is R, so c / R replaces c. A mu-GDP mechanism is as
    private as a Gaussian mechanism of deviation 1 / mu.
    """
    noise = config.privacy.embedding_noise / config.privacy.embedding_bound
    mu = expected_rows(config, rows) * math.sqrt(samples) / (noise * rows)
    return epsilon_of(mu, delta_of(config, rows))


def epsilon_of_theorem_vi5(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Return epsilon by DPZV's Theorem VI.5, for T = ``steps`` scalars.

    Its sigma = 2 C sqrt(T) / (D mu) treats sub-sampling as if it scaled the mechanism's mu.
    """
    mu = 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * multiplier)
    return epsilon_of(mu, delta_of(config, rows))


def calibrated_by_theorem_vi5(config: RunConfig, rows: int, steps: int) -> float:
    """Return the noise multiplier by Theorem VI.5. It can be much too small."""
    assert config.privacy.epsilon is not None
    mu = mu_of(config.privacy.epsilon, delta_of(config, rows))
    return 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * mu)
