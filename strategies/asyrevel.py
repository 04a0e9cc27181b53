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

from collections.abc import Mapping
from typing import Any, ClassVar

from strategies.vertical import Vertical


class AsyREVEL(Vertical):
    """AsyREVEL, Algorithm 1: asynchronous, zeroth-order on both sides."""

    name = "asyrevel"
    axes = "async · zeroth-order, one-sided · zeroth-order server · identity · no privacy"
    defaults: ClassVar[Mapping[str, Any]] = {
        "estimator": "zeroth-order",
        "server_update": "zeroth-order",
        "delay": "straggler",
        "optimizer": "adam",
        "batch_size": 8,
        "party_lr": 0.002,
        "server_lr": 0.002,
    }

    def default_quorum(self, parties: int) -> int:
        """One upload."""
        return 1


class SynREVEL(AsyREVEL):
    """SynREVEL: AsyREVEL that waits for every party, and so for the slowest."""

    name = "synrevel"
    axes = "sync · zeroth-order, one-sided · zeroth-order server · identity · no privacy"

    def default_quorum(self, parties: int) -> int:
        """All uploads."""
        return parties
