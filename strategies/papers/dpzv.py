"""DPZV: differentially private zeroth-order vertical federated learning (Zhang et al., 2026).

Algorithm 1: a party uploads its embeddings at w + mu u and at w - mu u. The direction u is on the
sphere of radius sqrt(d) (line 5, Eq. 6). The label holder takes each row's difference of losses
(Eq. 7), clips it to [-C, C], averages, and adds one Gaussian number (line 6, Eq. 8:
`clipped_noisy_means` in ``vfl_flower/protocol/privacy/noise.py``). The party steps along u (line 9,
Eq. 9). The top model steps by its gradient. With ``server-update = "zeroth-order"``, it steps along
directions instead.

Differences are divided by 2 mu, as in Eq. (3), and clipped on both sides, as the sensitivity needs.
The noise is calibrated to ``epsilon`` over the scalars of all parties and the top model's steps. It
counts how often each row is used. The paper instead treats mini-batches as secret Poisson samples,
and lets the top model learn without noise: ``calibration = "paper"``. Its models are larger than
the defaults here: ``bottom-model = "mlp"`` and ``top-model = "mlp"``.

The algorithm on one page: ``strategies/reference/dpzv.py``.
"""

from vfl_flower.protocol.system import ONE, System

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
        # Each parameter gets noise, and each step of a top model is a release.
        "bottom-model": "linear",
        "top-model": "sum",
    },
    rates={"sgd": (0.3, 0.05), "momentum": (0.03, 0.005)},
)
