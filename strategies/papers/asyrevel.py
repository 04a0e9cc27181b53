"""AsyREVEL: Desirable Companion for Vertical Federated Learning (Zhang, Gu et al., 2021); ZOO-VFL.

Algorithm 1: a party uploads its embeddings at w and at w + mu u (line 4). The label holder answers
with their loss difference, using its table of the other parties' embeddings (line 9). Both sides
step along their own directions (lines 6-7 and 10-11, Eq. 15-17). With option ``directions``,
``gaussian`` is AsyREVEL-Gau and ``sphere`` AsyREVEL-Uni. The estimator's factor is Cascaded's
phi(d); this paper writes d for both. ``regulariser = "nonconvex"`` is the regulariser of Eq. (22),
added at the party.

The papers' optimizer is plain SGD: ``optimizer = "sgd"``. With Adam, the default, one learning rate
serves large and small models.

Section 5.3 compares it with its synchronous counterpart, SynREVEL, where one party is 20 to 60 %
slower than the others.

The algorithm on one page: ``strategies/reference/asyrevel.py``.
"""

from vfl_flower.protocol.system import ALL, ONE, System

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
        "bottom-model": "linear",  # differences estimate fewer parameters better
        "top-model": "linear",
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
