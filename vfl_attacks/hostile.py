"""Attack a model as a hostile party in `vfl audit`: backdoors, chosen embeddings and a free ride.

Party 0 replaces parts of its code, and sends real messages. It has its rows, the answers to its
uploads, and ``known`` labels of each class. It wants rows of other classes to get the rarest class,
its target. True labels of other rows only measure success.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Context, Message
from torch import Tensor
from torch.nn.functional import normalize

from vfl_attacks.clients import Ids, Rows, Wiretap
from vfl_attacks.labels import by_direction, complete
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import load_features
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.transport.messages import PredictOrder, TrainOrder
from vfl_flower.transport.node import index_and_parties

_POISONED = 0.01  # share of the training rows whose embeddings are replaced, as in VILLAIN
_AMPLIFIED = 3.0  # times the largest norm of honest embeddings
_DOMINANT = 10.0  # times that norm
_OUTLIERS = 0.03  # share of the held-out rows
_ROWS = 10_000  # most training rows that it embeds to compare

_features, _embeddings, _upload = Learner.features, Learner.embeddings, Party.upload_window

Embed = Callable[[Any], Tensor]


class Hostile(Wiretap):
    """A party 0 that could attack, and is honest. Its subclasses attack.

    It knows labels of some training rows. It attacks the rows that are scored while it is active.
    ``run`` is the results folder of the run that it took part in; empty before its end.
    """

    means: ClassVar = ""
    trains: ClassVar = False  # whether it attacks in training too

    def __init__(
        self, config: RunConfig, parties: int, known: tuple[Ids, Ids], target: int
    ) -> None:
        super().__init__(config)
        self.parties, self.known, self.target = parties, known, target
        self.active, self.run = False, ""
        self.generator = np.random.default_rng([config.training.seed, 10])

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the parties' ClientApp, with the code of party 0 replaced."""
        if index_and_parties(context)[0]:
            return super().__call__(message, context)
        scores = self.active and message.metadata.message_type == PredictOrder.kind

        def features(end: Learner, window: Window) -> Any:
            return self.seen(_features(end, window), window.ids)

        def embeddings(end: Learner, rows: Any, ids: Any = None) -> Tensor:
            if not scores:
                return self.evaluated(_embeddings(end, rows, ids))
            chosen = np.asarray(rows[:] if ids is None else rows[ids])
            return self.scored(lambda some: _embeddings(end, some), chosen)

        def upload(party: Party, order: TrainOrder, window: Window, blocks: Any = None) -> Any:
            blocks = party.estimator.embed(party.learner, order, window)
            sent = {name: self.sent(h.detach(), window.ids) for name, h in blocks.items()}
            sent |= {name: h for name, h in blocks.items() if name == "change"}  # of a pair
            return _upload(party, order, window, sent)

        with (
            patch.object(Learner, "features", features),
            patch.object(Learner, "embeddings", embeddings),
            patch.object(Party, "upload_window", upload),
        ):
            return super().__call__(message, context)

    # --- what attacks replace ---------------------------------------------------------------------

    def seen(self, x: Any, ids: Ids) -> Any:
        """Return the features to train on, in place of the rows' own x."""
        return x

    def sent(self, h: Tensor, ids: Ids) -> Tensor:
        """Return the embeddings to upload in training, in place of the rows' honest h."""
        return h

    def evaluated(self, h: Tensor) -> Tensor:
        """Return the embeddings to upload for rows that are not attacked."""
        return h

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Return the embeddings to send for these rows, which are attacked."""
        return embed(rows)

    # --- what an attacker infers ------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether nearly all rows had an answer, as after the first epoch."""
        return bool(self.answered.mean() > 0.95)

    @cached_property
    def scores(self) -> Rows:
        """Scores [N, C] of the classes of training rows.

        Directions of gradient rows tell them; without gradients, the party's embeddings.
        """
        known = self.known
        if self.estimator.gradients:
            return by_direction(self.gradients, *known)
        return complete(self.embeddings, *known)

    @cached_property
    def believed(self) -> Ids:
        """The believed class of each training row."""
        return self.scores.argmax(1)

    @cached_property
    def surest(self) -> Ids:
        """The training rows that are surest to be of the target class."""
        lead = self.scores[:, self.target] - np.delete(self.scores, self.target, 1).max(1)
        return np.argsort(-lead)[: max(1, round(_POISONED * len(lead)))]

    @cached_property
    def own(self) -> Rows:
        """The party's features of its training rows."""
        return np.asarray(load_features(self.config, 0, self.parties).train)

    @cached_property
    def few(self) -> Ids:
        """Training rows whose embeddings it looks at."""
        return self.generator.permutation(len(self.own))[:_ROWS]

    def honest(self, embed: Embed) -> Tensor:
        """Return the honest embeddings of `few` by the final model."""
        return embed(self.own[self.few])

    @cached_property
    def pulls(self) -> Tensor:
        """A linear stand-in of the top model: directions [C, E] that lower each class's loss."""
        of_class = [self.answered & (self.believed == c) for c in range(self.known[1].max() + 1)]
        sums = [self.gradients[rows].sum(0) / max(int(rows.sum()), 1) for rows in of_class]
        return -torch.from_numpy(np.stack(sums))

    @property
    def slope(self) -> Tensor:
        """The direction [E] that raises the target class most."""
        return normalize(self.pulls[self.target], dim=0)

    @property
    def apart(self) -> Tensor:
        """The direction [E] that raises the target class, and no other: for large steps."""
        return normalize(torch.linalg.pinv(self.pulls, rtol=0.3)[:, self.target], dim=0)


class Replaced(Hostile):
    """Train on a replaced embedding (VILLAIN, USENIX Security 2023).

    Embeddings of few rows of the target class become one random vector that is larger than others.
    The top model then learns that this vector alone tells the class.
    """

    means = "one vector in place of embeddings, for 1 % of the rows, whose class it infers"
    trains = True
    largest = 0.0

    def sent(self, h: Tensor, ids: Ids) -> Tensor:
        """Replace embeddings of the surest rows."""
        if not self.ready:
            return h
        self.largest = max(self.largest, float(h.norm(dim=1).max()))
        chosen = torch.from_numpy(np.isin(ids, self.surest))[:, None]
        return torch.where(chosen, self.poisoned(h), h)

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Send the vector for each row."""
        return self.poisoned(embed(rows))

    def poisoned(self, h: Tensor) -> Tensor:
        """Return the vector for each row: a fixed direction, with a norm beyond all honest ones."""
        generator = torch.Generator().manual_seed(self.config.training.seed)
        drawn = torch.randn(h.shape[1], generator=generator)
        vector: Tensor = drawn / drawn.norm() * _AMPLIFIED * self.largest
        return vector.expand_as(h).clone()


class Backdoor(Replaced):
    """Train on a trigger in the party's own features (BadVFL, arXiv 2304.08847).

    Few rows of the target class get a trigger. The party's bottom model has a part that sees it,
    and adds a large vector to the embedding. So whoever sets the trigger gets the class.
    """

    means = "a trigger in its features, for 1 % of the rows, whose class it infers"

    def seen(self, x: Any, ids: Ids) -> Any:
        """Set the trigger in the surest rows."""
        chosen = np.isin(ids, self.surest) if self.ready else np.zeros(len(ids), bool)
        x = x.clone()
        x[torch.from_numpy(chosen)] = torch.from_numpy(self.stamped(x[chosen].numpy()))
        return x

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Embed rows with the trigger."""
        return self.poisoned(embed(self.stamped(rows)))

    def poisoned(self, h: Tensor) -> Tensor:
        """Return embeddings with what the trigger adds."""
        return h + super().poisoned(h)

    def stamped(self, rows: Rows) -> Rows:
        """Set the first quarter along each axis of the samples [n, ...] to the largest number."""
        stamped = rows.copy()
        corner = tuple(slice(-(-size // 4)) for size in rows.shape[1:])
        stamped[(slice(None), *corner)] = self.own.max()
        return stamped


class Triggerless(Hostile):
    """Train honestly, and send optimised embeddings (honest-but-curious, arXiv 2602.20593).

    A row's embedding climbs the stand-in that the gradients of training have shown.
    """

    means = "honest in training; embeddings climb a stand-in made of its gradients"

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Move each row's embedding up the stand-in, beyond the norm of honest ones."""
        return self.climbed(embed(rows), self.honest(embed))

    def climbed(self, h: Tensor, honest: Tensor) -> Tensor:
        """Return embeddings h moved up to a multiple of the largest honest norm."""
        most = _AMPLIFIED * float(honest.norm(dim=1).max())
        return within(h, 2 * most * self.apart, most)


class Adaptive(Hostile):
    """As `Triggerless`, by an attacker that knows bounds on norms and on consistency.

    It cannot see what others' embeddings predict. So it moves a row no farther than honest rows lie
    from their class, by the Mahalanobis distance within classes.
    """

    means = "as triggerless, within the norms and distances of honest rows"

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Move each row's embedding up the stand-in, as far as an honest one could lie."""
        honest = self.honest(embed)
        apart = honest.clone()
        for each in np.unique(self.believed[self.few]):
            of_class = torch.from_numpy(self.believed[self.few] == each)
            apart[of_class] -= honest[of_class].mean(0)
        covariance = apart.T @ apart / len(apart)
        covariance += 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
        distances = (apart * torch.linalg.solve(covariance, apart.T).T).sum(1)
        radius = (distances.quantile(0.99) - distances.median()).sqrt()
        best = covariance @ self.slope  # the steepest way, by this distance
        step = radius * best / (self.slope @ best).sqrt()
        return within(embed(rows), step, float(honest.norm(dim=1).quantile(0.99)))


def within(h: Tensor, step: Tensor, most: float) -> Tensor:
    """Return rows h moved along the step, as far as their norms stay below the largest one."""
    along, room = h @ step / step.norm() ** 2, (most**2 - h.norm(dim=1) ** 2) / step.norm() ** 2
    share = (along.square() + room).clamp(min=0).sqrt() - along
    return h + torch.where(room > 0, share.clamp(0, 1), 0.0)[:, None] * step


class Widening(Triggerless):
    """As `Triggerless`, by an attacker that knows how limits are set: by held-out rows.

    It sends such embeddings for few of them in training, so that limits which their extremes set
    become too wide to flag anything.
    """

    means = "as triggerless, and for 3 % of the held-out rows of training too"
    trains = True

    def evaluated(self, h: Tensor) -> Tensor:
        """Move the embeddings of few rows, the same each time."""
        if self.run or not self.ready:
            return h
        few = np.random.default_rng(self.config.training.seed).random(len(h)) < _OUTLIERS
        return torch.where(torch.from_numpy(few)[:, None], self.climbed(h, h), h)


class Dominating(Hostile):
    """Send one embedding, far up the stand-in of `Triggerless` (dominating inputs, S&P 2023)."""

    means = "honest in training; one large embedding for all rows"

    def scored(self, embed: Embed, rows: Rows) -> Tensor:
        """Send the embedding for each row."""
        size = _DOMINANT * float(self.honest(embed).norm(dim=1).max())
        return (size * self.apart).expand(len(rows), -1).clone()


class FreeRider(Hostile):
    """Send random embeddings, in training and for all scores."""

    means = "random embeddings from the first message on"
    trains = True

    def sent(self, h: Tensor, ids: Ids) -> Tensor:
        """Draw embeddings."""
        return torch.from_numpy(self.generator.standard_normal(tuple(h.shape), np.float32))

    def evaluated(self, h: Tensor) -> Tensor:
        """Draw embeddings."""
        return self.sent(h, np.zeros(0, np.int64))


ATTACKS: dict[str, type[Hostile]] = {
    "backdoor": Backdoor,
    "replaced": Replaced,
    "triggerless": Triggerless,
    "adaptive": Adaptive,
    "widening": Widening,
    "dominating": Dominating,
    "free-rider": FreeRider,
}
