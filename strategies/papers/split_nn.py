"""Synchronous split learning, the reference that every other system is compared with.

Each step all parties embed the same mini-batch, the label holder steps its top model and returns
gradient rows, and all parties step: centralised SGD, computed apart. EF-VFL's paper calls it SVFL.
"""

from __future__ import annotations

from vfl_flower.protocol.systems import System

SPLIT_NN = System(
    name="split-nn",
    about="Split learning: all parties embed the same mini-batch (SVFL).",
)
