"""Contributions to one score: the Shapley values of the participants, for one person.

v(S) is the score of a person from the data of the participants S. A participant's contribution is
the mean, over all orders of the participants, of what it adds to those before it (Shapley, 1953).
So base + sum of contributions = score, with base = v(nobody) and score = v(all).

The scale is the log-odds of a class, log(p / (1 - p)), before calibration, or the unit of the label
under regression. Of two classes, the second one counts. Of more, the predicted one counts.

A model of any subset has its own answer without a party, and with nobody the class shares of
training. Another model needs all parties. There, v(S) is a mean over up to `BACKGROUND` held-out
rows of the run. In each, the participants S show the person, and the others show that row
(interventional Shapley values). The checkpoint has the embeddings of these rows, from the last
evaluation, so nobody asks the parties. No model has a placeholder for the label holder's own
columns. So they show these rows too. Each contribution has a standard error over these rows.
"""

import math
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.data.split import BACKGROUND, background_rows
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.models.top_layers import TopModel
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.parts import standard_errors

EXACT = 10
"""Largest number of players for exact values from all sets. Above, sample random orders."""
ORDERS = 200
"""Number of random orders above that."""
HOLDER = "label holder"
LOG_ODDS, UNITS = "log-odds before calibration", "units of the label"
_MOST = 2**20  # most rows that the top model evaluates for one request
_OF_ONE, _LEAST = 2**13, 100  # rows for one score: fewer held-out rows if there are many sets
_NUMBERS = 2**18  # most numbers in a block of rows that it evaluates at once

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]


class Explainer:
    """Computes contributions to scores of one model.

    refusal : why the model has no contributions; empty if it has.
    most_ids : most ids of a request, so that it takes seconds at most.
    """

    def __init__(self, predictor: Predictor, own_columns: int) -> None:
        found, self.predictor = predictor.found, predictor
        self._about = found.about_labels
        self._classes: list[Any] = np.array(self._about["classes"]).tolist()
        self.any_subset = predictor.aggregation.any_subset
        self._owner = bool(own_columns)  # whether the label holder is a participant
        rows, own = found.arrays["test_table.rows"], found.arrays.get("background.own")
        at = background_rows(len(rows), BACKGROUND if own is None else len(own))
        self.blocks = torch.from_numpy(rows[at])
        self.own = np.zeros((len(at), 0), np.float32) if own is None else own
        players = len(predictor.sizes) + self._owner
        most = max(_LEAST, _OF_ONE // 2**players) if players <= EXACT else _LEAST
        count = min(most, len(at)) if self._owner or not self.any_subset else 1
        self._rows_shown = np.linspace(0, len(at) - 1, count).astype(np.int64)
        self._party_of = np.zeros(predictor.width, np.int64)  # the party of each column
        for party, columns in predictor.columns.items():
            self._party_of[columns] = party
        self.refusal = self._refusal(own_columns)
        each = 2**players * count if players <= EXACT else ORDERS * (players + 1)
        self.most_ids = max(1, _MOST // each)

    def _refusal(self, own_columns: int) -> str:
        found = self.predictor.found
        if self.predictor.aggregation.waits:
            return (
                "The label holder has only sums of this model's embeddings, so it knows no party's "
                "contribution. Leave explain out."
            )
        if self.own.shape[1] != own_columns:
            return (
                "The model's checkpoint has no columns to compare with: an earlier version wrote "
                "it. Leave explain out, or train the model again."
            )
        if not self.any_subset and not found.strategy["history"]["entries"]:
            return "The model's run has no evaluation yet. Leave explain out until it has one."
        return ""

    @torch.no_grad()
    def explain(self, rows: ScoredRows, predictions: list[Any]) -> list[dict[str, Any]]:
        """Return the contributions to the score of each row's predicted class, for an answer."""
        if self.refusal:
            raise ConfigError(self.refusal)
        return [self._one(rows.at([row]), each) for row, each in enumerate(predictions)]

    def _one(self, row: ScoredRows, prediction: Any) -> dict[str, Any]:
        chosen, players = self.chosen(row, prediction), self.players(row)
        score = float(self.scores(row.outputs, chosen)[0])
        if len(players) <= EXACT:
            sets, weights = all_sets(len(players))
            values = self._by_row(row, chosen, sets[:-1])
            values = np.vstack([values, np.full((1, values.shape[1]), score)])
            base, samples = float(values[0].mean()), values.T @ weights
        else:
            sets, places = sampled_sets(len(players))
            # An order and its reverse show the same row.
            shown = np.arange(ORDERS).repeat(len(players) + 1) // 2 % len(self._rows_shown)
            along = self._values(row, chosen, sets.reshape(len(shown), -1), self._rows_shown[shown])
            along = along.reshape(ORDERS, -1)
            along[:, -1] = score
            base, gains = float(along[:, 0].mean()), np.diff(along, axis=1)
            gains = np.take_along_axis(gains, places, axis=1)
            samples = gains.reshape(-1, 2, len(players)).mean(1)
        names = [str(each) for each in players]
        shares = zip(names, samples.mean(0).tolist(), strict=True)
        return {
            "contributions": dict(shares),
            "errors": dict(zip(names, standard_errors(samples).tolist(), strict=True)),
            "base": base,
            "score": score,
            "scale": LOG_ODDS if self._classes else UNITS,
            "explained_class": str(self._classes[chosen]) if self._classes else None,
        }

    @cached_property
    def by_score(self) -> Places:
        """Return the reference rows in the order of their scores, [n]."""
        known = np.ones((len(self.own), len(self.predictor.sizes)), bool)
        outputs = self.predictor.outputs(self.blocks, self.own, known)
        return outputs[:, 0].argsort(stable=True).numpy()

    def players(self, row: ScoredRows) -> list[int | str]:
        """Return the participants in a row's score: parties, and the label holder if it has any."""
        return [*np.flatnonzero(row.given[0]).tolist(), *[HOLDER] * self._owner]

    def chosen(self, row: ScoredRows, prediction: Any) -> int:
        """Return the number of the class whose log-odds are explained."""
        several = row.outputs.shape[1] > 1
        return self._classes.index(prediction) if several else len(self._classes) - 1

    def scores(self, outputs: Tensor, chosen: int) -> Tensor:
        """Return scores of outputs [R, C] on the scale of contributions, [R]."""
        z = outputs.double()
        if not self._classes:
            z = self._about["mean"] + self._about["deviation"] * z
        elif z.shape[1] > 1:
            others = torch.cat([z[:, :chosen], z[:, chosen + 1 :]], dim=1)
            z = z[:, [chosen]] - others.logsumexp(1, keepdim=True)
        return z[:, 0]

    def _by_row(self, row: ScoredRows, chosen: int, sets: Mask) -> Array:
        """Return the scores of sets of participants [S, P], for each background row, [S, n]."""
        count, players = sets.shape
        top, rows = self.predictor.top, self._rows_shown
        if self.any_subset or type(top) is not TopModel or top.precision != "float32":
            shown = np.tile(rows, count)
            values = self._values(row, chosen, sets.repeat(len(rows), axis=0), shown)
            return values.reshape(count, len(rows))
        # The first layer is linear: add the changes by each participant, and skip its products.
        single = np.vstack([np.zeros((1, players), bool), np.eye(players, dtype=bool)])
        blocks, own, present = self.rows(
            row, single.repeat(len(rows), axis=0), np.tile(rows, players + 1)
        )
        known = torch.from_numpy(own), torch.from_numpy(present)
        h = self.predictor.aggregation.rows(blocks, *known)
        first = top.first(h).view(players + 1, -1)
        changes, parts = first[1:] - first[0], math.ceil(count * first.shape[1] / _NUMBERS)
        parted = [np.zeros((0, len(rows)))]
        for part in np.array_split(sets.astype(np.float32), max(1, parts)):
            z = first[0] + torch.from_numpy(part) @ changes
            outputs = top.rest(z.view(len(part) * len(rows), -1))
            parted.append(self.scores(outputs, chosen).view(len(part), -1).numpy())
        return np.concatenate(parted)

    def _values(self, row: ScoredRows, chosen: int, sets: Mask, shown: Places) -> Array:
        """Return the scores of sets of participants, [K]; the parameters are as in `rows`."""
        width = len(self._party_of) + self.own.shape[1]
        parts = max(1, math.ceil(len(sets) * width / _NUMBERS))
        scores = [np.zeros(0)]
        for part, others in zip(
            np.array_split(sets, parts), np.array_split(shown, parts), strict=True
        ):
            outputs = self.predictor.outputs(*self.rows(row, part, others))
            scores.append(self.scores(outputs, chosen).numpy())
        return np.concatenate(scores)

    def rows(
        self, row: ScoredRows, sets: Mask, shown: Places
    ) -> tuple[Tensor, NDArray[np.float32], Mask]:
        """Return inputs of `Predictor`, where participants of ``sets`` [K, P] show the person.

        The others show the background rows ``shown``, [K].
        """
        here = np.zeros((len(sets), row.given.shape[1]), bool)
        here[:, row.given[0]] = sets[:, : sets.shape[1] - self._owner]
        theirs = self.blocks.new_zeros(()) if self.any_subset else self.blocks[shown]
        blocks = torch.where(torch.from_numpy(here[:, self._party_of]), row.blocks, theirs)
        own = np.zeros((len(sets), 0), np.float32)
        if self._owner:
            own = np.where(sets[:, -1:], row.own, self.own[shown])
        return blocks, own, here if self.any_subset else np.ones_like(here)


# --- sets of players ----------------------------------------------------------------------------


@lru_cache
def all_sets(players: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return all sets of players, [2 ** P, P], and weights: values are weights.T @ the sets'."""
    sets = np.array(list(product((False, True), repeat=players)), bool)
    sets = sets.reshape(2**players, players)
    by_size = np.array(
        [1 / (players * math.comb(players - 1, before)) for before in range(players)]
    )
    before = sets.sum(1)[:, None] - sets
    return sets, np.where(sets, 1, -1) * by_size[np.minimum(before, players - 1)]


@lru_cache
def sampled_sets(players: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return sets along random orders, [orders, P + 1, P], and each player's place, [orders, P].

    The reverse of an order follows it, to reduce variance.
    """
    generator = np.random.default_rng(0)
    half = [generator.permutation(players) for _ in range(ORDERS // 2)]
    places = np.array([np.argsort(each) for order in half for each in (order, order[::-1])])
    sizes = np.arange(players + 1)[None, :, None]
    sets: NDArray[np.bool_] = places[:, None, :] < sizes
    return sets, places
