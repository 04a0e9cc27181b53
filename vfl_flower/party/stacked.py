"""Stacks of similar parties in one process, computed together by torch's vmap.

An estimator treats a `Stack` as one party. The stack of M parties has rows [R, M, ...], embeddings
[R, M, E], parameters [M, ...] and directions [S, M, d]. One party has [R, ...], [R, E], [...] and
[S, d]. So the arithmetic is the same. Each party still counts, saves and sends its own data. The
parties' models and optimizers share the memory of their stack.

A batched product rounds otherwise than single products. So small groups of parties, and parties
without a match by `_kind`, are computed one by one, as on separate nodes.
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
from vfl_flower.config.provenance import peak_memory_mb
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.data.source import signs_in
from vfl_flower.models.bottom_model import BottomModel, Perturb
from vfl_flower.models.training import is_large, kind_of, optimizer_tensors, trained
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Blocks, decode_many
from vfl_flower.protocol.directions.window import StackedDirections
from vfl_flower.protocol.estimators.base import window_key
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.transport.messages import Arrays, EvaluateOrder, TrainOrder, Upload

FEWEST = 16
"""Smallest number of parties to stack."""
_BY_ENTRY = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that step each entry of a parameter separately."""
_MOST = 128  # parties of a stack: more would exceed the processor's cache
_DIRECTIONS = 2**25  # numbers in the directions of a stack: 128 MB


def serve(turns: Sequence[StackedTurn]) -> None:
    """Serve each party's turn, as `Party.train` or `Party.evaluate` does."""
    memory_mb = peak_memory_mb()  # to ask for each party would take long
    for turn in turns:
        turn.memory_mb = memory_mb
        turn.begin()
    groups: dict[Hashable, list[StackedTurn]] = defaultdict(list)
    for turn in turns:
        groups[turn.kind].append(turn)
    for kind, group in groups.items():
        most = 1 if kind is None else _most(group[0])
        parts = -(-len(group) // most)
        for part in range(parts):
            mine = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            if len(mine) < FEWEST:
                for turn in mine:
                    turn.alone()
            else:
                _together(mine)


class StackedTurn:
    """A party's turn, and its outcome.

    kind : key of turns that can be computed together; ``None`` for a single turn.
    """

    outcome: Upload | Exception
    window: Window
    kind: Hashable = None
    memory_mb = 0.0  # peak memory of this process, which all parties share

    def __init__(self, party: Party, order: TrainOrder | EvaluateOrder) -> None:
        self.party = party
        self.order = order

    def begin(self) -> None:
        """Run the part of the turn before any computation."""
        party, order = self.party, self.order
        try:
            if isinstance(order, TrainOrder):
                self.window = party.begin(order)
            else:
                party.begin_evaluation(order)
        except Exception as error:
            self.outcome = error
            return
        kind, pending = _kind(party), party.pending.order if party.pending else None
        draws = order if isinstance(order, TrainOrder) else pending
        if kind is not None and draws and (draws.coordinated or not party.sampling.varies):
            self.kind = kind, _steps(order), _steps(pending)

    def alone(self) -> None:
        """Run the rest of the turn for the party alone."""
        if hasattr(self, "outcome"):
            return
        try:
            self.party.learn(self.order.arrays)
        except Exception as error:
            self.outcome = error
            return
        self.embed()

    def embed(self, blocks: Blocks | None = None) -> None:
        """Make the party's upload. ``blocks`` are its embeddings, if a stack computed them."""
        party, order = self.party, self.order
        try:
            if isinstance(order, TrainOrder):
                self.outcome = party.upload_window(order, self.window, blocks)
            else:
                self.outcome = party.upload_test_rows(self.memory_mb)
        except Exception as error:
            self.outcome = error

    def upload(self) -> Upload:
        """Return the party's upload, or raise its error."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _steps(order: TrainOrder | EvaluateOrder | None) -> Hashable:
    if isinstance(order, TrainOrder):
        return order.epoch, order.first, order.steps, order.coordinated
    return None


def _kind(party: Party) -> Hashable:
    """Return what similar parties share; ``None`` for a party that must train alone."""
    if party.in_process.kind is None:
        learner, block = party.learner, party.inputs.block
        train, model, group = block.train, learner.model, learner.optimizer.param_groups[0]
        party.in_process.kind = (
            (
                type(party.estimator) in (FirstOrder, ZerothOrder)
                and type(model) is BottomModel
                and model.stackable
                and not is_large(model)
                and not learner.frozen
                and isinstance(train, np.ndarray)
                and party.inputs.mask is None
                and block.augment is samples.none
                and not party.estimator.mechanism.perturbs_uploads
                and not party.config.downlink.surrogates
                and not group["clip"]  # clipping uses the norm of all parameters
                and type(learner.optimizer) in _BY_ENTRY
            )
            and _same(
                (
                    *(party.config, learner.rows, learner.device, train.shape[1:], train.dtype),
                    *(kind_of(model), model.precision, *model.activations, type(learner.optimizer)),
                    *((key, group[key]) for key in group if key not in ("params", "rates")),
                    *(*vars(group["rates"]).items(), *signs_in(block.preparation)),
                )
            )
        )
    return party.in_process.kind or None


def _most(turn: StackedTurn) -> int:
    """Return how many such parties fit into a stack; a zeroth-order window draws [S, M, d]."""
    party, orders = turn.party, [turn.order, turn.party.pending and turn.party.pending.order]
    if not isinstance(party.estimator, ZerothOrder):
        return _MOST
    steps = max((each.steps for each in orders if isinstance(each, TrainOrder)), default=1)
    size = sum(p.numel() for p in trained(party.learner.model).values())
    return min(_MOST, max(1, _DIRECTIONS // (steps * size)))


@lru_cache(maxsize=64)
def _same(kind: Hashable) -> Hashable:
    """Return one shared object for equal kinds, which compares fast."""
    return kind


def _together(turns: Sequence[StackedTurn]) -> None:
    """Compute turns of similar parties in one stack."""
    stack = turns[0].party.in_process.stack
    parties = [turn.party for turn in turns]
    if stack is None or not stack.is_of(parties):
        stack = Stack(parties)
    try:
        stack.learn([turn.order.arrays for turn in turns])
    except VflError:  # raised for one party, before any party has learned
        for turn in turns:
            turn.alone()
        return
    except Exception as error:
        for turn in turns:
            turn.outcome = error
            turn.party.forget_window()  # use feedback once, even if the update fails halfway
        return
    if not isinstance(turns[0].order, TrainOrder):
        for turn in turns:  # their test rows may be many
            turn.embed()
        return
    try:
        stack.embed(turns)
    except Exception:  # raised for one party, before any party has uploaded
        for turn in turns:
            turn.embed()


class StackedModel(BottomModel):
    """Models with the same layers, stacked.

    Shapes are parameters [M, ...], rows [R, M, ...] and embeddings [R, M, E].
    The single models stay usable, and share its memory.
    """

    def __init__(self, models: Sequence[BottomModel]) -> None:
        super().__init__([], [])
        self._one = models[:1]  # a list hides the model from torch's module registry
        named = [dict(model.named_parameters()) for model in models]
        self._names = list(named[0])
        layers, precision = models[0].layers, models[0].precision
        plain = all(type(each) is nn.Linear and each.bias is not None for each in layers)
        self._linear = plain and precision == "float32"
        self.stacked = nn.ParameterList()
        for name in self._names:
            stacked = torch.stack([each[name].detach() for each in named])
            learns = named[0][name].requires_grad
            self.stacked.append(nn.Parameter(stacked, requires_grad=learns))
            for each, mine in zip(named, stacked.unbind(), strict=True):
                each[name].data = mine

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Return embeddings of each party's rows by its own model."""
        if self._linear and cast(Tensor, x).dim() == 3:  # vmap takes twice the time, and more
            z, parts = cast(Tensor, x).transpose(0, 1), iter(self.stacked)
            for activation in self._one[0].activations:
                weight, bias = next(parts), next(parts)
                z = activation(torch.baddbmm(bias[:, None], z, weight.mT))
            return z.transpose(0, 1)
        named = dict(zip(self._names, self.stacked, strict=True))

        def one(named: dict[str, Tensor], rows: Tensor) -> Tensor:
            outputs: Tensor = functional_call(self._one[0], named, (rows,))
            return outputs

        outputs: Tensor = vmap(one, in_dims=(0, 1), out_dims=1)(named, cast(Tensor, x))
        return outputs


class Stack:
    """Similar parties as one `PartyEnd` of an estimator.

    A stack stays valid as long as its parties only train together.
    """

    def __init__(self, parties: Sequence[Party]) -> None:
        one = parties[0].learner
        self.members, self.parties = parties, one.parties
        self.config, self.estimator = one.config, parties[0].estimator
        self.sampling = one.sampling
        self.rows, self.size, self.device = one.rows, one.size, one.device
        self.index, self.outputs = one.index, one.outputs
        self.frozen, self.secret = False, b""  # built-in layers do not use the secret
        self.arrays: Arrays = {}
        self.model: BottomModel = StackedModel([party.learner.model for party in parties])
        for party in parties:
            party.in_process.model = None  # its record shares another memory
            party.in_process.stack = None  # a former stack has lost them
        group = {**one.optimizer.param_groups[0], "params": list(trained(self.model).values())}
        group["foreach"] = True  # a third of the time on tensors of this size, with equal results
        self.optimizer = cast(Any, type(one.optimizer))([group])
        self.trace: Any = None
        self.pending = [party.pending for party in parties]  # windows that await feedback
        # State of the optimizer by name, and the tensor whose parts the parties' optimizers hold.
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        self._windows: list[Window] = []
        self._secrets: list[tuple[bytes, TrainOrder]] = []  # of each party's window
        self._directions: StackedDirections | None = None

    def is_of(self, parties: Sequence[Party]) -> bool:
        """Return whether the stack still belongs to exactly these parties, unchanged."""
        return len(parties) == len(self.members) and all(
            party.in_process.stack is self and party is mine and party.pending is pending
            for party, mine, pending in zip(parties, self.members, self.pending, strict=True)
        )

    def learn(self, arrays: Sequence[Arrays]) -> None:
        """Learn from all feedback, as `Party.learn`; if one is unusable, no party learns."""
        pending = [each for each in self.pending if each]
        if not pending:
            return
        self._windows = [each.rows for each in pending]
        self._secrets = [(each.secret, each.order) for each in pending]
        links = [party.links.down for party in self.members]
        blocks = decode_many(links, arrays, self._windows)
        self._take_optimizers()
        try:
            self.estimator.update(self, blocks, pending[0].order, pending[0].rows)
        finally:  # a failed update keeps its whole steps
            self._share_optimizers()
        for party in self.members:
            party.forget_window()
        self.pending = [None] * len(self.members)

    def embed(self, turns: Sequence[StackedTurn]) -> None:
        """Embed and upload the window of each turn, as `Party.upload_window`."""
        self._windows = [turn.window for turn in turns]
        orders = [cast(TrainOrder, turn.order) for turn in turns]
        secrets = [party.learner.secret for party in self.members]
        self._secrets = list(zip(secrets, orders, strict=True))
        blocks = self.estimator.embed(self, orders[0], self._windows[0])
        of_each = [rows.detach().cpu().unbind(1) for rows in blocks.values()]
        for turn, *mine in zip(turns, *of_each, strict=True):
            turn.party.in_process.stack = self
            turn.embed(dict(zip(blocks, mine, strict=True)))
        self.pending = [turn.party.pending for turn in turns]

    def _take_optimizers(self) -> None:
        """Stack the per-parameter states of the parties' optimizers, unless they are stacked."""
        if self.optimizer.param_groups[0]["plain"] or self._shared:
            return
        kept = [optimizer_tensors(party.learner.optimizer) for party in self.members]
        other_steps = VflError("has trained for another number of steps than other parties.")
        if any(each.keys() != kept[0].keys() for each in kept):
            raise other_steps
        for name, one in kept[0].items():
            of_each = [each[name] for each in kept]
            if not one.dim() and not all(map(one.equal, of_each)):  # the step count
                raise other_steps
            parameter, key = _place(self.optimizer, name)
            stacked = torch.stack(of_each) if one.dim() else one.clone()
            self.optimizer.state[parameter][key] = stacked

    def _share_optimizers(self) -> None:
        """Have the parties' optimizers share the memory of the stacked states."""
        for name, stacked in optimizer_tensors(self.optimizer).items():
            known, of_parties = self._shared.get(name, (None, stacked))
            if known is not stacked:
                of_parties = stacked if stacked.dim() else stacked.repeat(len(self.members))
                self._shared[name] = stacked, of_parties
                for party, part in zip(self.members, of_parties.unbind(), strict=True):
                    parameter, key = _place(party.learner.optimizer, name)
                    party.learner.optimizer.state[parameter][key] = part
            elif not stacked.dim():  # a party that later trains alone counts by itself
                of_parties.fill_(stacked)

    # --- interface for estimators ---------------------------------------------------------------

    def features(self, window: Window) -> Tensor:
        """Return the rows of each party's own window, [R, M, ...]."""
        of_each = zip(self.members, self._windows, strict=True)
        rows = [cast(Tensor, party.learner.features(own)) for party, own in of_each]
        return torch.stack(rows).movedim(0, 1)

    def noise(self, exchange: int, window: Window) -> None:
        """Return no noise: perturbed parties train alone."""

    def directions(self, order: TrainOrder) -> StackedDirections:
        """Return the directions of each party's own window."""
        keys = [window_key(*each) for each in self._secrets]
        if self._directions is None or self._directions.keys != keys:
            parameters = list(trained(self.model).values())
            one = self.members[0].learner.model
            config = self.config.estimator
            self._directions = StackedDirections(config, keys, one, parameters)
        return self._directions


def _place(optimizer: torch.optim.Optimizer, name: str) -> tuple[Tensor, str]:
    """Return the parameter and the key of a state that `optimizer_tensors` names."""
    number, key = name.split(".", 1)
    return optimizer.param_groups[0]["params"][int(number)], key
