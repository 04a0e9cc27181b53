"""VAFL: a Method of Vertical Asynchronous Federated Learning (Chen, Jin, Sun and Yin, 2020).

Algorithm 1: parties draw their own mini-batches and never wait for each other (lines 3-7); the
label holder answers each upload by what its table holds of the others, stale as it may be (lines
8-13, Eq. 2-3), and steps its model once (Eq. 4). Key ``max-delay`` is the bound D of section 2.3.

Algorithm 2, t-synchronous: the label holder waits for t uploads; key ``quorum``.

Section 4, perturbed local embedding: ``privacy = "perturbed-embedding"``.
"""

from __future__ import annotations

from strategies.vertical import Vertical


class Vafl(Vertical):
    """VAFL, Algorithm 1: asynchronous, uncoordinated mini-batches."""

    name = "vafl"
    axes = "async · first-order · first-order server · identity · optional perturbed embedding"

    def default_quorum(self, parties: int) -> int:
        """One upload."""
        return 1


class VaflT(Vertical):
    """VAFL, Algorithm 2: t-synchronous; t is `quorum`, by default half of the parties."""

    name = "vafl-t"
    axes = "t-sync · first-order · first-order server · identity · optional perturbed embedding"

    def default_quorum(self, parties: int) -> int:
        """Half of the parties, rounded up."""
        return -(-parties // 2)
