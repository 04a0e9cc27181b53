"""The noise of a run: where it is added, and which options contradict it.

Privacy has three parts. A `Mechanism` adds noise. An `Accountant` computes the cost. A `ReleaseLog`
records what was released. Other modules ask the mechanism of a run, and never compare its name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import MECHANISMS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import LabelNoise, Labels
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.protocol.privacy.accountant import Accountant, Released
from vfl_flower.protocol.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.protocol.privacy.release_log import ReleaseLog


def mechanism_of(config: RunConfig) -> Mechanism:
    """Return the mechanism that option ``privacy`` names."""
    return MECHANISMS.load(config.privacy.mechanism)(config)


class Mechanism:
    """The noise of a run, at the parties and at the label holder.

    Attributes
    ----------
    hides_labels : whether labels are protected. Then no digest of them is kept with the model.
    learns_from_noise : whether the top model learns from labels with noise.
    perturbs_uploads : whether parties add noise to their embeddings.
    encodes_by_row : whether a codec must encode each row by itself.
    costs_by_step : whether every further step costs more privacy, or needs more noise.
    covers_validation : whether epsilon covers the labels of validation rows.
    may_grow : whether a run may begin with the models of another run. Epsilon covers one run.
    """

    hides_labels: ClassVar[bool] = False
    learns_from_noise: ClassVar[bool] = False
    perturbs_uploads: ClassVar[bool] = False
    encodes_by_row: ClassVar[bool] = False
    costs_by_step: ClassVar[bool] = True
    covers_validation: ClassVar[bool] = False
    may_grow: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def claims(self) -> bool:
        """Return whether a run claims an epsilon. Repeatable noise hides nothing."""
        return self.config.privacy.noise_seed < 0

    @property
    def secret_batches(self) -> bool:
        """Return whether mini-batches must be secret. Synchronous systems publish theirs."""
        return False

    @property
    def relative_noise(self) -> float:
        """Return the noise's deviation on an embedding over its bound; 0 without noise."""
        return 0.0

    @property
    def hides_figures(self) -> bool:
        """Return whether a figure of the labels to learn from would tell what noise hides."""
        return self.hides_labels and not self.learns_from_noise

    # --- what it refuses ------------------------------------------------------------------------

    def check(self, estimator: Released) -> None:
        """Raise `ConfigError` if options contradict the mechanism."""
        privacy = self.config.privacy
        budget = privacy.epsilon is not None and self.config.task != "explain"
        if budget or privacy.noise_multiplier is not None:
            raise ConfigError(
                "epsilon is the budget of privacy = 'labels' or 'scalar', and noise-multiplier is "
                f"for 'scalar', but here privacy = {privacy.mechanism!r}. Change `privacy`, or "
                "leave both out. The epsilon of perturbed embeddings follows from embedding-noise."
            )

    def check_range(self) -> None:
        """Raise `ConfigError` if the scale of noise would depend on the labels."""
        if self.config.data.target == "regression" and not self.config.data.label_range:
            raise ConfigError(
                f"privacy = {self.config.privacy.mechanism!r} with target = 'regression' needs the "
                "lowest and the highest possible label, which must be public. Set label-range, for "
                "example to '0,120'."
            )

    def validated(self) -> RunConfig:
        """Return the configuration, with validation rows only if epsilon covers them."""
        fraction = self.config.data.validation_fraction
        if self.covers_validation or fraction == 0:
            return self.config
        if fraction is None:
            return self.config.with_values({"validation-fraction": 0.0})
        raise ConfigError(
            f"privacy = {self.config.privacy.mechanism!r} does not cover the labels of validation "
            f"rows, which decide when training stops: validation-fraction = {fraction:g}. Leave it "
            "out."
        )

    def check_baseline(self, uploads: bool = True) -> None:
        """Raise `ConfigError` if a baseline, with or without uploads, cannot have noise."""

    def check_bottom(self, party: int, name: str, model: BottomModel, augment: Any) -> None:
        """Raise `ConfigError` if noise on a party's embeddings would not hide a row."""

    def check_own_columns(self) -> None:
        """Raise `ConfigError` if the label holder may not have columns of features."""

    # --- the noise ------------------------------------------------------------------------------

    def labels(self, labels: Labels, accountant: Accountant) -> Labels:
        """Return the labels to learn from. The accountant counts their draws, if any."""
        return labels

    def kept(self, classes: int) -> float:
        """Return the probability that noise keeps a label of ``classes`` classes."""
        return 1.0

    def label_noise(self, labels: Labels) -> LabelNoise:
        """Return the noise on these labels, which corrects losses and metrics."""
        return LabelNoise(self.kept(len(labels.classes)))

    def warn(self, labels: Labels) -> None:
        """Warn, before training, if noise leaves too little to learn from."""

    def perturbation(
        self, secret: bytes, exchange: int, lengths: tuple[int, ...], last: int
    ) -> Perturbation:
        """Return the noise on one upload of ``lengths`` rows a step, if it `perturbs_uploads`.

        It follows from ``secret`` and ``exchange``, so that a second pass repeats it.
        """
        raise NotImplementedError

    def scalar_noise(self, accountant: Accountant) -> ScalarNoise | None:
        """Return the noise on scalars and on steps of the top model, if there is any."""
        return None

    # --- its cost -------------------------------------------------------------------------------

    def accountant(self, rows: int, estimator: Released) -> Accountant:
        """Return the accountant of a run on ``rows`` training rows."""
        return Accountant(self.config, rows, estimator)

    def release_log(self, accountant: Accountant) -> ReleaseLog | None:
        """Return a log of releases; None if the accountant counts no releases."""
        return ReleaseLog(accountant) if accountant.counts else None

    def epsilon_of_uploads(self, rows: int, uploads: int) -> float | None:
        """Return epsilon of one of N records after this many uploads; None without one."""
        return None


class NoNoise(Mechanism):
    """No noise: nothing is hidden, counted or claimed."""

    costs_by_step = False
    covers_validation = True
    may_grow = True

    @property
    def claims(self) -> bool:
        """Return False: without noise nothing is claimed."""
        return False
