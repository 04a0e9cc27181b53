"""Privacy axis: perturbed local embedding (VAFL section 4), and what it is worth.

What it protects, and from whom: the feature values of a record of one party, from the label holder
and whoever reads its messages, over all uploads of that record by that party. What the party's
parameters learn from a record, and other rows' uploads then show of it, is not bounded by it; nor
does it protect labels from the parties.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config import RunConfig
from vfl_flower.records import EmbedOrder, EvaluateOrder, Order, TrainOrder


@dataclass(frozen=True)
class Perturbation:
    """Noise in a bottom model, Eq. (10)-(11): uniform in inner layers, Gaussian in the last.

    The noise of a step depends on (secret, exchange, step, layer) alone, so the pass that answers
    the feedback repeats that of the upload. The last layer's output is first clipped to norm R,
    which bounds what one record can change; what the activation does after it is post-processing.
    """

    config: RunConfig
    secret: bytes
    exchange: int
    lengths: tuple[int, ...]
    last: int
    first_step: int = 0

    def __call__(self, layer: int, z: Tensor) -> Tensor:
        """``z``, a layer's output before its activation for all rows of a window, with noise."""
        if layer == self.last:
            norms = z.norm(dim=1, keepdim=True).clamp_min(1e-12)
            z = z * (self.config.embedding_bound / norms).clamp_max(1.0)
        elif self.config.inner_noise == 0:
            return z
        noise = [
            self._draw(step, layer, (length, *z.shape[1:]))
            for step, length in enumerate(self.lengths, start=self.first_step)
        ]
        return z + torch.cat(noise).to(z.device)

    def of_step(self, step: int) -> Perturbation:
        """The same noise, for a pass over the rows of one step of the window."""
        return Perturbation(
            self.config, self.secret, self.exchange, (self.lengths[step],), self.last, step
        )

    def _draw(self, step: int, layer: int, shape: tuple[int, ...]) -> Tensor:
        # Torch's generator would use 32 bits of the seed, which the label holder could try out.
        seed = hashlib.sha256(self.secret + f"|{self.exchange}|{step}|{layer}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed[:16], "little")))
        if layer == self.last:
            noise = self.config.embedding_noise * generator.standard_normal(shape, np.float32)
        else:
            half_width = math.sqrt(3) * self.config.inner_noise
            noise = half_width * (2 * generator.random(shape, np.float32) - 1)
        return torch.from_numpy(noise.astype(np.float32, copy=False))


class Accountant:
    """How often each row was asked for, and what that is worth.

    Kept by the label holder, whose honesty in counting is assumed. An upload counts when it is
    asked for, so one that is lost or refused counts too; noise protects test rows as it does
    training rows.
    """

    def __init__(self, config: RunConfig, rows: int) -> None:
        self.config = config
        self.rows = rows
        self.steps: dict[int, int] = {}  # by party: mini-batches asked for
        self.epochs: dict[int, int] = {}  # passes begun, each of which uploads a row once
        self.queries: dict[int, NDArray[np.int32]] = {}  # of each training row, apart from those
        self.evaluations: dict[int, int] = {}  # uploads of every test row

    def ordered(self, party: int, order: Order) -> None:
        """Count what this order asks a party for."""
        if self.config.privacy == "none":
            return
        if isinstance(order, TrainOrder):
            self.steps[party] = self.steps.get(party, 0) + order.steps
            self.epochs[party] = order.epoch + 1
        elif isinstance(order, EmbedOrder):
            queries = self.queries.setdefault(party, np.zeros(self.rows, np.int32))
            queries[order.arrays["ids"]] += 1  # ids do not repeat
        elif isinstance(order, EvaluateOrder):
            self.evaluations[party] = self.evaluations.get(party, 0) + 1

    def most_uploads(self, party: int) -> int:
        """Uploads of the row that this party uploads most."""
        queries = int(self.queries[party].max()) if party in self.queries else 0
        return max(self.epochs.get(party, 0) + queries, self.evaluations.get(party, 0))

    def figures(self) -> dict[str, float | None]:
        """Epsilon of the most uploaded record of any party, and what the paper would claim.

        There is none where the noise can be repeated from the run configuration.
        """
        if self.config.privacy == "none" or self.config.noise_seed >= 0:
            return {"epsilon": None, "delta": None, "epsilon_of_paper": None}
        parties = {*self.epochs, *self.queries, *self.evaluations}
        uploads = max((self.most_uploads(party) for party in parties), default=0)
        samples = max(self.steps.values(), default=0) * self.config.batch_size
        return {
            "epsilon": epsilon(self.config, uploads),
            "delta": self.config.delta,
            "epsilon_of_paper": epsilon_of_theorem_6(self.config, self.rows, samples),
        }


def epsilon(config: RunConfig, uploads: int) -> float:
    """Epsilon at delta of a record that one party has uploaded this many times.

    Each upload is a Gaussian mechanism of sensitivity R and deviation c (a record's embedding
    against none, in its place), and k of them compose to one of deviation c / (R sqrt(k)), whose
    epsilon is exact. Sub-sampling gives nothing, since the label holder sees which rows are sent.
    """
    if uploads == 0:
        return 0.0
    return _epsilon(config.embedding_noise / (config.embedding_bound * math.sqrt(uploads)), config)


def epsilon_of_theorem_6(config: RunConfig, rows: int, samples: int) -> float:
    """What VAFL's Theorem 6 would claim, with its unstated constant taken as 1.

    Eq. (15): mu = N_m sqrt(K) / (c N) for batch size N_m, N rows and K samples processed; a mu-GDP
    mechanism is as private as a Gaussian one of deviation 1 / mu.
    """
    mu = config.batch_size * math.sqrt(samples) / (config.embedding_noise * rows)
    return _epsilon(1 / mu, config) if mu > 0 else 0.0


def _epsilon(noise_multiplier: float, config: RunConfig) -> float:
    from dp_accounting import get_epsilon_gaussian  # here, since parties start often and need none

    return float(get_epsilon_gaussian(noise_multiplier, config.delta))
