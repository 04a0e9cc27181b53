"""Synchronous split learning, the reference for every other system.

In each step, all parties embed the same mini-batch. The label holder steps its top model and
returns gradient rows, and all parties step. This is centralised SGD, computed apart. EF-VFL's paper
calls it SVFL.

The algorithm on one page: ``strategies/reference/split_nn.py``.
"""

from vfl_flower.protocol.system import System

SPLIT_NN = System(
    name="split-nn",
    about="Split learning: all parties embed the same mini-batch (SVFL).",
)
