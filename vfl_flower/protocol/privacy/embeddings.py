"""Perturbed embeddings (VAFL section 4): how often each record was uploaded.

The noise protects the feature values of a record of one party, from the label holder and whoever
reads its messages (with shared labels, the other parties), over all uploads of that record by that
party; a codec adds nothing to it, and takes nothing from it. What the party's parameters learn from
a record, and other rows' uploads then show of it, is not bounded by it; nor does it protect labels
from the parties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Window, expected_rows
from vfl_flower.protocol.privacy.accountants import GdpAccountant, known
from vfl_flower.protocol.privacy.journal import Event
from vfl_flower.protocol.privacy.ledger import (
    EMBED,
    EVALUATE,
    RECEIVED,
    TRAIN,
    Guarantee,
    Ledger,
    Released,
)
from vfl_flower.protocol.privacy.paper import delta_of, epsilon_of_theorem_6
from vfl_flower.transport.messages import EmbedOrder, EvaluateOrder, Order, TrainOrder

_LATEST = 2**31 - 1  # a step that no epoch has


class EmbeddingLedger(Ledger):
    """Perturbed embeddings: how often each row was asked for.

    An upload counts when it is asked for, so one that is lost or refused counts too; noise protects
    test rows as it does training rows. A zeroth-order pair counts as two.
    """

    noise_on = "embeddings"
    journaled = (TRAIN, EMBED, EVALUATE, RECEIVED)

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        super().__init__(config, rows, estimator)
        self.steps: dict[int, int] = {}  # by party: mini-batches asked for
        # Passes over the rows that have begun, each of which uploads a row once; an order that is
        # given anew, or comes before the last, begins another.
        self.passes: dict[int, int] = {}
        self.last: dict[int, tuple[int, int]] = {}  # epoch and first step of the last order
        self.queries: dict[int, NDArray[np.int32]] = {}  # of each training row, apart from those
        self.evaluations: dict[int, int] = {}  # uploads of every test row
        self.sampled: dict[int, NDArray[np.int32]] = {}  # Poisson: uploads of each training row
        self.unseen: dict[int, int] = {}  # Poisson: steps whose rows are not known, or not yet

    def _ordered(self, party: int, order: Order) -> None:
        """Count what this order asks a party for."""
        if isinstance(order, TrainOrder):
            self.steps[party] = self.steps.get(party, 0) + order.steps
            self.unseen[party] = self.unseen.get(party, 0) + order.steps
            place, last = (order.epoch, order.first), self.last.get(party, (-1, 0))
            begun = 1 if place <= last else order.epoch - last[0]
            self.passes[party] = self.passes.get(party, 0) + begun
            self.last[party] = place
        elif isinstance(order, EmbedOrder):
            queries = self.queries.setdefault(party, np.zeros(self.rows, np.int32))
            queries[order.arrays["ids"]] += 1  # ids do not repeat
        elif isinstance(order, EvaluateOrder):
            self.evaluations[party] = self.evaluations.get(party, 0) + 1

    def _received(self, party: int, window: Window) -> None:
        """Count the rows that Poisson sampling took, in the place of one a step."""
        if self.config.schedule.sampling == "poisson":
            counts = self.sampled.setdefault(party, np.zeros(self.rows, np.int32))
            counts += np.bincount(window.ids, minlength=self.rows).astype(np.int32)
            self.unseen[party] -= len(window.lengths)

    def so_far(self) -> Iterator[Event]:
        """Events of each party that lead to the counts of now."""
        none = np.zeros(0, np.int32)
        for party, last in self.last.items():
            passes, steps = self.passes[party], self.steps[party]
            # The first order of an epoch begins a pass for each epoch before; an order that is not
            # later than the last begins one more.
            if passes > last[0] + 1:
                yield TRAIN, party, passes - 2, _LATEST, steps, none
                yield TRAIN, party, *last, 0, none
            else:
                yield TRAIN, party, *last, steps, none
        for party, sampled in self.sampled.items():
            rows = np.repeat(np.arange(self.rows, dtype=np.int32), sampled)
            yield RECEIVED, party, self.steps[party] - self.unseen[party], 0, 0, rows
        for party, queries in self.queries.items():
            for times in range(int(queries.max())):
                yield EMBED, party, 0, 0, 0, np.flatnonzero(queries > times).astype(np.int32)
        for party, times in self.evaluations.items():
            for _ in range(times):
                yield EVALUATE, party, 0, 0, 0, none

    def most_uploads(self, party: int) -> int:
        """Uploads of the row that this party uploads most."""
        trained = np.full(1, self.passes.get(party, 0), np.int32)
        if self.config.schedule.sampling == "poisson":
            trained = self.sampled.get(party, np.zeros(1, np.int32)) + self.unseen.get(party, 0)
        each = self.estimator.uploads_per_row
        most = int((each * trained + self.queries.get(party, 0)).max())
        evaluated = self.evaluations.get(party, 0)
        # Without rows held out, those that are evaluated are those that are trained on.
        return max(most, evaluated) if self.config.data.test_fraction else most + evaluated

    def uploads(self) -> int:
        """Uploads of the most uploaded record of any party."""
        parties = {*self.passes, *self.queries, *self.evaluations}
        return max((self.most_uploads(party) for party in parties), default=0)

    def figures(self) -> dict[str, Any]:
        """Epsilon of the most uploaded record of any party, and what the paper would claim."""
        if self.config.privacy.noise_seed >= 0:
            return super().figures()
        spent = _spent(self.config, self.rows, self.uploads())
        delta = delta_of(self.config, self.rows)
        samples = max(self.steps.values(), default=0) * expected_rows(self.config, self.rows)
        return {
            "epsilon": spent.get_epsilon(delta),
            "delta": delta,
            "gaussian_mu": spent.mu,
            "epsilon_of_paper": epsilon_of_theorem_6(self.config, self.rows, samples),
            **guarantee(self.estimator).figures(),
        }


def guarantee(estimator: Released) -> Guarantee:
    """What is protected, from whom."""
    return Guarantee(
        "features of one record at one party, in all uploads of that record; not what the party's "
        "model learns from it",
        "these features are changed; which records there are is public",
        f"who has {estimator.uploads_reach} view of those uploads",
    )


def epsilon(config: RunConfig, rows: int, uploads: int) -> float:
    """Epsilon at delta of a record, among N, that one party has uploaded this many times.

    Each upload is a Gaussian mechanism of deviation c and sensitivity 2 R, the distance of two
    embeddings of norm R. Sub-sampling gives nothing, since the label holder sees which rows are
    sent.
    """
    return _spent(config, rows, uploads).get_epsilon(delta_of(config, rows))


def _spent(config: RunConfig, rows: int, uploads: int) -> GdpAccountant:
    """So many uploads of a record."""
    accountant = known(delta_of(config, rows), rows=1)
    if uploads:
        multiplier = config.privacy.embedding_noise / (2 * config.privacy.embedding_bound)
        accountant.compose(GaussianPrivacyEvent(multiplier, 1, 1), uploads)
    return accountant
