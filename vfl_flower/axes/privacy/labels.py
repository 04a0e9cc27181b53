"""Noise on labels: the label holder randomises them once, and learns from those alone.

A label of K classes is kept by chance p = e^eps / (e^eps + K - 1), else one of the others is noted,
all alike (Warner, 1965; Ghazi et al., 2021). A number is clipped to ``label-range`` [a, b] and gets
noise of two-sided geometric distribution on a grid, which is Laplace noise of scale (b - a) / eps.
Either is (eps, 0)-differentially private, and all that follows is post-processing: any system,
codec, schedule and number of epochs, and the model itself. `models.losses.Loss` learns through it.

The noise is drawn once for a data set: it follows from a secret in a file of the label holder's,
with the ids and labels of all its rows, so that every run on them, and on any part of them, has the
same. Another epsilon is another draw of the same labels, and so are labels that have changed. The
file has each that was made, and what all of one data set have spent is what is claimed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.axes.privacy.journal import Mark
from vfl_flower.axes.privacy.ledger import (
    EVERYONE,
    Guarantee,
    Ledger,
    Released,
    check_range,
)
from vfl_flower.config import RunConfig
from vfl_flower.data.labels import Labels, kept_share
from vfl_flower.errors import ConfigError
from vfl_flower.files import alone_in, make_folder, told, unsealed, write_sealed
from vfl_flower.flower_internals import lasting_home

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_GRID = 1024  # steps of a number's range
_MOST = 30.0  # epsilon, at which chances of 2**-53 still tell

GUARANTEE = Guarantee(
    "labels of the training rows",
    "one person's label is changed; which persons there are is public",
    EVERYONE,
)


class LabelLedger(Ledger):
    """Noise on labels: what all draws for these labels have spent."""

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
        """The labels with noise; that it is drawn is on the disk before."""
        config, epsilon = self.config, self.config.privacy.epsilon
        assert epsilon is not None  # which `check` sees to
        what = f"{epsilon!r}|{config.data.label_range}|{len(labels.classes)}"
        if config.privacy.noise_seed >= 0:
            key = f"{config.privacy.noise_seed}|{what}".encode()
        else:
            secret, self._spent = _drawn(labels.whole, _name(config), what, epsilon)
            key = secret + f"|{labels.whole}|{what}".encode()
        noisy = randomised(config, labels, key)
        self._digest = hashlib.sha256(noisy.train.tobytes()).hexdigest()
        return noisy

    def keep_journal(self, path: Path, run: str = "", mark: Mark | None = None) -> None:
        """Nothing is released but once: only see that this was the same then."""
        if mark is not None and list(mark) != list(self.journal_mark()):
            raise ConfigError(
                "The noise on these labels is not that of the run to resume: put back the file of "
                f"then at {_path()}, or begin a new run."
            )

    def journal_mark(self) -> Mark:
        """The labels with noise."""
        return 0, self._digest

    def figures(self) -> dict[str, Any]:
        """What all draws for these labels have spent; empty where noise can be repeated."""
        if self._spent is None:
            return super().figures()
        return {**super().figures(), "epsilon": self._spent, "delta": 0.0, **GUARANTEE.figures()}


def randomised(config: RunConfig, labels: Labels, key: bytes) -> Labels:
    """The labels with the noise that follows from a key, row by row of the whole data set.

    Those of validation rows get it too, since by them the model is chosen.
    """
    privacy = config.privacy
    assert privacy.epsilon is not None
    places = np.arange(len(labels.train)) if labels.places is None else labels.places
    validation = labels.test[: labels.validation]
    if labels.validation:
        assert labels.test_places is not None
        places = np.concatenate([places, labels.test_places[: labels.validation]])
    bits = _bits(key, int(places.max()) + 1)[places]
    true = replace(labels, train=np.concatenate([labels.train, validation]))
    if labels.classes:
        noisy = _classes(true, bits, kept_share(privacy, len(labels.classes)))
    else:
        noisy = _numbers(true, bits, privacy.epsilon)
    train, validation = np.split(noisy, [len(labels.train)])
    test = np.concatenate([validation, labels.test[labels.validation :]])
    return replace(labels, train=train, test=test)


def _classes(labels: Labels, bits: NDArray[np.uint64], kept: float) -> NDArray[Any]:
    """Randomised response, by two random words for each row."""
    chance = (bits[:, 0] >> np.uint64(11)) * 2.0**-53
    shift = 1 + (bits[:, 1] % np.uint64(len(labels.classes) - 1)).astype(np.int64)
    other = (labels.train + shift) % len(labels.classes)
    return np.where(chance < kept, labels.train, other)


def _numbers(labels: Labels, bits: NDArray[np.uint64], epsilon: float) -> NDArray[Any]:
    """Discrete Laplace noise on the clipped numbers; they are standardised by what is public."""
    assert labels.bounds is not None
    low, high = labels.bounds
    step = (high - low) / _GRID
    true = labels.train.astype(np.float64) * labels.deviation + labels.mean
    on_grid = np.rint((np.clip(true, low, high) - low) / step)
    uniform = ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # above 0, at most 1
    geometric = np.floor(-np.log(uniform) * _GRID / epsilon)
    noisy = low + step * (on_grid + geometric[:, 0] - geometric[:, 1])
    scaled: NDArray[Any] = ((noisy - labels.mean) / labels.deviation).astype(np.float32)
    return scaled


def _bits(key: bytes, rows: int) -> NDArray[np.uint64]:
    """Random words, two for each row, that nobody can tell from others without the key."""
    stream = hashlib.shake_256(hashlib.sha256(key).digest()).digest(16 * rows)
    return np.frombuffer(stream, "<u8").reshape(rows, 2)


# --- what was drawn -----------------------------------------------------------------------------


def _path() -> Path:
    return lasting_home() / "labels.draws"


def _drawn(whole: str, named: str, what: str, epsilon: float) -> tuple[bytes, float]:
    """The secret of all noise on labels; and epsilon of all draws of these labels, with this one.

    Draws are of the same labels if these are equal; or if they have the same name, since of a file
    that has changed between, rows may be the same; and so on, from draw to draw.

    Raises
    ------
    VflError
        If the file is damaged, or cannot be written.
    """
    path = _path()
    with told(path):
        make_folder(path.parent)
        with alone_in(path.parent):
            kept: dict[str, Any] = {"secret": secrets.token_hex(32), "draws": []}
            if path.exists():
                kept = json.loads(unsealed(path))
            if [whole, named, what, epsilon] not in kept["draws"]:
                kept["draws"].append([whole, named, what, epsilon])
                write_sealed(path, json.dumps(kept).encode())
    labels, names, before = {whole}, {named}, 0
    while len(labels) + len(names) > before:
        before = len(labels) + len(names)
        for of, name, *_ in kept["draws"]:
            if of in labels or name in names:
                labels.add(of)
                names.add(name)
    same = {(of, kind, spent) for of, _, kind, spent in kept["draws"] if of in labels}
    each = [spent for *_, spent in sorted(same)]
    log.info("Noise on labels, epsilon = %g, is drawn once; the draw is kept in %s", epsilon, path)
    if len(each) > 1:
        notice.info(
            "Of these labels, or of others by the same name, %d draws were made: epsilon is %s = "
            "%g (%s).",
            len(each),
            " + ".join(f"{spent:g}" for spent in each),
            sum(each),
            path,
        )
    return bytes.fromhex(kept["secret"]), sum(each)


def _name(config: RunConfig) -> str:
    """What a data set is called: its path, whatever column of it; or that it is in memory."""
    kind, _, place = config.data.dataset.partition(":")
    if kind == "memory":  # where nobody can say whose rows they are
        return kind
    return str(Path(place).expanduser().resolve()) if place else kind
