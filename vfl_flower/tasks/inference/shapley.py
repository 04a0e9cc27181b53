"""Sets of players whose values give Shapley values: all sets of few players, or random orders.

A player's value is the mean, over all orders of the players, of what it adds to the players before
it (Shapley, 1953).
"""

import math
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

EXACT = 10
"""Largest number of players for exact values from all sets. Above, sample random orders."""
ORDERS = 200
"""Number of random orders above that."""


@lru_cache
def all_sets(players: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return all sets of players, [2 ** P, P], and weights: values are weights.T @ the sets'."""
    sets = np.array(list(product((False, True), repeat=players)), bool)
    sets = sets.reshape(2**players, players)
    by_size = np.array(
        [1 / (players * math.comb(players - 1, before)) for before in range(players)]
    )
    before = sets.sum(1)[:, None] - sets
    return sets, np.where(sets, 1, -1) * by_size[np.minimum(before, players - 1)]


@lru_cache
def sampled_sets(players: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return sets along random orders, [orders, P + 1, P], and each player's place, [orders, P].

    The reverse of an order follows it, to reduce variance.
    """
    generator = np.random.default_rng(0)
    half = [generator.permutation(players) for _ in range(ORDERS // 2)]
    places = np.array([np.argsort(each) for order in half for each in (order, order[::-1])])
    sizes = np.arange(players + 1)[None, :, None]
    sets: NDArray[np.bool_] = places[:, None, :] < sizes
    return sets, places
