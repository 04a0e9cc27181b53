"""Try to refute the epsilon that a run claims: canaries of the privacy audit.

A game has two worlds, which differ in one label, or in one record's features. The attacker plays
all parties, or the label holder, and gives a score to what it saw of the other side. How well the
scores tell the worlds apart bounds epsilon from below (Jagielski et al., 2020). A bound above the
claim refutes the claim. A lower bound proves nothing, so tests also play each game without noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import ArrayBlock
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.party.party import Party
from vfl_flower.protocol import estimators
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.ends import Arrival, Reading
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.embeddings import PerturbedEmbeddings
from vfl_flower.protocol.privacy.gaussian import epsilon_of
from vfl_flower.protocol.privacy.labels import Randomised, RandomisedLabels
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of
from vfl_flower.protocol.privacy.noise import ScalarNoise, grid_step
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.privacy.scalars import NoisyScalars, ScalarAccountant
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import sized
from vfl_flower.transport.messages import EmbedOrder, RejoinOrder, TrainOrder

Scores = NDArray[np.float64]

CONFIDENCE = 0.975  # that a bound holds

_PARTIES = 2
_FAR = 2000.0  # size of the embedding that marks the record
_PASSES = 4  # over all rows, with scalars by both parties
_SLOW = 1e-4  # rate at which noise hardly moves the top model, so that the mark stays extreme
_TWO_CLASSES = {  # sent whole, whatever the audited run does with its labels and messages
    **{"target": "classification", "label-range": "", "class-weights": "", "combine": "concat"},
    **{"codec": "identity", "sampling": "shuffle"},
}


@dataclass(frozen=True)
class Canary:
    """The epsilon that a run claims, and the lower bound that a game shows."""

    claimed: float
    shown: float
    delta: float
    trials: int
    at_most: float | None = None  # upper end of the interval, if the game has one


def canary(config: RunConfig) -> Canary | None:
    """Play the game of the configured mechanism; return None if it claims no epsilon."""
    mechanism = mechanism_of(config)
    games: dict[type[Mechanism], Callable[[RunConfig], Canary]] = {
        RandomisedLabels: of_labels,
        NoisyScalars: of_scalars,
        PerturbedEmbeddings: of_embeddings,
    }
    game = games.get(type(mechanism))
    return game(config) if game and mechanism.claims else None


def shown_at_least(
    one: Scores, other: Scores, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound of epsilon, from the scores [T] or [T, K] of both worlds.

    One half of the scores chooses the event that tells the worlds apart best: one score is above or
    below a threshold. The other half bounds the event's frequency in each world (Clopper-Pearson).
    """
    scores = [each.reshape(len(each), -1) for each in (one, other)]
    chosen, rest = zip(*(np.array_split(each, 2) for each in scores), strict=True)
    best, event = -1.0, (0, 0.0, 0)
    for kind in range(scores[0].shape[1]):
        known = np.concatenate([each[:, kind] for each in chosen])
        for threshold in np.unique(np.quantile(known, np.linspace(0.01, 0.99, 99))):
            for way in range(4):
                candidate = kind, float(threshold), way
                found = _tells(chosen[0], chosen[1], candidate, delta, confidence)
                if found > best:
                    best, event = found, candidate
    return max(0.0, _tells(rest[0], rest[1], event, delta, confidence))


def _tells(
    one: Scores, other: Scores, event: tuple[int, float, int], delta: float, confidence: float
) -> float:
    """Return the bound by how often an event happens in each world."""
    kind, threshold, way = event
    above = [int((each[:, kind] > threshold).sum()) for each in (one, other)]
    below = [len(one) - each for each in above]
    hits, alarms = (above, above[::-1], below, below[::-1])[way]
    return _bound(hits, alarms, len(one), delta, confidence)


def _bound(hits: int, alarms: int, trials: int, delta: float, confidence: float) -> float:
    """Return log((p - delta) / q), for the least p and greatest q of these counts."""
    from scipy.stats import beta

    level = (1 + confidence) / 2  # for each of the two bounds
    least = beta.ppf(1 - level, hits, trials - hits + 1) if hits else 0.0
    most = beta.ppf(level, alarms + 1, trials - alarms) if alarms < trials else 1.0
    return math.log((least - delta) / most) if least > delta else -math.inf


# --- labels: an attacker reads the answers to designed queries ------------------------------------


def of_labels(
    config: RunConfig,
    rows: int = 4000,
    runs: int = 3,
    confidence: float = CONFIDENCE,
    anew: bool = False,
) -> Canary:
    """Play the game of noise on labels: each row is one game, with independent noise.

    A party uploads embeddings of zero in several runs. The signs of the answers reveal the noisy
    label. Tests draw the noise of each run ``anew``, to win the game.
    """
    small = config.with_values(
        {
            **{**_TWO_CLASSES, "estimator": "first-order", "labels": "private", "perturbs": "each"},
            **{"downlink-codec": "identity", "top-model": "sum", "embedding-size": 1},
            "batch-size": rows,
        }
    )
    assert small.privacy.epsilon is not None
    scores: list[Scores] = []
    for world in (0, 1):
        label = np.full(rows, world)
        labels, key = Labels(label, np.array([0, 1]), (0, 1), ""), secrets.token_bytes(32)
        answers = []
        for _ in range(runs):
            key = secrets.token_bytes(32) if anew else key
            sizes = dict.fromkeys(range(_PARTIES), 1)
            holder = LabelHolder(small, Randomised(small, labels, key).labels(), sizes)
            window = sampling_of(small, rows).window(None, 0, 0, 1, b"")
            nothing = Reading(torch.zeros(rows, 1), ())
            both = [Arrival(each, window, True, nothing, window) for each in (0, 1)]
            answer = holder.answer(both)
            answers.append(-answer[0]["gradient"][:, 0].astype(np.float64) * rows)
        scores.append(np.mean(answers, 0))
    shown = shown_at_least(scores[1], scores[0], 0.0, confidence)
    return Canary(small.privacy.epsilon, shown, 0.0, rows)


# --- scalars: an attacker knows the hidden values of both worlds ---------------------------------


def of_scalars(
    config: RunConfig,
    plays: int = 40,
    noise: Callable[[RunConfig, float], ScalarNoise] | None = None,
    confidence: float = CONFIDENCE,
) -> Canary:
    """Play the game of noisy scalars: find the label of record 0.

    Both parties mark the record with an extreme embedding, so that its label moves each scalar and
    each step of the top model as far as the clip allows. A twin lives in the other world, and sends
    what the label holder has sent. So the attacker knows what the noise hides in each world,
    whatever was sent before. Its score is the likelihood ratio, which no attack exceeds. It shows
    mu: the distance of the hidden values over the deviation of the noise along their difference.
    Tests replace the accountant's ``noise``, to win the game.
    """
    from scipy.stats import chi2

    rows, batch = 256, 64
    together = config.estimator.perturbs == "all" or config.schedule.quorum not in (None, 1)
    small = config.with_values(
        {
            **{**_TWO_CLASSES, "subsets": "off", "top-model": "linear", "embedding-size": 2},
            **{"calibration": "known", "max-delay": 0, "optimizer": "sgd", "server-lr": _SLOW},
            "epochs": _PASSES // (1 if together else _PARTIES),
            "quorum": _PARTIES if together else 1,
            "batch-size": batch,
        }
    )
    base = (np.arange(rows) % 4 == 1).astype(np.int64)
    apart, errors = np.zeros(plays), []
    for play in range(plays):
        first, twin = (
            _label_holder(small, Labels(label, np.array([0, 1]), (0, 1), ""), noise)
            for label in (np.append(world, base[1:]) for world in (play % 2, 1 - play % 2))
        )
        twin[1].secret = first[1].secret  # of directions, which the attacker knows
        seen = _Seen(*first)
        other = _Seen(*twin, seen)
        _play(first[0], (first[1], twin[1]), rows, batch)
        for sent, mine, theirs in zip(seen.sent, seen.hidden, other.hidden, strict=True):
            if far := float(np.linalg.norm(theirs - mine)):
                apart[play] += far**2
                errors.append((sent - mine) @ (theirs - mine) / far)
    figures = first[0].accountant.figures()
    claimed, delta = figures["epsilon"] or math.inf, figures["delta"] or 0.0
    ends = chi2.ppf([1 - confidence, confidence], len(errors)) / np.square(errors).sum()
    shown, at_most = (epsilon_of(float(mu), delta) for mu in np.sqrt(apart.mean() * ends))
    return Canary(claimed, shown, delta, plays, at_most)


class _Seen:
    """Releases of a label holder: what its noise hides, and what is sent, over the claimed noise.

    A twin sends the releases of the ``first`` label holder.
    """

    def __init__(self, log: ReleaseLog, holder: LabelHolder, first: _Seen | None = None) -> None:
        assert holder.noise is not None and isinstance(log.accountant, ScalarAccountant)
        noise, privacy = holder.noise, holder.config.privacy
        self.hidden: list[Scores] = []
        self.sent: list[Scores] = []
        self._raw: list[Any] = []
        self._first = first
        clips = {"added_to": privacy.clip, "added_to_gradients": privacy.top_clip}
        for name, clip in clips.items():
            claimed = log.accountant.multiplier * clip
            setattr(noise, name, partial(self._add, getattr(noise, name), claimed))

    def _add(self, add: Callable[..., Any], scale: float, values: Any, divisors: Any) -> Any:
        sent = self._first._raw[len(self._raw)] if self._first else add(values, divisors)
        self._raw.append(sent)
        over = np.asarray(divisors) / scale
        self.hidden.append(_flat(values) * over)
        self.sent.append(_flat(sent) * over)
        return sent


def _flat(values: Tensor | Sequence[Tensor]) -> Scores:
    parts = [values] if isinstance(values, Tensor) else values
    return torch.cat([each.reshape(-1).double() for each in parts]).numpy()


def _play(releases: ReleaseLog, holders: Sequence[LabelHolder], rows: int, batch: int) -> None:
    """Have the label holders answer mini-batches with and without record 0.

    Scalars of mini-batches without it show whether the top model has learned its label unnoticed.
    """
    together = holders[0].config.schedule.quorum == _PARTIES

    def ask(number: int, window: Window, centre: list[float], away: list[float]) -> None:
        """Ask for these rows' scalars; record 0 lies at the centre, others at 0."""
        at = torch.tensor(centre).repeat(len(window.ids), 1)
        at[torch.from_numpy(window.ids > 0)] = 0.0
        pair = at + torch.tensor(away), at - torch.tensor(away)
        parties = range(_PARTIES) if together else [number % _PARTIES]
        allowed = releases.permits_answers([(party, window) for party in parties])
        for holder in holders:
            for party in parties:
                holder.table.write(party, window, at)
            if allowed:
                reading = Reading(at, pair)
                holder.answer(
                    [Arrival(party, window, together, reading, window) for party in parties]
                )

    for holder in holders:
        with torch.no_grad():  # it predicts along the second dimension; the mark is along the first
            next(holder.top.parameters()).copy_(torch.tensor([[0.0, 1.0] * _PARTIES]))
    ids = np.arange(rows, dtype=np.int32)
    marked = Window(ids[:batch], np.array([batch], np.int32), distinct=True)
    others = Window(ids[batch:], np.full(rows // batch - 1, batch, np.int32), distinct=True)
    for number in range(_PASSES):
        ask(number, marked, [_FAR, 0.0], [0.0, _FAR])
        ask(number, others, [0.0, 0.0], [_FAR, 0.0])


# --- embeddings: the label holder tells two records' features apart ------------------------------


def of_embeddings(
    config: RunConfig, rows: int = 4000, uploads: int = 4, confidence: float = CONFIDENCE
) -> Canary:
    """Play the game of noisy embeddings: find a record's features by its uploads.

    Each row is one game. Its embedding lies at the bound R, at -R, or between. The attacker plays
    the label holder: it orders a window, asks for fresh embeddings of the same rows, and drops
    both. Its scores are the sum of a row's embeddings, and how many are off the grid of the noise.
    """
    config = sized(config, rows)
    small = config.with_values(
        {
            **{"bottom-model": "linear", "embedding-size": 1, "embedding-activation": "none"},
            **{"codec": "identity", "compression": "direct", "max-delay": 0},
            **{"sampling": "shuffle", "batch-size": rows},
            "epochs": max(uploads, config.training.epochs),
        }
    )
    bound = small.privacy.embedding_bound
    seen = [_uploaded(small, size * bound, rows, uploads) for size in (1e4, -1e4, 0.3)]
    delta, each = delta_of(small, rows), (1 + confidence) / 2  # of two bounds
    shown = max(shown_at_least(seen[0], other, delta, each) for other in seen[1:])
    return Canary(PerturbedEmbeddings(small).epsilon_of_uploads(rows, uploads), shown, delta, rows)


def _uploaded(config: RunConfig, feature: float, rows: int, uploads: int) -> Scores:
    """Return the scores [T, 2] of the uploads of rows with this single feature."""
    features, ids = np.full((rows, 1), feature, np.float32), np.arange(rows)
    block = ArrayBlock(features, features[:2], "", None, "", ids, ids[:2])
    party = Party(config, 0, 1, 1, block)
    with torch.no_grad():  # the embedding is the feature
        for parameter in party.learner.model.parameters():
            parameter.fill_(parameter.dim() > 1)
    sent: list[Scores] = []
    for epoch in range(-(-uploads // 2)):  # two embeddings in each turn, at least
        number = party.exchange + 1
        train = TrainOrder(exchange=number, epoch=epoch, first=0, steps=1, coordinated=True)
        arrays = party.train(train).arrays
        sent += [arrays[name][:, 0] for name in party.links.up]
        fresh = EmbedOrder(exchange=number + 1, arrays={"ids": ids.astype(np.int32)})
        sent.append(party.embed(fresh).arrays["embedding"][:, 0])
        party.rejoin(RejoinOrder(exchange=number + 2, outputs=1))  # nothing was answered
    numbers = np.array(sent[:uploads], np.float64)
    places = numbers / grid_step(config.privacy.embedding_bound)
    return np.stack([numbers.sum(0), (places != np.rint(places)).sum(0)], 1)


def _label_holder(
    config: RunConfig, labels: Labels, noise: Callable[[RunConfig, float], ScalarNoise] | None
) -> tuple[ReleaseLog, LabelHolder]:
    """Return a label holder of two parties, and the log of what it releases."""
    rows = len(labels.train)
    config = sized(config, rows)
    estimator = estimators.choose(config)(config)
    mechanism = mechanism_of(config)
    accountant = mechanism.accountant(rows, estimator)
    steps = config.training.epochs * -(-rows // config.training.batch_size) * _PARTIES
    quorum = config.schedule.quorum or _PARTIES
    accountant.steps_allowed(steps, _PARTIES, quorum, config.models.top != "sum")
    sizes = dict.fromkeys(range(_PARTIES), config.models.embedding_size or 1)
    added = mechanism.scalar_noise(accountant)
    if noise and added:
        added = noise(config, added.multiplier)
    return ReleaseLog(accountant), LabelHolder(config, labels, sizes, added)
