"""Noise on labels: the label holder randomises each label once.

The label holder learns from the randomised labels. `randomise` draws the noise, which makes labels
(eps, 0)-differentially private. Everything computed from noisy labels is post-processing: any
system, codec, schedule and number of epochs, and the model itself. `models.losses.Loss` corrects
the loss for the noise.

A label has one draw in all runs, and `draws` records it. A changed label, or another mechanism, is
a new draw.
"""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import LOSSES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import LabelNoise, Labels
from vfl_flower.protocol.privacy.accountant import EVERYONE, Accountant, Guarantee, Released
from vfl_flower.protocol.privacy.draws import SHIPPED, Spent, opened, path_of_draws
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.mechanism import Mechanism
from vfl_flower.protocol.privacy.randomise import Randomised, kept_share
from vfl_flower.protocol.privacy.release_log import ReleaseLog

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # `vfl run` shows this logger too

LEAST = 50.0
"""Least number of clean rows that noisy rows must be worth (`docs/explanation/what-leaks.md`)."""

_MOST = 30.0  # largest epsilon whose noise probabilities 53-bit random numbers resolve

GUARANTEE = Guarantee(
    "labels of the training rows",
    "one person's label is changed in all runs; which persons there are, and whether a person's "
    "label is that of an earlier run, is public",
    EVERYONE,
)


class RandomisedLabels(Mechanism):
    """Noise on each label, drawn once in all runs."""

    hides_labels = True
    learns_from_noise = True
    costs_by_step = False
    covers_validation = True

    def check(self, estimator: Released) -> None:
        """Refuse a missing budget, an unused option, and a loss that is not corrected."""
        privacy, loss = self.config.privacy, self.config.models.loss
        if privacy.epsilon is None:
            raise ConfigError("privacy = 'labels' needs a budget. Set epsilon, such as 1.0.")
        if privacy.delta is not None or privacy.noise_multiplier is not None:
            raise ConfigError(
                "privacy = 'labels' follows from epsilon, with a delta of 0. Leave `delta` and "
                "`noise-multiplier` out."
            )
        if privacy.epsilon > _MOST:
            raise ConfigError(
                f"epsilon = {privacy.epsilon:g} hides no label. With privacy = 'labels', set "
                f"epsilon to {_MOST:g} or less."
            )
        self.check_range()
        if loss not in LOSSES.known and self.config.data.target == "classification":
            raise ConfigError(
                f"loss = {loss!r} is not corrected for the noise of privacy = 'labels'. Leave one "
                "of them out."
            )

    def kept(self, classes: int) -> float:
        """Return p of `randomise.kept_share`; 1 for numbers."""
        return kept_share(self._epsilon, classes) if classes else 1.0

    def label_noise(self, labels: Labels) -> LabelNoise:
        """Return the probability to keep a class, or the variance of noise on a number."""
        if labels.classes:
            return super().label_noise(labels)
        assert labels.bounds is not None  # `check_range` guarantees it
        scale = (labels.bounds[1] - labels.bounds[0]) / self._epsilon / labels.deviation
        return LabelNoise(variance=2 * scale**2)

    def labels(self, labels: Labels, accountant: Accountant) -> Labels:
        """Return the labels with noise, once their draws are on the disk."""
        assert isinstance(accountant, DrawAccountant)
        if self.config.privacy.noise_seed >= 0:
            secret = str(self.config.privacy.noise_seed).encode()
            noisy = Randomised(self.config, labels, secret)
        else:
            with opened() as draws:
                whole = b"" if labels.people is not None else f"|{labels.whole}".encode()
                noisy = Randomised(self.config, labels, draws.secret + whole)
                spent = noisy.counted(draws)
                if self.config.running.resume and draws.added:
                    raise _other_noise()  # inside `opened`, so that the new draws are not written
            accountant.spent = spent.epsilon
            _tell(spent, self.config, labels)
        found = noisy.labels()
        accountant.digest = hashlib.sha256(found.train.tobytes()).hexdigest()
        return found

    def warn(self, labels: Labels) -> None:
        """Warn if noise on classes leaves too little to learn from."""
        rows, classes = len(labels.train), len(labels.classes)
        if not classes:
            return
        left, enough = rows_left(rows, classes, self._epsilon), epsilon_for(rows, classes)
        if left < LEAST and enough is not None:
            notice.warning(
                "epsilon = %g is too small for %d training rows of %d classes: they are worth "
                "about %.0f rows without noise. Set epsilon to %.2f or more, or use more rows.",
                *(self._epsilon, rows, classes, left, math.ceil(20 * enough) / 20),
            )

    def accountant(self, rows: int, estimator: Released) -> DrawAccountant:
        """Return an accountant with the sum of the draws."""
        return DrawAccountant(self.config, rows, estimator)

    def release_log(self, accountant: Accountant) -> ReleaseLog:
        """Return a log that compares the noise with the noise of a checkpoint."""
        return DrawnOnce(accountant)

    @property
    def _epsilon(self) -> float:
        assert self.config.privacy.epsilon is not None  # `check` guarantees it
        return self.config.privacy.epsilon


class DrawAccountant(Accountant):
    """Hold the largest sum of epsilons over all draws of one person's label, ``spent``.

    It is None if a seed makes the noise repeatable.
    """

    spent: float | None = None
    digest = ""

    def figures(self) -> dict[str, Any]:
        """Return the sum as epsilon, with a delta of 0."""
        if self.spent is None:
            return super().figures()
        return {**super().figures(), "epsilon": self.spent, "delta": 0.0, **GUARANTEE.figures()}


class DrawnOnce(ReleaseLog):
    """Compare the labels with noise, released once, with the digest in a checkpoint."""

    accountant: DrawAccountant

    def keep(
        self, path: Path, run: str = "", mark: Mark | None = None, second: Path | None = None
    ) -> None:
        """Raise `ConfigError` if the noise differs. Write no file: `draws` has one."""
        if mark is not None and list(mark) != list(self.mark):
            raise _other_noise()

    @property
    def mark(self) -> Mark:
        """Return the digest of the labels with noise."""
        return 0, self.accountant.digest


def rows_left(rows: int, classes: int, epsilon: float) -> float:
    """Return how many clean rows carry as much signal as all N noisy rows of K classes.

    A label is kept with probability p, and becomes each other class with probability q. Among rows
    with equal features, the share of a label is q + (p - q) s, where s is its true share. So noise
    multiplies the signal by p - q, and N rows are worth (p - q)^2 N.
    """
    gap = math.expm1(epsilon) / (math.exp(epsilon) + classes - 1)
    return gap**2 * rows


def epsilon_for(rows: int, classes: int, left: float = LEAST) -> float | None:
    """Return the least epsilon at which `rows_left` is ``left``; None without one."""
    gap = math.sqrt(left / rows)
    return math.log((1 + (classes - 1) * gap) / (1 - gap)) if gap < 1 else None


def _other_noise() -> ConfigError:
    return ConfigError(
        "The noise on these labels differs from the noise of the run to resume. Restore the file "
        f"of that run at {path_of_draws()}, or begin a new run."
    )


def _tell(spent: Spent, config: RunConfig, labels: Labels) -> None:
    """Log where draws are kept, and the parts of epsilon if it sums several draws."""
    path = path_of_draws()
    log.info("Noise on labels is drawn once; the draw is kept in %s", path)
    if spent.epsilon <= (config.privacy.epsilon or 0.0):
        return
    with_ids = "draws of one person's label, all values and epsilons that it has had"
    without = "draws of labels without ids, which could be anybody's"
    own, unknown = (without, with_ids) if labels.people is None else (with_ids, without)
    if labels.people is None and config.data.dataset in SHIPPED:
        own = "draws of these labels"
    parts = {own: spent.own, unknown: spent.unknown, "lost draws": spent.lost}
    notice.warning(
        "epsilon is %g in all: %s (%s).",
        spent.epsilon,
        ", ".join(f"{part:g} by {words}" for words, part in parts.items() if part),
        path,
    )
