"""The figures of an explanation that a party is told: with noise, and once about each person.

A party chooses what it uploads in place of permuted rows, so exact figures would tell labels. The
outputs of the model depend on no label of the explained rows. So for each row and feature, the
label holder knows by how much that row's label can change the figure (`Score.possible`). A row's
sensitivity is the norm of these changes over all features, and Gaussian noise covers the largest.

All figures of an explanation, of all parties together, are one Gaussian mechanism. It hides a
person's label by `EPSILON`, or by the option ``epsilon``, but not what the model has learned from
the label. An AUC is divided by the number of pairs, from a noisy count of the second class, which
is part of the mechanism.

A file has the day on which parties were told about each person. For 30 days, no other explanation
has a figure with that person's label, so nothing averages the noise away. Parties are told none
about fewer than 200 people, which would be noise alone.
"""

from __future__ import annotations

import math
import secrets
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.alignment.store import home
from vfl_flower.data.ids import People, people_of_rows
from vfl_flower.protocol.batches import secret_generator
from vfl_flower.protocol.privacy.gaussian import mu_of
from vfl_flower.protocol.privacy.noise import on_grid
from vfl_flower.records.ledger import Ledger, content_in_file, opened, today
from vfl_flower.tasks.inference.importance import AUC, SURE, Floats, Outputs, Score
from vfl_flower.tasks.inference.rows import RowsToPredict

EPSILON = 1.0
LEAST, DAYS = 200, 30
"""Least rows of the figures for parties, and the days between two figures about a person."""
FEW = f"Parties get no figures about fewer than {LEAST} people: noise would hide them."
LATE = (
    f"Parties get no figures: they got figures about these people in the last {DAYS} days. Their "
    "tables stay as they are."
)
_DAYS = "day"  # name in the ledger
_OF_COUNT = 0.1  # part of the squared mu that the count of the second class takes


class FiguresToTell:
    """The exact sums of one party's figures, and the largest change of them by a row's label."""

    def __init__(
        self, score: Score, outputs: Outputs, fresh: NDArray[np.bool_], features: int
    ) -> None:
        self._score, self._fresh = score, fresh
        self._weights = score.weights[fresh]
        self._plain = score.possible(outputs[fresh])
        self._falls = self._plain[None][:0]
        self._sums, self._squares = np.zeros(features), np.zeros(len(self._plain))

    def add(self, first: int, outputs: Outputs, repeat: int, repeats: int) -> None:
        """Add the outputs of a permutation of features from ``first`` on, [count, R, C]."""
        if not repeat:
            self._falls = np.zeros((len(outputs), *self._plain.shape), np.float32)
        for falls, each in zip(self._falls, outputs, strict=True):
            falls += self._plain - self._score.possible(each[self._fresh])
        if repeat < repeats - 1:
            return
        for feature, total in enumerate(self._falls, start=first):
            falls = total.astype(np.float64) / repeats
            self._sums[feature] = (falls * self._weights).sum()
            self._squares += np.square(np.ptp(falls, axis=1))

    @property
    def sensitivity(self) -> float:
        """Return the largest norm of the change of all sums by the label of one row."""
        return math.sqrt(self._squares.max(initial=0.0))

    def told(self, noise: Noise) -> tuple[Floats, Floats, float]:
        """Return the falls with noise, half of the 95 % intervals of the noise, its deviation."""
        sums, deviation = noise.on(self._sums, self.sensitivity)
        deviation *= noise.unit
        return sums * noise.unit, np.full(len(sums), SURE * deviation), deviation


class Noise:
    """The noise on all parties' figures. A sum times ``unit`` is the fall of the metric."""

    def __init__(
        self, score: Score, fresh: NDArray[np.bool_], parties: int, epsilon: float, delta: float
    ) -> None:
        mu, rows = mu_of(epsilon, delta), int(fresh.sum())
        self._mu = mu * math.sqrt((1 - _OF_COUNT) / parties)
        self._generator = secret_generator(secrets.token_bytes(32))
        self.unit = 1 / rows
        if score.metric == AUC:
            count = score.weights[fresh, 1].sum(keepdims=True)
            self._mu, of_parties = mu * math.sqrt(_OF_COUNT), self._mu
            (second,), _ = self.on(count, 1.0)
            self._mu = of_parties
            second = min(max(float(second), 1.0), rows - 1.0)
            self.unit = rows / (second * (rows - second))

    def on(self, sums: Floats, sensitivity: float) -> tuple[Floats, float]:
        """Return sums with noise, and the deviation of the noise on each."""
        if not sensitivity:
            return sums, 0.0
        deviation = sensitivity / self._mu
        drawn = deviation * self._generator.standard_normal((1, len(sums)))
        noisy = on_grid(torch.from_numpy(sums)[None], drawn, sensitivity)
        found: Floats = noisy[0].numpy()
        return found, deviation


# --- each person once ---------------------------------------------------------------------------


def people_of(rows: RowsToPredict, dataset: str) -> People:
    """Return a number for the person of each row, [N], the same in all runs."""
    if rows.table is None or rows.places is None:
        return people_of_rows(dataset, rows.ids)
    return rows.table.people(rows.places)


def fresh(people: People) -> NDArray[np.bool_]:
    """Return the people that parties were told nothing about for 30 days, as a mask."""
    with _opened() as ledger:
        return today() - ledger.numbers(_DAYS, people) >= DAYS


def claim(people: People) -> bool:
    """Note that parties are told about these people today, unless they were told of one lately."""
    with _opened() as ledger:
        if (today() - ledger.numbers(_DAYS, people) < DAYS).any():
            return False  # another explanation was faster
        ledger.put(_DAYS, people, today())
    return True


def _opened() -> AbstractContextManager[Ledger]:
    return opened(home("") / "explained-labels", content_in_file(_DAYS))
