"""Parties of one process that are alike, computed together: their models stacked, by torch's vmap.

To an estimator a `Stack` is a party: it has rows [R, M, ...], embeddings [R, M, E] and parameters
[M, ...] where one of its M parties has [R, ...], [R, E] and [...]. So there is no other arithmetic
than theirs. What a party says, counts and keeps is its own, before and after: parameters are
copied from the parties' models, and back when all of a window has been learned.

A batched product rounds otherwise than one for each party. So few parties are computed one by one,
as on nodes of their own, and so are all that `_kind` knows no other like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vfl_flower.config.errors import VflError
from vfl_flower.data import augmentation
from vfl_flower.data.samples import Samples
from vfl_flower.models.bottoms import BottomModel, Perturb
from vfl_flower.models.training import (
    is_large,
    is_plain_sgd,
    kind_of,
    load_optimizer,
    optimizer_tensors,
    trained,
)
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.privacy.ledger import ledger_of
from vfl_flower.transport.messages import Arrays, TrainOrder, Upload

FEWEST = 16
"""Parties that are worth it."""
_MOST = 128  # of a stack: more would leave the processor's cache


def train(turns: Sequence[Turn]) -> None:
    """Have each party train, as by `Party.train`."""
    for turn in turns:
        turn.begin()
    groups: dict[Hashable, list[Turn]] = defaultdict(list)
    for turn in turns:
        groups[turn.kind].append(turn)
    for kind, group in groups.items():
        parts = -(-len(group) // _MOST)
        for part in range(parts):
            mine = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            if kind is None or len(mine) < FEWEST:
                for turn in mine:
                    turn.alone()
            else:
                _together(mine)


class Turn:
    """A party's turn, and what came of it."""

    outcome: Upload | Exception
    window: Window
    kind: Hashable = None  # of turns that can be computed together; none: with no other

    def __init__(self, party: Party, order: TrainOrder) -> None:
        self.party = party
        self.order = order

    def begin(self) -> None:
        """What a party does before it computes."""
        party, order = self.party, self.order
        try:
            self.window = party.begin(order)
        except Exception as error:
            self.outcome = error
            return
        kind = _kind(party)
        if kind is not None and (order.coordinated or party.config.schedule.sampling == "shuffle"):
            self.kind = (kind, *(_steps(each) for each in (order, party.pending)))

    def alone(self) -> None:
        """The rest of it, by the party alone."""
        if hasattr(self, "outcome"):
            return
        try:
            self.party.learn(self.order.arrays)
        except Exception as error:
            self.outcome = error
            return
        self.embed()

    def embed(self) -> None:
        """The party's upload, once it has learned."""
        try:
            self.outcome = self.party.embed_window(self.order, self.window)
        except Exception as error:
            self.outcome = error

    def upload(self) -> Upload:
        """What the party uploads, unless it raises an error."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _steps(order: TrainOrder | None) -> Hashable:
    return order and (order.epoch, order.first, order.steps, order.coordinated)


def _kind(party: Party) -> Hashable:
    """What parties have in common that can be computed together; none if with no other."""
    if party.stacks_as is None:
        train, model, group = party.block.train, party.model, party.optimizer.param_groups[0]
        party.stacks_as = (
            (
                type(party.estimator) is FirstOrder
                and type(model) is BottomModel
                and model.stackable
                and not is_large(model)
                and not party.frozen
                and isinstance(train, np.ndarray)
                and party.mask is None
                and party.block.augment is augmentation.none
                and ledger_of(party.config).noise_on != "embeddings"
                and not party.config.downlink.surrogates
                and not group["clip"]  # by the norm of all parameters
            )
            and _same(
                (
                    *(party.config, party.rows, party.device, train.shape[1:], train.dtype),
                    *(kind_of(model), model.precision, *model.activations, type(party.optimizer)),
                    *((key, group[key]) for key in group if key not in ("params", "rates")),
                    *vars(group["rates"]).items(),
                )
            )
        )
    return party.stacks_as or None


@lru_cache(maxsize=64)
def _same(kind: Hashable) -> Hashable:
    """One object for all that are equal, which is soon compared."""
    return kind


def _together(turns: Sequence[Turn]) -> None:
    """Turns of parties that are alike."""
    stack = turns[0].party.stack
    parties = [turn.party for turn in turns]
    if stack is None or not stack.is_of(parties):
        stack = Stack(parties)
    try:
        stack.learn([turn.order.arrays for turn in turns])
    except VflError:  # of one of them, before any has learned
        for turn in turns:
            turn.alone()
        return
    except Exception as error:
        for turn in turns:
            turn.outcome = error
            turn.party.forget_window()  # feedback is used once, even if it fails halfway
        return
    try:
        stack.embed(turns)
    except Exception:  # of one of them, before any has sent
        for turn in turns:
            turn.embed()


class StackedModel(BottomModel):
    """Models with the same layers: parameters [M, ...], rows [R, M, ...], embeddings [R, M, E].

    The models go on as they are, but share its memory.
    """

    def __init__(self, models: Sequence[BottomModel]) -> None:
        super().__init__([], [])
        self._one = models[:1]  # in a list, since it is no part of this module
        named = [trained(model) for model in models]
        self._names = list(named[0])
        self.stacked = nn.ParameterList()
        for name in self._names:
            stacked = torch.stack([each[name].detach() for each in named])
            self.stacked.append(stacked)
            for each, mine in zip(named, stacked.unbind(), strict=True):
                each[name].data = mine

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Embeddings of each party's rows by its own model."""

        named = dict(zip(self._names, self.stacked, strict=True))

        def one(named: dict[str, Tensor], rows: Tensor) -> Tensor:
            outputs: Tensor = functional_call(self._one[0], named, (rows,))
            return outputs

        outputs: Tensor = vmap(one, in_dims=(0, 1), out_dims=1)(named, cast(Tensor, x))
        return outputs


class Stack:
    """Alike parties as one: the `PartyEnd` of an estimator.

    It stays as long as all that its parties do is to train together.
    """

    def __init__(self, parties: Sequence[Party]) -> None:
        one = parties[0]
        self.members, self.parties = parties, one.parties
        self.config, self.estimator, self.rows, self.size = (
            *(one.config, FirstOrder(one.config), one.rows, one.size),
        )
        self.index, self.outputs, self.device = one.index, one.outputs, one.device
        self.frozen, self.secret = False, b""  # which layers of ours have no use for
        self.arrays: Arrays = {}
        self.model: BottomModel = StackedModel([party.model for party in parties])
        for party in parties:
            party.kept = None  # which is over other memory
        group = {**one.optimizer.param_groups[0], "params": list(self.model.parameters())}
        self.optimizer = cast(Any, type(one.optimizer))([group])
        self.trace: Any = None
        self.pending = [party.pending for party in parties]  # what was last asked for
        self.windows: list[Window] = []

    def is_of(self, parties: Sequence[Party]) -> bool:
        """Whether it is still of these parties, as they are."""
        return len(parties) == len(self.members) and all(
            party.stack is self and party is mine and party.pending is pending
            for party, mine, pending in zip(parties, self.members, self.pending, strict=True)
        )

    def learn(self, arrays: Sequence[Arrays]) -> None:
        """As `Party.learn`, by answers to each; `VflError` before any does, if one is of no use."""
        order = self.pending[0]
        if order is None:
            return
        self.windows = self.windows or [party.pending_window() for party in self.members]
        of_each = zip(self.members, arrays, self.windows, strict=True)
        answers = [party.downlinks.decode(sent, own)["gradient"] for party, sent, own in of_each]
        self._take_optimizers()
        blocks = {"gradient": torch.stack(answers, dim=1)}
        self.estimator.update(self, blocks, order, self.windows[0])
        self._give_optimizers_back()
        for party in self.members:
            party.forget_window()

    def embed(self, turns: Sequence[Turn]) -> None:
        """As `Party.embed_window`, of each."""
        self.windows = [turn.window for turn in turns]
        for turn in turns:
            turn.party.await_answer(turn.order)
        self.pending = [turn.order for turn in turns]
        blocks = self.estimator.embed(self, turns[0].order, self.windows[0])
        of_each = blocks["embedding"].detach().cpu().unbind(1)
        for turn, rows in zip(turns, of_each, strict=True):
            turn.party.stack = self
            try:
                mine = {"embedding": rows}
                turn.outcome = turn.party.uploaded(turn.order, turn.window, mine)
            except Exception as error:
                turn.outcome = error

    def _take_optimizers(self) -> None:
        """Take over what the parties' optimizers keep of each parameter, if they do."""
        self.optimizer.state.clear()
        if is_plain_sgd(self.optimizer):
            return
        kept = [optimizer_tensors(party.optimizer) for party in self.members]
        stacked = {}
        for name, one in kept[0].items():
            of_each = [each[name] for each in kept]
            if one.dim():
                stacked[name] = torch.stack(of_each)
            elif all(map(one.equal, of_each)):  # how many steps it has made
                stacked[name] = one
            else:
                raise VflError("has learned from another number of steps than others.")
        load_optimizer(self.optimizer, {name: each.cpu().numpy() for name, each in stacked.items()})

    def _give_optimizers_back(self) -> None:
        """Leave what they keep in the parties' own."""
        for name, stacked in optimizer_tensors(self.optimizer).items():
            parts = stacked.unbind() if stacked.dim() else [stacked] * len(self.members)
            number, key = name.split(".", 1)
            for party, part in zip(self.members, parts, strict=True):
                parameter = party.optimizer.param_groups[0]["params"][int(number)]
                party.optimizer.state[parameter][key] = part.clone()

    # --- what the estimator has of it -----------------------------------------------------------

    def features(self, window: Window) -> Tensor:
        """The rows of each party's own window, [R, M, ...]."""
        of_each = zip(self.members, self.windows, strict=True)
        rows = [cast(Tensor, party.features(own)) for party, own in of_each]
        return torch.stack(rows).movedim(0, 1)

    def noise(self, exchange: int, window: Window) -> None:
        """None of it."""
