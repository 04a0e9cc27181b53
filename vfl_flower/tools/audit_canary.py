"""Try to refute the epsilon that a run claims: canaries of the privacy audit.

A game has two worlds, which differ in one label, or in one record's features. In one kind of game
the attacker plays all parties, and sees everything that leaves the label holder. In the other it
plays the label holder, and sees everything that leaves a party. It gives a score to what it saw.
How well the scores tell the worlds apart bounds epsilon from below (Jagielski et al., 2020). A
bound above the claim refutes the claim. A lower bound proves nothing, so the tests also play each
game without noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import ArrayBlock
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.party.party import Party
from vfl_flower.protocol import estimators
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.embeddings import PerturbedEmbeddings
from vfl_flower.protocol.privacy.labels import RandomisedLabels
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of
from vfl_flower.protocol.privacy.noise import ScalarNoise, grid_step
from vfl_flower.protocol.privacy.randomise import Randomised
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.privacy.scalars import NoisyScalars
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import sized
from vfl_flower.protocol.uploads import Arrival, Reading
from vfl_flower.transport.messages import EmbedOrder, RejoinOrder, TrainOrder

Scores = NDArray[np.float64]

CONFIDENCE = 0.975  # that a bound holds

_PARTIES = 2
_FAR = 2000.0  # size of the embedding that marks the record
_PASSES = 12  # over all rows; the scalars of rows without the record reveal the model


@dataclass(frozen=True)
class Canary:
    """The epsilon that a run claims, and the lower bound that a game shows."""

    claimed: float
    shown: float
    delta: float
    trials: int


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
    label.

    Parameters
    ----------
    anew : whether each run draws its noise anew. The tests use it to win the game.
    """
    small = config.with_values(
        {
            "estimator": "first-order",
            "labels": "private",
            "perturbs": "each",
            "target": "classification",
            "label-range": "",
            "codec": "identity",
            "downlink-codec": "identity",
            "top-model": "sum",
            "combine": "concat",
            "class-weights": "",
            "batch-size": rows,
            "sampling": "shuffle",
            "embedding-size": 1,
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


# --- scalars: an attacker asks for scalars of rows without the record -----------------------------


def of_scalars(
    config: RunConfig,
    trials: int = 400,
    noise: ScalarNoise | None = None,
    confidence: float = CONFIDENCE,
) -> Canary:
    """Play the game of noisy scalars: find the label of record 0.

    Both parties mark the record with an extreme embedding, so that its label moves the top model.
    Scalars of other mini-batches along that mark then reveal the model. Parties take turns, or step
    together if the configuration says so.

    Parameters
    ----------
    noise : replaces the accountant's noise. The tests use it to win the game.
    """
    rows, batch = 256, 64
    together = config.estimator.perturbs == "all" or config.schedule.quorum not in (None, 1)
    small = config.with_values(
        {
            "target": "classification",
            "label-range": "",
            "codec": "identity",
            "top-model": "linear",
            "combine": "concat",
            "class-weights": "",
            "batch-size": batch,
            "epochs": _PASSES // (1 if together else _PARTIES),
            "embedding-size": 2,
            "quorum": _PARTIES if together else 1,
            "sampling": "shuffle",
            "calibration": "known",
            "max-delay": 0,
            "server-lr": 1.0,
        }
    )
    base = np.arange(rows) % 4 == 1  # one class is more frequent, as an attacker knows
    worlds: list[list[tuple[float, ...]]] = [[], []]
    claimed, delta = 0.0, 0.0
    for _ in range(trials):
        for world, scores in enumerate(worlds):
            label = base.astype(np.int64)
            label[0] = world
            labels = Labels(label, np.array([0, 1]), (0, 1), "")
            releases, holder = _label_holder(small, labels, noise)
            scores.append(_played(releases, holder, rows, batch))
            figures = releases.accountant.figures()
            claimed, delta = figures["epsilon"] or math.inf, figures["delta"] or 0.0
    shown = shown_at_least(np.array(worlds[1]), np.array(worlds[0]), delta, confidence)
    return Canary(claimed, shown, delta, trials)


def _played(
    releases: ReleaseLog, holder: LabelHolder, rows: int, batch: int
) -> tuple[float, float, float]:
    """Return scores of record 0's scalars, of the other scalars, and of both."""
    together = holder.config.schedule.quorum == _PARTIES

    def ask(number: int, window: Window, centre: list[float], away: list[float]) -> float:
        """Return the sum of these rows' scalars; record 0 lies at the centre, others at 0."""
        at = torch.tensor(centre).repeat(len(window.ids), 1)
        at[torch.from_numpy(window.ids > 0)] = 0.0
        pair = at + torch.tensor(away), at - torch.tensor(away)
        parties = range(_PARTIES) if together else [number % _PARTIES]
        for party in parties:
            holder.table.write(party, window, at)
        if not releases.answered([(party, window) for party in parties]):
            return 0.0
        answers = holder.answer(
            [Arrival(party, window, together, Reading(at, pair), window) for party in parties]
        )
        return float(sum(answer["difference"].sum() for answer in answers.values()))

    with torch.no_grad():  # it predicts along the second dimension; the mark is along the first
        next(holder.top.parameters()).copy_(torch.tensor([[0.0, 1.0] * _PARTIES]))
    ids = np.arange(rows, dtype=np.int32)
    marked = Window(ids[:batch], np.array([batch], np.int32), distinct=True)
    others = Window(ids[batch:], np.full(rows // batch - 1, batch, np.int32), distinct=True)
    told = probed = 0.0
    for number in range(_PASSES):
        told -= ask(number, marked, [_FAR, 0.0], [0.0, _FAR])
        probed += ask(number, others, [0.0, 0.0], [5.0, 0.0])
    return told, probed, told + probed / len(others.lengths) ** 0.5


# --- embeddings: the label holder tells two records' features apart ------------------------------


def of_embeddings(
    config: RunConfig, rows: int = 4000, uploads: int = 4, confidence: float = CONFIDENCE
) -> Canary:
    """Play the game of noisy embeddings: find a record's features by its uploads.

    Each row is one game. Its embedding lies at the bound R, at -R, or between. The attacker plays
    the label holder: it orders a window, asks for fresh embeddings of the same rows, and drops
    both. Its scores are the sum of a row's embeddings, and how many are off the grid of the noise.
    Fresh and zeroth-order embeddings have no gradients.

    Parameters
    ----------
    uploads : embeddings of a row. A zeroth-order upload has two of them.
    """
    config = sized(config, rows)
    small = config.with_values(
        {
            "bottom-model": "linear",
            "embedding-size": 1,
            "embedding-activation": "none",
            "codec": "identity",
            "compression": "direct",
            "max-delay": 0,
            "epochs": max(uploads, config.training.epochs),
            "batch-size": rows,
            "sampling": "shuffle",
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
    config: RunConfig, labels: Labels, noise: ScalarNoise | None = None
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
    size = config.models.embedding_size or 1
    sizes = dict.fromkeys(range(_PARTIES), size)
    holder = LabelHolder(config, labels, sizes, noise or mechanism.scalar_noise(accountant))
    return ReleaseLog(accountant), holder
