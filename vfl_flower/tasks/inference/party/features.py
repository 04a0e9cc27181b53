"""A party's features as its owner calls them, and where they are in a sample.

A feature is a column of a table, however many 0/1 columns encode a text, a signal of sequences, or
a patch of images.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.data.samples import Samples
from vfl_flower.data.source import Preparation

_PATCHES = 4  # along each side of an image


@dataclass(frozen=True)
class Feature:
    """A feature: its name, its index into samples [R, ...], and its number in the owner's order."""

    name: str
    index: tuple[Any, ...]
    number: int


def features_of(
    party: int, sample: Samples, preparation: Preparation | None, sequences: bool
) -> list[Feature]:
    """Return a party's features in order, from one row, or raise `ConfigError` if it has none."""
    if isinstance(sample, dict) or not sample.is_floating_point():
        raise ConfigError(
            f"Party {party} has samples of {'tokens or ' * (not isinstance(sample, dict))}several "
            "parts, which have no columns to permute. Only tables, sequences and images are "
            "explained."
        )
    shape = tuple(sample.shape)
    table = list(preparation.columns.items()) if preparation else []
    named: list[tuple[str, tuple[Any, ...]]]
    if len(shape) == 1 and table and table[-1][1].stop == shape[0]:
        named = [(name, (..., place)) for name, place in table]
    elif len(shape) == 1:
        named = [(f"column {at}", (..., slice(at, at + 1))) for at in range(shape[0])]
    elif sequences and shape[-1] > 1:
        named = [(f"signal {at}", (..., slice(at, at + 1))) for at in range(shape[-1])]
    else:
        named = _of_grid(shape, ("step", "signal") if sequences else ("row", "column"))
    return [Feature(name, index, number) for number, (name, index) in enumerate(named)]


def _of_grid(shape: tuple[int, ...], words: tuple[str, str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return name and index of the patches of samples [height, width, ...]."""
    sides = [
        list(pairwise(np.linspace(0, size, min(size, _PATCHES) + 1).astype(int).tolist()))
        for size in shape[:2]
    ]
    return [
        (
            f"{words[0]}s {top}-{bottom - 1}, {words[1]}s {left}-{right - 1}",
            (slice(None), slice(top, bottom), slice(left, right)),
        )
        for (top, bottom), (left, right) in product(*sides)
    ]
