"""Directions of a window, which a key reproduces at each use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    Parameters
    ----------
    key : names the owner and the window, and contains a secret of the owner. Anybody with the
        directions could solve pairs of embeddings for the features.
    model : the model with the d parameters.
    """

    def __init__(self, config: EstimatorConfig, key: bytes, model: nn.Module) -> None:
        self.config = config
        self.key = key
        self.parameters = [p.detach() for p in trained(model).values()]
        self.size = sum(p.numel() for p in self.parameters)  # d
        self.large = is_large(model)
        self.set: DirectionSet = DIRECTIONS.load(config.directions)(self.size)
        self._seeds = secret_generator(b"direction|" + key)
        self._states = np.zeros((0, 4), np.uint64)  # state of the generator for each step

    def can_be_stacked(self, steps: int) -> bool:
        """Return whether a stack of so many directions fits into memory and saves time."""
        return 1 < steps <= _STACK // max(self.size, 1) and not self.large

    def stack(self, steps: int) -> Tensor:
        """Draw the directions of all steps, [S, d]."""
        drawn = np.empty((steps, self.size), np.float32)
        states = self._states_of(steps)

        def fill(share: range) -> None:
            bits = np.random.SFC64(_ANY_SEED)
            for step in share:
                self.set.fill(_at(bits, states[step]), drawn[step])

        threads = torch.get_num_threads() if drawn.size > _BLOCK else 1
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # NumPy draws without the GIL
                list(pool.map(fill, [range(first, steps, threads) for first in range(threads)]))
        else:
            fill(range(steps))
        u = torch.from_numpy(drawn).to(self.parameters[0].device, non_blocking=True)
        if self.set.length is not None:
            u *= self.set.length / u.norm(dim=1, keepdim=True)
        return u

    def add(self, step: int, tensors: Sequence[Tensor], factor: float) -> None:
        """Add a step's direction times a factor to tensors in the parameters' shapes."""
        if self.set.length is not None:
            squares = sum(float(drawn.square().sum()) for _, drawn in self._draw(step, tensors))
            factor *= self.set.length / squares**0.5
        with np.errstate(over="ignore"):  # a later check refuses infinite values
            factor = float(np.float32(factor))
        added = 0
        try:
            for part, drawn in self._draw(step, tensors):
                part.add_(drawn.to(part.device, non_blocking=True), alpha=factor)
                added += 1
        except BaseException:  # an interrupt too must not leave half a step
            for part, drawn in islice(self._draw(step, tensors), added):
                part.sub_(drawn.to(part.device, non_blocking=True), alpha=factor)
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
            more = self._seeds.integers(0, 2**64, (missing, 4), np.uint64)
            self._states = np.concatenate([self._states, more])
        return self._states


def blocks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat slices of tensors in order, each of at most `_BLOCK` numbers.

    Copies of slices need little memory.
    """
    for tensor in tensors:
        yield from tensor.view(-1).split(_BLOCK)


def _at(bits: np.random.SFC64, state: NDArray[np.uint64]) -> np.random.Generator:
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": state},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits)
