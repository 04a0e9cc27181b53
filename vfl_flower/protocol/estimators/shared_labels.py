"""First-order estimator of parties that know the labels (EF-VFL, Algorithm 1).

A party gets the other parties' embeddings and the top model of each step instead of gradient rows
(line 4), and finds these itself, with its own embedding exact (Eq. 4), at its parameters as they
are by then: so it can take several local steps on a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.plugins import LOSSES, TOPS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.models import passes
from vfl_flower.models.losses import loss_of, penalty_gradient, targets
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.training import autocast, count, flat, load_flat, step_along
from vfl_flower.protocol.batches import Joint, Window, divisors, first_step
from vfl_flower.protocol.codecs.channel import Channel, zeros
from vfl_flower.protocol.estimators.base import HolderEnd, Links, PartyEnd
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.uploads import Arrival, Reading
from vfl_flower.transport.messages import Arrays, TrainOrder


@dataclass(frozen=True)
class Sent(Reading):
    """Embeddings, and the upload as it came, to be sent on."""

    arrays: Arrays


class SharedLabels(FirstOrder):
    """The others' embeddings and the top model, with the labels at the parties too."""

    uploads_reach = "the label holder's and the other parties'"
    broadcasts = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._top: TopModel | None = None  # at a party
        self._top_link: Channel | None = None  # at the label holder

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise `ConfigError` if it cannot work as configured."""
        if config.data.target == "regression":
            raise ConfigError(
                "labels = 'shared' is for classes, and target = 'regression' has none: leave one "
                "of them out."
            )
        for key, registry, name in (
            ("top-model", TOPS, config.models.top),
            ("loss", LOSSES, config.models.loss),
        ):
            if name not in registry.known:
                raise ConfigError(
                    f"labels = 'shared' has parties use the top model and the loss, and {key} = "
                    f"{name!r} is code of the label holder's: choose ours, or leave labels out."
                )

    # --- links: both ends -----------------------------------------------------------------------

    def party_links(self, end: PartyEnd) -> Links:
        """Its embeddings up, those of the others and the top model down."""
        top = self.aggregation.build_top([end.size] * end.parties, end.outputs)
        self._top = top.to(end.device)
        others = [other for other in range(end.parties) if other != end.index]
        return {
            "uplink": self.uplink(zeros((end.rows, end.size))),
            **{f"other-{other}": self.uplink(zeros((end.rows, end.size))) for other in others},
            "top": self.downlink(zeros((1, count(self._top)))),
        }

    def holder_links(self, table: Tensor) -> Links:
        """Embeddings up; they are sent on as they came."""
        return {"uplink": self.uplink(table)}

    def links_of_all(self, end: HolderEnd) -> Links:
        """The top model, as one row."""
        if self._top_link is None:
            self._top_link = self.downlink(zeros((1, count(end.top))))
        return {"top": self._top_link}

    def compared(self, end: HolderEnd, party: int) -> list[Channel]:
        """Its own, the others', and the top model's."""
        others = [end.links[other]["uplink"] for other in end.links if other != party]
        return [end.links[party]["uplink"], *others, *self.links_of_all(end).values()]

    def party_tables(self, parties: int) -> int:
        """One for each party."""
        return parties * int(self.config.uplink.surrogates)

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """The others' uploads, the labels, and a top model a step."""
        assert self._top is not None
        of_parties = end.parties * super().answer_bytes(end, rows, steps)
        return of_parties + 2 * 4 * steps * count(self._top) + 8 * end.rows

    def holder_tables(self) -> int:
        """None beside the table."""
        return 0

    # --- the label holder -----------------------------------------------------------------------

    def opening(self, end: HolderEnd) -> Arrays:
        """The labels of the training rows."""
        labels = end.labels.cpu().numpy()
        return {"labels": labels.astype(np.min_scalar_type(labels.max()))}

    def read(self, links: Links, arrays: Arrays, window: Window, size: int) -> Reading:
        """The embeddings, and the arrays that they came in."""
        fresh = super().read(links, arrays, window, size).fresh
        return Sent(
            fresh, {name: arrays[name] for name in links["uplink"].codec.names("embedding")}
        )

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Arrays]:
        """To each party the others' uploads, and the top model that each step met."""
        h, labels = end.gather(joint.window)
        tops = self._steps(end, h, labels, joint)
        top: Arrays = {}
        if end.optimizer:
            key = f"{self.config.training.seed}|down|{end.steps}"
            top = self.links_of_all(end)["top"].send("top", tops, _top_window(len(tops)), key)
        uploads = {each.party: _for_party(each.party, _sent(each)) for each in arrivals}
        feedback: dict[int, Arrays] = {}
        for party in uploads:
            feedback[party] = dict(top)
            for other in uploads.keys() - {party}:
                feedback[party].update(uploads[other])
        return feedback

    def _steps(self, end: HolderEnd, h: Tensor, labels: Tensor, joint: Joint) -> Tensor:
        """Q steps of the top model on each mini-batch; its parameters before each [S, d_0].

        As everywhere a mini-batch counts as one step, whatever Q.
        """
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        tops = []
        for rows, of_rows, length, divisor in zip(
            h.split(lengths), labels.split(lengths), lengths, divided, strict=True
        ):
            tops.append(flat(end.top))
            steps = [
                end.step(rows, of_rows, [length], [divisor], gradients=False)[1]
                for _ in range(self.config.estimator.local_steps)
            ]
            end.count(steps[0])
        return torch.stack(tops)

    # --- the party ------------------------------------------------------------------------------

    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Arrays:
        """The embeddings; the first order brings the labels."""
        if "labels" in order.arrays:
            end.arrays["labels"] = self._checked_labels(end, order.arrays["labels"])
        return super().embed(end, order, window)

    def _checked_labels(self, end: PartyEnd, labels: NDArray[Any]) -> NDArray[Any]:
        if labels.dtype.kind != "u" or labels.shape != (end.rows,):
            raise VflError("was sent labels that are not one for each of its training rows.")
        if labels.max(initial=0) >= max(2, end.outputs):
            raise VflError(f"was sent labels of more than {max(2, end.outputs)} classes.")
        return labels

    def update(self, end: PartyEnd, arrays: Arrays, order: TrainOrder, window: Window) -> None:
        """Q optimizer steps on each mini-batch of the upload (Alg. 1 line 2)."""
        embeddings, tops = self._broadcast(end, arrays, window)
        x, hs = end.trace or (end.features(window), None)
        top, known = self._top, end.arrays["labels"]
        assert top is not None
        labels = torch.from_numpy(known[window.ids].astype(np.int64)).to(end.device)
        lengths, noise = window.lengths.tolist(), end.noise(order.exchange, window)
        divided = divisors(self.config, end.rows, window.lengths).tolist()
        loss = loss_of(self.config, known, max(2, end.outputs), end.device)
        columns = slice(end.index * end.size, (end.index + 1) * end.size)
        parameters = end.optimizer.param_groups[0]["params"]
        training, y, start = self.config.training, targets(labels, top.outputs), 0
        key = end.secret + f"|{order.exchange}".encode()
        first = first_step(self.config, end.rows, order)
        for step, (length, divisor) in enumerate(zip(lengths, divided, strict=True)):
            rows = slice(start, start + length)
            start += length
            of_step = noise.of_step(step) if noise else None
            weights: Tensor | float = 1 / divisor
            of_classes = loss.row_weights(labels[rows])
            if of_classes is not None:
                weights = weights * of_classes[:, None]
            load_flat(top, tops[step])
            for local_step in range(self.config.estimator.local_steps):
                if hs is not None and len(lengths) == 1 and not local_step:
                    h = hs[0]  # the upload's own
                else:
                    of_rows = samples.rows(x, rows)
                    h = passes.one(end.model, of_rows, step, of_step, key, learns=False)
                embeddings[rows, columns] = h.detach()
                with torch.no_grad(), autocast(top, top.precision):
                    met = top.combined(embeddings[rows], embeddings[rows])
                    _, signal, _ = top.passes(met, y[rows], weights, loss.gradient, True, False)
                signal = top.spread_to(columns, signal, embeddings[rows])
                gradients = torch.autograd.grad(h, parameters, signal, materialize_grads=True)
                whole = [
                    gradient + training.regulariser_weight * penalty_gradient(training, p.detach())
                    for p, gradient in zip(parameters, gradients, strict=True)
                ]
                step_along(end.optimizer, whole, first + step)

    def _broadcast(self, end: PartyEnd, arrays: Arrays, window: Window) -> tuple[Tensor, Tensor]:
        """The others' embeddings of the window's rows, [R, M * E], and each step's top model.

        Embeddings of the party's own are left for it to fill in.
        """
        if len(end.arrays.get("labels", ())) != end.rows:
            raise VflError("the labels, which were to be shared, have not come.")
        blocks = []
        for party in range(end.parties):
            if party == end.index:
                blocks.append(torch.empty(len(window.ids), end.size))
                continue
            link = end.links[f"other-{party}"]
            sent = _of_party(party, arrays, link.codec.names("embedding"))
            blocks.append(link.receive("embedding", sent, window, end.size))
        assert self._top is not None
        steps, size = _top_window(len(window.lengths)), count(self._top)
        tops = torch.zeros(len(steps.ids), 0)
        if size:
            tops = end.links["top"].receive("top", arrays, steps, size)
        return torch.cat(blocks, dim=1).to(end.device), tops.to(end.device)


def _top_window(steps: int) -> Window:
    """The top model of each step, as the one row of a table, each time anew."""
    return Window(np.zeros(steps, np.int32), np.ones(steps, np.int32))


def _sent(arrival: Arrival) -> Arrays:
    assert isinstance(arrival.reading, Sent)
    return arrival.reading.arrays


def _for_party(party: int, arrays: Arrays) -> Arrays:
    """A party's upload, named so that it can be sent on to the others."""
    return {f"party-{party}/{name}": array for name, array in arrays.items()}


def _of_party(party: int, arrays: Arrays, names: Sequence[str]) -> Arrays:
    """A party's upload, among what was sent on."""
    sent = {name: f"party-{party}/{name}" for name in names}
    return {name: arrays[sent[name]] for name in names if sent[name] in arrays}
