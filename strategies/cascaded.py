"""Secure and Fast Asynchronous VFL via Cascaded Hybrid Optimization (Wang et al., 2023).

Algorithm 1, VFL-Cascaded: parties are trained by zeroth order (lines 3-7, Eq. 2-3), the top model
by its own gradient (lines 10-11, Eq. 4), after the losses are taken (line 9). The label holder
sends their difference, which is all that a party uses of them.

Algorithm 2 (appendix B), Syn-ZOO-VFL: all parties and the server step by zeroth order, on one
shared mini-batch. For it Adam is the default, as for AsyREVEL; the paper's is plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from strategies.vertical import Vertical


class Cascaded(Vertical):
    """VFL-Cascaded, Algorithm 1: zeroth-order parties, first-order server."""

    name = "cascaded"
    axes = "async · zeroth-order, one-sided · first-order server · identity · no privacy"
    defaults: ClassVar[Mapping[str, Any]] = {
        "estimator": "zeroth-order",
        "party_lr": 0.002,
        "server_lr": 0.1,
    }

    def default_quorum(self, parties: int) -> int:
        """One upload."""
        return 1


class SynZoo(Vertical):
    """Syn-ZOO-VFL, Algorithm 2: synchronous, zeroth-order on both sides."""

    name = "syn-zoo"
    axes = "sync · zeroth-order, one-sided · zeroth-order server · identity · no privacy"
    defaults: ClassVar[Mapping[str, Any]] = {
        "estimator": "zeroth-order",
        "server_update": "zeroth-order",
        "optimizer": "adam",
        "batch_size": 8,
        "party_lr": 0.002,
        "server_lr": 0.002,
    }
