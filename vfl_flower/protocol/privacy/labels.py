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
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.plugins import LOSSES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import LabelNoise, Labels
from vfl_flower.protocol.privacy.accountant import EVERYONE, Accountant, Guarantee, Released
from vfl_flower.protocol.privacy.draws import SHIPPED, Draws, Spent, Tags, opened, path_of_draws
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.mechanism import Mechanism
from vfl_flower.protocol.privacy.release_log import ReleaseLog

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
        """Return p of `kept_share`; 1 for numbers."""
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
    """Hold the most epsilon ``spent`` on one person's label; None if a seed repeats the noise."""

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

    Chance p keeps a label, and q makes it each other one. A share s of a label among equal rows
    becomes q + (p - q) s, so noise leaves (p - q)^2 N rows.
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


Words = NDArray[np.uint64]  # two random words for each row, [N, 2]

_GRID = 1024  # number of grid steps in the range of a number


def kept_share(epsilon: float, classes: int) -> float:
    """Return the probability to keep a label of K classes, e^eps / (e^eps + K - 1)."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


class Randomised:
    """One draw of labels, also of validation rows, which decide which model is kept.

    For rows without ids, the secret contains a digest of all labels.
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
        """Return noisy labels of all rows but test rows, unless these are training rows."""
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
        return ((noisy - labels.mean) / labels.deviation).astype(np.float32)

    def _on_grid(self) -> NDArray[Any]:
        """Return standardised numbers, clipped, in steps of the grid: 0 to `_GRID`."""
        labels = self._labels
        assert labels.bounds is not None
        low, high = labels.bounds
        true = self._true.astype(np.float64) * labels.deviation + labels.mean
        return np.rint((np.clip(true, low, high) - low) / ((high - low) / _GRID))

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
    """Return two random words for each person. No input block repeats for one key."""
    blocks = np.stack([people, np.full_like(people, number)], axis=1).astype("<u8").tobytes()
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks), "<u8").reshape(-1, 2)
