"""Perturbed embeddings (VAFL section 4): how often each record was uploaded.

The noise protects the features of a record at one party, over all uploads of that record. It
protects them from the label holder, and from everybody who reads the label holder's messages. With
shared labels the other parties read them too. A codec neither adds to the noise nor takes from it.

The noise does not bound what the party's parameters learn from a record, nor the bins of a
`tabular` model. Uploads of other rows can show some of that. Nor does the noise protect labels from
the parties.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.protocol.batches import expected_rows
from vfl_flower.protocol.privacy.accountant import Accountant, Guarantee, Released, delta_of
from vfl_flower.protocol.privacy.gaussian import epsilon_of, mu_of_releases
from vfl_flower.protocol.privacy.journal import EMBED, EVALUATE, RECEIVED, TRAIN, Event
from vfl_flower.protocol.privacy.mechanism import Mechanism
from vfl_flower.protocol.privacy.noise import Perturbation

_LATEST = 2**31 - 1  # later than every step of an epoch


class PerturbedEmbeddings(Mechanism):
    """Noise that each party adds to everything that it uploads."""

    perturbs_uploads = True
    covers_validation = True

    @property
    def relative_noise(self) -> float:
        """Return the noise's deviation over the bound. Epsilon follows from this ratio."""
        return self.config.privacy.embedding_noise / self.config.privacy.embedding_bound

    def check_baseline(self, uploads: bool = True) -> None:
        """Refuse a baseline without uploads."""
        if not uploads:
            raise ConfigError(
                f"strategy = {self.config.strategy!r} sends nothing that noise could protect. "
                "Leave `privacy` out."
            )

    def check_bottom(self, party: int, name: str, model: BottomModel, augment: Any) -> None:
        """Refuse a model or an augmentation that mixes several rows into one embedding."""
        if not model.apart():
            raise ConfigError(
                f"Party {party}'s model {name!r} can mix a row into another row's "
                "embedding, and noise would not hide it. Leave BatchNorm or `privacy` out."
            )
        if augment not in (samples.none, samples.crop_flip):
            raise ConfigError(
                f"Party {party}'s own augmentation can mix a row into another row's "
                "embedding, and noise would not hide it. Leave the augmentation or `privacy` out."
            )

    def perturbation(
        self, secret: bytes, exchange: int, lengths: tuple[int, ...], last: int
    ) -> Perturbation:
        """Return noise in every layer. Epsilon follows from the last layer."""
        return Perturbation(self.config.privacy, secret, exchange, lengths, last)

    def accountant(self, rows: int, estimator: Released) -> EmbeddingAccountant:
        """Return an accountant that counts uploads of each row."""
        return EmbeddingAccountant(self.config, rows, estimator)

    def epsilon_of_uploads(self, rows: int, uploads: int) -> float:
        """Return epsilon of one of N records after this many uploads by one party.

        Sub-sampling amplifies nothing, because the label holder sees which rows are sent.
        """
        return epsilon_of(_mu(self.config, uploads), delta_of(self.config, rows))


class EmbeddingAccountant(Accountant):
    """Count how often the label holder asks each party for each row.

    Orders count, so a lost upload counts too. A zeroth-order pair counts as two uploads.
    """

    counts = (TRAIN, EMBED, EVALUATE, RECEIVED)

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self.steps: dict[int, int] = {}  # by party: mini-batches asked for
        # Passes over the rows that have begun. Each pass uploads a row once. An order that is
        # repeated, or that is earlier than the last, begins another pass.
        self.passes: dict[int, int] = {}
        self.last: dict[int, tuple[int, int]] = {}  # epoch and first step of the last order
        self.queries: dict[int, NDArray[np.int32]] = {}  # each training row's uploads by EMBED
        self.evaluations: dict[int, int] = {}  # uploads of every test row
        self.sampled: dict[int, NDArray[np.int32]] = {}  # Poisson: uploads of each training row
        self.unseen: dict[int, int] = {}  # Poisson: steps whose rows are not known, or not yet

    def count(self, event: Event) -> None:
        """Count an order. The rows of a Poisson sample replace one upload a step."""
        kind, party, epoch, first, steps, rows = event
        if kind == TRAIN:
            self.steps[party] = self.steps.get(party, 0) + steps
            self.unseen[party] = self.unseen.get(party, 0) + steps
            place, last = (epoch, first), self.last.get(party, (-1, 0))
            begun = 1 if place <= last else epoch - last[0]
            self.passes[party] = self.passes.get(party, 0) + begun
            self.last[party] = place
        elif kind == EMBED:
            queries = self.queries.setdefault(party, np.zeros(self.rows, np.int32))
            queries[rows] += 1  # right because rows do not repeat
        elif kind == EVALUATE:
            self.evaluations[party] = self.evaluations.get(party, 0) + 1
        elif self.config.schedule.sampling == "poisson":
            counts = self.sampled.setdefault(party, np.zeros(self.rows, np.int32))
            counts += np.bincount(rows, minlength=self.rows).astype(np.int32)
            self.unseen[party] -= event.first

    def so_far(self) -> Iterator[Event]:
        """Yield events of each party that bring a new accountant to the same counts."""
        for party, last in self.last.items():
            passes, steps = self.passes[party], self.steps[party]
            # `count` begins a pass for each epoch since the last order. It begins one more for an
            # order that is not later than the last.
            if passes > last[0] + 1:
                yield Event(TRAIN, party, passes - 2, _LATEST, steps)
                yield Event(TRAIN, party, *last, 0)
            else:
                yield Event(TRAIN, party, *last, steps)
        for party, sampled in self.sampled.items():
            rows = np.repeat(np.arange(self.rows, dtype=np.int32), sampled)
            yield Event(RECEIVED, party, self.steps[party] - self.unseen[party], rows=rows)
        for party, queries in self.queries.items():
            for times in range(int(queries.max())):
                rows = np.flatnonzero(queries > times).astype(np.int32)
                yield Event(EMBED, party, rows=rows)
        for party, times in self.evaluations.items():
            for _ in range(times):
                yield Event(EVALUATE, party)

    def most_uploads(self, party: int) -> int:
        """Return how often this party uploaded its most uploaded row."""
        trained = np.full(1, self.passes.get(party, 0), np.int32)
        if self.config.schedule.sampling == "poisson":
            trained = self.sampled.get(party, np.zeros(1, np.int32)) + self.unseen.get(party, 0)
        each = self.estimator.uploads_per_row
        most = int((each * trained + self.queries.get(party, 0)).max())
        evaluated = self.evaluations.get(party, 0)
        # Without a test fraction, the rows that are evaluated are the training rows.
        return max(most, evaluated) if self.config.data.test_fraction else most + evaluated

    def uploads(self) -> int:
        """Return how often the most uploaded record of any party was uploaded."""
        parties = {*self.passes, *self.queries, *self.evaluations}
        return max((self.most_uploads(party) for party in parties), default=0)

    def figures(self) -> dict[str, Any]:
        """Return epsilon of the most uploaded record, and the epsilon of VAFL's Theorem 6."""
        if self.config.privacy.noise_seed >= 0:
            return super().figures()
        mu = _mu(self.config, self.uploads())
        samples = max(self.steps.values(), default=0) * expected_rows(self.config, self.rows)
        guarantee = Guarantee(
            "features of one record at one party, in all uploads of that record; not what the "
            "party's model learns from it",
            "these features are changed; which records there are is public",
            f"anybody with {self.estimator.uploads_reach} view of those uploads",
        )
        return {
            "epsilon": epsilon_of(mu, self.delta),
            "delta": self.delta,
            "gaussian_mu": mu,
            "epsilon_of_paper": epsilon_of_theorem_6(self.config, self.rows, samples),
            **guarantee.figures(),
        }


def _mu(config: RunConfig, uploads: int) -> float:
    """Return mu of this many uploads of a record: deviation c, and sensitivity 2 R for norm R."""
    privacy = config.privacy
    return mu_of_releases(privacy.embedding_noise / (2 * privacy.embedding_bound), uploads)


def epsilon_of_theorem_6(config: RunConfig, rows: int, samples: int) -> float:
    """Return epsilon by VAFL's Theorem 6, with its unstated constant taken as 1.

    Eq. (15): mu = N_m sqrt(K) / (c N) for batch size N_m, N rows and K samples processed. It is for
    embeddings of norm 1. Here their bound is R, so c / R replaces c. A mu-GDP mechanism is as
    private as a Gaussian mechanism of deviation 1 / mu.
    """
    noise = config.privacy.embedding_noise / config.privacy.embedding_bound
    mu = expected_rows(config, rows) * sqrt(samples) / (noise * rows)
    return epsilon_of(mu, delta_of(config, rows))
