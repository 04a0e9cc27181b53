"""First-order estimator of parties that know the labels (EF-VFL, Algorithm 1).

A party gets the other parties' embeddings and each step's top model instead of gradient rows
(line 4). It computes its gradient rows itself, with its own embedding exact (Eq. 4), at its current
parameters. So it can take several local steps on a mini-batch.
"""

from collections.abc import Mapping, Sequence
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
from vfl_flower.models.losses import loss_of, penalty_gradient
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.training import autocast, count, flat, load_flat, step_along
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks, Links, zeros
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd
from vfl_flower.protocol.estimators.base import window_key
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.transport.messages import Arrays, TrainOrder


class SharedLabels(FirstOrder):
    """Other parties' embeddings and the top model as answers; parties have the labels."""

    uploads_reach = "the label holder's and the other parties'"
    broadcasts = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._top: TopModel | None = None  # at a party
        self._others = Links()  # at a party
        self._top_link = Links()  # at the label holder

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise `ConfigError` if the estimator cannot work as configured."""
        if config.running.grow and config.estimator.initial_surrogates != "zero":
            # The run evaluates first, and a checkpoint then would lack the first uploads.
            raise ConfigError(
                "initial-surrogates = 'embeddings' with labels = 'shared' begins with new models, "
                f"and grow = {config.running.grow!r} with an earlier run's. Leave one of them out."
            )
        if config.data.target == "regression":
            raise ConfigError(
                "labels = 'shared' is for classes, and target = 'regression' has none. Leave one "
                "of them out."
            )
        for key, registry, name in (
            ("top-model", TOPS, config.models.top),
            ("loss", LOSSES, config.models.loss),
        ):
            if name not in registry.known:
                raise ConfigError(
                    f"labels = 'shared' has parties use the top model and the loss, and {key} = "
                    f"{name!r} is code that only the label holder has. Choose one of "
                    f"{', '.join(map(repr, registry.known))}, or leave `labels` out."
                )

    # --- links: both ends -----------------------------------------------------------------------

    def downlinks(self, rows: int, size: int) -> Links:
        """Return no links: every party gets the same answer."""
        return Links()

    def downlinks_of(self, end: PartyEnd) -> Links:
        """Make a party's end of the links of other parties' embeddings and the top model."""
        top = self.aggregation.build_top([end.size] * end.parties, end.outputs)
        self._top = top.to(end.device)
        self._others = Links()
        for other in range(end.parties):
            if other != end.index:
                table = zeros((end.rows, end.size))
                self._others[_block_of(other)] = self.uplink(table, f"other-{other}")
        links = Links(self._others)
        if count(self._top):
            links["top"] = self.downlink(zeros((1, count(self._top))), "top", by_step=True)
        return links

    def links_of_all(self, end: HolderEnd) -> Links:
        """Return the label holder's end of the link of the top model, as one row."""
        if not self._top_link and count(end.top):
            top = self.downlink(zeros((1, count(end.top))), "top", by_step=True)
            self._top_link = Links(top=top)
        return self._top_link

    def compared(self, end: HolderEnd, party: int) -> list[Tensor]:
        """Return the party's surrogates, then the other parties', then the top model's."""
        others = [other for other in end.uplinks if other != party]
        links = *(end.uplinks[each] for each in (party, *others)), self.links_of_all(end)
        return [surrogate for each in links for _, surrogate in each.with_surrogates()]

    def party_tables(self, parties: int) -> int:
        """Return one table for each party with error feedback."""
        return parties * int(self.config.uplink.surrogates)

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """Return a bound for other parties' uploads, labels, and one top model a step."""
        assert self._top is not None
        of_parties = end.parties * super().answer_bytes(end, rows, steps)
        return of_parties + 2 * 4 * steps * count(self._top) + 8 * end.rows

    def holder_tables(self) -> int:
        """Return 0: the table of embeddings is enough."""
        return 0

    # --- the label holder -----------------------------------------------------------------------

    def opening(self, end: HolderEnd, party: int) -> Arrays:
        """Return the labels of the training rows, [N], and what begins the other surrogates."""
        labels = end.labels.cpu().numpy()
        opening: Arrays = {"labels": labels.astype(np.min_scalar_type(labels.max()))}
        for other in end.first_uploads.keys() - {party}:
            opening |= _for_others(other, end.first_uploads[other])
        return opening

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer with the top model before each step, [S, d_0]."""
        end.first_uploads.clear()  # all parties have had their first orders
        h, labels = end.gather(joint.window)
        tops = self._steps(end, h, labels, joint)
        top = {"top": tops} if end.optimizer else {}
        return {each.party: top for each in arrivals}

    def encode(
        self, end: HolderEnd, arrivals: Sequence[Arrival], answers: Mapping[int, Blocks]
    ) -> dict[int, Arrays]:
        """Encode the top model once for all parties; add the others' uploads as they arrived."""
        key, party = f"{self.config.training.seed}|down|{end.steps}", arrivals[0].party
        top = self.links_of_all(end).encode(answers[party], arrivals[0].window, key)
        uploads = {each.party: _for_others(each.party, each.arrays) for each in arrivals}
        encoded: dict[int, Arrays] = {}
        for party in uploads:
            encoded[party] = dict(top)
            for other in uploads.keys() - {party}:
                encoded[party].update(uploads[other])
        return encoded

    def _steps(self, end: HolderEnd, h: Tensor, labels: Tensor, joint: Joint) -> Tensor:
        """Take Q steps of the top model on each mini-batch, which counts as one step.

        Return its parameters before each mini-batch, [S, d_0].
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

    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Blocks:
        """Embed the window's rows, [R, E]; read the labels and surrogates of the first order."""
        if "labels" in order.arrays:
            end.arrays["labels"] = self._checked_labels(end, order.arrays["labels"])
            if self.config.estimator.initial_surrogates != "zero":
                ids = np.arange(end.rows, dtype=np.int32)
                every = Window(ids, np.array([end.rows], np.int32), distinct=True)
                self._others.decode(order.arrays, every)
        return super().embed(end, order, window)

    def _checked_labels(self, end: PartyEnd, labels: NDArray[Any]) -> NDArray[Any]:
        if labels.dtype.kind != "u" or labels.shape != (end.rows,):
            raise VflError(
                f"was sent {labels.dtype} labels of shape {labels.shape}: it needs one unsigned "
                f"integer for each of its {end.rows} training rows."
            )
        if labels.max(initial=0) >= max(2, end.outputs):
            raise VflError(f"was sent labels of more than {max(2, end.outputs)} classes.")
        return labels

    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Take Q optimizer steps on each mini-batch of the upload (Alg. 1 line 2)."""
        embeddings, tops = self._broadcast(end, blocks, window)
        x, hs = end.trace or (end.features(window), None)
        top, known = self._top, end.arrays["labels"]
        assert top is not None
        labels = torch.from_numpy(known[window.ids].astype(np.int64))
        labels = labels.to(end.device, non_blocking=True)
        noise = end.noise(order.exchange, window) if self.mechanism.perturbs_uploads else None
        lengths = window.lengths.tolist()
        divided = end.sampling.divisors(window.lengths).tolist()
        classes = max(2, end.outputs)
        loss = loss_of(self.config, known, classes, self.mechanism.kept(classes), end.device)
        columns = slice(end.index * end.size, (end.index + 1) * end.size)
        parameters = end.optimizer.param_groups[0]["params"]
        training, y, start = self.config.training, loss.targets(labels, top.outputs), 0
        key = window_key(end.secret, order)
        first = order.epoch * end.sampling.per_epoch + order.first
        for step, (length, divisor) in enumerate(zip(lengths, divided, strict=True)):
            rows = slice(start, start + length)
            start += length
            of_step = noise.of_step(step) if noise else None
            weights: Tensor | float = 1 / divisor
            if loss.class_weights is not None:
                weights = weights * loss.row_weights(labels[rows])[:, None]
            load_flat(top, tops[step])
            for local_step in range(self.config.estimator.local_steps):
                if hs is not None and len(lengths) == 1 and not local_step:
                    h = hs[0]
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

    def _broadcast(self, end: PartyEnd, blocks: Blocks, window: Window) -> tuple[Tensor, Tensor]:
        """Return embeddings [R, M * E], without this party's own, and the top models [S, d_0]."""
        if len(end.arrays.get("labels", ())) != end.rows:
            raise VflError("the labels are missing, although labels = 'shared'.")
        own, tops = torch.empty(len(window.ids), end.size), torch.zeros(len(window.lengths), 0)
        of_parties = [blocks.get(_block_of(party), own) for party in range(end.parties)]
        tops = blocks.get("top", tops)
        embeddings = torch.cat(of_parties, dim=1).to(end.device, non_blocking=True)
        return embeddings, tops.to(end.device, non_blocking=True)


def _block_of(party: int) -> str:
    """Return the name of a party's embeddings in messages to the other parties."""
    return f"party-{party}/embedding"


def _for_others(party: int, arrays: Arrays) -> Arrays:
    """Return a party's upload with the names that messages to other parties use."""
    return {f"party-{party}/{name}": array for name, array in arrays.items()}
