"""Few cases in which each two values of different parameters meet, in place of all cases."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def cases(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases, one value of each parameter in each, that hold all pairs of values.

    The next case is always the first that holds most of the missing pairs. So the cases are the
    same each time, and the first of all has the first values.
    """
    places = list(product(*(range(len(each)) for each in values)))

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, places))
    chosen = []
    while missing:
        chosen.append(max(places, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return [tuple(of[at] for of, at in zip(values, case, strict=True)) for case in chosen]


def pairwise(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the decorator that runs a test on `cases` of these parameters."""
    return pytest.mark.parametrize(tuple(values), cases(*values.values()), ids=str)
