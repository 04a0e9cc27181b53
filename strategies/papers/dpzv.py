"""DPZV: differentially private zeroth-order vertical federated learning (Zhang et al., 2026).

Algorithm 1: a party uploads its embeddings at w + mu u and at w - mu u, u on the sphere of radius
sqrt(d) (line 5, Eq. 6); the label holder clips each row's loss difference to [-C, C], averages, and
adds one Gaussian number (line 6, Eq. 7-8); the party steps along u (line 9, Eq. 9). The top model
steps by its own gradient, or with ``server-update = "zeroth-order"`` along directions of its own.

Differences are divided by 2 mu, as Eq. (3) has it, and clipped on both sides, which its sensitivity
needs. The noise is calibrated to ``epsilon`` over the scalars of all parties and the steps of the
top model, by how often a row is in one: the paper takes mini-batches for secret Poisson samples,
and lets the top model learn without noise, which is ``calibration = "paper"``.
"""

from __future__ import annotations

from vfl_flower.protocol.schedule import ONE
from vfl_flower.protocol.systems import System

DPZV = System(
    name="dpzv",
    about="DPZV, Algorithm 1: parties receive scalars that are clipped and noisy.",
    quorum=ONE,
    defaults={
        "estimator": "zeroth-order",
        "differences": "two-sided",
        "directions": "scaled-sphere",
        "privacy": "scalar",
        "epsilon": 1.0,
        "batch-size": 1024,  # noise on a mean is the smaller, the more rows it is of
        "epochs": 200,
        "clip": 0.2,
    },
    rates={"sgd": (0.005, 0.05), "momentum": (0.0005, 0.005)},
)
