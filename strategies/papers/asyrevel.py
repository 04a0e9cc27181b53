"""AsyREVEL: Desirable Companion for Vertical Federated Learning (Zhang, Gu et al., 2021); ZOO-VFL.

Algorithm 1: a party uploads its embeddings at w and at w + mu u (line 4), the label holder answers
their loss difference by what its table holds of the other parties (line 9), and both sides step
along directions of their own (lines 6-7 and 10-11, Eq. 15-17). Key ``directions``: ``gaussian`` is
AsyREVEL-Gau, ``sphere`` AsyREVEL-Uni. The estimator's factor is Cascaded's phi(d), where this
paper writes d for both. ``regulariser = "nonconvex"`` is that of Eq. (22), added at the party.

The papers' optimizer is plain SGD, which here is ``optimizer = "sgd"``; with Adam, the default, one
learning rate serves large and small models.

Section 5.3 compares it with its synchronous counterpart, SynREVEL, where one party is 20 to 60 %
slower than the others.
"""

from __future__ import annotations

from vfl_flower.protocol.schedule import ALL, ONE
from vfl_flower.protocol.systems import System

ASYREVEL = System(
    name="asyrevel",
    about="AsyREVEL, Algorithm 1: asynchronous, zeroth-order on both sides.",
    quorum=ONE,
    defaults={
        "estimator": "zeroth-order",
        "server-update": "zeroth-order",
        "delay": "straggler",
        "optimizer": "adam",
        "batch-size": 8,
    },
    rates={"sgd": (0.002, 0.002), "momentum": (0.0002, 0.0002)},
)
SYNREVEL = System(
    name="synrevel",
    about="SynREVEL: AsyREVEL, but every step waits for the slowest party.",
    quorum=ALL,
    defaults=ASYREVEL.defaults,
    rates=ASYREVEL.rates,
)
