"""The noise itself: in bottom models (VAFL, section 4), on scalars (DPZV, IV)."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.options import PrivacyConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import secret_generator, step_means

_FINE = 2.0**-12
"""Largest step of the grid on which noise is added, over the bound of the hidden value."""


def grid_step(bound: float, width: int = 1) -> float:
    """Return the grid's step for vectors of ``width`` numbers and a bounded norm."""
    return 2.0 ** math.floor(math.log2(_FINE * bound / math.sqrt(width)))


def on_grid(value: Tensor, noise: NDArray[np.float64], bound: float) -> Tensor:
    """Add noise to a value on a grid, so that the last bits do not show the value.

    Floating-point addition rounds a sum by the size of its parts. So some sums occur for some
    values only (Mironov, 2012). On multiples of a power of two, shifting and rounding commute. So
    the result is Gaussian noise about the value, rounded. Rounding adds at most `_FINE` of the
    bound to the change that a row can make, and the noise is larger by the same share.

    The result depends on the sum of two integers, and on nothing else. So the value decides neither
    the last bits nor the sign of a zero. Gradients pass through the function unchanged.

    The bound is for one number, values being [S], or for the norm of a row of [R, E].
    """
    step = grid_step(bound, value.shape[-1] if value.ndim > 1 else 1)
    # Adding 0 turns -0 into 0. Else a sum of -0 would show that the value is negative.
    drawn = torch.from_numpy(np.rint((1 + _FINE) * noise / step) + 0.0)
    drawn = drawn.to(value.device, non_blocking=True)
    with torch.no_grad():
        total = (((value.double() / step).round() + drawn) * step).to(value.dtype)
    # The parenthesis is exactly zero, and has the gradient. Any other order of these sums rounds.
    return total + (value - value.detach()) if value.requires_grad else total


@dataclass(frozen=True)
class Perturbation:
    """Noise in a bottom model, Eq. (10)-(11): uniform, and Gaussian in the last layer.

    The noise of a step depends on (secret, exchange, step, layer) only. So the pass that uses the
    feedback repeats the noise of the upload. The last layer's output is first clipped to norm R,
    which bounds the change by one record. The activation after it is post-processing.
    """

    config: PrivacyConfig
    secret: bytes
    exchange: int
    lengths: tuple[int, ...]
    last: int
    first_step: int = 0
    other_of_pair: bool = False  # the two embeddings of a zeroth-order pair differ in noise

    def __call__(self, layer: int, z: Tensor) -> Tensor:
        """Return a layer's output for a window, before its activation, with noise."""
        if layer == self.last:
            norms = z.norm(dim=1, keepdim=True).clamp_min(1e-12)
            z = z * (self.config.embedding_bound / norms).clamp_max(1.0)
            # NaN stays NaN under any noise, and so would show its row.
            z = z.nan_to_num(nan=0.0)
            return on_grid(z, self._drawn(layer, z), self.config.embedding_bound)
        if self.config.inner_noise == 0:
            return z
        return z + torch.from_numpy(self._drawn(layer, z)).to(z)

    def _drawn(self, layer: int, z: Tensor) -> NDArray[np.float64]:
        """Return the noise of a layer, in the shape of its output."""
        steps = enumerate(self.lengths, start=self.first_step)
        return np.concatenate(
            [self._draw(step, layer, (length, *z.shape[1:])) for step, length in steps]
        )

    def of_step(self, step: int) -> Perturbation:
        """Return the same noise, for a pass over the rows of one step of the window."""
        return replace(self, lengths=(self.lengths[step],), first_step=step)

    def of_pair(self) -> Perturbation:
        """Return noise for the other embedding of a zeroth-order pair."""
        return replace(self, other_of_pair=True)

    def _draw(self, step: int, layer: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
        # Torch's generator uses 32 bits of a seed, and the label holder could try out all of them.
        place = f"|{self.exchange}|{step}|{layer}" + "|other" * self.other_of_pair
        seed = hashlib.sha256(self.secret + place.encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed[:16], "little")))
        if layer == self.last:
            return self.config.embedding_noise * generator.standard_normal(shape)
        half_width = math.sqrt(3) * self.config.inner_noise
        return half_width * (2 * generator.random(shape) - 1)


class ScalarNoise:
    """Noise on each scalar (DPZV Eq. 8), and on each step of the top model.

    A step of the top model has noise on its gradient (DP-SGD, Abadi et al., 2016), or on a scalar.
    As in DPZV, it has no noise with ``calibration='paper'``. ``multiplier`` is the deviation on a
    mean over U rows, in units of C / U, where C bounds a row's difference or its gradient's norm.
    """

    def __init__(self, config: RunConfig, multiplier: float) -> None:
        self.clip = config.privacy.clip
        self.top_clip = config.privacy.top_clip
        self.of_top = config.privacy.calibration != "paper"
        self.multiplier = multiplier
        # In 32 bits, one of 50,000 rows changes how the others' sum rounds, more than noise hides.
        self.sums = torch.float64 if multiplier else torch.float32
        self.secret = secrets.token_bytes(16)
        if config.privacy.noise_seed >= 0:
            self.secret = f"{config.privacy.noise_seed} label holder".encode()
        self.drawn = 0  # number of draws so far

    def added_to(self, scalars: Tensor, divisors: Sequence[int]) -> Tensor:
        """Add noise to means [S] of clipped differences, over ``divisors`` rows each."""
        if not self.multiplier:
            return scalars
        sent = []
        for scalar, divisor in zip(scalars.double().split(1), divisors, strict=True):
            bound = self.clip / divisor
            sent.append(on_grid(scalar, self.multiplier * bound * self._drawn(1), bound))
        return torch.cat(sent).to(scalars)

    def added_to_gradients(self, gradients: Sequence[Tensor], divisor: int) -> list[Tensor]:
        """Add noise to a mean of clipped gradients, and return it in 32 bits."""
        if not self.multiplier:
            return list(gradients)
        bound = self.top_clip / divisor
        flat = torch.cat([each.reshape(1, -1) for each in gradients], dim=1)
        noise = self.multiplier * bound * self._drawn(flat.shape[1])
        added = on_grid(flat, noise, bound)[0].float()
        parts = added.split([each.numel() for each in gradients])
        return [part.view_as(each) for each, part in zip(gradients, parts, strict=True)]

    def standard(self, generator: np.random.Generator, numbers: int) -> NDArray[np.float64]:
        """Draw noise of multiplier 1. A subclass may draw from another distribution."""
        return generator.standard_normal(numbers)

    def _drawn(self, numbers: int) -> NDArray[np.float64]:
        """Draw numbers. Earlier and later draws do not follow from them."""
        self.drawn += 1
        generator = secret_generator(f"scalar|{self.drawn}|".encode() + self.secret)
        return self.standard(generator, numbers)


def clipped_noisy_means(
    of_rows: Tensor, lengths: Sequence[int], divisors: Sequence[int], noise: ScalarNoise | None
) -> Tensor:
    """Average rows' differences [R] over steps, [S]; clip and add noise (DPZV Eq. 7-8), if any."""
    if noise is None:
        return step_means(of_rows, lengths, divisors)
    # NaN would pass the clip.
    clipped = of_rows.nan_to_num(nan=0.0).clamp(-noise.clip, noise.clip)
    means = step_means(clipped.to(noise.sums), lengths, divisors)
    return noise.added_to(means, divisors).to(of_rows.dtype)
