"""Synchronous split learning, the reference that every other system is compared with.

Each step all parties embed the same mini-batch, the label holder steps its top model and returns
gradient rows, and all parties step: centralised SGD, computed apart. EF-VFL's paper calls it SVFL.
"""

from __future__ import annotations

from strategies.vertical import Vertical


class SplitNN(Vertical):
    """Split learning with a coordinated mini-batch; SVFL."""

    name = "split-nn"
    axes = "sync · first-order · first-order server · identity · no privacy"
