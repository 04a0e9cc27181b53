"""Scalar noise (DPZV section IV): how many noisy scalars all parties together were sent.

The noise protects labels, and the records behind other parties' embeddings, in the scalars that
parties receive; embeddings reach the label holder as they are. Its epsilon is for who does not know
which rows a mini-batch held. A party knows that of its own mini-batches, so the summary also has
the epsilon without that ignorance. Neither counts what reaches the scalars through the top model,
which learns from labels without noise and is not sent to anyone.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent

from vfl_flower.axes.batches import Window, expected_rows
from vfl_flower.axes.privacy.accountants import calibrated, known, most_steps, sampled
from vfl_flower.axes.privacy.ledger import ANSWERED, Ledger, Released
from vfl_flower.axes.privacy.noise import ScalarNoise
from vfl_flower.axes.privacy.paper import (
    calibrated_by_theorem_vi5,
    delta_of,
    epsilon_of_theorem_vi5,
)
from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError

log = logging.getLogger("flwr")


class ScalarLedger(Ledger):
    """Scalar noise: how many noisy scalars all parties together were sent."""

    secret_batches = True
    journaled = (ANSWERED,)

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self.sample = expected_rows(config, rows)
        self.multiplier = 0.0
        self.released = 0
        self.taken = np.zeros(rows, np.int32)  # releases that each row was in

    @classmethod
    def check(cls, config: RunConfig, estimator: Released) -> None:
        """Raise `ConfigError` if keys of privacy contradict each other, or the estimator."""
        if config.privacy.epsilon is not None and config.privacy.delta is None:
            raise ConfigError(
                f"epsilon = {config.privacy.epsilon} says nothing without its delta: give delta "
                "too, well below one over the number of rows."
            )
        if not estimator.answers_by_scalars:
            raise ConfigError(
                "privacy = 'scalar' adds noise to scalars, but first-order feedback is gradient "
                "rows: choose estimator = 'zeroth-order', or strategy = 'dpzv'."
            )
        if config.schedule.sampling != "poisson":
            raise ConfigError(
                "privacy = 'scalar' is accounted for Poisson sampling: set sampling = 'poisson'."
            )
        if config.privacy.epsilon is None and config.privacy.noise_multiplier is None:
            raise ConfigError(
                "privacy = 'scalar' needs a budget, epsilon with delta, or a noise-multiplier."
            )

    def steps_allowed(self, planned: int) -> int:
        """All that are planned, where noise is calibrated to them; else what the budget allows.

        Raises
        ------
        ConfigError
            If the budget does not allow a single step.
        """
        config = self.config
        if config.privacy.epsilon and delta_of(config) >= 1 / self.rows:
            log.warning(
                "delta = %g is not below one over the %d training rows, where epsilon says little.",
                delta_of(config),
                self.rows,
            )
        if config.privacy.noise_multiplier is None:
            self.multiplier = self._calibrated(planned)
            return planned
        self.multiplier = config.privacy.noise_multiplier
        epsilon = config.privacy.epsilon
        if epsilon is None:
            return planned
        allowed = most_steps(
            epsilon, delta_of(config), self.multiplier, self.sample, self.rows, planned
        )
        if allowed == 0:
            raise ConfigError(
                f"The budget epsilon = {epsilon:g} is already spent: noise-multiplier = "
                f"{self.multiplier:g} spends more in one step; raise one of them."
            )
        if allowed < planned:
            log.warning(
                "The privacy budget epsilon = %g allows %d of %d steps; the run stops there.",
                epsilon,
                allowed,
                planned,
            )
        return allowed

    def _calibrated(self, steps: int) -> float:
        if self.config.privacy.calibration == "paper":
            return calibrated_by_theorem_vi5(self.config, self.rows, steps)
        epsilon = self.config.privacy.epsilon
        assert epsilon is not None  # or there would be a multiplier
        return calibrated(epsilon, delta_of(self.config), self.sample, self.rows, steps)

    def noise(self) -> ScalarNoise:
        """Clipping and noise."""
        return ScalarNoise(self.config, self.multiplier, self.rows)

    def _answered(self, party: int, window: Window) -> None:
        """Count a release for each step, and the rows that were in it."""
        self.released += len(window.lengths)
        self.taken += np.bincount(window.ids, minlength=self.rows).astype(np.int32)

    def released_steps(self) -> int:
        """Scalars sent."""
        return self.released

    def figures(self) -> dict[str, Any]:
        """Epsilon as spent, the paper's, and to those who know the rows of every mini-batch."""
        figures = {**super().figures(), "noise_multiplier": self.multiplier}
        if self.config.privacy.noise_seed >= 0 or self.multiplier == 0:
            return figures
        delta, event = delta_of(self.config), self._event()
        secret, seen = sampled(delta, self.rows), known(delta, self.rows)
        if self.released:
            secret.compose(event, self.released)
        if self.taken.any():  # mini-batches may all have been empty
            seen.compose(event, int(self.taken.max()))
        return {
            **figures,
            "epsilon": secret.get_epsilon(delta),
            "delta": delta,
            "epsilon_of_paper": epsilon_of_theorem_vi5(
                self.config, self.rows, self.multiplier, self.released
            ),
            "epsilon_known_batches": seen.get_epsilon(delta),
            "epsilon_protects": "a record and its label, from who sees the scalars of all parties "
            "but not which rows a mini-batch held, which parties draw honestly; not from the label "
            "holder, and not what the top model learns from labels without noise",
        }

    def _event(self) -> GaussianPrivacyEvent:
        return GaussianPrivacyEvent(self.multiplier, self.sample, self.rows)
