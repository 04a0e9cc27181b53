"""Noise on scalars (DPZV section IV): how often each label had a part in what was released.

Who sees which rows a mini-batch holds, as parties do, knows when a label has a part in a release:
in each scalar of its rows, and in each step of the top model, since all later scalars and the
model itself follow from that. Each is the mean of clipped numbers or gradients over U rows with
Gaussian noise; a changed label changes it by 2 C / U at most. So if a label had a part in n
releases, of noise multiplier s each, they are together one Gaussian mechanism of mu = 2 sqrt(n) / s
(Dong et al., 2022). An answer by which a label would have more parts than the budget allows says
nothing.

DPZV itself has mini-batches that are secret Poisson samples, though to the device that draws them
they are none, and a top model that learns without noise. Both are here by ``calibration``, and the
figures that they lead to are named so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Window, expected_rows, steps_per_epoch
from vfl_flower.protocol.privacy.accountants import calibrated, known, most_steps, sampled
from vfl_flower.protocol.privacy.journal import Event
from vfl_flower.protocol.privacy.ledger import (
    ANSWERED,
    EVERYONE,
    Guarantee,
    Ledger,
    Released,
    check_range,
)
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.privacy.paper import (
    calibrated_by_theorem_vi5,
    delta_of,
    epsilon_of_theorem_vi5,
)

log = logging.getLogger("flwr")

GUARANTEE = Guarantee(
    "labels of the training rows",
    "one person's label is changed; how many persons there are, and who is in which mini-batch, is "
    "public",
    EVERYONE,
)


class ScalarLedger(Ledger):
    """Noise on scalars and top model: releases that each row's label had a part in."""

    noise_on = "scalars"
    journaled = (ANSWERED,)

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self.joint = config.estimator.perturbs == "all"
        self.top = 1  # releases of a step of the top model, beside the scalars
        self.multiplier = 0.0
        self.most: int | None = None  # releases of a row, by the budget
        self.released = 0  # scalars
        self.taken = np.zeros(rows, np.int32)  # releases that each row had a part in
        self._refused = False

    @property
    def secret_batches(self) -> bool:
        """Whether parties draw mini-batches in secret, as DPZV has it."""
        return self.config.privacy.calibration != "known"

    @classmethod
    def check(cls, config: RunConfig, estimator: Released) -> None:
        """Raise `ConfigError` if keys of privacy contradict each other, or others."""
        privacy, sampling = config.privacy, config.schedule.sampling
        if not estimator.answers_by_scalars:
            raise ConfigError(
                "privacy = 'scalar' adds noise to scalars, but first-order feedback is gradient "
                "rows: choose estimator = 'zeroth-order', strategy = 'dpzv', or privacy = 'labels'."
            )
        due = "shuffle" if privacy.calibration == "known" else "poisson"
        if sampling != due:
            raise ConfigError(
                f"calibration = {privacy.calibration!r} is for sampling = {due!r}, and here it is "
                f"{sampling!r}: set one of them so."
            )
        if privacy.epsilon is None and privacy.noise_multiplier is None:
            raise ConfigError("privacy = 'scalar' needs a budget, epsilon, or a noise-multiplier.")
        if config.training.precision != "float32":
            raise ConfigError(
                f"precision = {config.training.precision!r} rounds the top model's gradients off, "
                "by which a row could add more than privacy = 'scalar' clips it to: leave it out."
            )
        if config.data.class_weights == "balanced":
            raise ConfigError(
                "class-weights = 'balanced' follows from all labels, which no noise of privacy = "
                "'scalar' hides: give the weights, or choose privacy = 'labels'."
            )
        if sampling == "poisson" and config.schedule.max_delay:
            raise ConfigError(
                "max-delay asks parties for the rows of each other's mini-batches, which with "
                "sampling = 'poisson' are to be secret: leave it out."
            )
        check_range(config)

    def steps_allowed(self, planned: int, parties: int, quorum: int, top_learns: bool) -> int:
        """All that are planned, where noise is calibrated to them; else what the budget allows.

        Raises
        ------
        ConfigError
            If the budget does not allow a single pass over the rows, or a row may be in a step of
            the top model twice.
        """
        privacy = self.config.privacy
        if 1 < quorum < parties:
            raise ConfigError(
                f"privacy = 'scalar' is counted for a quorum of 1 or of all {parties}: of others, "
                f"such as {quorum}, a row may be in one step of the top model more than once."
            )
        of_top = self.joint and self.config.estimator.server_update == "zeroth-order"
        self.top = int(top_learns and not of_top)
        if privacy.epsilon and delta_of(self.config, self.rows) >= 1 / self.rows:
            log.warning(
                "delta = %g is not below one over the %d training rows, where epsilon says little.",
                delta_of(self.config, self.rows),
                self.rows,
            )
        if privacy.calibration != "known":
            return self._allowed_by_secrecy(planned)
        together = parties > 1 and quorum == parties
        # In so many steps of all parties a row is in so many releases.
        steps = steps_per_epoch(self.config, self.rows) * (parties if together else 1)
        each = self.top + (parties if together and not self.joint else 1)
        if privacy.noise_multiplier is not None:
            self.multiplier = privacy.noise_multiplier
        if privacy.epsilon is None:
            return planned
        mu = 1 / self._sigma(privacy.epsilon)
        if privacy.noise_multiplier is None:
            self.most = -(-planned // steps) * each
            self.multiplier = 2 * self.most**0.5 / mu
            return planned
        self.most = int((self.multiplier * mu / 2) ** 2)
        if self.most < each:
            raise ConfigError(
                f"The budget epsilon = {privacy.epsilon:g} is already spent: noise-multiplier = "
                f"{self.multiplier:g} spends more in one pass over the rows; raise one of them."
            )
        return self._said(min(planned, self.most // each * steps), planned)

    def _sigma(self, epsilon: float) -> float:
        """The deviation of one Gaussian mechanism of sensitivity 1 that spends epsilon."""
        from dp_accounting import get_sigma_gaussian  # here: parties start often, without

        return float(get_sigma_gaussian(epsilon, delta_of(self.config, self.rows)))

    def _allowed_by_secrecy(self, planned: int) -> int:
        """As DPZV accounts, by what would hold if nobody knew the mini-batches."""
        privacy, rows = self.config.privacy, self.rows
        sample = expected_rows(self.config, rows)
        log.warning(
            "calibration = %r takes mini-batches for secret, which to who draws them they are not: "
            "%s",
            privacy.calibration,
            "and the top model learns without noise, so that no epsilon holds."
            if privacy.calibration == "paper"
            else "the summary's epsilon is what holds then.",
        )
        if privacy.noise_multiplier is not None:
            self.multiplier = privacy.noise_multiplier
        elif privacy.calibration == "paper":
            self.multiplier = calibrated_by_theorem_vi5(self.config, rows, planned)
        if privacy.epsilon is None or privacy.calibration == "paper":
            return planned
        together = (1 + self.top) ** 0.5  # releases on one sample are as one of less noise
        delta = delta_of(self.config, rows)
        if privacy.noise_multiplier is None:
            found = calibrated(privacy.epsilon, delta, sample, rows, planned)
            self.multiplier = found * together
            return planned
        multiplier = self.multiplier / together
        allowed = most_steps(privacy.epsilon, delta, multiplier, sample, rows, planned)
        if allowed == 0:
            raise ConfigError(
                f"The budget epsilon = {privacy.epsilon:g} is already spent: noise-multiplier = "
                f"{self.multiplier:g} spends more in one step; raise one of them."
            )
        return self._said(allowed, planned)

    def _said(self, allowed: int, planned: int) -> int:
        if allowed < planned:
            log.warning(
                "The privacy budget epsilon = %g allows %d of %d steps; the run stops there.",
                self.config.privacy.epsilon,
                allowed,
                planned,
            )
        return allowed

    def noise(self) -> ScalarNoise:
        """Clipping and noise."""
        return ScalarNoise(self.config, self.multiplier)

    def answered(self, group: Sequence[tuple[int, Window]]) -> bool:
        """Count the releases of a group's answers; whether the budget allows them."""
        weights = [self._releases(number) for number in range(len(group))]
        if self.most is not None and self._most_after(group, weights) > self.most:
            if not self._refused:
                log.info(
                    "A label has had its part in as many releases as epsilon = %g allows: what "
                    "would be one more is answered with nothing.",
                    self.config.privacy.epsilon,
                )
            self._refused = True
            return False
        for weight, (party, window) in zip(weights, group, strict=True):
            self._write(ANSWERED, party, len(window.lengths), weight, ids=window.ids)
            self._answered(party, window, weight)
        return True

    def _most_after(self, group: Sequence[tuple[int, Window]], weights: Sequence[int]) -> int:
        """Releases that the label of some row of a group would then have had a part in, at most."""
        ids = np.concatenate([window.ids for _, window in group])
        more = np.repeat(weights, [len(window.ids) for _, window in group]).astype(np.int32)
        np.add.at(self.taken, ids, more)
        most = int(self.taken[ids].max(initial=0))
        np.subtract.at(self.taken, ids, more)
        return most

    def _releases(self, number: int) -> int:
        """Of the answer with this number in its group: its scalar, and the step of all."""
        first = number == 0
        return int(first or not self.joint) + self.top * first

    def _answered(self, party: int, window: Window, weight: int) -> None:
        self.released += len(window.lengths)
        np.add.at(self.taken, window.ids, weight)

    def so_far(self) -> Iterator[Event]:
        """One event for all scalars; then one for each binary digit of the rows' counts."""
        yield ANSWERED, 0, self.released, 0, 0, np.zeros(0, np.int32)
        for digit in range(int(self.taken.max(initial=0)).bit_length()):
            rows = np.flatnonzero(self.taken >> digit & 1).astype(np.int32)
            yield ANSWERED, 0, 0, 1 << digit, 0, rows

    def released_steps(self) -> int:
        """Scalars sent."""
        return self.released

    def figures(self) -> dict[str, Any]:
        """Epsilon as spent, where it is, and beside it those that the paper's assumptions give."""
        figures = {**super().figures(), "noise_multiplier": self.multiplier}
        if self.config.privacy.noise_seed >= 0 or self.multiplier == 0:
            return figures
        delta, calibration = delta_of(self.config, self.rows), self.config.privacy.calibration
        sample = expected_rows(self.config, self.rows)
        figures["epsilon_of_paper"] = epsilon_of_theorem_vi5(
            self.config, self.rows, self.multiplier, self.released
        )
        if calibration != "known":
            each = self.multiplier / (1 + self.top * (calibration == "secret")) ** 0.5
            secret = sampled(delta, self.rows)
            if self.released:
                secret.compose(GaussianPrivacyEvent(each, sample, self.rows), self.released)
            figures["epsilon_secret_batches"] = secret.get_epsilon(delta)
        if calibration == "paper" and self.top:
            return figures  # none holds
        seen = known(delta, self.rows)
        if self.taken.any():
            # A changed label is twice what the multiplier is of.
            event = GaussianPrivacyEvent(self.multiplier / 2, sample, self.rows)
            seen.compose(event, int(self.taken.max()))
        return {
            **figures,
            "epsilon": seen.get_epsilon(delta),
            "delta": delta,
            "gaussian_mu": seen.mu,
            **GUARANTEE.figures(),
        }
