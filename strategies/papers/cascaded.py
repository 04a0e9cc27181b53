"""Secure and Fast Asynchronous VFL via Cascaded Hybrid Optimization (Wang et al., 2023).

Algorithm 1, VFL-Cascaded: parties learn by zeroth order (lines 3-7, Eq. 2-3). The top model learns
by its own gradient (lines 10-11, Eq. 4), after the losses are taken (line 9). The label holder
sends only the difference of the losses, since a party needs no more.

Algorithm 2 (appendix B), Syn-ZOO-VFL: all parties and the server step by zeroth order, on one
shared mini-batch. For it Adam is the default, as for AsyREVEL; the paper's is plain SGD.

The algorithm on one page: ``strategies/reference/cascaded.py``.
"""

from vfl_flower.protocol.system import ONE, System

CASCADED = System(
    name="cascaded",
    about="VFL-Cascaded, Algorithm 1: zeroth-order parties, first-order server.",
    quorum=ONE,
    defaults={"estimator": "zeroth-order"},
    rates={"sgd": (0.002, 0.1), "momentum": (0.0002, 0.01), "adam": (0.001, 0.002)},
)
SYN_ZOO = System(
    name="syn-zoo",
    about="Syn-ZOO-VFL, Algorithm 2: synchronous, zeroth-order on both sides.",
    defaults={
        "estimator": "zeroth-order",
        "server-update": "zeroth-order",
        "optimizer": "adam",
        "batch-size": 8,
        "bottom-model": "linear",
        "top-model": "linear",
    },
    rates={"sgd": (0.002, 0.002), "momentum": (0.0002, 0.0002)},
)
