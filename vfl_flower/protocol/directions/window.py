"""Directions of a window, which a key reproduces at each use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vfl_flower.config.options import EstimatorConfig
from vfl_flower.config.plugins import DIRECTIONS
from vfl_flower.models.training import is_large, trained
from vfl_flower.protocol.batches import secret_generator
from vfl_flower.protocol.directions.base import DirectionSet

_STACK = 2**24  # numbers in the perturbed models that are evaluated at once: 64 MB
_ANY_SEED = np.random.SeedSequence(0)
_BLOCK = 2**18  # numbers of a direction that are drawn at once, in place


class Directions:
    """The directions u_1 ... u_S of a window, in order, which the key reproduces.

    The key names the owner and the window, and contains a secret of the owner. Anybody with the
    directions could solve pairs of embeddings for the features.
    """

    def __init__(self, config: EstimatorConfig, key: bytes, model: nn.Module) -> None:
        self.config = config
        self.key = key
        self.parameters = [p.detach() for p in trained(model).values()]
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)  # d
        self.large = is_large(model)
        self.set: DirectionSet = DIRECTIONS.load(config.directions)(self.size)
        self._seeds = secret_generator(b"direction|" + key)
        self._states = np.zeros((0, 4), np.uint64)  # state of the generator for each step
        self._last: tuple[int, Sequence[Tensor]] = -1, ()  # a step that was drawn, if it is small

    def can_be_stacked(self, steps: int) -> bool:
        """Return whether a stack of so many directions fits into memory and saves time."""
        return 1 < steps <= _STACK // max(self.size, 1) and not self.large

    def stack(self, steps: int) -> Tensor:
        """Draw the directions of all steps, [S, d]."""
        return self._draw_all(self._states_of(steps)[:steps])

    def _draw_all(self, states: NDArray[np.uint64]) -> Tensor:
        """Draw a direction by each state of a generator, [n, d]."""
        drawn = np.empty((len(states), self.size), np.float32)

        def fill(share: range) -> None:
            bits = np.random.SFC64(_ANY_SEED)
            for each in share:
                self.set.fill(_at(bits, states[each]), drawn[each])

        threads = torch.get_num_threads() if drawn.size > _BLOCK else 1
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # NumPy draws without the GIL
                shares = [range(first, len(drawn), threads) for first in range(threads)]
                list(pool.map(fill, shares))
        else:
            fill(range(len(drawn)))
        u = torch.from_numpy(drawn).to(self.parameters[0].device, non_blocking=True)
        if self.set.length is not None:
            u *= self.set.length / u.norm(dim=1, keepdim=True)
        return u

    @property
    def flat(self) -> Tensor:
        """Return the parameters as one vector, [d]."""
        return torch.cat([p.view(-1) for p in self.parameters])

    def total(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of an elementwise function over all parameters."""
        return torch.stack([function(part).sum() for part in blocks(self.parameters)]).sum()

    def add(self, step: int, tensors: Sequence[Tensor], factor: float) -> None:
        """Add a step's direction times a factor to tensors in the parameters' shapes."""
        small: list[tuple[Tensor, Tensor]] = []
        if self.size <= _BLOCK:  # a step adds its direction several times
            if self._last[0] != step:
                drawn = np.empty(self.size, np.float32)
                bits = np.random.SFC64(_ANY_SEED)
                self.set.fill(_at(bits, self._states_of(step + 1)[step]), drawn)
                self._last = step, torch.from_numpy(drawn).split(self.sizes)
            small = list(zip((t.view(-1) for t in tensors), self._last[1], strict=True))
        if self.set.length is not None:
            squares = sum(float(u.square().sum()) for _, u in small or self._draw(step, tensors))
            factor *= self.set.length / squares**0.5
        with np.errstate(over="ignore"):  # a later check refuses infinite values
            factor = float(np.float32(factor))
        added = 0
        try:
            for part, u in small or self._draw(step, tensors):
                part.add_(u.to(part.device, non_blocking=True), alpha=factor)
                added += 1
        except BaseException:  # an interrupt too must not leave half a step
            for part, u in islice(small or self._draw(step, tensors), added):
                part.sub_(u.to(part.device, non_blocking=True), alpha=factor)
            raise

    def _draw(self, step: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slices of the tensors, each with as many entries of a step's direction."""
        generator = _at(np.random.SFC64(_ANY_SEED), self._states_of(step + 1)[step])
        for part in blocks(tensors):
            drawn = np.empty(len(part), np.float32)
            self.set.fill(generator, drawn)
            yield part, torch.from_numpy(drawn)

    def _states_of(self, steps: int) -> NDArray[np.uint64]:
        """Return the generator states of the first steps; seeding would take longer."""
        missing = steps - len(self._states)
        if missing > 0:
            self._states = np.concatenate([self._states, self._more_states(missing)])
        return self._states

    def _more_states(self, steps: int) -> NDArray[np.uint64]:
        return self._seeds.integers(0, 2**64, (steps, 4), np.uint64)


class StackedDirections(Directions):
    """The directions of M parties, whose keys decide them, and whose parameters are [M, ...]."""

    def __init__(
        self,
        config: EstimatorConfig,
        keys: Sequence[bytes],
        model: nn.Module,
        parameters: Sequence[Tensor],
    ) -> None:
        super().__init__(config, keys[0], model)
        self.parameters = [p.detach() for p in parameters]
        self.keys = keys
        self._seeds_of = [secret_generator(b"direction|" + key) for key in keys]
        self._states = np.zeros((0, len(keys), 4), np.uint64)
        self._drawn: Tensor | None = None  # a window of one step adds its direction several times

    def can_be_stacked(self, steps: int) -> bool:
        """Return whether a window has several steps. A stack of parties is always small enough."""
        return steps > 1

    def stack(self, steps: int) -> Tensor:
        """Return the directions of all steps and parties, [S, M, d]."""
        if self._drawn is None or len(self._drawn) < steps:
            states = self._states_of(steps)[:steps]
            self._drawn = self._draw_all(states.reshape(-1, 4)).view(*states.shape[:2], -1)
        return self._drawn[:steps]

    def _more_states(self, steps: int) -> NDArray[np.uint64]:
        of_each = [seeds.integers(0, 2**64, (steps, 4), np.uint64) for seeds in self._seeds_of]
        return np.stack(of_each, axis=1)

    @property
    def flat(self) -> Tensor:
        """Return the parameters as one vector for each party, [M, d]."""
        return torch.cat([p.flatten(1) for p in self.parameters], 1)

    def total(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of an elementwise function over each party's parameters, [M]."""
        return torch.stack([function(p).flatten(1).sum(1) for p in self.parameters]).sum(0)

    def add(self, step: int, tensors: Sequence[Tensor], factor: float | list[float]) -> None:
        """Add each party's direction to its tensors; ``factor`` is one number, or one a party."""
        parts = self.stack(step + 1)[step].split(self.sizes, dim=-1)
        for tensor, part in zip(tensors, parts, strict=True):
            if isinstance(factor, list):
                part = part * torch.tensor(factor).to(part)[:, None]
                tensor.add_(part.view_as(tensor))
            else:
                tensor.add_(part.view_as(tensor), alpha=factor)


def blocks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return flat slices of tensors, of at most `_BLOCK` numbers, since copies need memory."""
    return [part for tensor in tensors for part in tensor.view(-1).split(_BLOCK)]


def _at(bits: np.random.SFC64, state: NDArray[np.uint64]) -> np.random.Generator:
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": state},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits)
