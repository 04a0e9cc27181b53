"""Noise on labels, drawn from a secret: randomised response, or Laplace noise.

A label of K classes is kept with probability p = e^eps / (e^eps + K - 1). Else it becomes one of
the other classes, uniformly (Warner, 1965; Ghazi et al., 2021). A number is clipped to
``label-range`` [a, b], and gets noise of two-sided geometric distribution on a grid. This is
Laplace noise of scale (b - a) / eps, on the grid.

The noise of a person's label follows from a secret, the person's id, the label and the mechanism.
The mechanism is epsilon, the names of the classes or the range of the numbers, and the name of the
label column. So the noise depends on no other row, no order of rows or classes, and no file name.

Rows without ids cannot be identified. Their noise follows from all labels in their order.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.protocol.privacy.draws import SHIPPED, Draws, Spent, Tags

Words = NDArray[np.uint64]
"""Two random words for each row, [N, 2]."""

_GRID = 1024  # number of grid steps in the range of a number


def kept_share(epsilon: float, classes: int) -> float:
    """Return the probability to keep a label of K classes, e^eps / (e^eps + K - 1)."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


class Randomised:
    """One draw of labels, by a secret that for rows without ids contains a digest of all labels.

    Validation rows are included because their labels decide which model is kept.
    """

    def __init__(self, config: RunConfig, labels: Labels, secret: bytes) -> None:
        assert config.privacy.epsilon is not None
        self.config = config
        self.epsilon = config.privacy.epsilon
        self._labels, until = labels, labels.validation
        self._true = np.concatenate([labels.train, labels.test[:until]])
        people = labels.people
        self._people = people and np.concatenate([people[0], people[1][:until]])
        self._tags: Tags = np.zeros(0, np.uint64)  # a keyed hash of each person's draw
        self._words = self._of_all(secret) if people is None else self._of_each(secret)

    def labels(self) -> Labels:
        """Return the labels with noise, of training and validation rows.

        Test rows keep their labels, unless they are training rows: ``test-fraction=0``.
        """
        labels = self._labels
        noisy = self._of_classes() if labels.classes else self._of_numbers()
        train, validation = np.split(noisy, [len(labels.train)])
        test = labels.test[labels.validation :]
        if labels.repeats:
            assert labels.places is not None and labels.test_places is not None
            tested = labels.test_places
            drawn = np.concatenate([labels.places, tested[: labels.validation]])
            order = np.argsort(drawn, kind="stable")
            found = np.searchsorted(drawn, tested[labels.validation :], sorter=order)
            test = noisy[order[found]]
        return replace(labels, train=train, test=np.concatenate([validation, test]))

    def counted(self, draws: Draws) -> Spent:
        """Count these draws, if they are new; return the sum that the labels have spent."""
        if self._people is None:
            dataset = self.config.data.dataset
            named = dataset if dataset in SHIPPED else ""
            return draws.add_whole(self._labels.whole, named, self._mechanism, self.epsilon)
        people = _ciphered(_key(draws.secret, "people"), self._people, 0)[:, 0]
        return draws.add_people(people, self._tags, self.epsilon)

    # --- the noise ------------------------------------------------------------------------------

    def _of_classes(self) -> NDArray[Any]:
        """Randomise classes: the first word keeps a label, the second chooses another."""
        names = self._labels.classes
        order = np.arange(len(names))
        if self._people is not None:  # the order of names is the same in all data sets
            texts = [_text(name) for name in names]
            order = np.array(sorted(order, key=texts.__getitem__))
        chance = (self._words[:, 0] >> np.uint64(11)) * 2.0**-53
        shift = 1 + (self._words[:, 1] % np.uint64(len(order) - 1)).astype(np.int64)
        other = order[(np.argsort(order)[self._true] + shift) % len(order)]
        return np.where(chance < kept_share(self.epsilon, len(names)), self._true, other)

    def _of_numbers(self) -> NDArray[Any]:
        """Add discrete Laplace noise to clipped numbers; standardise by public numbers."""
        labels = self._labels
        assert labels.bounds is not None
        low, high = labels.bounds
        uniform = ((self._words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # above 0, at most 1
        geometric = np.floor(-np.log(uniform) * _GRID / self.epsilon)
        on_grid = self._on_grid() + geometric[:, 0] - geometric[:, 1]
        noisy = low + (high - low) / _GRID * on_grid
        scaled: NDArray[Any] = ((noisy - labels.mean) / labels.deviation).astype(np.float32)
        return scaled

    def _on_grid(self) -> NDArray[Any]:
        """Return standardised numbers, clipped, in steps of the grid: 0 to `_GRID`."""
        labels = self._labels
        assert labels.bounds is not None
        low, high = labels.bounds
        true = self._true.astype(np.float64) * labels.deviation + labels.mean
        steps: NDArray[Any] = np.rint((np.clip(true, low, high) - low) / ((high - low) / _GRID))
        return steps

    # --- the random words -----------------------------------------------------------------------

    @property
    def _mechanism(self) -> str:
        """Return a description of everything that decides how a label is drawn."""
        labels, data = self._labels, self.config.data
        if self._people is None:
            return f"{self.epsilon!r}|{data.label_range}|{len(labels.classes)}"
        values = sorted(map(_text, labels.classes)) or labels.bounds
        return json.dumps([self.epsilon, data.label, values])

    def _of_all(self, secret: bytes) -> Words:
        """Return words by the row numbers in the data set."""
        labels, until = self._labels, self._labels.validation
        places = np.arange(len(labels.train)) if labels.places is None else labels.places
        if until:
            assert labels.test_places is not None
            places = np.concatenate([places, labels.test_places[:until]])
        key = hashlib.sha256(secret + f"|{self._mechanism}".encode()).digest()
        rows = int(places.max()) + 1
        stream = hashlib.shake_256(key).digest(16 * rows)
        return np.frombuffer(stream, "<u8").reshape(rows, 2)[places]

    def _of_each(self, secret: bytes) -> Words:
        """Return words by each person's id and label; keep a keyed hash of each draw."""
        people, labels = self._people, self._labels
        assert people is not None
        if labels.classes:
            texts, which = [_text(name) for name in labels.classes], self._true
        else:
            values, which = np.unique(self._on_grid(), return_inverse=True)
            texts = [f"{value:.0f}" for value in values]
        found = np.empty((len(which), 4), np.uint64)
        by_label = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(texts)))[:-1]
        for text, some in zip(texts, np.split(by_label, ends), strict=True):
            key = _key(secret, f"{self._mechanism}|{text}")
            found[some, :2] = _ciphered(key, people[some], 0)
            found[some, 2:] = _ciphered(key, people[some], 1)
        self._tags = found[:, 2]
        return found[:, :2]


def _text(name: bool | int | float | str) -> str:
    """Return the name of a class as text; 1, 1.0 and "1" give the same."""
    whole = isinstance(name, float) and name.is_integer()
    return str(int(name) if whole else name)


def _key(secret: bytes, what: str) -> bytes:
    """Return an AES-256 key for one use of the secret."""
    return hashlib.blake2b(what.encode(), key=secret, digest_size=32).digest()


def _ciphered(key: bytes, people: Tags, number: int) -> Words:
    """Return two random words for each person, by a key and a number.

    A block cipher is as good as a random function as long as no input block repeats.
    """
    blocks = np.stack([people, np.full_like(people, number)], axis=1).astype("<u8").tobytes()
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks), "<u8").reshape(-1, 2)
