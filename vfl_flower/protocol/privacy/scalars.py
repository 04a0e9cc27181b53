"""Noise on scalars (DPZV, section IV): how often a label had a part in a release.

Parties see the rows of a mini-batch, and so know when a label has a part in a release. A label has
a part in each scalar of its mini-batches, and in each step of the top model on them. Later scalars
and the model follow from these steps.

A release is the mean of clipped numbers or gradients over U rows, with Gaussian noise. A changed
label changes it by at most 2 C / U. A label's n releases, each of noise multiplier s, are one
Gaussian mechanism of mu = 2 sqrt(n) / s (Dong et al., 2022). If the budget allows no more releases
of a label, answers carry no information.

DPZV assumes that mini-batches are secret Poisson samples, though the device that draws them knows
them. Its top model learns without noise. Option ``calibration`` offers both, and the names of the
resulting figures say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.plugins import AGGREGATIONS, SERVER_UPDATES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Window, expected_rows, steps_per_epoch
from vfl_flower.protocol.privacy import gaussian
from vfl_flower.protocol.privacy.accountant import (
    EVERYONE,
    Accountant,
    Guarantee,
    Released,
    delta_of,
)
from vfl_flower.protocol.privacy.journal import ANSWERED, Event
from vfl_flower.protocol.privacy.mechanism import Mechanism
from vfl_flower.protocol.privacy.noise import ScalarNoise

LEAST = 6.0
"""Least signal to noise of a party's averaged scalars, for each of its columns
(`docs/explanation/what-leaks.md`)."""

GUARANTEE = Guarantee(
    "labels of the training rows",
    "one person's label is changed; how many persons there are, and who is in which mini-batch, is "
    "public",
    EVERYONE,
)


class NoisyScalars(Mechanism):
    """Noise that the label holder adds to scalars, and to steps of the top model."""

    hides_labels = True
    encodes_by_row = True

    @property
    def claims(self) -> bool:
        """Return whether scalars and the top model have noise that does not repeat."""
        privacy = self.config.privacy
        noisy = privacy.epsilon is not None or bool(privacy.noise_multiplier)
        return super().claims and noisy and privacy.calibration != "paper"

    @property
    def hides_figures(self) -> bool:
        """Return False without noise, which hides nothing."""
        return self.config.privacy.noise_multiplier != 0

    @property
    def secret_batches(self) -> bool:
        """Return whether parties draw mini-batches in secret, as DPZV assumes."""
        return self.config.privacy.calibration != "known"

    def check(self, estimator: Released) -> None:
        """Refuse options whose releases the noise cannot hide or whose cost is unknown."""
        privacy, sampling = self.config.privacy, self.config.schedule.sampling
        if not estimator.answers_by_scalars:
            raise ConfigError(
                "privacy = 'scalar' adds noise to scalars, but estimator = "
                f"{self.config.estimator.kind!r} does not answer by scalars. Choose estimator = "
                "'zeroth-order', strategy = 'dpzv', or privacy = 'labels'."
            )
        due = "poisson" if self.secret_batches else "shuffle"
        if sampling != due:
            raise ConfigError(
                f"calibration = {privacy.calibration!r} is for sampling = {due!r}, but here "
                f"sampling = {sampling!r}. Change one of them."
            )
        if privacy.epsilon is None and privacy.noise_multiplier is None:
            raise ConfigError(
                "privacy = 'scalar' needs a budget or a noise multiplier. Set epsilon or "
                "noise-multiplier."
            )
        for registry in (SERVER_UPDATES, AGGREGATIONS):
            name = self.config.values()[registry.key]
            if name not in registry.known:  # a top model may leave out the bound of each row
                raise ConfigError(
                    f"privacy = {privacy.mechanism!r} does not know what {registry.key} = {name!r} "
                    f"shows of labels. Choose {' or '.join(map(repr, registry.known))}."
                )
        if self.config.training.precision != "float32":
            raise ConfigError(
                f"precision = {self.config.training.precision!r} rounds the top model's gradients "
                "off, so a row could add more than privacy = 'scalar' allows. Leave `precision` "
                "out."
            )
        if self.config.data.class_weights == "balanced":
            raise ConfigError(
                "class-weights = 'balanced' follows from all labels, and the noise of privacy = "
                "'scalar' does not cover such weights. Give the weights, or set privacy = 'labels'."
            )
        if sampling == "poisson" and self.config.schedule.max_delay:
            raise ConfigError(
                f"max-delay = {self.config.schedule.max_delay} asks parties for the rows of each "
                "other's mini-batches, but sampling = 'poisson' keeps them secret. Leave "
                "`max-delay` out."
            )
        if self.config.subsets == "laser":
            raise ConfigError(
                "subsets = 'laser' weighs copies of a row, and privacy = 'scalar' cannot bound "
                "each copy by itself. Set subsets = 'sampled'."
            )
        self.check_range()

    def check_baseline(self, uploads: bool = True) -> None:
        """Refuse every baseline: none learns from scalars."""
        raise ConfigError(
            f"strategy = {self.config.strategy!r} is a baseline without scalars, so privacy = "
            "'scalar' has nothing to add noise to. Leave `privacy` out."
        )

    def check_own_columns(self) -> None:
        """Refuse gradients of the label holder's bottom model: they are not clipped."""
        if self.config.estimator.server_update == "first-order":
            raise ConfigError(
                "privacy = 'scalar' clips gradients of the top model's layers only, and the label "
                "holder has its own columns. Set server-update = 'zeroth-order', or columns = "
                "'none'."
            )

    def scalar_noise(self, accountant: Accountant) -> ScalarNoise:
        """Return the noise and the clipping bounds, with the accountant's multiplier."""
        assert isinstance(accountant, ScalarAccountant)
        return ScalarNoise(self.config, accountant.multiplier)

    def accountant(self, rows: int, estimator: Released) -> ScalarAccountant:
        """Return an accountant that counts releases of each row's label."""
        return ScalarAccountant(self.config, rows, estimator)


class ScalarAccountant(Accountant):
    """Count the releases ``taken`` [N] of each row's label; a budget allows ``most`` of them."""

    counts = (ANSWERED,)

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self.joint = config.estimator.perturbs == "all"
        self.top = 1  # number of releases in a step of the top model, beside the scalars
        self.multiplier = 0.0
        self.most: int | None = None
        self.taken = np.zeros(rows, np.int32)
        self._refused = False

    @property
    def _sample(self) -> int:
        """Return the expected number of rows in a mini-batch."""
        return expected_rows(self.config, self.rows)

    def steps_allowed(self, planned: int, parties: int, quorum: int, top_learns: bool) -> int:
        """Return the planned steps if noise is calibrated to them, else the allowed steps."""
        privacy = self.config.privacy
        if 1 < quorum < parties:
            raise ConfigError(
                f"privacy = 'scalar' with quorum = {quorum} lets a row be in one step of the top "
                f"model more than once. Set quorum = 1, or {parties} for all parties."
            )
        of_top = self.joint and self.config.estimator.server_update == "zeroth-order"
        self.top = int(top_learns and not of_top)
        if privacy.epsilon and self.delta >= 1 / self.rows:
            log.warning(
                "delta = %g is too large for %d training rows, so epsilon guarantees little. Set "
                "delta below one over the number of rows.",
                *(self.delta, self.rows),
            )
        if privacy.noise_multiplier is not None:
            self.multiplier = privacy.noise_multiplier
        if privacy.calibration != "known":
            return self._allowed_by_secrecy(planned)
        if privacy.epsilon is None:
            return planned
        together = parties > 1 and quorum == parties
        # A row has a part in `each` releases in every `steps` steps, counted over all parties.
        steps = steps_per_epoch(self.config, self.rows) * (parties if together else 1)
        each = self.top + (parties if together and not self.joint else 1)
        mu = gaussian.mu_of(privacy.epsilon, self.delta)
        if privacy.noise_multiplier is None:
            self.most = -(-planned // steps) * each
            self.multiplier = 2 * self.most**0.5 / mu
            return planned
        self.most = int((self.multiplier * mu / 2) ** 2)
        return self._allowed(self.most // each * steps, planned, "one pass over the rows")

    def _allowed_by_secrecy(self, planned: int) -> int:
        """Return the steps that DPZV allows, as if nobody knew the mini-batches."""
        privacy, rows = self.config.privacy, self.rows
        log.warning(
            "calibration = %r assumes secret mini-batches, but parties know what they draw. %s",
            privacy.calibration,
            "The top model learns without noise, so no epsilon holds."
            if privacy.calibration == "paper"
            else "The epsilon that holds is in the summary.",
        )
        if privacy.calibration == "paper":
            if privacy.noise_multiplier is None:
                self.multiplier = calibrated_by_theorem_vi5(self.config, rows, planned)
            return planned
        if privacy.epsilon is None:
            return planned
        together = (1 + self.top) ** 0.5  # releases on one sample equal one release of less noise
        budget = privacy.epsilon, self.delta
        if privacy.noise_multiplier is None:
            self.multiplier = gaussian.calibrated(*budget, self._sample, rows, planned) * together
            return planned
        multiplier = self.multiplier / together
        allowed = gaussian.most_steps(*budget, multiplier, self._sample, rows, planned)
        return self._allowed(allowed, planned, "one step")

    def warn(self, steps: int, columns: int, outputs: int) -> None:
        """Warn, before training, if noise on scalars leaves too little to learn from.

        The mean of a party's scalars has a signal to noise of at most sqrt(sum of U^2) / s, which
        all columns share, and all outputs.
        """
        epsilon, batch = self.config.privacy.epsilon, self.config.training.batch_size
        if epsilon is None or not self.multiplier or not steps:
            return

        def squares(rows: int) -> int:  # of U, in an epoch
            return rows // batch * batch**2 + (rows % batch) ** 2

        epochs = steps / steps_per_epoch(self.config, self.rows)
        due = LEAST * max(1, columns) * outputs**0.5
        short = due / (epochs * squares(self.rows)) ** 0.5 * self.multiplier
        if short <= 1:
            return
        enough, more, mu = epsilon, self.rows, short * gaussian.mu_of(epsilon, self.delta)
        while gaussian.mu_of(enough, self.delta) < mu:
            enough *= 1.05
        while squares(more) < short**2 * squares(self.rows):
            more += 1 + more // 20
        notice.warning(
            "epsilon = %g may be too small for %d training rows and %d columns at a party: noise "
            "hides all but strong patterns. Set epsilon to %.2g or more, or use %d rows or more.",
            *(epsilon, self.rows, columns, enough, float(f"{more:.2g}")),
        )

    def _allowed(self, allowed: int, planned: int, least: str) -> int:
        """Return how many planned steps the budget allows; log it if it cuts them."""
        epsilon = self.config.privacy.epsilon
        if allowed == 0:
            raise ConfigError(
                f"The budget epsilon = {epsilon:g} is already spent in {least}: noise-multiplier = "
                f"{self.multiplier:g} is too small. Raise one of them."
            )
        if allowed < planned:
            log.warning(
                "The privacy budget epsilon = %g allows %d of %d steps; the run stops there.",
                *(epsilon, allowed, planned),
            )
        return min(allowed, planned)

    def events_within_budget(self, group: Sequence[tuple[int, Window]]) -> list[Event] | None:
        """Return the releases of a group's answers: its scalars, and the top model's step."""
        events: list[Event] = []
        for party, window in group:
            first = not events
            weight = int(first or not self.joint) + self.top * first
            events.append(Event(ANSWERED, party, len(window.lengths), weight, 0, window.ids))
        if self.most is None or self._most_after(events) <= self.most:
            return events
        if not self._refused:
            log.info(
                "A label has had a part in as many releases as epsilon = %g allows. Answers "
                "beyond that carry no information.",
                self.config.privacy.epsilon,
            )
        self._refused = True
        return None

    def _most_after(self, events: Sequence[Event]) -> int:
        """Return the largest count of releases of one label, including these events."""
        rows = np.concatenate([event.rows for event in events])
        more = np.repeat([event.second for event in events], [len(event.rows) for event in events])
        np.add.at(self.taken, rows, more.astype(np.int32))
        most = int(self.taken[rows].max(initial=0))
        np.subtract.at(self.taken, rows, more.astype(np.int32))
        return most

    def count(self, event: Event) -> None:
        """Count the scalars of an answer, and the releases of its rows."""
        self.released += event.first
        np.add.at(self.taken, event.rows, event.second)

    def so_far(self) -> Iterator[Event]:
        """Yield an event for all scalars, and one for each binary digit of row counts."""
        yield Event(ANSWERED, 0, self.released)
        for digit in range(int(self.taken.max(initial=0)).bit_length()):
            rows = np.flatnonzero(self.taken >> digit & 1).astype(np.int32)
            yield Event(ANSWERED, 0, 0, 1 << digit, 0, rows)

    def figures(self) -> dict[str, Any]:
        """Return the spent epsilon, if one holds, and epsilon by the paper's assumptions."""
        figures = {**super().figures(), "noise_multiplier": self.multiplier}
        if self.config.privacy.noise_seed >= 0 or self.multiplier == 0:
            return figures
        calibration = self.config.privacy.calibration
        figures["epsilon_of_paper"] = epsilon_of_theorem_vi5(
            self.config, self.rows, self.multiplier, self.released
        )
        if calibration != "known":
            each = self.multiplier / (1 + self.top * (calibration == "secret")) ** 0.5
            figures["epsilon_secret_batches"] = gaussian.epsilon_of_samples(
                each, self._sample, self.rows, self.released, self.delta
            )
        if calibration == "paper" and self.top:
            return figures  # no epsilon holds: the top model learned without noise
        # The multiplier is over C / U, and a changed label changes a mean by 2 C / U.
        mu = gaussian.mu_of_releases(self.multiplier / 2, int(self.taken.max(initial=0)))
        return {
            **figures,
            "epsilon": gaussian.epsilon_of(mu, self.delta),
            "delta": self.delta,
            "gaussian_mu": mu,
            **GUARANTEE.figures(),
        }


def epsilon_of_theorem_vi5(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Return epsilon by DPZV's Theorem VI.5, for T = ``steps`` scalars.

    Its sigma = 2 C sqrt(T) / (D mu) treats sub-sampling as if it scaled the mechanism's mu.
    """
    mu = 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * multiplier)
    return gaussian.epsilon_of(mu, delta_of(config, rows))


def calibrated_by_theorem_vi5(config: RunConfig, rows: int, steps: int) -> float:
    """Return the noise multiplier by Theorem VI.5. It can be much too small."""
    assert config.privacy.epsilon is not None
    mu = gaussian.mu_of(config.privacy.epsilon, delta_of(config, rows))
    return 2 * expected_rows(config, rows) * math.sqrt(steps) / (rows * mu)
