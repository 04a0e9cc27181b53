"""Noise on labels: the label holder randomises them once, and learns from those alone.

A label of K classes is kept by chance p = e^eps / (e^eps + K - 1), else one of the others is noted,
all alike (Warner, 1965; Ghazi et al., 2021). A number is clipped to ``label-range`` [a, b] and gets
noise of two-sided geometric distribution on a grid, which is Laplace noise of scale (b - a) / eps.
Either is (eps, 0)-differentially private, and all that follows is post-processing: any system,
codec, schedule and number of epochs, and the model itself. `models.losses.Loss` learns through it.

A label has one draw. The noise of a person's label follows from a secret, the person's id, the
label and the mechanism: epsilon, the names of the classes or the range of the numbers, and the name
of the label column. So no other row, no order of rows or classes and no file name has a part in it.
A label that has changed, or another mechanism, is another draw. `draws` keeps account of them.

Rows without ids have nothing to be known by. Their noise follows from all labels in their order.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels, kept_share
from vfl_flower.protocol.privacy.draws import SHIPPED, Draws, Spent, Tags, opened, path_of_draws
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.ledger import EVERYONE, Guarantee, Ledger, Released, check_range

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_GRID = 1024  # steps of a number's range
_NO_TAGS = np.zeros(0, np.uint64)
_MOST = 30.0  # epsilon, at which chances of 2**-53 still tell

GUARANTEE = Guarantee(
    "labels of the training rows",
    "one person's label is changed in all runs; which persons there are, and whether a person's "
    "label is that of an earlier run, is public",
    EVERYONE,
)


class LabelLedger(Ledger):
    """Noise on labels: the sum over all draws of a person's label, of the largest such sum."""

    noise_on = "labels"

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self._spent: float | None = None
        self._digest = ""  # of the labels with noise

    @classmethod
    def check(cls, config: RunConfig, estimator: Released) -> None:
        """Raise `ConfigError` if keys of privacy contradict each other, or the target."""
        privacy = config.privacy
        if privacy.epsilon is None:
            raise ConfigError("privacy = 'labels' needs a budget: give epsilon, such as 1.0.")
        if privacy.delta is not None or privacy.noise_multiplier is not None:
            raise ConfigError(
                "privacy = 'labels' follows from epsilon alone, with a delta of 0: leave delta and "
                "noise-multiplier out."
            )
        if privacy.epsilon > _MOST:
            raise ConfigError(
                f"epsilon = {privacy.epsilon:g} hides no label: with privacy = 'labels' give at "
                f"most {_MOST:g}."
            )
        check_range(config)

    def labels(self, labels: Labels) -> Labels:
        """Return the labels with noise; their draws are on the disk before."""
        config, rows = self.config, _Rows.of(labels)
        if config.privacy.noise_seed >= 0:
            words, _ = _words(config, labels, rows, str(config.privacy.noise_seed).encode())
        else:
            with opened() as draws:
                whole = b"" if rows.people is not None else f"|{labels.whole}".encode()
                words, tags = _words(config, labels, rows, draws.secret + whole)
                spent = _counted(config, labels, rows, tags, draws)
                if config.running.resume and draws.added:
                    raise _other_noise()  # before it is on the disk
            self._spent = spent.epsilon
            _tell(spent, config, labels)
        noisy = _noisy(config, labels, rows, words)
        self._digest = hashlib.sha256(noisy.train.tobytes()).hexdigest()
        return noisy

    def keep_journal(self, path: Path, run: str = "", mark: Mark | None = None) -> None:
        """Nothing is released but once: only see that this was the same then."""
        if mark is not None and list(mark) != list(self.journal_mark()):
            raise _other_noise()

    def journal_mark(self) -> Mark:
        """The labels with noise."""
        return 0, self._digest

    def figures(self) -> dict[str, Any]:
        """Return the largest sum over a label's draws; empty where noise can be repeated."""
        if self._spent is None:
            return super().figures()
        return {**super().figures(), "epsilon": self._spent, "delta": 0.0, **GUARANTEE.figures()}


def _other_noise() -> ConfigError:
    return ConfigError(
        "The noise on these labels is not that of the run to resume: put back the file of then at "
        f"{path_of_draws()}, or begin a new run."
    )


def randomised(config: RunConfig, labels: Labels, secret: bytes) -> Labels:
    """Return the labels with the noise that follows from a secret."""
    rows = _Rows.of(labels)
    return _noisy(config, labels, rows, _words(config, labels, rows, secret)[0])


@dataclass(frozen=True)
class _Rows:
    """The training rows and then the validation rows.

    labels : as `Labels.train`, [N].
    places : their numbers in the data set, [N].
    people : numbers of their ids, [N], if they have ids.
    """

    labels: NDArray[Any]
    places: NDArray[Any]
    people: Tags | None

    @classmethod
    def of(cls, labels: Labels) -> _Rows:
        """The rows whose labels get noise."""
        until = labels.validation
        places = np.arange(len(labels.train)) if labels.places is None else labels.places
        if until:
            assert labels.test_places is not None
            places = np.concatenate([places, labels.test_places[:until]])
        people = labels.people
        return cls(
            np.concatenate([labels.train, labels.test[:until]]),
            places,
            people and np.concatenate([people[0], people[1][:until]]),
        )


def _noisy(config: RunConfig, labels: Labels, rows: _Rows, words: NDArray[np.uint64]) -> Labels:
    """The labels with noise; validation rows get it too, since they choose the model."""
    privacy = config.privacy
    assert privacy.epsilon is not None
    if labels.classes:
        order = np.arange(len(labels.classes))
        if rows.people is not None:  # the order of names, which is the same in all data sets
            texts = [_text(name) for name in labels.classes]
            order = np.array(sorted(order, key=texts.__getitem__))
        noisy = _classes(rows.labels, order, words, kept_share(privacy, len(labels.classes)))
    else:
        noisy = _numbers(labels, rows.labels, words, privacy.epsilon)
    train, validation = np.split(noisy, [len(labels.train)])
    test = np.concatenate([validation, labels.test[labels.validation :]])
    return replace(labels, train=train, test=test)


def _classes(
    labels: NDArray[Any], order: NDArray[Any], bits: NDArray[np.uint64], kept: float
) -> NDArray[Any]:
    """Randomised response by two random words [N, 2]: the second one chooses along an order."""
    chance = (bits[:, 0] >> np.uint64(11)) * 2.0**-53
    shift = 1 + (bits[:, 1] % np.uint64(len(order) - 1)).astype(np.int64)
    other = order[(np.argsort(order)[labels] + shift) % len(order)]
    return np.where(chance < kept, labels, other)


def _numbers(
    labels: Labels, values: NDArray[Any], bits: NDArray[np.uint64], epsilon: float
) -> NDArray[Any]:
    """Discrete Laplace noise on the clipped numbers; they are standardised by what is public."""
    assert labels.bounds is not None
    low, high = labels.bounds
    uniform = ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # above 0, at most 1
    geometric = np.floor(-np.log(uniform) * _GRID / epsilon)
    on_grid = _on_grid(labels, values) + geometric[:, 0] - geometric[:, 1]
    noisy = low + (high - low) / _GRID * on_grid
    scaled: NDArray[Any] = ((noisy - labels.mean) / labels.deviation).astype(np.float32)
    return scaled


def _on_grid(labels: Labels, values: NDArray[Any]) -> NDArray[Any]:
    """Standardised numbers, clipped, in steps of the grid: 0 to `_GRID`."""
    assert labels.bounds is not None
    low, high = labels.bounds
    true = values.astype(np.float64) * labels.deviation + labels.mean
    steps: NDArray[Any] = np.rint((np.clip(true, low, high) - low) / ((high - low) / _GRID))
    return steps


# --- from what the noise follows ----------------------------------------------------------------


def _words(
    config: RunConfig, labels: Labels, rows: _Rows, secret: bytes
) -> tuple[NDArray[np.uint64], Tags]:
    """Two random words for each row [N, 2]; and of people a keyed hash of each draw [N].

    A person's follow from the secret, the mechanism, the id and the label, and nothing else.
    """
    mechanism = _mechanism(config, labels)
    if rows.people is None:
        key = hashlib.sha256(secret + f"|{mechanism}".encode()).digest()
        until = int(rows.places.max()) + 1
        stream = hashlib.shake_256(key).digest(16 * until)
        return np.frombuffer(stream, "<u8").reshape(until, 2)[rows.places], _NO_TAGS
    if labels.classes:
        texts, which = [_text(name) for name in labels.classes], rows.labels
    else:
        values, which = np.unique(_on_grid(labels, rows.labels), return_inverse=True)
        texts = [f"{value:.0f}" for value in values]
    found = np.empty((len(which), 4), np.uint64)
    by_label = np.argsort(which, kind="stable")
    ends = np.cumsum(np.bincount(which, minlength=len(texts)))[:-1]
    for text, some in zip(texts, np.split(by_label, ends), strict=True):
        key = _key(secret, f"{mechanism}|{text}")
        found[some, :2] = _ciphered(key, rows.people[some], 0)
        found[some, 2:] = _ciphered(key, rows.people[some], 1)
    return found[:, :2], found[:, 2]


def _mechanism(config: RunConfig, labels: Labels) -> str:
    """All that says how a label is drawn."""
    epsilon = config.privacy.epsilon
    if labels.people is None:
        return f"{epsilon!r}|{config.data.label_range}|{len(labels.classes)}"
    values = sorted(map(_text, labels.classes)) or labels.bounds
    return json.dumps([epsilon, config.data.label, values])


def _text(name: bool | int | float | str) -> str:
    """The name of a class, the same whether a file holds 1, 1.0 or a text."""
    whole = isinstance(name, float) and name.is_integer()
    return str(int(name) if whole else name)


def _key(secret: bytes, what: str) -> bytes:
    """A key of AES-256 for one use of the secret."""
    return hashlib.blake2b(what.encode(), key=secret, digest_size=32).digest()


def _ciphered(key: bytes, people: Tags, number: int) -> NDArray[np.uint64]:
    """Two random words for each person, by a key and a number: [N, 2].

    A block of a cipher is as good as a random function where no block comes twice.
    """
    blocks = np.stack([people, np.full_like(people, number)], axis=1).astype("<u8").tobytes()
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks), "<u8").reshape(-1, 2)


# --- what was spent -----------------------------------------------------------------------------


def _counted(config: RunConfig, labels: Labels, rows: _Rows, tags: Tags, draws: Draws) -> Spent:
    """Count the draws of these labels, those that are new; what the labels have spent."""
    epsilon = config.privacy.epsilon
    assert epsilon is not None
    if rows.people is None:
        named = config.data.dataset if config.data.dataset in SHIPPED else ""
        return draws.add_whole(labels.whole, named, _mechanism(config, labels), epsilon)
    people = _ciphered(_key(draws.secret, "people"), rows.people, 0)[:, 0]
    return draws.add_people(people, tags, epsilon)


def _tell(spent: Spent, config: RunConfig, labels: Labels) -> None:
    """Say where draws are kept; and of what epsilon is the sum, if there was more than one."""
    path = path_of_draws()
    log.info("Noise on labels is drawn once; the draw is kept in %s", path)
    if spent.epsilon <= (config.privacy.epsilon or 0.0):
        return
    with_ids = "draws of one person's label, all values and epsilons that it has had"
    without = "draws of labels without ids, which could be anybody's"
    own, unknown = (without, with_ids) if labels.people is None else (with_ids, without)
    if labels.people is None and config.data.dataset in SHIPPED:
        own = "draws of these labels"
    parts = {own: spent.own, unknown: spent.unknown, "draws that are lost": spent.lost}
    notice.warning(
        "epsilon is %g in all: %s (%s).",
        spent.epsilon,
        ", ".join(f"{part:g} by {words}" for words, part in parts.items() if part),
        path,
    )
