"""Zeroth-order estimator: embedding pairs go up, and scalar differences come down.

The methods stand in the order in which data meets them. The party draws a direction u for each
step, and embeds at perturbed parameters (AsyREVEL Alg. 1 line 4; DPZV Eq. 6). The label holder
evaluates both embeddings of a pair, and answers with one scalar a step (line 9; DPZV Eq. 7-8). The
party steps along u (lines 6-7; Cascaded Eq. 2-3). The table keeps the centre of a two-sided pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from vfl_flower.config.arrays import peak
from vfl_flower.config.errors import ConfigError, DivergedError
from vfl_flower.config.options import EstimatorConfig, TrainingConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models import passes
from vfl_flower.models.losses import Loss, penalty
from vfl_flower.protocol import server_update
from vfl_flower.protocol.batches import Joint, Window, row_losses, step_means
from vfl_flower.protocol.codecs.channel import Blocks, Links, of_steps
from vfl_flower.protocol.directions.differences import (
    descend,
    differences,
    in_place,
    values_of_pairs,
)
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd, Reading
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.privacy.noise import clipped_noisy_means
from vfl_flower.transport.messages import LARGEST, TrainOrder

Pair = tuple[Tensor, Tensor]  # embeddings [R, E] at w + mu u, and at w or w - mu u


class ZerothOrder(Estimator):
    """One scalar a step as an answer; a party's bottom model may be a black box."""

    windows: ClassVar = {"free": 16, "cheap": 64, "dear": 64}
    uploads_per_row = 2
    gradients = False
    answers_by_scalars = True

    @property
    def word(self) -> str:
        """Return a short description."""
        return f"{super().word}, {self.config.estimator.differences}"

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise `ConfigError` if the estimator cannot work as configured."""
        super().check(config)
        if config.downlink.codec != "identity":
            raise ConfigError(
                f"downlink-codec = {config.downlink.codec!r} has nothing to compress under zeroth "
                "order: feedback is one number a step. Leave `downlink-codec` out."
            )

    # --- links: both ends -----------------------------------------------------------------------

    def uplinks(self, table: Tensor) -> Links:
        """Make one end of the links of a pair. Only embeddings for the table have surrogates."""
        return Links(
            (name, self.uplink(table, "uplink" if name == "embedding" else ""))
            for name in self.block_names()
        )

    def downlinks(self, rows: int, size: int) -> Links:
        """Make the label holder's end of the link of differences, which no codec changes."""
        return Links(difference=of_steps())

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """Return the bound of the base class, plus one number for each step."""
        return super().answer_bytes(end, rows, steps) + 4 * steps

    def block_names(self) -> tuple[str, str]:
        """Return the names of the two blocks of a pair in messages, in `blocks` order."""
        if self._apart:
            return "change", "embedding"
        two_sided = self.config.estimator.differences == "two-sided"
        return ("plus", "minus") if two_sided else ("perturbed", "embedding")

    def blocks(self, pair: Pair) -> Pair:
        """Return the blocks to send: both embeddings, or a difference and the fresh one.

        A lossy codec would erase the difference of nearly equal embeddings. Under fixed point it is
        divided by mu, so that it is as large as an embedding.
        """
        if not self._apart:
            return pair
        return (pair[0] - pair[1]) / self._unit, self._fresh(pair)

    def _pair_of(self, first: Tensor, second: Tensor) -> Pair:
        """Return the pair that `blocks` turned into these two blocks."""
        if not self._apart:
            return first, second
        first = first * self._unit
        if self.config.estimator.differences == "two-sided":
            return second + first / 2, second - first / 2
        return second + first, second

    @cached_property
    def _apart(self) -> bool:
        """Return whether a codec or fixed point loses bits."""
        return self.config.uplink.codec != "identity" or self.aggregation.rounds

    @property
    def _unit(self) -> float:
        """Return the divisor of a difference that is sent."""
        return self.config.estimator.mu if self.aggregation.rounds else 1.0

    def _fresh(self, pair: Pair) -> Tensor:
        two_sided = self.config.estimator.differences == "two-sided"
        return (pair[0] + pair[1]) / 2 if two_sided else pair[1]

    # --- the party ------------------------------------------------------------------------------

    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Blocks:
        """Embed the window's rows twice, [R, E] each, in the order of `block_names`."""
        x = end.features(window)
        noise = end.noise(order.exchange, window) if self.mechanism.perturbs_uploads else None
        lengths, directions = window.lengths.tolist(), end.directions(order)
        if end.frozen:
            h, _ = passes.window(end.model, x, lengths, noise, directions.key, learns=False)
            pair = h, h
        else:
            pair, end.trace = values_of_pairs(end.model, x, lengths, directions, noise)
        return dict(zip(self.block_names(), self.blocks(pair), strict=True))

    # --- the label holder -----------------------------------------------------------------------

    def read(self, blocks: Blocks, window: Window) -> Reading:
        """Read the pair. The fresh embedding is f(w), or the centre of a two-sided pair."""
        pair = self._pair_of(*blocks.values())
        return Reading(self._fresh(pair), pair)

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer with scalar differences [S], at the top model before this call."""
        if self.config.estimator.perturbs == "all":
            return self._joint_answer(end, arrivals, joint)
        h, labels = end.gather(joint.window)
        answers: dict[int, Blocks] = {each.party: {} for each in arrivals}
        learning = [each for each in arrivals if each.party not in end.frozen]
        if joint.places:  # parties sent different rows
            for arrival in learning:
                answers |= self._scalars(end, [arrival], *end.gather(arrival.window))
        elif learning:
            answers |= self._scalars(end, learning, h, labels)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        end.count(end.step(h, labels, lengths, divided, gradients=False)[1])
        return answers

    @torch.no_grad()
    def _scalars(
        self, end: HolderEnd, arrivals: Sequence[Arrival], h: Tensor, labels: Tensor
    ) -> dict[int, Blocks]:
        """Answer parties that embedded the same rows with one difference a step each, [S]."""
        window, parties = arrivals[0].window, len(arrivals)
        lengths = of_steps = window.lengths.tolist()
        copies = end.copies(h, lengths, end.steps)
        if copies:
            h, labels, of_steps = copies.h, labels[copies.rows], copies.lengths
        blocks = []
        for arrival in arrivals:
            sent = (each.to(end.device, non_blocking=True) for each in arrival.reading.embeddings)
            first, second = (each[copies.rows] if copies else each for each in sent)
            blocks.append((end.columns[arrival.party], first, second))
        of_parties = []
        for pair in end.top.pairs(h, blocks, of_steps, end.key):
            values = [_row_losses(end.loss, outputs, labels) for outputs in pair]
            of_rows = differences(self.config.estimator, values)[0]
            of_parties.append(copies.mean(of_rows.T).T if copies else of_rows)
        divided = end.sampling.divisors(arrivals[0].batches.lengths).tolist()
        flat = torch.cat(of_parties).flatten()
        scalars = self._means(end, flat, parties * lengths, parties * divided)
        of_each = zip(arrivals, scalars.view(parties, -1).cpu(), strict=True)  # once for all
        return {arrival.party: {"difference": mine} for arrival, mine in of_each}

    @torch.no_grad()
    def _joint_answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer all parties with one difference a step, along all their directions (Spall, 1992).

        A top model that learns by differences steps by the same scalar, along its own direction.
        """
        h, labels = end.gather(joint.window)
        first, second = h.clone(), h.clone()
        for number, arrival in enumerate(arrivals):
            for rows, sent in zip((first, second), arrival.reading.embeddings, strict=True):
                mine = rows[:, end.columns[arrival.party]]
                sent = sent.to(end.device, non_blocking=True)
                if joint.places:
                    places = torch.from_numpy(joint.places[number])
                    mine[places.to(end.device, non_blocking=True)] = sent
                else:
                    mine[:] = sent
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        of_steps, copies = lengths, end.copies(first, lengths, end.steps)
        if copies:
            of_steps, first = copies.lengths, copies.h
            second = torch.cat(
                [second[copies.rows][:, : -end.parties], first[:, -end.parties :]], 1
            )
        own = end.optimizer if server_update.choose(self.config).by_differences else None
        if own:
            directions = end.directions()
            outputs, u = values_of_pairs(end.top, first, of_steps, directions, second=second)
        else:
            outputs = passes.pair(end.top, first, second, of_steps, end.key)
        values = [row_losses(end.loss, each, labels, copies) for each in outputs]
        of_rows, at_centre = differences(self.config.estimator, values)
        scalars = self._means(end, of_rows, lengths, divided)
        if own:
            descend(own, directions, u, scalars, end.steps)
            end.count(step_means(at_centre, lengths, divided))
        else:
            end.count(end.step(h, labels, lengths, divided, gradients=False)[1])
        answer = {"difference": scalars}
        return {each.party: {} if each.party in end.frozen else answer for each in arrivals}

    def _means(
        self, end: HolderEnd, of_rows: Tensor, lengths: Sequence[int], divided: Sequence[int]
    ) -> Tensor:
        if end.noise is None and not peak(of_rows) <= LARGEST:  # NaN is not
            raise DivergedError
        return clipped_noisy_means(of_rows, lengths, divided, end.noise)

    def silence(self, arrival: Arrival) -> Blocks:
        """Return differences of zero, [S]."""
        return {"difference": torch.zeros(len(arrival.window.lengths))}

    # --- the party again ------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Take S optimizer steps, with the regulariser's differences (AsyREVEL Eq. 16)."""
        steps = len(window.lengths)
        scalars = blocks["difference"].to(end.device, non_blocking=True)
        directions = end.directions(order)
        u: Tensor | None = end.trace
        if u is None and directions.can_be_stacked(steps):
            u = directions.stack(steps)
        weight = self.config.training.regulariser_weight
        if weight:
            scalars = scalars + weight * penalties(self.config.training, directions, u, steps)
        first = order.epoch * end.sampling.per_epoch + order.first
        descend(end.optimizer, directions, u, scalars, first)


def _row_losses(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row of P parties, [P, R], from their outputs [P, R, C]."""
    if loss.own:  # it may mix the rows that it gets
        return torch.stack([loss.per_row(each, labels) for each in outputs])
    parties = len(outputs)
    return loss.per_row(outputs.flatten(0, 1), labels.repeat(parties)).view(parties, -1)


def penalties(
    training: TrainingConfig, directions: Directions, u: Tensor | None, steps: int
) -> Tensor:
    """Return differences of the regulariser g along the directions, [S]; [S, M] of a stack."""
    config: EstimatorConfig = directions.config
    two_sided = config.differences == "two-sided"
    if u is not None:
        w = directions.flat
        ends = [w + config.mu * u, w - config.mu * u if two_sided else w]
        return differences(config, [penalty(training, end) for end in ends])[0].sum(-1)

    def g() -> Tensor:
        return directions.total(lambda part: penalty(training, part))

    firsts, seconds = in_place(directions, steps, lambda step, first: g())
    ends = [torch.stack(firsts), torch.stack(seconds) if two_sided else g()]
    return differences(config, ends)[0]
